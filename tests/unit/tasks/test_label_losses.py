"""Focal and asymmetric losses, by the formulas of their papers in numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from rtrain.config import TrainConfig
from rtrain.tasks.label_losses import AsymmetricLoss, FocalLoss, get_label_loss

LOGITS = np.array([[2.0, -1.0, 0.5], [-3.0, 0.1, 0.0], [0.0, 4.0, -2.0]])
CLASSES = np.array([0, 2, 0])
HAS_LABEL = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=np.float32)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_of_one_label_out_of_several(gamma: float) -> None:
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    right = probabilities[np.arange(3), CLASSES]
    actual = FocalLoss(gamma, alpha=0.25).choose_one(tensor(LOGITS), CLASSES)
    assert actual.tolist() == pytest.approx((-((1 - right) ** gamma) * np.log(right)).tolist())


@pytest.mark.parametrize(("gamma", "alpha"), [(0.0, None), (2.0, 0.25), (2.0, None)])
def test_the_focal_loss_of_each_yes_or_no(gamma: float, alpha: float | None) -> None:
    right = np.where(HAS_LABEL > 0, sigmoid(LOGITS), 1 - sigmoid(LOGITS))
    factor = 1.0 if alpha is None else np.where(HAS_LABEL > 0, alpha, 1 - alpha)
    expected = -factor * (1 - right) ** gamma * np.log(right)
    actual = FocalLoss(gamma, alpha).decide_each(tensor(LOGITS), HAS_LABEL)
    assert np.allclose(actual.detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("yes", "no", "margin"), [(0.0, 4.0, 0.05), (1.0, 2.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_asymmetric_loss(yes: float, no: float, margin: float) -> None:
    chance = sigmoid(LOGITS)
    lowered = np.maximum(chance - margin, 0)
    expected = np.where(HAS_LABEL > 0, -((1 - chance) ** yes) * np.log(chance), -(lowered**no) * np.log(1 - lowered))
    actual = AsymmetricLoss(yes, no, margin).decide_each(tensor(LOGITS), HAS_LABEL)
    assert np.allclose(actual.detach().numpy(), expected, rtol=1e-9, atol=1e-40)


@pytest.mark.parametrize("loss", [FocalLoss(2.0, 0.25), FocalLoss(0.3), AsymmetricLoss(0.5, 4.0, 0.05)])
def test_gradients_are_finite_where_an_answer_is_certain(loss: Any) -> None:
    for value in (-500.0, -40.0, 40.0, 500.0):
        for targets in (np.ones((1, 2), dtype=np.float32), np.zeros((1, 2), dtype=np.float32)):
            logits = torch.full((1, 2), value, requires_grad=True)
            loss.decide_each(logits, targets).sum().backward()
            assert torch.isfinite(logits.grad).all()  # type: ignore[arg-type]


def test_label_smoothing_is_torch_s_but_for_a_constant() -> None:
    loss = get_label_loss(TrainConfig(label_smoothing=0.2))
    actual = loss.choose_one(tensor(LOGITS), CLASSES)
    targets = torch.from_numpy(CLASSES)
    expected = torch.nn.functional.cross_entropy(tensor(LOGITS), targets, reduction="none", label_smoothing=0.2)
    assert actual.tolist() == pytest.approx((expected - 0.2 * np.log(3)).tolist())


def test_the_settings_choose_the_loss() -> None:
    assert get_label_loss(TrainConfig()) == FocalLoss(0.0)
    assert get_label_loss(TrainConfig(loss="focal", focal_gamma=1.5)) == FocalLoss(1.5, 0.25)
    assert get_label_loss(TrainConfig(loss="asymmetric")) == AsymmetricLoss(0.0, 4.0, 0.05)
