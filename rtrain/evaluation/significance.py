"""Significance of a difference: paired bootstrap, McNemar's test, required sample size."""

import math
from dataclasses import dataclass

import numpy as np

from rtrain.metrics import bootstrap
from rtrain.metrics.scores import MAX_DRAWS
from rtrain.metrics.slices import MIN_ROWS
from rtrain.metrics.sums import SumMetric
from rtrain.report.stats import wilson_interval

ALPHA = 0.05
"""Significance level."""
REPLICATES = 2000
"""Resamples. The least p is 1 in 1,000, small enough for the correction of a few comparisons."""
Z95, Z80 = 1.959964, 0.841621
"""Quantiles of the normal distribution for a two-sided 95 % interval and for a power of 80 %."""


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


def compare_scores(first: SumMetric, other: SumMetric, replicates: int = REPLICATES) -> list[Difference]:
    """Compare each finite score that both have, in the order of the first.

    Many rows get fewer resamples: at most `MAX_DRAWS` drawn rows in all.
    """
    rows = len(first)
    resamples = max(100, min(replicates, MAX_DRAWS // max(1, rows)))
    with np.errstate(invalid="ignore"):  # inf - inf of two infinite perplexities
        comparisons = bootstrap.compare(other, first, replicates=resamples)
    first_scores, other_scores = first.scores(), other.scores()
    # An error is redundant beside its negative.
    redundant_names = {name.removeprefix("neg_") for name in comparisons if name.startswith("neg_")}
    finite_comparisons = {
        name: comparison
        for name, comparison in comparisons.items()
        if all(map(math.isfinite, comparison)) and name not in redundant_names
    }
    return [
        Difference(
            name,
            first_scores[name],
            other_scores[name],
            comparison.difference,
            comparison.low,
            comparison.high,
            # With fewer resamples there are many rows, so the normal approximation is valid; it has no least p.
            min(comparison.p, _normal_p_value(comparison))
            if resamples < replicates and comparison.p <= 2 / (resamples + 1)
            else comparison.p,
            rows,
        )
        for name, comparison in finite_comparisons.items()
    ]


def _normal_p_value(comparison: bootstrap.Comparison) -> float:
    """Compute p from the interval, whose half-width is 1.96 standard errors."""
    error = (comparison.high - comparison.low) / (2 * Z95)
    return math.erfc(abs(comparison.difference) / error / math.sqrt(2)) if error else 0.0


def compare_shares(name: str, first: float, other: float, rows: int) -> Difference:
    """Compare two shares of `rows` rows each, without row pairing.

    The interval is Newcombe's (1998, method 10) from Wilson's intervals; p is the normal approximation. Both are wider
    than a paired comparison.
    """
    (low_a, high_a), (low_b, high_b) = (wilson_interval(share * rows, rows) for share in (first, other))
    difference, mean = other - first, (first + other) / 2
    low = difference - math.hypot(other - low_b, high_a - first)
    high = difference + math.hypot(high_b - other, first - low_a)
    error = math.sqrt(2 * mean * (1 - mean) / rows)
    p = math.erfc(abs(difference) / error / math.sqrt(2)) if error and difference else 1.0
    return Difference(name, first, other, difference, low, high, p, rows)


def mcnemar_p_value(lost: int, won: int) -> float:
    """Exact two-sided p of McNemar's test (1947): discordant rows favor either model with equal probability."""
    discordant = lost + won
    if not discordant:
        return 1.0
    from scipy.special import bdtr

    return float(min(1.0, 2 * bdtr(min(lost, won), discordant, 0.5)))


def minimum_detectable_effect(observed: Difference) -> float:
    """Smallest difference that these rows detect with a power of 80 %, from this difference's standard error."""
    return (Z95 + Z80) * _standard_error(observed)


def required_sample_size(observed: Difference, effect: float) -> int:
    """Rows that detect this effect with a power of 80 %, to two digits."""
    rows = observed.rows * (minimum_detectable_effect(observed) / abs(effect)) ** 2
    digits = max(0, math.floor(math.log10(max(rows, 1.0))) - 1)
    return int(np.ceil(rows / 10**digits) * 10**digits)


def _standard_error(observed: Difference) -> float:
    """Standard error from the width of the interval."""
    return (observed.high - observed.low) / (2 * Z95)
