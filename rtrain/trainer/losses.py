"""The loss of a run, as sums over a pass's targets: the task's own, or mixed with a teacher's answers."""

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rtrain.config import Distill, Recipe
from rtrain.core.errors import Problem
from rtrain.core.ragged import Head, Ints, Tokens, spread
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task, get
from rtrain.trainer.step import Loss

if TYPE_CHECKING:
    import torch


class Inner(Protocol):
    """Distances inside student and teacher (`rtrain.trainer.feature_distillation`), as further parts of a loss."""

    parts: int

    def counts(self, tokens: Tokens) -> list[int]:
        """What each part is a sum over."""
        ...

    def __call__(self, tokens: Tokens) -> "torch.Tensor":
        """The sums of the student's newest forward pass, over these rows, [parts]."""
        ...


class RunLoss:
    """The task's loss for a run; see `step.Loss`. Distillation and smoothing change it and nothing else of a run."""

    def __init__(
        self, task: Task, distill: Distill, head: Head, smoothing: float = 0.0, inner: Inner | None = None
    ) -> None:
        self._task, self._distill, self._head, self._smoothing, self._inner = task, distill, head, smoothing, inner
        self._parts = task.parts(head)
        self.parts = len(self._parts) + (inner.parts if inner else 0)

    @property
    def is_planned(self) -> bool:
        """Whether the counts follow from the rows' stored targets."""
        return self._inner is None and not self._task.prepares

    def counts(self, tokens: Tokens) -> list[int]:
        """Targets of each part. Those that stand in for a label count too: the teacher answers them."""
        found = self._task.counts(tokens, self._head)
        return [found[name] for name in self._parts] + (self._inner.counts(tokens) if self._inner else [])

    def wanted(self, tokens: Tokens) -> Ints | None:
        """Tokens whose logits are needed; see `Task.wanted`."""
        return self._task.wanted(tokens, self._head)

    def __call__(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """Sums over the targets [parts]: (1 - alpha) x the task's loss + alpha x the distance to the teacher. The first
        is zero for a row without a label."""
        import torch

        sums = self._answers(logits, tokens)
        return sums if self._inner is None else torch.cat([sums, self._inner(tokens).to(sums)])

    def _answers(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        if self._distill.teacher is None:
            return self._labels(logits, tokens)
        alpha, total = self._distill.alpha, logits.float().sum() * 0.0
        if alpha:
            soft = self._task.imitation(logits, tokens, self._head, self._distill.temperature)
            total = total + alpha * self._stacked(soft)
        logits, tokens = self._labelled(logits, tokens)
        return total + (1 - alpha) * self._labels(logits, tokens) if len(tokens) else total

    def _labels(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """The task's loss, smoothed."""
        sums = self._stacked(self._task.loss(logits, tokens, self._head))
        if not self._smoothing:
            return sums
        return (1 - self._smoothing) * sums + self._smoothing * self._spread(logits, tokens)

    def _labelled(self, logits: "torch.Tensor", tokens: Tokens) -> "tuple[torch.Tensor, Tokens]":
        """The rows with a label, and their lines of the logits."""
        import torch

        if tokens.unlabelled is None or not tokens.unlabelled.any():
            return logits, tokens
        rows = np.flatnonzero(~tokens.unlabelled)
        lines = spread(tokens.windows, rows)
        if self._task.by_token:
            lines = spread(tokens.lengths, lines)
        return logits[torch.from_numpy(lines).to(logits.device)], tokens.pick(rows)

    def _spread(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """Distance to a teacher that finds all labels equally likely: what smoothing mixes in (Szegedy et al. 2016,
        arXiv:1512.00567), but for the constant log(labels), which has no gradient."""
        lines = len(tokens.ids) if self._task.by_token else len(tokens)
        even = replace(tokens, teacher=np.zeros((lines, logits.shape[1]), dtype=np.float32))
        return self._stacked(self._task.imitation(logits, even, self._head, 1.0))

    def _stacked(self, sums: "dict[str, torch.Tensor]") -> "torch.Tensor":
        import torch

        return torch.stack([sums[name] for name in self._parts])


def planned(loss: Loss, store: Store, positions: Ints) -> list[int] | None:
    """Targets of each part of the loss in some training rows, by the store alone; None where they depend on more."""
    if not isinstance(loss, RunLoss) or not loss.is_planned:
        return None
    targets, nothing = store.targets("train", positions), np.empty(0, dtype=np.int32)
    ids = store.column("train", "row_id")[positions]
    teacher = np.empty((len(positions), 0), dtype=np.float32)
    return loss.counts(Tokens(nothing, nothing, nothing, nothing, targets.values, targets.counts, ids, teacher))


def problems(recipe: Recipe) -> list[Problem]:
    """Settings of the loss that the recipe's task cannot use."""
    smoothing, task = recipe.train.label_smoothing, get(recipe.task)
    if not smoothing or task.smooths:
        return []
    reason = f"{task.name} does not choose one label out of several"
    return [Problem("train.label_smoothing", smoothing, reason, "set it to 0", code="conflicting_settings")]


def for_run(
    task: Task, distill: Distill, head: Head | None = None, smoothing: float = 0.0, inner: Inner | None = None
) -> RunLoss:
    return RunLoss(task, distill, head or Head(), smoothing, inner)
