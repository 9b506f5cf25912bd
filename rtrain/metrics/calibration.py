"""Whether a probability means what it says: reliability, expected calibration error, Brier score, temperature.

`confidence` is a row's highest probability and `right` whether that label is true.
"""

from typing import Any, NamedTuple

import numpy as np

from rtrain.metrics.additive import Additive, Bools, Floats, Ints, means, ratio

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


def probabilities(logits: Floats, temperature: float = 1.0) -> Floats:
    """Softmax over the last axis, of the logits divided by the temperature."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


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


def additive_brier(true: Ints, class_probabilities: Floats) -> Additive:
    """brier: mean over rows of the squared distance of the probabilities (rows, classes) from the truth, 0 to 2.

    As Brier 1950 has it: with two classes it is twice scikit-learn's `brier_score_loss` of one of them. The truth of a
    label that is no class (-1) is 0 everywhere.
    """
    truth = np.zeros_like(class_probabilities, dtype=np.float64)
    known = np.flatnonzero(true >= 0)
    truth[known, true[known]] = 1
    return means({"brier": ((class_probabilities - truth) ** 2).sum(axis=1)})


def log_loss(true: Ints, logits: Floats, temperature: float = 1.0) -> float:
    """Mean of -ln of the true class's probability over the rows that have a class (not -1); 0 without such rows."""
    known = np.flatnonzero(true >= 0)
    scaled = np.asarray(logits, dtype=np.float64)[known] / temperature
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(known)), true[known]]
    return float(losses.mean()) if known.size else 0.0


def fit_temperature(true: Ints, logits: Floats, lowest: float = 0.01, highest: float = 100.0) -> float:
    """The temperature of the lowest log loss on validation rows (Guo et al. 2017); between the two bounds.

    Log loss is convex in 1 / temperature, so the zero of its slope (mean expected logit - mean true logit) is the
    minimum. Rows without a class (-1) are left out. Without a zero between the bounds the nearer bound is the
    minimum: of logits that are all right the lowest temperature, of logits that are worse than none the highest.
    """
    from scipy.optimize import brentq

    known = true >= 0
    scores = np.asarray(logits, dtype=np.float64)[known]
    scores = scores - scores.max(axis=1, keepdims=True)
    own = scores[np.arange(len(scores)), true[known]]

    def slope(inverse: float) -> float:
        return float(((probabilities(scores, 1 / inverse) * scores).sum(axis=1) - own).mean())

    if not len(scores) or slope(1 / highest) >= 0:
        return highest if len(scores) else 1.0
    if slope(1 / lowest) <= 0:
        return lowest
    return float(1 / brentq(slope, 1 / highest, 1 / lowest, xtol=1e-12, rtol=1e-12))


def _binned(confidence: Floats, right: Bools, bins: int) -> Floats:
    """(rows, 3 x bins): one, the confidence and whether it is right, in the columns of the row's bin."""
    # A bin holds its upper edge: 1.0 falls into the last, not past it.
    place = np.clip(np.ceil(np.asarray(confidence) * bins).astype(np.int64) - 1, 0, bins - 1)
    found = np.zeros((len(place), 3, bins))
    found[np.arange(len(place)), :, place] = np.stack([np.ones(len(place)), confidence, right], axis=1)
    return found.reshape(len(place), -1)
