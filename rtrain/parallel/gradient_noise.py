"""The gradient noise scale, from norms that training has anyway: how many rows an update can have before more rows
tell it little.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. With G the gradient over all rows, and S the variance of one
row's gradient, summed over the parameters, the gradient over n rows has a squared norm of |G|^2 + S / n on average. The
norms over a few rows and over many give both; the noise scale is S / |G|^2, in rows. Updates of far fewer rows are
mostly noise, and those of far more mostly repeat each other.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVERY = 8
"""Updates from one whose rows are dealt at random to the next, in every run: these may measure."""
PILOT = 2
"""The same of a run that is made to measure; the updates between tell how long one takes."""
HOW = "rtrain profile RECIPE --choose-k trains a pilot that measures it"
KIND = "noise"
"""The event of a measurement, with `trace` (S), `square` (|G|^2) and `rows`, those of the update."""
LATEST = 25
"""Measurements that the noise scale of a run is told by: it grows while a model learns."""
CONFIDENCE = 0.95


def due(number: int, every: int) -> bool:
    """Whether the rows of update `number`, from 0, are dealt at random (`order.deal`), one in `every`; 0: none. Shares
    of like lengths would resemble each other more than chance has it."""
    return every > 0 and number % every == every // 2


@dataclass(frozen=True)
class Measured:
    """What an update tells of S and |G|^2. Each is right on average only: either may be negative."""

    trace: float
    square: float
    rows: int


def between(terms: float, workers: int, whole: float, rows: int) -> Measured | None:
    """What the workers' gradients tell before their exchange.

    `terms`: the sum over workers of |g|^2 / f, where g is what a worker adds to the update's gradient and f its share
    of the targets; `workers`: those that have any; `whole`: the squared norm of the update's gradient. None for one.
    """
    if workers < 2:
        return None
    return _measured((terms - whole) / (workers - 1), whole, rows)


def within(first: float, share: float, whole: float, rows: int) -> Measured | None:
    """The scale from one worker's passes: `first` is the squared norm of what the first one adds to the update's
    gradient, `share` its share of the targets. None if the first pass has none, or all."""
    if not 0 < share < 1:
        return None
    return _measured((first / share**2 - whole) / (1 / share - 1), whole, rows)


def _measured(variance: float, whole: float, rows: int) -> Measured | None:
    """`variance`: of the update's gradient, summed over the parameters; S is that of one row."""
    found = Measured(variance * rows, whole - variance, rows)
    return found if math.isfinite(found.trace) and math.isfinite(found.square) else None


# -------------------------------------------------------------------------------------------------------- the estimate


@dataclass(frozen=True)
class Scale:
    """The noise scale in rows, and where it lies with 95 % confidence."""

    rows: float
    low: float
    high: float | None
    """None: there is no telling how high, as |G|^2 may be 0."""
    measurements: int


def measurements(log: Iterable[Mapping[str, Any]]) -> list[tuple[int, Measured]]:
    """(update, what it told) of a run's log; what was measured again after a resume counts once."""
    found = {event["update"]: event for event in log if event["kind"] == KIND}
    return [
        (update, Measured(*(found[update][name] for name in ("trace", "square", "rows")))) for update in sorted(found)
    ]


def estimate(measured: Sequence[Measured]) -> Scale | None:
    """The ratio of the means: a mean of ratios would be that of its outliers.

    The interval is Fieller's (1954): the ratios for which mean(trace - ratio x square) could be 0. None with fewer than
    three measurements, or where the mean of |G|^2 is not above 0: more rows would be needed to see any signal.
    """
    from scipy.special import stdtrit

    count = len(measured)
    if count < 3:
        return None
    traces, squares = [one.trace for one in measured], [one.square for one in measured]
    trace, square = statistics.fmean(traces), statistics.fmean(squares)
    if square <= 0 or trace <= 0:
        return None
    factor = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) ** 2 / count
    # (trace - r square)^2 <= factor (var(trace) - 2 r cov + r^2 var(square)), a quadratic inequality in r.
    a = square**2 - factor * statistics.variance(squares)
    b = trace * square - factor * statistics.covariance(traces, squares)
    c = trace**2 - factor * statistics.variance(traces)
    root = math.sqrt(max(0.0, b * b - a * c))
    if a <= 0:  # |G|^2 could be 0
        return Scale(trace / square, max(0.0, c / (b + root)) if b + root > 0 else 0.0, None, count)
    return Scale(trace / square, max(0.0, (b - root) / a), (b + root) / a, count)


def of_run(log: Iterable[Mapping[str, Any]]) -> Scale | None:
    """The noise scale at the end of what a run's log tells."""
    return estimate([one for _, one in measurements(log)][-LATEST:])
