"""Scores of predicted numbers over a whole split. All rows must have a finite true value.

A correlation with a constant side is undefined; it is given as 0: a constant prediction orders nothing.
"""

import numpy as np

from rtrain.metrics.sums import Additive, Floats, Ints, ratio


def additive(true: Floats, predicted: Floats) -> Additive:
    """rmse, mae, r2 and pearson.

    rmse = sqrt(mean (p - t)^2); mae = mean |p - t|; r2 = 1 - sum (p - t)^2 / sum (t - mean t)^2, 0 where all true
    values are equal; pearson = cov(t, p) / (sd t * sd p).
    """
    # Sums of squares about a far-off origin cancel: centred on the split's means they keep their digits.
    t, p = (side - (side.mean() if len(side) else 0.0) for side in (true, predicted))
    error = predicted - true
    rows = np.stack([t, p, t * t, p * p, t * p, error * error, np.abs(error), np.ones_like(t)], axis=1)
    # What centring leaves of equal values: 1e-17 of 0.1, not 0.
    tiny_t, tiny_p = (
        len(t) * (np.finfo(np.float64).eps * np.abs(side).max(initial=0.0)) ** 2 for side in (true, predicted)
    )

    def score(sums: Floats) -> dict[str, Floats]:
        t, p, tt, pp, tp, squared, absolute, count = np.moveaxis(sums, -1, 0)
        spread_t = _spread(tt, t, count, tiny_t)
        spread_p = _spread(pp, p, count, tiny_p)
        together = tp - ratio(t * p, count)
        return {
            "rmse": np.sqrt(ratio(squared, count)),
            "mae": ratio(absolute, count),
            "r2": np.where(spread_t > 0, 1 - ratio(squared, spread_t), 0.0),
            "pearson": np.clip(ratio(together, np.sqrt(spread_t) * np.sqrt(spread_p)), -1, 1),
        }

    return Additive(rows, score)


def spearman(true: Floats, predicted: Floats) -> float:
    """Rank correlation, ties at their mean rank; by scipy."""
    from scipy.stats import spearmanr

    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(spearmanr(true, predicted).statistic)


def ratings(values: Floats, low: float, high: float, step: float = 1.0) -> Ints:
    """The nearest of the ratings low, low + step, ..., high, as its number from 0; halves go to the even number.

    Predictions beyond the range are given its end, as a rater must.
    """
    return np.clip(np.rint((values - low) / step), 0, round((high - low) / step)).astype(np.int64)


def additive_kappa(true: Floats, predicted: Floats, low: float, high: float, step: float = 1.0) -> Additive:
    """qwk: quadratic weighted kappa (Cohen 1968) of the ratings.

    With weights (i - j)^2, kappa = 1 - mean (t - p)^2 / (var t + var p + (mean t - mean p)^2): the denominator is the
    mean of (t - p)^2 over all pairs of a true and a predicted rating. It is 0, undefined, where both sides are one
    and the same rating.
    """
    t, p = (ratings(side, low, high, step).astype(np.float64) for side in (true, predicted))
    rows = np.stack([t, p, t * t, p * p, (t - p) ** 2, np.ones_like(t)], axis=1)

    def score(sums: Floats) -> dict[str, Floats]:
        t, p, tt, pp, squared, count = np.moveaxis(sums, -1, 0)
        # count^2 x chance: whole numbers, so that equal ratings give exactly 0.
        chance = count * (tt + pp) - 2 * t * p
        return {"qwk": np.where(chance > 0, 1 - ratio(count * squared, chance), 0.0)}

    return Additive(rows, score)


def quadratic_weighted_kappa(true: Floats, predicted: Floats, low: float, high: float, step: float = 1.0) -> float:
    """`additive_kappa` over all rows: scikit-learn's `cohen_kappa_score(weights="quadratic", labels=all ratings)`."""
    return additive_kappa(true, predicted, low, high, step).scores()["qwk"]


def _spread(squares: Floats, total: Floats, count: Floats, tiny: float) -> Floats:
    """Sum of squares about the mean; 0 where it is only the rounding of equal values."""
    found = squares - ratio(total * total, count)
    return np.where(found > np.maximum(tiny, 1e-12 * squares), found, 0.0)
