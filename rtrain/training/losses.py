"""The loss of a run, as sums over a pass's targets: the task's own, or mixed with a teacher's answers."""

from typing import TYPE_CHECKING

from rtrain.config import Distill
from rtrain.tasks.base import Head, Task
from rtrain.tasks.batch import Ints, Tokens

if TYPE_CHECKING:
    import torch


class RunLoss:
    """The task's loss for a run; see `step.Loss`. Distillation changes it and nothing else of a run."""

    def __init__(self, task: Task, distill: Distill, head: Head):
        self._task, self._distill, self._head = task, distill, head
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
        if self._distill.teacher is None:
            return sums
        soft = self._task.imitation(logits, tokens, self._head, self._distill.temperature)
        alpha = self._distill.alpha
        return alpha * torch.stack([soft[name] for name in self._parts]) + (1 - alpha) * sums


def for_run(task: Task, distill: Distill, head: Head | None = None) -> RunLoss:
    return RunLoss(task, distill, head or Head())
