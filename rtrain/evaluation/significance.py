"""The measure of two models on the same rows: paired bootstrap, McNemar's test, slices, classes; required sample size.
Figures of a difference as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rtrain.metrics import bootstrap, per_class
from rtrain.metrics.bootstrap import Bools, Floats, SumMetric
from rtrain.metrics.scores import LENGTH_COLUMN, MAX_DRAWS, MAX_SLICES, MIN_ROWS, bin_by_quantile, group_rows
from rtrain.report import stats
from rtrain.report.svg import format_significant, humanize_score_name

ALPHA = 0.05
"""Significance level."""
REPLICATES = 2000
"""Resamples. The least p is 1 in 1,000, small enough for the correction of a few comparisons."""
MIN_SLICE_REPLICATES = 1000
"""Fewest resamples of a slice."""
REPLICATES_PER_SLICE = 80
"""Resamples of each slice, times the number of slices. The least p, 2 / resamples, is below 0.05 after Holm's
correction."""
Z95, Z80 = 1.959964, 0.841621
"""Quantiles of the normal distribution for a two-sided 95 % interval and for a power of 80 %."""
NON_SHARE_SCORES = ("rmse", "mae", "r2", "pearson", "qwk", "perplexity")
"""Errors and correlations, whose values may lie between 0 and 1."""


@dataclass(frozen=True)
class Difference:
    """Score of another model minus score of the first one, on the same rows."""

    name: str
    first: float
    other: float
    difference: float
    low: float
    high: float
    """95 % interval of the difference."""
    p: float
    rows: int

    @property
    def verdict(self) -> int:
        """1: the other model is better, -1: worse, 0: not significant. Larger scores are better.

        The bootstrap is overconfident on very few rows, since resamples repeat the same rows.
        """
        if self.rows < MIN_ROWS or self.p >= ALPHA:
            return 0
        return 1 if self.difference > 0 else -1


@dataclass(frozen=True)
class SliceDifference:
    column: str
    value: str
    difference: Difference
    """p is corrected for the number of slices by Holm's method."""

    @property
    def verdict(self) -> int:
        """1: the other model is better, -1: worse, 0: not significant."""
        return self.difference.verdict


@dataclass(frozen=True)
class McNemarTest:
    """McNemar's test: rows that only the first model has right, rows that only the other has right, and the exact p."""

    lost: int
    won: int
    p: float


@dataclass(frozen=True)
class RowScores:
    """Scores of one model's predictions; one entry per row."""

    scores: SumMetric
    headline: str
    """Name of the compared score in `scores`; larger is better."""
    is_correct: Bools | None
    """Correct predictions; None for graded ones."""
    slice_scores: SumMetric
    """The headline with few other scores, since it is resampled for each slice."""
    grades: Floats | None = None
    """Quality of each row's prediction, if it is not right or wrong; larger is better."""
    classes: Sequence[per_class.ClassResult] = ()
    """Scores of each class; empty if predictions are not labels."""

    @property
    def quality(self) -> Floats:
        """Quality of each row's prediction; larger is better."""
        if self.grades is not None:
            return self.grades
        assert self.is_correct is not None
        return self.is_correct.astype(np.float64)


@dataclass(frozen=True)
class PairedScores:
    headline: Difference | None = None
    """For classes p is the larger of the bootstrap's and McNemar's. None if the score is not finite."""
    scores: tuple[Difference, ...] = ()
    """All scores with the p of the bootstrap."""
    mcnemar: McNemarTest | None = None
    """None for answers that are not right or wrong."""
    first_correct: int = 0
    """Rows that the first model has right."""
    slices: tuple[SliceDifference, ...] = ()
    """The worst slices first."""
    classes: Sequence[per_class.ClassResult] = ()
    """Scores of each class by both models."""


def compare_models(
    output: str, first: RowScores, other: RowScores, columns: Mapping[str, Sequence[str]], lengths: npt.ArrayLike
) -> PairedScores:
    """Compare the scores of two models on the same rows.

    Args:
        output: kind of the task's output.
        columns: values of each row by column, for slices.
        lengths: tokens of each row, for slices by length.
    """
    scores = tuple(compare_scores(first.scores, other.scores))
    headline = next((score for score in scores if score.name == first.headline), None)
    if headline is None:
        return PairedScores(scores=scores)
    mcnemar = count_flips(first.is_correct, other.is_correct)
    if mcnemar is not None and output == "classes":
        headline = replace(headline, p=max(headline.p, mcnemar.p))
    if LENGTH_COLUMN not in columns:
        columns = {**columns, LENGTH_COLUMN: bin_by_quantile(lengths)}
    return PairedScores(
        headline,
        scores,
        mcnemar,
        0 if first.is_correct is None else int(first.is_correct.sum()),
        tuple(compare_slices(first.slice_scores, other.slice_scores, first.headline, columns)),
        per_class.pair_classes(first.classes, other.classes),
    )


def compare_scores(first: SumMetric, other: SumMetric, replicates: int = REPLICATES) -> list[Difference]:
    """Compare each finite score that both have, in the order of the first.

    Many rows get fewer resamples: at most `MAX_DRAWS` drawn rows in all.
    """
    rows = len(first)
    resamples = max(100, min(replicates, MAX_DRAWS // max(1, rows)))
    with np.errstate(invalid="ignore"):  # inf - inf of two infinite perplexities
        comparisons = bootstrap.compare(other, first, replicates=resamples)
    first_scores, other_scores = first.scores(), other.scores()

    def p_value(comparison: bootstrap.Comparison) -> float:
        # With fewer resamples there are many rows, so the normal approximation is valid; it has no least p.
        if resamples < replicates and comparison.p <= 2 / (resamples + 1):
            return min(comparison.p, _normal_p_value(comparison))
        return comparison.p

    return [
        Difference(name, first_scores[name], other_scores[name], *comparison[:3], p_value(comparison), rows)
        for name, comparison in comparisons.items()
        # An error is redundant beside its negative.
        if all(map(math.isfinite, comparison)) and f"neg_{name}" not in comparisons
    ]


def _normal_p_value(comparison: bootstrap.Comparison) -> float:
    """Compute p from the interval, whose half-width is 1.96 standard errors."""
    error = (comparison.high - comparison.low) / (2 * Z95)
    return math.erfc(abs(comparison.difference) / error / math.sqrt(2)) if error else 0.0


def count_flips(first: Bools | None, other: Bools | None) -> McNemarTest | None:
    """Count correct answers lost and won; None for answers that are not right or wrong."""
    if first is None or other is None:
        return None
    lost, won = int((first & ~other).sum()), int((~first & other).sum())
    return McNemarTest(lost, won, mcnemar_p_value(lost, won))


def mcnemar_p_value(lost: int, won: int) -> float:
    """Exact two-sided p of McNemar's test (1947): discordant rows favor either model with equal probability."""
    if not lost + won:
        return 1.0
    from scipy.special import bdtr

    return float(min(1.0, 2 * bdtr(min(lost, won), lost + won, 0.5)))


def compare_slices(
    first: SumMetric, other: SumMetric, headline: str, columns: Mapping[str, Sequence[str]], min_rows: int = MIN_ROWS
) -> list[SliceDifference]:
    """Compare the rows of each slice, the worst slice first.

    Rare values, and values beyond the `MAX_SLICES` most frequent, are merged into one slice. Columns with a single
    value and slices below `MIN_ROWS` rows are omitted.
    """
    grouped = {
        column: group_rows(values, 1 if column == LENGTH_COLUMN else min_rows, MAX_SLICES)
        for column, values in columns.items()
    }
    parts = [
        (column, group)
        for column, groups in grouped.items()
        for group in groups
        if len(groups) > 1 and len(group.rows) >= MIN_ROWS
    ]
    replicates = max(MIN_SLICE_REPLICATES, REPLICATES_PER_SLICE * len(parts))
    differences = []
    for _, group in parts:
        a, b = (SumMetric(model.rows[group.rows], model.score) for model in (first, other))
        differences.append(next(score for score in compare_scores(a, b, replicates) if score.name == headline))
    corrected = stats.holm_correction([difference.p for difference in differences])
    slices = [
        SliceDifference(column, group.value, replace(difference, p=p))
        for (column, group), difference, p in zip(parts, differences, corrected, strict=True)
    ]
    return sorted(slices, key=lambda slice_: slice_.difference.difference)


def minimum_detectable_effect(observed: Difference) -> float:
    """Smallest difference that these rows detect with a power of 80 %, from this difference's standard error."""
    return (Z95 + Z80) * ((observed.high - observed.low) / (2 * Z95))


def required_sample_size(observed: Difference, effect: float) -> int:
    """Rows that detect this effect with a power of 80 %, to two digits."""
    rows = observed.rows * (minimum_detectable_effect(observed) / abs(effect)) ** 2
    digits = max(0, math.floor(math.log10(max(rows, 1.0))) - 1)
    return int(np.ceil(rows / 10**digits) * 10**digits)


def format_difference(difference: Difference) -> str:
    """Format both scores (the other model's first), their difference with its interval, and p."""
    name, first, other, change, p = format_cells(difference)
    return f"{name} {other} against {first}, {change}, p {p}"


def format_cells(difference: Difference) -> tuple[str, str, str, str, str]:
    """Format a row of a table: name, both scores, their difference with its interval, and p."""
    first, other = (format_score(difference, value) for value in (difference.first, difference.other))
    return format_score_name(difference), first, other, format_change(difference), format_p_value(difference.p)


def is_share(difference: Difference) -> bool:
    """Whether the score is a share, with differences in points. Errors have the unit of the targets."""
    return (
        difference.name not in NON_SHARE_SCORES
        and not is_error(difference.name)
        and 0 <= difference.first <= 1
        and 0 <= difference.other <= 1
    )


def is_error(name: str) -> bool:
    """Whether a score is a negated error. It is shown as the error: smaller is better."""
    return name.startswith("neg_")


def format_score_name(difference: Difference) -> str:
    return humanize_score_name(difference.name.removeprefix("neg_"))


def format_score(difference: Difference, value: float) -> str:
    if is_share(difference):
        return f"{value:.3f}"
    return format_significant(-value if is_error(difference.name) else value)


def format_change(difference: Difference) -> str:
    """Format `+1.2 points (0.4 to 2.0)`, or `-0.020 (-0.036 to -0.004)` for an error."""
    value, low, high = difference.difference, difference.low, difference.high
    if is_share(difference):
        return f"{100 * value:+.1f} points ({100 * low:.1f} to {100 * high:.1f})"
    if is_error(difference.name):
        value, low, high = -value, -high, -low
    sign = "+" if value >= 0 else ""
    return f"{sign}{format_significant(value)} ({format_significant(low)} to {format_significant(high)})"


def format_size(difference: Difference, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share(difference) else format_significant(value)


def format_p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0095 else f"{p:.1g}" if p >= 1e-4 else "below 0.0001"
