"""What the tasks share that answer once per row: windows of a long text are pooled into one output."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Floats, Head, Outputs, Ragged, Tokens
from rtrain.tasks import base
from rtrain.tasks.defaults import Defaults, widened

if TYPE_CHECKING:
    import torch


class PooledTask(Defaults):
    """The part of `base.Task` that is the same for all of them."""

    auto_model = "AutoModelForSequenceClassification"
    by_token = False
    varies: base.Variation = "text"

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        return {"loss": len(tokens.targets)}

    def outputs(self, logits: Floats, tokens: Tokens, head: Head) -> Floats:
        """[rows, outputs]."""
        if len(tokens.lengths) == len(tokens):
            return logits
        starts = tokens.first_windows
        match _pooling(head.facts):
            case "max":
                found: Floats = np.maximum.reduceat(logits, starts, axis=0)
            case "first":
                found = logits[starts]
            case _:
                found = (np.add.reduceat(logits, starts, axis=0) / tokens.windows[:, None]).astype(logits.dtype)
        return found

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        return Ragged.even(np.asarray(outputs, dtype=np.float64))


def _pooling(facts: Mapping[str, Any]) -> str:
    return str(facts.get("pooling", "mean"))


def pooled(logits: "torch.Tensor", tokens: Tokens, head: Head) -> "torch.Tensor":
    """`PooledTask.outputs`, with a gradient."""
    import torch

    wide = widened(logits)
    if len(tokens.lengths) == len(tokens):
        return wide
    windows = torch.from_numpy(tokens.windows.astype(np.int64)).to(wide.device)
    row = torch.repeat_interleave(torch.arange(len(tokens), device=wide.device), windows)
    shape = (len(tokens), wide.shape[1])
    match _pooling(head.facts):
        case "max":
            # From -inf: with include_self=False the start, a zero, would take part of the gradient of an equal output.
            lowest = wide.new_full(shape, -torch.inf)
            return lowest.scatter_reduce(0, row[:, None].expand_as(wide), wide, "amax")
        case "first":
            return wide[torch.cumsum(windows, 0) - windows]
        case _:
            return wide.new_zeros(shape).index_add(0, row, wide) / windows[:, None]
