"""Losses of plug-ins: `train.loss` names a function `f(logits, targets) -> (sum, count)` (`rtrain.register_loss`).

A step divides the sum over all its micro-batches and workers by the sum of all counts. So a loss must be a sum over
targets: a mean would weigh the targets of a small micro-batch more. Each worker checks this before the first step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.config import Recipe
from rtrain.config.recipe import LOSSES
from rtrain.core import plugins
from rtrain.core.errors import Problem, UserError
from rtrain.core.ragged import IGNORE_INDEX, Head, TokenBatch
from rtrain.metrics.entities import select_token_targets
from rtrain.tasks.base import Task, get_task
from rtrain.tasks.defaults import pool_logits, upcast_logits

if TYPE_CHECKING:
    import torch

UNSUPPORTED_OUTPUTS = ("heads", "spans", "tokens", "summary")
"""Answers whose loss has several parts, or targets that are no plain array."""
CHECKED_PARTS = (slice(0, 8), slice(0, 3), slice(3, 8))
"""Targets of the check: all, and two parts of them."""
MAX_ADDITIVITY_ERROR = 1e-6
"""Largest difference of the loss of all targets from the sum over the parts, relative to it, in float64."""


def check_loss(recipe: Recipe) -> list[Problem]:
    """Conflicts of a plug-in's loss with the task and with other settings of the loss."""
    name, task = recipe.train.loss, get_task(recipe.task)
    reason = ""
    if task.output in UNSUPPORTED_OUTPUTS:
        reason = f"{task.name} has a loss of its own parts; a task of a plug-in may have another"
    elif recipe.train.label_smoothing:
        reason = "train.label_smoothing changes losses of rtrain only"
    elif recipe.train.class_weights != "none" or recipe.data.weight_column is not None:
        reason = "train.class_weights and data.weight_column change losses of rtrain only"
    if name in LOSSES or not reason:
        return []
    return [Problem("train.loss", name, reason, f"write {LOSSES[0]}, or leave it out", code="conflicting_settings")]


class RegisteredLoss:
    """The loss of a plug-in for a task and its head. Raises `UserError` if it is no sum over targets."""

    def __init__(self, name: str, task: Task, head: Head):
        self._function: Callable[..., Any] = plugins.find_value("loss", name)
        self._name, self._task, self._head = name, task, head
        self._check_additivity()

    def count_targets(self, tokens: TokenBatch) -> int:
        """The divisor of a micro-batch's sum; it is known before the logits are."""
        import torch

        targets = self._select_targets(tokens)
        return self._call(torch.zeros((len(targets), len(self._head.labels))), targets)[1]

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """The sum over a micro-batch's targets, a scalar."""
        import torch

        if self._task.is_token_level:
            is_target = select_token_targets(tokens.row_targets).values != IGNORE_INDEX
            logits = upcast_logits(logits)[torch.from_numpy(is_target).to(logits.device)]
        else:
            logits = pool_logits(logits, tokens, self._head)
        return self._call(logits, self._select_targets(tokens).to(logits.device))[0]

    def _select_targets(self, tokens: TokenBatch) -> "torch.Tensor":
        if self._task.is_token_level:
            values = select_token_targets(tokens.row_targets).values
            return self._convert(values[values != IGNORE_INDEX])
        rows = len(tokens.targets_per_row)
        return self._convert(tokens.targets if len(tokens.targets) == rows else tokens.targets.reshape(rows, -1))

    def _convert(self, values: Any) -> "torch.Tensor":
        import torch

        if self._task.is_token_level or self._task.problem_type == "single_label_classification":
            return torch.from_numpy(values.astype(np.int64))
        if self._task.problem_type == "regression":
            values = (values - self._head.facts["mean"]) / self._head.facts["std"]
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _call(self, logits: "torch.Tensor", targets: "torch.Tensor") -> "tuple[torch.Tensor, int]":
        try:
            total, count = self._function(logits, targets)
            if total.dim() == 0 and float(count) == int(count):
                return total, int(count)
        except (TypeError, ValueError, AttributeError) as error:
            if plugins.find_place(error):
                raise
        reason = "it must return a sum, a tensor without dimensions, and a count, a whole number"
        raise UserError(f"train.loss={self._name}: {reason}", code="wrong_result")

    def _check_additivity(self) -> None:
        import torch

        generator, shape = np.random.default_rng(0), (CHECKED_PARTS[0].stop, len(self._head.labels))
        logits, values = torch.from_numpy(generator.normal(size=shape)), generator.integers(0, shape[1], shape[0])
        if self._task.problem_type == "multi_label_classification":
            values = generator.integers(0, 2, shape)
        targets = self._convert(values)
        sums, counts = zip(*(self._call(logits[part], targets[part]) for part in CHECKED_PARTS), strict=True)
        total, first, second = map(float, sums)
        is_sum = abs(total - first - second) <= MAX_ADDITIVITY_ERROR * max(1.0, abs(total))
        if not is_sum or counts[0] != counts[1] + counts[2]:
            raise UserError(
                f"train.loss={self._name} depends on the micro-batch: for {shape[0]} targets it is {total:.4g} (count "
                f"{counts[0]}), for their two parts {first:.4g} and {second:.4g}; return the sum over the targets, not "
                "their mean, and their number",
                code="not_additive",
            )
