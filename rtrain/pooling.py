"""How the vectors of a text's tokens become the one that is classified, where that is not the model's own way."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rtrain.errors import UserError
from rtrain.inputs import LAYOUT

if TYPE_CHECKING:
    import torch
    import transformers

FACT = "token_pooling"
"""Name of the fact of an artefact whose model pools by `mean`: transformers alone would answer otherwise."""


def pool_by_mean(network: "transformers.PreTrainedModel") -> None:
    """Give the head the mean of the text's tokens in place of its first token's vector.

    That is what sentence encoders are trained with (Reimers and Gurevych 2019, arXiv:1908.10084): their mean tells
    texts apart before any fine-tuning, their first token does not. A pooler, of BERT and its kin, is dropped. Raises
    `UserError` for a network that does not tell its encoder from its head.
    """
    encoder: Any = network.base_model
    if encoder is network:
        kind = type(network).__name__
        raise UserError(f"model.pooling=mean: {kind} does not tell its encoder from its head; write model.pooling=own")
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    encoder.register_forward_hook(_mean, with_kwargs=True)


def _mean(module: "torch.nn.Module", inputs: Any, named: Mapping[str, Any], output: Any) -> Any:
    """Heads read the pooled output (BERT) or the first place of the last layer (RoBERTa, DistilBERT): both are set."""
    import torch

    if LAYOUT in named:  # its windows are pooled already
        return output
    hidden = output.last_hidden_state
    mask = named["attention_mask"].to(torch.promote_types(hidden.dtype, torch.float32))[..., None]
    mean = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)).to(hidden.dtype)
    output.last_hidden_state = torch.cat([mean[:, None], hidden[:, 1:]], dim=1)
    if "pooler_output" in type(output).__dataclass_fields__:
        output.pooler_output = mean
    return output
