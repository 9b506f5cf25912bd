"""Scores of predicted numbers over a whole split. All rows must have a finite true value.

A correlation with a constant is undefined and reported as 0.
"""

import numpy as np

from rtrain.metrics.sums import Floats, Ints, SumMetric, ratio


def make_sum_metric(true: Floats, predicted: Floats) -> SumMetric:
    """rmse, mae, r2 and pearson.

    rmse = sqrt(mean (p - t)^2); mae = mean |p - t|; r2 = 1 - sum (p - t)^2 / sum (t - mean t)^2, 0 where all true
    values are equal; pearson = cov(t, p) / (sd t * sd p).
    """
    # Sums of squares about a distant origin cancel; centered on the split's means they stay exact.
    t, p = (side - (side.mean() if len(side) else 0.0) for side in (true, predicted))
    error = predicted - true
    rows = np.stack([t, p, t * t, p * p, t * p, error * error, np.abs(error), np.ones_like(t)], axis=1)
    # The rounding error of centering equal values: 1e-17 for 0.1, not 0.
    tiny_t, tiny_p = (
        len(t) * (np.finfo(np.float64).eps * np.abs(side).max(initial=0.0)) ** 2 for side in (true, predicted)
    )

    def score(sums: Floats) -> dict[str, Floats]:
        t, p, tt, pp, tp, squared, absolute, count = np.moveaxis(sums, -1, 0)
        spread_t = _sum_centered_squares(tt, t, count, tiny_t)
        spread_p = _sum_centered_squares(pp, p, count, tiny_p)
        covariance_sum = tp - ratio(t * p, count)
        return {
            "rmse": np.sqrt(ratio(squared, count)),
            "mae": ratio(absolute, count),
            "r2": np.where(spread_t > 0, 1 - ratio(squared, spread_t), 0.0),
            "pearson": np.clip(ratio(covariance_sum, np.sqrt(spread_t) * np.sqrt(spread_p)), -1, 1),
        }

    return SumMetric(rows, score)


def compute_spearman(true: Floats, predicted: Floats) -> float:
    """Spearman rank correlation (scipy), ties at their mean rank."""
    from scipy.stats import spearmanr

    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(spearmanr(true, predicted).statistic)


def to_ratings(values: Floats, low: float, high: float, step: float = 1.0) -> Ints:
    """The nearest of the ratings low, low + step, ..., high, as its number from 0; halves go to the even number.

    Predictions beyond the range are clipped to it.
    """
    return np.clip(np.rint((values - low) / step), 0, round((high - low) / step)).astype(np.int64)


def make_kappa_metric(true: Floats, predicted: Floats, low: float, high: float, step: float = 1.0) -> SumMetric:
    """qwk: quadratic weighted kappa (Cohen 1968) of the ratings.

    With weights (i - j)^2, kappa = 1 - mean (t - p)^2 / (var t + var p + (mean t - mean p)^2): the denominator is the
    mean of (t - p)^2 over all pairs of a true and a predicted rating. It is 0, undefined, where both sides are one
    and the same rating.
    """
    t, p = (to_ratings(side, low, high, step).astype(np.float64) for side in (true, predicted))
    rows = np.stack([t, p, t * t, p * p, (t - p) ** 2, np.ones_like(t)], axis=1)

    def score(sums: Floats) -> dict[str, Floats]:
        t, p, tt, pp, squared, count = np.moveaxis(sums, -1, 0)
        # count^2 x chance: whole numbers, so equal ratings give exactly 0.
        expected_disagreement = count * (tt + pp) - 2 * t * p
        return {"qwk": np.where(expected_disagreement > 0, 1 - ratio(count * squared, expected_disagreement), 0.0)}

    return SumMetric(rows, score)


def compute_quadratic_weighted_kappa(
    true: Floats, predicted: Floats, low: float, high: float, step: float = 1.0
) -> float:
    """`make_kappa_metric` over all rows: scikit-learn's `cohen_kappa_score(weights="quadratic", labels=all
    ratings)`."""
    return make_kappa_metric(true, predicted, low, high, step).scores()["qwk"]


def _sum_centered_squares(squares: Floats, total: Floats, count: Floats, tiny: float) -> Floats:
    """Sum of squares about the mean; 0 where it is only the rounding of equal values."""
    centered_squares = squares - ratio(total * total, count)
    return np.where(centered_squares > np.maximum(tiny, 1e-12 * squares), centered_squares, 0.0)
