"""The loss of a pass: the task's own, and the mixture with a teacher's answers, against arithmetic by hand."""

import math

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.config import DistillConfig
from rtrain.core.ragged import TokenBatch, single_window_batch
from rtrain.tasks import base
from rtrain.trainer import losses

TASK = base.get_task("classification")


def rows(targets: list[int], teacher: list[list[float]] | None = None) -> TokenBatch:
    count = len(targets)
    ones = np.ones(count, dtype=np.int32)
    answers = np.empty((count, 0)) if teacher is None else np.array(teacher)
    return single_window_batch(
        ones, ones, ones, np.array(targets), np.arange(count, dtype=np.uint64), answers.astype(np.float32)
    )


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in logits]
    return [power / sum(powers) for power in powers]


def kl(teacher: list[float], student: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(teacher, student, strict=True))


LOGITS = [[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]]
TEACHER = [[1.0, 1.0, -2.0], [-1.0, 4.0, 0.0]]


def test_without_a_teacher_it_is_the_cross_entropy_summed_over_rows() -> None:
    loss = losses.make_loss(TASK, DistillConfig())
    expected = -math.log(softmax(LOGITS[0])[2]) - math.log(softmax(LOGITS[1])[1])
    actual = loss(torch.tensor(LOGITS, dtype=torch.float64), rows([2, 1]))
    assert actual.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_with_a_teacher_it_mixes_both(temperature: float, alpha: float) -> None:
    distill = DistillConfig(teacher="v1", temperature=temperature, alpha=alpha)
    hard = -math.log(softmax(LOGITS[0])[2]) - math.log(softmax(LOGITS[1])[1])
    soft = sum(
        kl(softmax(teacher, temperature), softmax(student, temperature))
        for teacher, student in zip(TEACHER, LOGITS, strict=True)
    )
    expected = alpha * temperature**2 * soft + (1 - alpha) * hard
    actual = losses.make_loss(TASK, distill)(torch.tensor(LOGITS, dtype=torch.float64), rows([2, 1], TEACHER))
    assert actual.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("teacher", [None, "v1"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_a_loss_is_computed_in_fp32_or_better(teacher: str | None, dtype: torch.dtype, expected: torch.dtype) -> None:
    loss = losses.make_loss(TASK, DistillConfig(teacher=teacher))
    assert loss(torch.tensor(LOGITS, dtype=dtype), rows([2, 1], TEACHER)).dtype == expected


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothing_is_torch_s_but_for_a_constant(smoothing: float) -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    actual = losses.make_loss(TASK, DistillConfig(), smoothing=smoothing)(logits, rows([2, 1]))
    targets = torch.tensor([2, 1])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    assert actual.item() == pytest.approx(expected.item() - 2 * smoothing * math.log(3), rel=1e-12)
    [ours], [theirs] = torch.autograd.grad(actual, [logits]), torch.autograd.grad(expected, [logits])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_smoothing_of_what_is_no_choice_is_refused() -> None:
    smoothed = {"train.label_smoothing": 0.1}
    assert losses.check_label_smoothing(config.load_config("intent", smoothed).recipe) == []
    assert losses.check_label_smoothing(config.load_config("entities", smoothed).recipe) == []
    [problem] = losses.check_label_smoothing(config.load_config("essay", smoothed).recipe)
    assert (problem.field, problem.reason) == (
        "train.label_smoothing",
        "regression does not choose one label out of several",
    )
