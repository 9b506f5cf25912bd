"""Values and slopes of a float model on the straight way from a baseline to a row, a few points at a time.

The way leads through the embeddings, from those of padding (special tokens are kept) to those of the row's tokens. All
windows of a row move together, and the caller's score pools them: so the attributions of a long text add up to the
change of its one answer.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.core.ragged import Tokens
from rtrain.inference.explain.integrated_gradients import Doubles

if TYPE_CHECKING:
    import torch
    import transformers

POINT_TOKENS = 1024
"""Tokens of one forward and backward pass, some 150 MB of MiniLM; a longer row is passed one point at a time."""

Score = Callable[["torch.Tensor", Tokens], "torch.Tensor"]
"""Logits [windows or tokens, outputs] of rows -> [rows, targets]."""


class Stopped(Exception):
    """The caller no longer waits for the explanation."""


class Path:
    """The way to one row. It changes nothing in the network, which other threads may use meanwhile."""

    def __init__(
        self,
        network: "transformers.PreTrainedModel",
        accepted: frozenset[str],
        row: Tokens,
        kept: npt.NDArray[np.bool_],
        pad_id: int,
        score: Score,
        stop: Callable[[], bool] = lambda: False,
    ):
        """`row`: one row; `kept` [tokens]: which of its tokens the baseline has too; `accepted`: arguments of the
        network's forward; `stop` is asked between passes."""
        import torch

        if "inputs_embeds" not in accepted:
            kind = type(network).__name__
            raise UserError(
                f"{kind} takes no embeddings as its input, so that its answers cannot be explained",
                code="not_explainable",
            )
        self._network, self._row, self._score, self._stop = network, row, score, stop
        embed: Any = network.get_input_embeddings()
        device = embed.weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        baseline = torch.where(torch.from_numpy(kept).to(device), ids, pad_id)
        with torch.no_grad():
            self._start = embed(baseline)
            self._way = embed(ids) - self._start
        ends = np.cumsum(row.lengths, dtype=np.int64)
        self._windows = [
            (slice(int(end - length), int(end)), _inputs(int(length), int(second), accepted, device))
            for end, length, second in zip(ends, row.lengths, row.second, strict=True)
        ]

    def __call__(self, points: Doubles) -> tuple[Doubles, Doubles]:
        """Values [points, targets] and slopes [points, targets, tokens] (see `integral.integrate`)."""
        at_once = max(1, POINT_TOKENS // len(self._row.ids))
        parts = [self._pass(points[start : start + at_once]) for start in range(0, len(points), at_once)]
        return np.concatenate([values for values, _ in parts]), np.concatenate([slopes for _, slopes in parts])

    def _pass(self, points: Doubles) -> tuple[Doubles, Doubles]:
        import torch

        if self._stop():
            raise Stopped
        shares = torch.from_numpy(points).to(self._way)[:, None, None]
        embedded = (self._start + shares * self._way).requires_grad_()  # [points, tokens, hidden]
        answers = [self._logits(embedded[:, place], inputs) for place, inputs in self._windows]
        rows = self._row.pick([0] * len(points))
        # Row after row, as the score expects it: [points, tokens, outputs] or [points, windows, outputs].
        by_token = answers[0].ndim == 3
        logits = (torch.cat(answers, dim=1) if by_token else torch.stack(answers, dim=1)).flatten(0, 1)
        values = self._score(logits.cpu(), rows)
        slopes = np.empty((len(points), values.shape[1], len(self._row.ids)))
        for target in range(values.shape[1]):
            # `grad` does not accumulate into the parameters, which this thread shares with others.
            (gradient,) = torch.autograd.grad(values[:, target].sum(), embedded, retain_graph=True)
            slopes[:, target] = (gradient * self._way).double().sum(dim=-1).cpu().numpy()
        return values.detach().double().numpy(), slopes

    def _logits(self, embedded: "torch.Tensor", inputs: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Logits of one window at each point: [points, outputs] or [points, tokens, outputs]."""
        from torch.utils import checkpoint

        def forward(embedded: "torch.Tensor") -> "torch.Tensor":
            repeated = {name: value.expand(len(embedded), -1) for name, value in inputs.items()}
            logits: torch.Tensor = self._network(inputs_embeds=embedded, **repeated).logits
            return logits

        if len(self._windows) == 1:
            return forward(embedded)
        # Only one window's activations are held at a time; the backward pass computes them again.
        again: torch.Tensor = checkpoint.checkpoint(forward, embedded, use_reentrant=False, preserve_rng_state=False)
        return again


def _inputs(length: int, second: int, accepted: frozenset[str], device: "torch.device") -> dict[str, "torch.Tensor"]:
    """Mask and types of a window [1, length], as far as the network takes them. Nothing is padded."""
    import torch

    types = (torch.arange(length) >= second).long()
    every = {"attention_mask": torch.ones(1, length, dtype=torch.long), "token_type_ids": types[None]}
    return {name: value.to(device) for name, value in every.items() if name in accepted}


def special(ids: Sequence[int], spans: Sequence[tuple[int, int]], special_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Which tokens the tokenizer added [tokens]; a special token's name that a user wrote in the text is text."""
    return np.array(
        [number in special_ids and start == end for number, (start, end) in zip(ids, spans, strict=True)],
        dtype=np.bool_,
    )
