"""Whether a probability means what it says: reliability and expected calibration error.

`confidence` is a row's highest probability and `right` whether that label is true. A confidence that is no number says
nothing of how sure a model is, and is left out.
"""

from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics.sums import Bools, Floats, ratio

BINS = 15


class Bin(NamedTuple):
    """Rows with low < confidence <= high (the first bin has 0 too); the means are 0 where there are none."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def softmax(logits: Any) -> Any:
    """Probabilities over the last axis, float64."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True), dtype=np.float64)
    return shifted / shifted.sum(axis=-1, keepdims=True)


def reliability(confidence: Floats, right: Bools, bins: int = BINS) -> list[Bin]:
    """Equal-width bins of confidence: the points of the reliability diagram (Niculescu-Mizil and Caruana 2005)."""
    count, sure, accurate = _binned(confidence, right, bins)
    edges = np.linspace(0, 1, bins + 1)
    columns = zip(edges[:-1], edges[1:], count, ratio(sure, count), ratio(accurate, count), strict=True)
    return [Bin(float(a), float(b), int(n), float(c), float(d)) for a, b, n, c, d in columns]


def expected_calibration_error(confidence: Floats, right: Bools, bins: int = BINS) -> float:
    """Sum over bins of the share of rows x |accuracy - mean confidence| (Guo et al. 2017)."""
    count, sure, accurate = _binned(confidence, right, bins)
    return float(ratio(np.abs(accurate - sure).sum(), count.sum()))


def _binned(confidence: Floats, right: Bools, bins: int) -> tuple[Floats, Floats, Floats]:
    """For each bin: rows, the sum of their confidence, and how many are right. A table of rows and bins would not fit
    into memory where each label of each row, or each word of a text, has a confidence of its own."""
    known = ~np.isnan(confidence)
    confidence, right = confidence[known], right[known]
    # A bin holds its upper edge: 1.0 falls into the last, not past it.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    sums = (np.bincount(place, weights, bins) for weights in (None, confidence, right))
    count, sure, accurate = (found.astype(np.float64) for found in sums)
    return count, sure, accurate
