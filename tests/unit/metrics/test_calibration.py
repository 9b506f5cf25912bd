"""Calibration against arithmetic by hand."""

import tracemalloc

import numpy as np
import pytest

from rtrain.metrics import classification

CONFIDENCE = np.array([0.55, 0.6, 0.95, 1.0])
RIGHT = np.array([True, False, True, True])


def test_reliability_by_hand() -> None:
    bins = classification.compute_reliability_bins(CONFIDENCE, RIGHT, bins=5)
    assert [tuple(part) for part in bins] == [
        pytest.approx((0.0, 0.2, 0, 0, 0)),
        pytest.approx((0.2, 0.4, 0, 0, 0)),
        pytest.approx((0.4, 0.6, 2, 0.575, 0.5)),  # .6 lies in the bin that ends there
        pytest.approx((0.6, 0.8, 0, 0, 0)),
        pytest.approx((0.8, 1.0, 2, 0.975, 1.0)),
    ]
    # Half of the rows .075 too sure, half .025 too little.
    assert classification.expected_calibration_error(CONFIDENCE, RIGHT, bins=5) == pytest.approx(0.05)


def test_every_row_falls_into_a_bin_that_holds_it() -> None:
    edges = np.linspace(0, 1, 16)
    bins = classification.compute_reliability_bins(np.array([0.0, 1.0, *edges]), np.ones(18, dtype=bool))
    assert sum(part.rows for part in bins) == 18


def test_a_confidence_takes_tens_of_bytes_not_a_row_of_all_bins() -> None:
    """5,000 rows of 1,000 labels have 5,000,000 of them: 1.8 GB as a table of rows and bins."""
    confidence = np.random.default_rng(0).random(100_000)
    tracemalloc.start()
    result = classification.expected_calibration_error(confidence, confidence > 0.5, bins=10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * len(confidence)
    assert result == pytest.approx(0.25, abs=0.01)  # x too sure below one half, 1 - x too little above it


def test_softmax_of_large_logits_does_not_overflow() -> None:
    assert classification.softmax(np.array([[1e4, 0.0, -1e4]])).tolist() == [[1.0, 0.0, 0.0]]
