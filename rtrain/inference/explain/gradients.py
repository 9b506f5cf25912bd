"""Values and directional derivatives of a float model on the straight line from a baseline to a row.

The line runs in embedding space, from padding (special tokens are kept) to the row's tokens. All windows of a row are
interpolated together, and the caller's score function pools them, so the attributions of a long text sum to the change
of its value.

"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.core.ragged import TokenBatch
from rtrain.inference.explain.integrated_gradients import Doubles

if TYPE_CHECKING:
    import torch
    import transformers

MAX_BATCH_TOKENS = 1024
"""Tokens of one forward and backward pass, about 150 MB with MiniLM; a longer row is computed one point at a time."""

ScoreFunction = Callable[["torch.Tensor", TokenBatch], "torch.Tensor"]
"""Logits [windows or tokens, outputs] of rows -> [rows, targets]."""


class ExplanationCancelled(Exception):
    """The caller no longer needs the explanation."""


class IntegrationPath:
    """The line to one row. The network is not changed, so other threads may use it."""

    def __init__(
        self,
        network: "transformers.PreTrainedModel",
        accepted_arguments: frozenset[str],
        row: TokenBatch,
        is_special: npt.NDArray[np.bool_],
        pad_id: int,
        score: ScoreFunction,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        """Args:
        accepted_arguments: arguments of the network's forward.
        row: one row.
        is_special: [tokens] bool; these tokens are in the baseline too.
        should_stop: called before each forward pass.
        """
        import torch

        if "inputs_embeds" not in accepted_arguments:
            kind = type(network).__name__
            raise UserError(
                f"{kind} does not accept embeddings as input, so its predictions cannot be explained",
                code="not_explainable",
            )
        self._network, self._row, self._score, self._should_stop = network, row, score, should_stop
        embed: Any = network.get_input_embeddings()
        device = embed.weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        baseline = torch.where(torch.from_numpy(is_special).to(device), ids, pad_id)
        with torch.no_grad():
            self._baseline_embeddings = embed(baseline)
            self._delta = embed(ids) - self._baseline_embeddings
        ends = np.cumsum(row.window_lengths, dtype=np.int64)
        self._windows = [
            (slice(int(end - length), int(end)), _window_inputs(int(length), int(second), accepted_arguments, device))
            for end, length, second in zip(ends, row.window_lengths, row.pair_start, strict=True)
        ]

    def __call__(self, points: Doubles) -> tuple[Doubles, Doubles]:
        """Return values [points, targets] and slopes [points, targets, tokens] (see
        `integrated_gradients.integrate`)."""
        batch_points = max(1, MAX_BATCH_TOKENS // len(self._row.ids))
        batches = [
            self._forward_backward(points[start : start + batch_points])
            for start in range(0, len(points), batch_points)
        ]
        return np.concatenate([values for values, _ in batches]), np.concatenate([slopes for _, slopes in batches])

    def _forward_backward(self, points: Doubles) -> tuple[Doubles, Doubles]:
        import torch

        if self._should_stop():
            raise ExplanationCancelled
        fractions = torch.from_numpy(points).to(self._delta)[:, None, None]
        embeddings = (self._baseline_embeddings + fractions * self._delta).requires_grad_()  # [points, tokens, hidden]
        window_logits = [self._window_logits(embeddings[:, place], inputs) for place, inputs in self._windows]
        rows = self._row.take([0] * len(points))
        # [points, tokens, outputs] or [points, windows, outputs], flattened as the score function expects.
        by_token = window_logits[0].ndim == 3
        logits = (torch.cat(window_logits, dim=1) if by_token else torch.stack(window_logits, dim=1)).flatten(0, 1)
        values = self._score(logits.cpu(), rows)
        slopes = np.empty((len(points), values.shape[1], len(self._row.ids)))
        for target in range(values.shape[1]):
            # `grad` does not accumulate into the parameters, which are shared between threads.
            (gradient,) = torch.autograd.grad(values[:, target].sum(), embeddings, retain_graph=True)
            slopes[:, target] = (gradient * self._delta).double().sum(dim=-1).cpu().numpy()
        return values.detach().double().numpy(), slopes

    def _window_logits(self, embeddings: "torch.Tensor", inputs: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the logits of one window at each point: [points, outputs] or [points, tokens, outputs]."""
        from torch.utils import checkpoint

        def forward(embeddings: "torch.Tensor") -> "torch.Tensor":
            expanded_inputs = {name: value.expand(len(embeddings), -1) for name, value in inputs.items()}
            logits: torch.Tensor = self._network(inputs_embeds=embeddings, **expanded_inputs).logits
            return logits

        if len(self._windows) == 1:
            return forward(embeddings)
        # Activation checkpointing: memory for one window's activations.
        checkpointed: torch.Tensor = checkpoint.checkpoint(
            forward, embeddings, use_reentrant=False, preserve_rng_state=False
        )
        return checkpointed


def _window_inputs(
    length: int, pair_start: int, accepted_arguments: frozenset[str], device: "torch.device"
) -> dict[str, "torch.Tensor"]:
    """Return attention mask and token types [1, length], if the network accepts them. No padding."""
    import torch

    types = (torch.arange(length) >= pair_start).long()
    candidates = {"attention_mask": torch.ones(1, length, dtype=torch.long), "token_type_ids": types[None]}
    return {name: value.to(device) for name, value in candidates.items() if name in accepted_arguments}


def find_special_tokens(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], special_ids: frozenset[int]
) -> npt.NDArray[np.bool_]:
    """Return which tokens the tokenizer added [tokens]. A special token in the user's text counts as text."""
    return np.array(
        [number in special_ids and start == end for number, (start, end) in zip(ids, spans, strict=True)],
        dtype=np.bool_,
    )
