"""The loss of a run, as sums over a pass's targets: the task's own, or mixed with a teacher's answers."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rtrain.batch import Head, Ints, Tokens
from rtrain.config import Distill, Recipe
from rtrain.errors import Problem
from rtrain.tasks.base import Task, get

if TYPE_CHECKING:
    import torch


class RunLoss:
    """The task's loss for a run; see `step.Loss`. Distillation and smoothing change it and nothing else of a run."""

    def __init__(self, task: Task, distill: Distill, head: Head, smoothing: float = 0.0):
        self._task, self._distill, self._head, self._smoothing = task, distill, head, smoothing
        self._parts = task.parts(head)
        self.parts = len(self._parts)

    def counts(self, tokens: Tokens) -> list[int]:
        """Targets of each part."""
        found = self._task.counts(tokens, self._head)
        return [found[name] for name in self._parts]

    def wanted(self, tokens: Tokens) -> Ints | None:
        """Tokens whose logits are needed; see `Task.wanted`."""
        return self._task.wanted(tokens, self._head)

    def __call__(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """Sums over the targets [parts]: (1 - alpha) x the task's loss + alpha x the distance to the teacher."""
        import torch

        hard = self._task.loss(logits, tokens, self._head)
        sums = torch.stack([hard[name] for name in self._parts])
        if self._smoothing:
            sums = (1 - self._smoothing) * sums + self._smoothing * self._spread(logits, tokens)
        if self._distill.teacher is None:
            return sums
        soft = self._task.imitation(logits, tokens, self._head, self._distill.temperature)
        alpha = self._distill.alpha
        return alpha * torch.stack([soft[name] for name in self._parts]) + (1 - alpha) * sums

    def _spread(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """Distance to a teacher that finds all labels equally likely: what smoothing mixes in (Szegedy et al. 2016,
        arXiv:1512.00567), but for the constant log(labels), which has no gradient."""
        import torch

        lines = len(tokens.ids) if self._task.by_token else len(tokens)
        even = replace(tokens, teacher=np.zeros((lines, logits.shape[1]), dtype=np.float32))
        soft = self._task.imitation(logits, even, self._head, 1.0)
        return torch.stack([soft[name] for name in self._parts])


def problems(recipe: Recipe) -> list[Problem]:
    """Settings of the loss that the recipe's task cannot use."""
    smoothing, task = recipe.train.label_smoothing, get(recipe.task)
    if not smoothing or task.smooths:
        return []
    reason = f"{task.name} does not choose one label out of several"
    return [Problem("train.label_smoothing", smoothing, reason, "set it to 0")]


def for_run(task: Task, distill: Distill, head: Head | None = None, smoothing: float = 0.0) -> RunLoss:
    return RunLoss(task, distill, head or Head(), smoothing)
