"""Train the rows of the word embedding that a run's texts use; the other rows follow in closed form.

A row whose token occurs in no training row has a gradient and moments of zero. AdamW and RAdam then change it by their
decoupled weight decay alone:

    w_t = w_0 x prod_s (1 - lr_s x weight_decay)        over the steps s before t

So a run trains a table of the used rows, and its artifact gets the complete table from `expand_rows`. Gradients, norms
and weights are those of the complete table, to rounding. Gradients, moments, checkpoints and the time of an optimizer
step are those of the used rows. Texts for evaluation use rows too, which are trained with gradients of zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Ints
from rtrain.parallel.ddp import find_embedding

if TYPE_CHECKING:
    import torch

MIN_UNUSED_WEIGHTS = 2**20
"""Unused weights from which `train.embedding_rows=auto` trains the used rows alone: 4 MB of fp32."""
ROW_BUFFER = "row_by_token"
"""Buffer of a restricted embedding: the row of each token id, -1 for unused tokens. Checkpoints leave it out."""


@dataclass(frozen=True)
class UsedVocabulary:
    """The rows of a word embedding that a run trains."""

    name: str
    """Name of the embedding's weight in the network."""
    ids: Ints
    """[rows] Token ids, ascending."""
    size: int
    """Rows of the complete table."""

    def expand_gradient(self, gradient: "torch.Tensor") -> "torch.Tensor":
        """The gradient [size, dim] of the complete table from that of the used rows [rows, dim]."""
        complete = gradient.new_zeros(self.size, gradient.shape[1])
        complete[self.ids] = gradient
        return complete

    def expand_rows(self, rows: "torch.Tensor", initial: "torch.Tensor", decay: float) -> "torch.Tensor":
        """The complete table [size, dim] after training.

        Args:
            rows: [rows, dim] The trained rows.
            initial: [size, dim] The complete table before the first step.
            decay: Product of all steps' decay (`rtrain.trainer.optimizers.decay_product`).
        """
        complete = (initial.to(rows) * decay).to(rows.dtype)
        complete[self.ids] = rows
        return complete


def special_ids(folder: Path) -> set[int]:
    """Ids that a network may get without a text: padding, and the tokens that a tokenizer adds."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {0, *tokenizer.get_added_tokens_decoder()}


def select_vocabulary(
    network: Any, used_ids: Iterable[int], min_unused_weights: int = MIN_UNUSED_WEIGHTS
) -> UsedVocabulary | None:
    """Return the rows to train, or None if the network needs the complete table: its embedding is frozen, or tied to an
    output vocabulary, or fewer than `min_unused_weights` weights are unused."""
    if (embedding_entry := find_embedding(network)) is None:
        return None
    name, embedding = embedding_entry
    size, width = embedding.weight.shape
    extra_ids = {network.config.pad_token_id or 0, embedding.padding_idx or 0}
    ids = np.union1d(np.fromiter(used_ids, dtype=np.int64), np.fromiter(extra_ids, dtype=np.int64))
    ids = ids[(ids >= 0) & (ids < size)]
    return None if (size - len(ids)) * width < max(1, min_unused_weights) else UsedVocabulary(name, ids, size)


def restrict_embedding(network: Any, vocabulary: UsedVocabulary) -> None:
    """Keep the used rows of the word embedding. Inputs of the network keep their token ids; an unused one raises
    `IndexError`. Call before the strategy and the optimizer are built."""
    import torch

    embedding: torch.nn.Embedding = network.get_input_embeddings()
    ids = torch.from_numpy(vocabulary.ids).to(embedding.weight.device)
    row_by_token = torch.full((vocabulary.size,), -1, dtype=torch.int64, device=ids.device)
    row_by_token[ids] = torch.arange(len(ids), device=ids.device)
    embedding.weight = torch.nn.Parameter(embedding.weight.detach()[ids].clone())
    embedding.num_embeddings = len(ids)
    if embedding.padding_idx is not None:
        embedding.padding_idx = int(row_by_token[embedding.padding_idx])
    embedding.register_buffer(ROW_BUFFER, row_by_token, persistent=False)
    embedding.register_forward_pre_hook(_map_ids)


def _map_ids(embedding: "torch.nn.Module", inputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
    """A hook, because copies of a network keep hooks and not overridden methods."""
    row_by_token: Any = getattr(embedding, ROW_BUFFER)
    return (row_by_token[inputs[0]], *inputs[1:])
