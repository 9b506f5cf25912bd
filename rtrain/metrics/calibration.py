"""Whether a probability means what it says: reliability and expected calibration error.

`confidence` is a row's highest probability and `right` whether that label is true.
"""

from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics.additive import Additive, Bools, Floats, ratio

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
    count, sure, accurate = _binned(confidence, right, bins).sum(axis=0).reshape(3, bins)
    edges = np.linspace(0, 1, bins + 1)
    columns = zip(edges[:-1], edges[1:], count, ratio(sure, count), ratio(accurate, count), strict=True)
    return [Bin(float(a), float(b), int(n), float(c), float(d)) for a, b, n, c, d in columns]


def additive(confidence: Floats, right: Bools, bins: int = BINS) -> Additive:
    """ece (Guo et al. 2017): sum over bins of the share of rows x |accuracy - mean confidence|."""

    def score(sums: Floats) -> dict[str, Floats]:
        count, sure, accurate = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, bins), -2, 0)
        return {"ece": ratio(np.abs(accurate - sure).sum(axis=-1), count.sum(axis=-1))}

    return Additive(_binned(confidence, right, bins), score)


def expected_calibration_error(confidence: Floats, right: Bools, bins: int = BINS) -> float:
    """`additive` over all rows."""
    return additive(confidence, right, bins).scores()["ece"]


def _binned(confidence: Floats, right: Bools, bins: int) -> Floats:
    """(rows, 3 x bins): one, the confidence and whether it is right, in the columns of the row's bin."""
    # A bin holds its upper edge: 1.0 falls into the last, not past it.
    place = np.clip(np.ceil(np.asarray(confidence) * bins).astype(np.int64) - 1, 0, bins - 1)
    found = np.zeros((len(place), 3, bins))
    found[np.arange(len(place)), :, place] = np.stack([np.ones(len(place)), confidence, right], axis=1)
    return found.reshape(len(place), 3 * bins)
