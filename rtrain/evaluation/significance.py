"""Whether a difference is more than chance: the paired bootstrap, McNemar's test, rows needed."""

import math
from dataclasses import dataclass

import numpy as np

from rtrain.metrics import bootstrap
from rtrain.metrics.scores import MOST_DRAWS
from rtrain.metrics.slices import LEAST
from rtrain.metrics.sums import Additive
from rtrain.report.stats import wilson

ALPHA = 0.05
"""A difference with a smaller p is taken for more than chance."""
REPLICATES = 2000
"""Resamples: p is at least 1 in 1,000, also after the correction for a few comparisons."""
Z95, Z80 = 1.959964, 0.841621
"""Quantiles of the normal distribution: of a two-sided 95 % interval, and of a power of 80 %."""


@dataclass(frozen=True)
class Difference:
    """A score of another model less that of the first one, on the same rows."""

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
        """1: the other model is better, -1: worse, 0: not told apart; of a score of which larger is better.

        Of very few rows the bootstrap says too much: each of its resamples repeats the same ones.
        """
        if self.rows < LEAST or self.p >= ALPHA:
            return 0
        return 1 if self.difference > 0 else -1


def differences(first: Additive, other: Additive, replicates: int = REPLICATES) -> list[Difference]:
    """Each score that both have, in the order of the first; a score that is not finite is left out. Of many rows there
    are fewer resamples, at most `MOST_DRAWS` rows in all."""
    rows = len(first)
    fewer = max(100, min(replicates, MOST_DRAWS // max(1, rows)))
    with np.errstate(invalid="ignore"):  # of two endless perplexities
        found = bootstrap.compare(other, first, replicates=fewer)
    before, after = first.scores(), other.scores()
    # Beside the negative of an error the error itself says nothing more.
    twice = {name.removeprefix("neg_") for name in found if name.startswith("neg_")}
    kept = {name: one for name, one in found.items() if all(map(math.isfinite, one)) and name not in twice}
    return [
        Difference(
            name,
            before[name],
            after[name],
            one.difference,
            one.low,
            one.high,
            # Rows too many for all resamples are enough for the normal distribution, which has no least p.
            min(one.p, _normal(one)) if fewer < replicates and one.p <= 2 / (fewer + 1) else one.p,
            rows,
        )
        for name, one in kept.items()
    ]


def _normal(one: bootstrap.Comparison) -> float:
    """p of a difference by its interval, whose ends are 1.96 standard errors apart from the middle."""
    error = (one.high - one.low) / (2 * Z95)
    return math.erfc(abs(one.difference) / error / math.sqrt(2)) if error else 0.0


def unpaired(name: str, first: float, other: float, rows: int) -> Difference:
    """Two shares of so many rows each, of which it is not known which rows they are: the interval is Newcombe's (1998,
    method 10), by Wilson's of each share, p that of the normal approximation. Wider than a comparison row by row."""
    (low_a, high_a), (low_b, high_b) = (wilson(share * rows, rows) for share in (first, other))
    difference, mean = other - first, (first + other) / 2
    low = difference - math.hypot(other - low_b, high_a - first)
    high = difference + math.hypot(high_b - other, first - low_a)
    error = math.sqrt(2 * mean * (1 - mean) / rows)
    p = math.erfc(abs(difference) / error / math.sqrt(2)) if error and difference else 1.0
    return Difference(name, first, other, difference, low, high, p, rows)


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of McNemar's test, exact: of the rows that only one of two models has right, each is as likely to be
    the one's as the other's (McNemar 1947)."""
    both = lost + won
    if not both:
        return 1.0
    from scipy.special import bdtr

    return float(min(1.0, 2 * bdtr(min(lost, won), both, 0.5)))


def seen(one: Difference) -> float:
    """The smallest difference that so many rows show four times out of five, by the spread of this one."""
    return (Z95 + Z80) * _error(one)


def needed(one: Difference, difference: float) -> int:
    """Rows on which a difference of that size would be found four times out of five, to two digits."""
    rows = one.rows * (seen(one) / abs(difference)) ** 2
    digits = max(0, math.floor(math.log10(max(rows, 1.0))) - 1)
    return int(np.ceil(rows / 10**digits) * 10**digits)


def _error(one: Difference) -> float:
    """Standard error, from the width of the interval."""
    return (one.high - one.low) / (2 * Z95)
