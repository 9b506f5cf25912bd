"""Scores of predicted numbers over a whole split. All rows must have a finite true value.

A correlation with a constant is undefined and reported as 0.
"""

from typing import Any

import numpy as np

from rtrain.core.ragged import Head, RaggedArray
from rtrain.metrics.bootstrap import Floats, Ints, SumMetric, combine_metrics, ratio
from rtrain.metrics.classification import build_confusion_table, count_confusion

RESIDUAL_BINS = 30


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
    eps = np.finfo(np.float64).eps
    tiny_t, tiny_p = (len(t) * (eps * np.abs(side).max(initial=0.0)) ** 2 for side in (true, predicted))

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
    and the same rating. As scikit-learn's `cohen_kappa_score(weights="quadratic", labels=all ratings)`.
    """
    t, p = (to_ratings(side, low, high, step).astype(np.float64) for side in (true, predicted))
    rows = np.stack([t, p, t * t, p * p, (t - p) ** 2, np.ones_like(t)], axis=1)

    def score(sums: Floats) -> dict[str, Floats]:
        t, p, tt, pp, squared, count = np.moveaxis(sums, -1, 0)
        # count^2 x chance: whole numbers, so equal ratings give exactly 0.
        expected_disagreement = count * (tt + pp) - 2 * t * p
        return {"qwk": np.where(expected_disagreement > 0, 1 - ratio(count * squared, expected_disagreement), 0.0)}

    return SumMetric(rows, score)


def _sum_centered_squares(squares: Floats, total: Floats, count: Floats, tiny: float) -> Floats:
    """Sum of squares about the mean; 0 where it is only the rounding of equal values."""
    centered_squares = squares - ratio(total * total, count)
    return np.where(centered_squares > np.maximum(tiny, 1e-12 * squares), centered_squares, 0.0)


# ---------------------------------------------------------------------------------------------- the output `number`


def make_number_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Errors in the targets' own unit; Pearson's r; and, where the training scores are steps of a scale, quadratic
    weighted kappa of predictions rounded to that scale.

    The headline is the negative RMSE: it is defined for any targets and predictions, also for the constant ones of a
    model that has learned nothing yet, and sees a wrong scale or offset, to which a correlation is blind.
    """
    predicted, true = row_results.values.astype(np.float64), targets.values.astype(np.float64)
    parts = [make_sum_metric(true, predicted)]
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        # A score between or beyond the steps of the training scores counts as the nearest step.
        rated = low + step * to_ratings(true, low, high, step)
        parts.append(make_kappa_metric(rated, predicted, low, high, step))
    combined_metric = combine_metrics(*parts)

    def score(sums: Floats) -> dict[str, Floats]:
        scores = combined_metric.score(sums)
        return {"neg_rmse": -scores["rmse"], **scores}

    return SumMetric(combined_metric.rows, score)


def compute_extra_number_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, float]:
    true, predicted = targets.values.astype(np.float64), row_results.values.astype(np.float64)
    return {"spearman": compute_spearman(true, predicted)}


def build_number_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    predicted, true = row_results.values.astype(np.float64), targets.values.astype(np.float64)
    if not len(predicted):
        return {}
    counts, edges = np.histogram(predicted - true, bins=RESIDUAL_BINS)
    tables: dict[str, Any] = {"residuals": {"edges": edges.tolist(), "rows": counts.tolist()}}
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        true_ratings, predicted_ratings = (to_ratings(side, low, high, step) for side in (true, predicted))
        names = [f"{low + index * step:g}" for index in range(round((high - low) / step) + 1)]
        tables["scale"] = build_confusion_table(count_confusion(true_ratings, predicted_ratings, len(names)), names)
    return tables
