"""The common part of tasks with one output per row: the windows of a long text are pooled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Floats, Head, Outputs, RaggedArray, TokenBatch
from rtrain.tasks import base
from rtrain.tasks.defaults import BaseTask, upcast_logits

if TYPE_CHECKING:
    import torch


class PooledTask(BaseTask):
    """The part of `base.Task` that these tasks share."""

    auto_model = "AutoModelForSequenceClassification"
    is_token_level = False
    augmentable: base.Variation = "text"

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        return {"loss": len(tokens.targets)}

    def row_outputs(self, logits: Floats, tokens: TokenBatch, head: Head) -> Floats:
        """[rows, outputs]."""
        if len(tokens.window_lengths) == len(tokens):
            return logits
        starts = tokens.first_window_indices
        match _pooling_mode(head.facts):
            case "max":
                pooled_logits: Floats = np.maximum.reduceat(logits, starts, axis=0)
            case "first":
                pooled_logits = logits[starts]
            case _:
                pooled_logits = (np.add.reduceat(logits, starts, axis=0) / tokens.windows_per_row[:, None]).astype(
                    logits.dtype
                )
        return pooled_logits

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        return RaggedArray.from_matrix(np.asarray(outputs, dtype=np.float64))


def _pooling_mode(facts: Mapping[str, Any]) -> str:
    return str(facts.get("pooling", "mean"))


def pool_logits(logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> "torch.Tensor":
    """`PooledTask.row_outputs`, with a gradient."""
    import torch

    fp32_logits = upcast_logits(logits)
    if len(tokens.window_lengths) == len(tokens):
        return fp32_logits
    windows = torch.from_numpy(tokens.windows_per_row.astype(np.int64)).to(fp32_logits.device)
    row = torch.repeat_interleave(torch.arange(len(tokens), device=fp32_logits.device), windows)
    shape = (len(tokens), fp32_logits.shape[1])
    match _pooling_mode(head.facts):
        case "max":
            # From -inf: with include_self=False the start, a zero, would take part of the gradient of an equal output.
            lowest = fp32_logits.new_full(shape, -torch.inf)
            return lowest.scatter_reduce(0, row[:, None].expand_as(fp32_logits), fp32_logits, "amax")
        case "first":
            return fp32_logits[torch.cumsum(windows, 0) - windows]
        case _:
            return fp32_logits.new_zeros(shape).index_add(0, row, fp32_logits) / windows[:, None]
