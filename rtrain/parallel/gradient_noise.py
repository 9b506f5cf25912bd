"""Gradient noise scale, from norms that training computes anyway: the batch size beyond which more rows add little.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. Let G be the gradient over all rows, and S the variance of one
row's gradient, summed over the parameters. The gradient over n rows has a squared norm of |G|^2 + S / n on average. The
norms over few rows and over many give both; the noise scale is S / |G|^2, in rows. Steps with far fewer rows are mostly
noise, and steps with far more rows mostly repeat each other.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_INTERVAL = 8
"""Interval of steps with rows in random order, in every run: these steps may measure."""
CALIBRATION_INTERVAL = 2
"""The interval of a run that must measure; the steps between give the time of a step."""
MEASURE_HINT = "rtrain profile RECIPE --choose-k trains a pilot that measures it"
EVENT_KIND = "noise"
"""The event of a measurement, with `trace` (S), `square` (|G|^2) and `rows`, the rows of the step."""
MAX_MEASUREMENTS = 25
"""Measurements for the noise scale of a run, the newest ones: the scale grows while a model learns."""
CONFIDENCE = 0.95


def has_random_rows(step: int, interval: int) -> bool:
    """Whether the rows of step `step` (from 0) are in random order (`order.assign_micro_batches`), once per `interval`;
    0 for never. Shares of similar lengths would resemble each other more than random ones."""
    return interval > 0 and step % interval == interval // 2


@dataclass(frozen=True)
class NoiseMeasurement:
    """Estimates of S and |G|^2 from a step. Each is right on average only and may be negative."""

    trace: float
    square: float
    rows: int


def measure_between_replicas(terms: float, num_replicas: int, sq_norm: float, num_rows: int) -> NoiseMeasurement | None:
    """Measure from the workers' gradients before their all-reduce. None with a single replica.

    Args:
        terms: The sum over workers of |g|^2 / f, where g is a worker's addend to the step's gradient and f its share of
            the targets.
        num_replicas: Replicas with targets.
        sq_norm: The squared norm of the step's gradient.
    """
    if num_replicas < 2:
        return None
    return _make_measurement((terms - sq_norm) / (num_replicas - 1), sq_norm, num_rows)


def measure_within_replica(
    first_sq_norm: float, target_share: float, sq_norm: float, num_rows: int
) -> NoiseMeasurement | None:
    """Measure from one worker's micro-batches. `first_sq_norm` is the squared norm of the first one's addend to the
    step's gradient, `target_share` its share of the targets. None if that share is 0 or 1."""
    if not 0 < target_share < 1:
        return None
    return _make_measurement((first_sq_norm / target_share**2 - sq_norm) / (1 / target_share - 1), sq_norm, num_rows)


def _make_measurement(variance: float, sq_norm: float, num_rows: int) -> NoiseMeasurement | None:
    """`variance`: the variance of the step's gradient, summed over the parameters; S is the variance of one row's."""
    measurement = NoiseMeasurement(variance * num_rows, sq_norm - variance, num_rows)
    return measurement if math.isfinite(measurement.trace) and math.isfinite(measurement.square) else None


# -------------------------------------------------------------------------------------------------------- the estimate


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale in rows, with a 95 % confidence interval."""

    rows: float
    low: float
    high: float | None
    """None: no upper bound, as |G|^2 may be 0."""
    measurements: int


def read_measurements(log: Iterable[Mapping[str, Any]]) -> list[tuple[int, NoiseMeasurement]]:
    """(step, measurement) of a run's log; repeated measurements after a resume count once."""
    events_by_step = {event["step"]: event for event in log if event["kind"] == EVENT_KIND}
    return [
        (step, NoiseMeasurement(*(events_by_step[step][name] for name in ("trace", "square", "rows"))))
        for step in sorted(events_by_step)
    ]


def estimate_scale(samples: Sequence[NoiseMeasurement]) -> NoiseScale | None:
    """The ratio of the means: a mean of ratios would be dominated by outliers.

    The interval is Fieller's (1954): the ratios for which mean(trace - ratio x square) could be 0. None with fewer than
    three measurements, or if the mean of |G|^2 is not positive: more rows would be needed to see any signal.
    """
    from scipy.special import stdtrit

    count = len(samples)
    if count < 3:
        return None
    traces, squares = [sample.trace for sample in samples], [sample.square for sample in samples]
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
        return NoiseScale(trace / square, max(0.0, c / (b + root)) if b + root > 0 else 0.0, None, count)
    return NoiseScale(trace / square, max(0.0, (b - root) / a), (b + root) / a, count)


def estimate_from_log(log: Iterable[Mapping[str, Any]]) -> NoiseScale | None:
    return estimate_scale([measurement for _, measurement in read_measurements(log)][-MAX_MEASUREMENTS:])
