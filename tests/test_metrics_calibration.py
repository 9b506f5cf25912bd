"""Calibration against arithmetic by hand and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn import metrics as sk

from rtrain.metrics import calibration
from rtrain.metrics.additive import Floats, Ints

CONFIDENCE = np.array([0.55, 0.6, 0.95, 1.0])
RIGHT = np.array([True, False, True, True])


def test_reliability_by_hand() -> None:
    bins = calibration.reliability(CONFIDENCE, RIGHT, bins=5)
    assert [tuple(part) for part in bins] == [
        pytest.approx((0.0, 0.2, 0, 0, 0)),
        pytest.approx((0.2, 0.4, 0, 0, 0)),
        pytest.approx((0.4, 0.6, 2, 0.575, 0.5)),  # .6 lies in the bin that ends there
        pytest.approx((0.6, 0.8, 0, 0, 0)),
        pytest.approx((0.8, 1.0, 2, 0.975, 1.0)),
    ]
    # Half of the rows .075 too sure, half .025 too little.
    assert calibration.expected_calibration_error(CONFIDENCE, RIGHT, bins=5) == pytest.approx(0.05)


def test_every_row_falls_into_a_bin_that_holds_it() -> None:
    edges = np.linspace(0, 1, 16)
    bins = calibration.reliability(np.array([0.0, 1.0, *edges]), np.ones(18, dtype=bool))
    assert sum(part.rows for part in bins) == 18


def brier(true: Ints, probabilities: Floats) -> float:
    return calibration.additive_brier(true, probabilities).scores()["brier"]


def test_brier_by_hand_and_by_scikit_learn() -> None:
    # (.8 - 1)^2 + .2^2 = .08; .6^2 + (.4 - 1)^2 = .72.
    assert brier(np.array([0, 1]), np.array([[0.8, 0.2], [0.6, 0.4]])) == pytest.approx(0.4)
    assert brier(np.array([-1]), np.array([[0.5, 0.5]])) == pytest.approx(0.5)
    generator = np.random.default_rng(1)
    true, positive = generator.integers(0, 2, 50), generator.random(50)
    found = brier(true, np.stack([1 - positive, positive], axis=1))
    assert found == pytest.approx(2 * sk.brier_score_loss(true, positive))


def test_log_loss_is_scikit_learns() -> None:
    generator = np.random.default_rng(2)
    true, logits = generator.integers(0, 4, 60), generator.normal(size=(60, 4)) * 5
    for temperature in (0.5, 1.0, 3.0):
        expected = sk.log_loss(true, calibration.probabilities(logits, temperature), labels=range(4))
        assert calibration.log_loss(true, logits, temperature) == pytest.approx(expected)
    without_class = np.append(true, -1), np.vstack([logits, [9.0, 0, 0, 0]])
    assert calibration.log_loss(*without_class) == pytest.approx(calibration.log_loss(true, logits))
    assert calibration.log_loss(np.array([-1]), np.zeros((1, 4))) == 0.0


def test_temperature_by_hand() -> None:
    # Logits (2, 0), right in three of four: log loss is lowest where p = 3/4, that is 2 / T = ln 3.
    logits = np.tile([2.0, 0.0], (4, 1))
    assert calibration.fit_temperature(np.array([0, 0, 0, 1]), logits) == pytest.approx(2 / np.log(3))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.2, 5))
def test_no_temperature_near_the_fitted_one_is_better(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    true, logits = generator.integers(0, 3, 30), generator.normal(size=(30, 3)) * scale
    logits[np.arange(30), true] += scale
    best = calibration.fit_temperature(true, logits)
    loss = calibration.log_loss(true, logits, best)
    for other in (best * 0.99, best * 1.01):
        assert loss <= calibration.log_loss(true, logits, float(np.clip(other, 0.01, 100))) + 1e-12


def test_temperature_without_a_minimum_is_a_bound() -> None:
    logits = np.array([[3.0, 0.0], [0.0, 3.0]])
    assert calibration.fit_temperature(np.array([0, 1]), logits) == 0.01  # all right: the surer the better
    assert calibration.fit_temperature(np.array([1, 0]), logits) == 100.0  # all wrong
    assert calibration.fit_temperature(np.array([-1, -1]), logits) == 1.0  # nothing to fit


def test_temperature_leaves_the_order_and_scales_large_logits_without_overflow() -> None:
    logits = np.array([[1e4, 0.0, -1e4]])
    assert calibration.probabilities(logits).tolist() == [[1.0, 0.0, 0.0]]
    assert calibration.probabilities(logits, 1e4).argmax() == 0
