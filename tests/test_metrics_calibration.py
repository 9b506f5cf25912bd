"""Calibration against arithmetic by hand."""

import numpy as np
import pytest

from rtrain.metrics import calibration

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


def test_softmax_of_large_logits_does_not_overflow() -> None:
    assert calibration.softmax(np.array([[1e4, 0.0, -1e4]])).tolist() == [[1.0, 0.0, 0.0]]
