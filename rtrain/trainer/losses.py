"""Loss of a run as sums over a micro-batch's targets: the task's loss, or its mixture with a teacher's."""

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rtrain.config import DistillConfig, Recipe
from rtrain.core.errors import Problem
from rtrain.core.ragged import Head, Ints, TokenBatch, flat_indices
from rtrain.data.store.store import Store
from rtrain.tasks.base import Task, get_task
from rtrain.trainer.step import Loss

if TYPE_CHECKING:
    import torch


class FeatureLoss(Protocol):
    """Feature distances between student and teacher (`rtrain.trainer.feature_distillation`), as further parts of a
    loss."""

    num_parts: int

    def count_targets(self, tokens: TokenBatch) -> list[int]:
        """Number of targets of each part."""
        ...

    def __call__(self, tokens: TokenBatch) -> "torch.Tensor":
        """Sums [parts] over the student's newest forward pass, which had these rows."""
        ...


class RunLoss:
    """Loss of a run; see `step.Loss`. Distillation and smoothing change only this part of a run."""

    def __init__(
        self,
        task: Task,
        distill: DistillConfig,
        head: Head,
        smoothing: float = 0.0,
        feature_loss: FeatureLoss | None = None,
    ) -> None:
        self._task, self._distill, self._head, self._smoothing, self._feature_loss = (
            task,
            distill,
            head,
            smoothing,
            feature_loss,
        )
        self._part_names = task.loss_parts(head)
        self.num_parts = len(self._part_names) + (feature_loss.num_parts if feature_loss else 0)

    @property
    def is_planned(self) -> bool:
        """Whether the counts follow from the rows' stored targets."""
        return self._feature_loss is None and not self._task.prepares_targets

    def count_targets(self, tokens: TokenBatch) -> list[int]:
        """Number of targets of each part. Placeholder labels count too: the teacher answers them."""
        counts_by_part = self._task.count_targets(tokens, self._head)
        return [counts_by_part[name] for name in self._part_names] + (
            self._feature_loss.count_targets(tokens) if self._feature_loss else []
        )

    def logit_positions(self, tokens: TokenBatch) -> Ints | None:
        """Tokens whose logits are needed; see `Task.logit_positions`."""
        return self._task.logit_positions(tokens, self._head)

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """Sums over the targets [parts]: (1 - alpha) x the task's loss + alpha x the distance to the teacher. The first
        is zero for a row without a label."""
        import torch

        sums = self._mixed_loss(logits, tokens)
        return sums if self._feature_loss is None else torch.cat([sums, self._feature_loss(tokens).to(sums)])

    def _mixed_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        if self._distill.teacher is None:
            return self._label_loss(logits, tokens)
        alpha, total = self._distill.alpha, logits.float().sum() * 0.0
        if alpha:
            distillation_sums = self._task.distillation_loss(logits, tokens, self._head, self._distill.temperature)
            total = total + alpha * self._stack_parts(distillation_sums)
        logits, tokens = self._select_labeled(logits, tokens)
        return total + (1 - alpha) * self._label_loss(logits, tokens) if len(tokens) else total

    def _label_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """The task's loss with label smoothing."""
        sums = self._stack_parts(self._task.loss(logits, tokens, self._head))
        if not self._smoothing:
            return sums
        return (1 - self._smoothing) * sums + self._smoothing * self._smoothing_loss(logits, tokens)

    def _select_labeled(self, logits: "torch.Tensor", tokens: TokenBatch) -> "tuple[torch.Tensor, TokenBatch]":
        """Rows with a label, and their rows of the logits."""
        import torch

        if tokens.is_unlabeled is None or not tokens.is_unlabeled.any():
            return logits, tokens
        rows = np.flatnonzero(~tokens.is_unlabeled)
        logit_rows = flat_indices(tokens.windows_per_row, rows)
        if self._task.is_token_level:
            logit_rows = flat_indices(tokens.window_lengths, logit_rows)
        return logits[torch.from_numpy(logit_rows).to(logits.device)], tokens.take(rows)

    def _smoothing_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """Distance to a uniform distribution over the labels, which smoothing mixes in (Szegedy et al. 2016,
        arXiv:1512.00567), without the constant log(labels), which has no gradient."""
        num_logits = len(tokens.ids) if self._task.is_token_level else len(tokens)
        uniform = replace(tokens, teacher_logits=np.zeros((num_logits, logits.shape[1]), dtype=np.float32))
        return self._stack_parts(self._task.distillation_loss(logits, uniform, self._head, 1.0))

    def _stack_parts(self, sums: "dict[str, torch.Tensor]") -> "torch.Tensor":
        import torch

        return torch.stack([sums[name] for name in self._part_names])


def plan_target_counts(loss: Loss, store: Store, positions: Ints) -> list[int] | None:
    """Number of targets of each part in some training rows, from the store; None if they depend on more."""
    if not isinstance(loss, RunLoss) or not loss.is_planned:
        return None
    targets, empty = store.targets("train", positions), np.empty(0, dtype=np.int32)
    ids = store.column("train", "row_id")[positions]
    teacher = np.empty((len(positions), 0), dtype=np.float32)
    return loss.count_targets(TokenBatch(empty, empty, empty, empty, targets.values, targets.counts, ids, teacher))


def check_label_smoothing(recipe: Recipe) -> list[Problem]:
    """Settings of the loss that the recipe's task cannot use."""
    smoothing, task = recipe.train.label_smoothing, get_task(recipe.task)
    if not smoothing or task.supports_label_smoothing:
        return []
    reason = f"{task.name} does not choose one label out of several"
    return [Problem("train.label_smoothing", smoothing, reason, "set it to 0", code="conflicting_settings")]


def make_loss(
    task: Task,
    distill: DistillConfig,
    head: Head | None = None,
    smoothing: float = 0.0,
    feature_loss: FeatureLoss | None = None,
) -> RunLoss:
    return RunLoss(task, distill, head or Head(), smoothing, feature_loss)
