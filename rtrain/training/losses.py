"""The loss of a run, as a sum over a pass's targets: the task's own, or mixed with a teacher's answers."""

from typing import TYPE_CHECKING

from rtrain.config import Distill
from rtrain.data.store import Tokens
from rtrain.tasks.base import Task
from rtrain.training.step import Loss

if TYPE_CHECKING:
    import torch


def for_run(task: Task, distill: Distill) -> Loss:
    """Distillation changes the loss and nothing else of a run."""
    if distill.teacher is None:
        return lambda logits, tokens: _hard(task, logits, tokens)
    return lambda logits, tokens: soft(task, distill, logits, tokens)


def _hard(task: Task, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
    import torch

    targets = torch.from_numpy(tokens.targets.copy()).to(logits.device)
    return sum((value for value, _ in task.loss(logits, targets).values()), torch.zeros((), device=logits.device))


def soft(task: Task, distill: Distill, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
    """alpha x T^2 x KL(teacher, student at temperature T) + (1 - alpha) x the task's loss; Hinton et al. 2015.

    T^2 keeps the gradient of the soft part at the scale of the hard part, whatever the temperature.
    """
    import torch
    import torch.nn.functional as F

    teacher = torch.from_numpy(tokens.teacher.copy()).to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    student_log = F.log_softmax(logits.to(wide) / distill.temperature, dim=-1)
    teacher_log = F.log_softmax(teacher.to(wide) / distill.temperature, dim=-1)
    divergence = F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)
    return distill.alpha * distill.temperature**2 * divergence + (1 - distill.alpha) * _hard(task, logits, tokens)
