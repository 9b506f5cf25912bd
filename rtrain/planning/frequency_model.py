"""Choose the aggregation frequency with the shortest training time. Pure.

To reach the same loss, steps of B rows are needed in proportion to 1 + B_noise / B (McCandlish et al. 2018,
arXiv:1812.06162): below the noise scale, each further row saves nearly as much as it costs; above it, a row saves
nothing. A step of k micro-batches takes t(k). So time(k) = (1 + B_noise / B(k)) x t(k), up to a factor. A short
calibration run measures B_noise and t.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rtrain.config import Recipe
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.parallel import gradient_noise
from rtrain.planning.throughput import (
    ADAMW_BYTES_PER_BYTE,
    ComputeTime,
    fit_two_points,
    memory_bandwidth,
    micro_batches_per_step,
)
from rtrain.trainer.step_timing import BACKWARD, FORWARD

CANDIDATE_FREQUENCIES: Final = (1, 2, 4, 8)
SEARCH_FREQUENCIES: Final = (*CANDIDATE_FREQUENCIES, 16, 32, 64)
MAX_RELATIVE_TIME: Final = 1.1
"""Largest relative time of a frequency that is worth a trial: the model is off by some percent."""


@dataclass(frozen=True)
class FrequencyOption:
    """An aggregation frequency, and its time to the same loss relative to the best option."""

    aggregation_frequency: int
    global_batch_size: int
    step_s: float
    relative_time: float
    relative_time_low: float
    """Relative time at the lower and at the upper bound of the noise scale's confidence interval."""
    relative_time_high: float | None


@dataclass(frozen=True)
class CalibrationRun:
    """Measurements of a calibration run."""

    noise_scale: gradient_noise.NoiseScale
    global_batch_size: int
    micro_batches: float
    """Micro-batches of `micro_batch_size` rows per worker and step: the aggregation frequency."""
    step_s: float
    all_reduce_s: float
    """Seconds of `step_s` in which a worker waited for the all-reduce."""
    compute_s: float | None = None
    """Seconds of `step_s` in forward and backward. None on a GPU: kernels run asynchronously to the spans."""


def calibration_from_log(log: Sequence[Mapping[str, Any]], aggregation_frequency: float) -> CalibrationRun:
    """Read a calibration run with the given aggregation frequency from its log. Raises `UserError` if the log has too
    few measurements."""
    noise_scale = gradient_noise.estimate_from_log(log)
    if noise_scale is None:
        raise UserError(
            "--choose-k: this run has fewer than 3 measurements of the gradient noise; "
            f"{gradient_noise.MEASURE_HINT}, with the whole model on each worker",
            code="not_measured",
        )
    started, ended = _last_attempt(log)
    all_reduce_s = ended["gradient_sync"]["seconds"] if ended["gradient_sync"] else 0.0
    stages = ended["stages"] if started["device"] == "cpu" else ()
    compute_s = statistics.fmean(stage[FORWARD] + stage[BACKWARD] for stage in stages) if stages else None
    return CalibrationRun(
        noise_scale, started["global_batch_size"], aggregation_frequency, median_step_s(log), all_reduce_s, compute_s
    )


def median_step_s(log: Sequence[Mapping[str, Any]]) -> float:
    """Median seconds of a step, from the newest completed attempt in a run's log.

    The first step of an attempt is excluded, since it includes warm-up. Steps that measure the noise scale are excluded
    if others remain. Raises `UserError` if no attempt completed.
    """
    started, ended = _last_attempt(log)
    begin, end = (max(index for index, event in enumerate(log) if event is bound) for bound in (started, ended))
    attempt_events = log[begin:end]  # a later attempt counts its own seconds
    noise_steps = {event["step"] for event in attempt_events if event["kind"] == gradient_noise.EVENT_KIND}
    progress_events = [event for event in attempt_events if event["kind"] == "progress"]
    plain_times, all_times = list[float](), list[float]()
    for previous, current in itertools.pairwise(progress_events):
        steps = current["step"] - previous["step"]
        all_times.append((current["train_s"] - previous["train_s"]) / steps)
        if not any(number in noise_steps for number in range(previous["step"] + 1, current["step"] + 1)):
            plain_times.append(all_times[-1])
    if step_times := plain_times or all_times:
        return statistics.median(step_times)
    seconds: float = ended["seconds"]["train"] / (ended["steps"] - started["step"])
    return seconds


def _last_attempt(log: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    attempt = events.find_last_trained_attempt(log)
    if attempt is None or attempt[1]["steps"] <= attempt[0]["step"]:
        raise UserError("--choose-k: this run has not completed: its log has no event `trained`", code="not_finished")
    return attempt


def fit_compute_time(
    calibration: CalibrationRun, weight_bytes: float, bandwidth: float, second_point: tuple[float, float] | None = None
) -> ComputeTime:
    """Split the step time into a fixed overhead, which includes the all-reduce, and the time of a micro-batch.

    With `second_point`, a pair (micro-batches, seconds), fit a line through both points. Otherwise forward and backward
    count as micro-batch time: the fixed cost of operator calls then scales with the rows, and steps of fewer
    micro-batches are estimated slightly too fast. On a GPU the optimizer time is estimated as `weight_bytes` (bytes)
    over `bandwidth` (bytes per second).
    """
    if second_point is not None:
        return fit_two_points((calibration.micro_batches, calibration.step_s), second_point)
    compute_s = calibration.compute_s
    if compute_s is None:
        optimizer_s = min(ADAMW_BYTES_PER_BYTE * weight_bytes / bandwidth, calibration.step_s / 2)
        compute_s = calibration.step_s - calibration.all_reduce_s - optimizer_s
    compute_s = min(max(compute_s, 0.0), calibration.step_s)
    return ComputeTime(calibration.step_s - compute_s, compute_s / calibration.micro_batches)


def frequency_options(
    calibration: CalibrationRun, compute_time: ComputeTime, frequencies: Iterable[int] = CANDIDATE_FREQUENCIES
) -> list[FrequencyOption]:
    """Estimate the relative time of each frequency, with the learning rate scaled to its batch size."""
    batch_sizes = {k: round(calibration.global_batch_size * k / calibration.micro_batches) for k in frequencies}
    step_times = {k: compute_time.step_seconds(k) for k in batch_sizes}

    def relative_times(noise_scale: float) -> dict[int, float]:
        times = {k: (1 + noise_scale / batch_sizes[k]) * step_times[k] for k in batch_sizes}
        return {k: time / min(times.values()) for k, time in times.items()}

    mean_times, low_times = relative_times(calibration.noise_scale.rows), relative_times(calibration.noise_scale.low)
    high_times = None if calibration.noise_scale.high is None else relative_times(calibration.noise_scale.high)
    return [
        FrequencyOption(
            k, batch_sizes[k], step_times[k], mean_times[k], low_times[k], None if high_times is None else high_times[k]
        )
        for k in sorted(batch_sizes)
    ]


def model_weight_bytes(folder: Path) -> int:
    """Bytes of the weight files in a model folder."""
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def evaluate_log(
    log: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    weight_bytes: float,
    frequencies: Iterable[int] = CANDIDATE_FREQUENCIES,
    second_point: tuple[float, float] | None = None,
) -> tuple[CalibrationRun, list[FrequencyOption]]:
    """Evaluate a calibration run of the recipe by its log. `weight_bytes`: size of the weights; `second_point` as in
    `fit_compute_time`. Raises `UserError` if the log has too few measurements."""
    calibration = calibration_from_log(log, micro_batches_per_step(recipe, recipe.train.workers))
    bandwidth = memory_bandwidth(_last_attempt(log)[0]["device"])
    return calibration, frequency_options(
        calibration, fit_compute_time(calibration, weight_bytes, bandwidth, second_point), frequencies
    )


@dataclass(frozen=True)
class BatchSizePrior:
    """Batch sizes that the first trial of a search suggests for the other trials."""

    max_batch_size: int
    """Upper limit: larger batches gain little, or cost more than they gain."""
    best_batch_size: int
    """Batch size with the shortest training time."""


def batch_size_prior(log: Sequence[Mapping[str, Any]], recipe: Recipe, weight_bytes: float) -> BatchSizePrior | None:
    """Derive the prior from the log of the search's first trial; None if the log has too few measurements."""
    noise_scale = gradient_noise.estimate_from_log(log)
    if noise_scale is None or noise_scale.high is None or events.find_last_trained_attempt(log) is None:
        return None
    _, options = evaluate_log(log, recipe, weight_bytes, SEARCH_FREQUENCIES)
    best_batch_size = best_option(options).global_batch_size
    max_worthwhile = max(
        option.global_batch_size for option in options if conservative_time(option) <= MAX_RELATIVE_TIME
    )
    return BatchSizePrior(min(math.ceil(noise_scale.high), max_worthwhile), best_batch_size)


def best_option(options: Sequence[FrequencyOption]) -> FrequencyOption:
    """The fastest option. Among options within 1 % of the best, the smallest batch size wins, since it makes more
    steps."""
    return min(
        (option for option in options if conservative_time(option) <= 1.01),
        key=lambda option: option.aggregation_frequency,
    )


def conservative_time(option: FrequencyOption) -> float:
    """Relative time of an option. The noise scale was measured early in a run and grows while a model learns
    (McCandlish et al. 2018 find the same), so the upper bound of its interval is used if there is one."""
    return option.relative_time if option.relative_time_high is None else option.relative_time_high
