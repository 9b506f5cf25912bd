"""Confidence interval of the difference of two trials, over rows and seeds.

A trial's score varies with its rows and with its seed; an interval over the rows alone mistakes one lucky seed for a
better setting (Bouthillier et al. 2021, arXiv:2103.03098). Here both count. The model of the difference of row i with
seed s is

    difference + row[i] + seed[s] + rest[i, s]

with means of 0, so the mean over all has the variance  rows / n + (seeds + rest / n) / S  (the two-way layout of
Searle, Casella & McCulloch 1992, section 4.3). Rows and rest are estimated from the rows. The seeds' part is the
variance of the scores of all trials with these seeds, less the means of trial and seed, less the rest. It has few
degrees of freedom and the other parts have many, so the interval is Student's, with the mean of both quantiles weighted
by their parts of the variance (Cochran & Cox 1950): a large variance between seeds widens it. In simulations the error
rate of `better` for equal trials (nominal 2.5 %) is 1 to 3 % with three seeds of three trials, up to 5 % with three
seeds of two trials or two of three, and up to 7 % with two of two; it is highest if seeds differ far more than rows.

For a score that is not a mean over rows, e.g. F1, the rows have jackknife pseudo-values (Tukey 1958).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rtrain.evaluation import pairing
from rtrain.evaluation.significance import ALPHA
from rtrain.metrics.bootstrap import Floats, SumMetric

_BLOCK = 1 << 20
"""Elements of a block of leave-one-out sums."""


@dataclass(frozen=True, eq=False)
class HoldoutScores:
    """Scores of a finished run on the holdout rows."""

    score_name: str
    """Name of the compared score; larger is better."""
    row_ids: npt.NDArray[np.uint64]
    """Ids of the rows, (rows,)."""
    row_metric: SumMetric
    """An entry per row, in the order of `row_ids`; `score_name` is one of its scores."""

    @property
    def score(self) -> float:
        return self.row_metric.scores()[self.score_name]


ScoreTable = Mapping[int, Sequence[HoldoutScores]]
"""Scores of each seed by trial; all trials have the same seeds in the same order."""


@dataclass(frozen=True)
class DifferenceCI:
    """Candidate's score minus the baseline's, as means over the seeds."""

    score_name: str
    baseline_score: float
    candidate_score: float
    difference: float
    ci_low: float
    ci_high: float
    """Interval over rows and seeds; with one seed over the rows alone."""
    rows: int
    """Distinct rows with scores of both, over all seeds."""
    seeds: int


def align_rows(table: ScoreTable, is_nested: bool) -> dict[int, list[HoldoutScores]]:
    """Align the rows of all trials, and of all seeds unless each seed has its own rows (`is_nested`)."""
    aligned = {trial: list(scores) for trial, scores in table.items()}
    seeds = range(len(next(iter(table.values()))))
    groups = [[(trial, seed) for trial in table] for seed in seeds]
    if not is_nested:
        groups = [[cell for group in groups for cell in group]]
    for group in groups:
        ids = [table[trial][seed].row_ids for trial, seed in group]
        if all(np.array_equal(row_ids, ids[0]) for row_ids in ids):
            continue
        for (trial, seed), rows in zip(group, pairing.common_positions(ids), strict=True):
            scores = table[trial][seed]
            row_metric = SumMetric(scores.row_metric.rows[rows], scores.row_metric.score)
            aligned[trial][seed] = replace(scores, row_ids=scores.row_ids[rows], row_metric=row_metric)
    return aligned


def difference_ci(
    table: ScoreTable, baseline: int, candidate: int, *, is_nested: bool = False, alpha: float = ALPHA
) -> DifferenceCI:
    """Compare two trials of an aligned table (`align_rows`).

    Args:
        is_nested: each seed has its own rows. The seeds' differences then count as independent; shared training rows
            correlate them slightly (Bengio & Grandvalet 2004).
        alpha: error probability of the interval.
    """
    pairs = list(zip(table[baseline], table[candidate], strict=True))
    seeds = len(pairs)
    by_row = [pseudo_values(b) - pseudo_values(a) for a, b in pairs]
    rows = sum(map(len, by_row)) if is_nested else len(by_row[0])
    means = [float(np.mean([holdout.score for holdout in table[trial]])) for trial in (baseline, candidate)]
    difference = means[1] - means[0]
    noise = _estimate_variance(table, baseline, candidate, by_row, is_nested)
    half_width = noise.half_width(rows // seeds if is_nested else rows, seeds, alpha)
    low, high = difference - half_width, difference + half_width
    return DifferenceCI(pairs[0][0].score_name, means[0], means[1], difference, low, high, rows, seeds)


@dataclass(frozen=True)
class _VarianceParts:
    """Variances of the parts of the model in the module docstring."""

    row_variance: float
    seed_variance: float
    residual_variance: float
    degrees_per_seed: int
    """Degrees of freedom of the seeds' part per seed after the first."""

    def half_width(self, rows: int, seeds: int, alpha: float) -> float:
        """Return half the width of the interval with so many seeds, on so many rows each."""
        from scipy.special import stdtrit

        def quantile(degrees: int) -> float:
            return float(stdtrit(max(1, degrees), 1 - alpha / 2))

        seed_part, row_part = self.seed_variance / seeds, (self.row_variance + self.residual_variance / seeds) / rows
        weighted_quantile = seed_part * quantile(self.degrees_per_seed * (seeds - 1)) + row_part * quantile(rows - 1)
        return weighted_quantile / math.sqrt(seed_part + row_part) if weighted_quantile else 0.0


def _estimate_variance(
    table: ScoreTable, baseline: int, candidate: int, by_row: Sequence[Floats], is_nested: bool
) -> _VarianceParts:
    """`by_row`: the difference of each row, by seed."""
    seeds, rows = len(by_row), float(np.mean([len(differences) for differences in by_row]))
    single_seed_variance = float(np.mean([_variance_of_mean(differences) for differences in by_row]))
    if seeds == 1:
        return _VarianceParts(single_seed_variance * rows, 0.0, 0.0, 0)
    # The maximum of the estimate from all trials and of the estimate from the two.
    all_scores = np.array([[holdout.score for holdout in trial_scores] for trial_scores in table.values()])
    pair_scores = np.array([[holdout.score for holdout in table[trial]] for trial in (baseline, candidate)])
    degrees_per_seed = len(table) - 1
    score_variance = max(
        2 * _residual_squares(all_scores) / (degrees_per_seed * (seeds - 1)),
        2 * _residual_squares(pair_scores) / (seeds - 1),
    )
    # The rows give a lower bound: two seeds may be alike by chance.
    if is_nested:
        return _VarianceParts(
            0.0, max(0.0, score_variance - single_seed_variance), single_seed_variance * rows, degrees_per_seed
        )
    mean_variance = _variance_of_mean(np.mean(by_row, axis=0))
    residual = max(0.0, (single_seed_variance - mean_variance) * seeds / (seeds - 1))
    return _VarianceParts(
        max(0.0, mean_variance - residual / seeds) * rows,
        max(0.0, score_variance - residual),
        residual * rows,
        degrees_per_seed,
    )


def row_std(first: HoldoutScores, second: HoldoutScores) -> float:
    """Return the standard deviation of a score over rows, from two trainings with equal settings on aligned rows: the
    square root of half the variance of their difference. It is 0 if all predictions are equal."""
    return math.sqrt(_variance_of_mean(pseudo_values(second) - pseudo_values(first)) / 2)


def pseudo_values(holdout: HoldoutScores) -> Floats:
    """Return the jackknife pseudo-values, (rows,): n times the score of all n rows, less n - 1 times the score without
    the row. For a mean they are the rows' values."""
    rows, count = holdout.row_metric.rows, len(holdout.row_metric)
    if count < 2:
        return np.full(count, holdout.score)
    total = np.asarray(rows.sum(axis=0), dtype=np.float64).reshape(-1)
    step = max(1, _BLOCK // max(1, len(total)))
    blocks = []
    for start in range(0, count, step):
        block = rows[start : start + step]
        block = block if isinstance(block, np.ndarray) else block.toarray()
        blocks.append(holdout.row_metric.score(total - block)[holdout.score_name])
    values: Floats = count * holdout.score - (count - 1) * np.concatenate(blocks)
    return values


def _variance_of_mean(values: Floats) -> float:
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.0


def _residual_squares(scores: Floats) -> float:
    """Return the residual sum of squares of (trials, seeds), without the means of trial and seed."""
    residuals = scores - scores.mean(axis=1, keepdims=True) - scores.mean(axis=0, keepdims=True) + scores.mean()
    return float((residuals**2).sum())
