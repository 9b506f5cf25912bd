"""Calibration of probabilities: reliability and expected calibration error.

`confidence` is a row's highest probability and `is_correct` whether that label is true. NaN confidences are excluded.
"""

from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics.sums import Bools, Floats, ratio

BINS = 15


class ReliabilityBin(NamedTuple):
    """Rows with low < confidence <= high (the first bin has 0 too); the means are 0 in an empty bin."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def softmax(logits: Any) -> Any:
    """Probabilities over the last axis, float64."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True), dtype=np.float64)
    return shifted / shifted.sum(axis=-1, keepdims=True)


def compute_reliability_bins(confidence: Floats, is_correct: Bools, bins: int = BINS) -> list[ReliabilityBin]:
    """Equal-width bins of confidence: the points of the reliability diagram (Niculescu-Mizil and Caruana 2005)."""
    count, confidence_sums, num_correct = _bin_rows(confidence, is_correct, bins)
    edges = np.linspace(0, 1, bins + 1)
    columns = zip(edges[:-1], edges[1:], count, ratio(confidence_sums, count), ratio(num_correct, count), strict=True)
    return [ReliabilityBin(float(a), float(b), int(n), float(c), float(d)) for a, b, n, c, d in columns]


def expected_calibration_error(confidence: Floats, is_correct: Bools, bins: int = BINS) -> float:
    """Sum over bins of the share of rows x |accuracy - mean confidence| (Guo et al. 2017)."""
    count, confidence_sums, num_correct = _bin_rows(confidence, is_correct, bins)
    return float(ratio(np.abs(num_correct - confidence_sums).sum(), count.sum()))


def _bin_rows(confidence: Floats, is_correct: Bools, bins: int) -> tuple[Floats, Floats, Floats]:
    """For each bin: rows, the sum of their confidence, and the number of correct rows. A table of rows and bins would
    not fit into memory if each label of each row, or each word of a text, has a confidence."""
    is_number = ~np.isnan(confidence)
    confidence, is_correct = confidence[is_number], is_correct[is_number]
    # A bin holds its upper edge: 1.0 falls into the last, not past it.
    bin_index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    sums = (np.bincount(bin_index, weights, bins) for weights in (None, confidence, is_correct))
    count, confidence_sums, num_correct = (values.astype(np.float64) for values in sums)
    return count, confidence_sums, num_correct
