"""Throughput of a worker, measured by a finished run or assumed from a table; and the aggregation frequency with the
shortest training time. Pure, except for reading a run's log.

To reach the same loss, steps of B rows are needed in proportion to 1 + B_noise / B (McCandlish et al. 2018,
arXiv:1812.06162): below the noise scale, each further row saves nearly as much as it costs; above it, a row saves
nothing. A step of k micro-batches takes t(k). So time(k) = (1 + B_noise / B(k)) x t(k), up to a factor. A short
calibration run measures B_noise and t.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rtrain import config as configuration
from rtrain.config import Recipe, TrainConfig
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise
from rtrain.parallel.profiler import BACKWARD, FORWARD
from rtrain.planning.run_facts import EncoderShape, RowStats, read_encoder_shape

ADAMW_BYTES_PER_BYTE: Final = 7
"""Bytes that AdamW moves per byte of weights: it reads weight, gradient and two moments, and writes weight and
moments."""


@dataclass(frozen=True)
class ComputeTime:
    """Compute time of one worker, for one model, precision and processor."""

    overhead_s: float
    """Fixed seconds per step: the optimizer and the loop."""
    micro_batch_s: float
    """Seconds of a micro-batch of `micro_batch_size` rows of mean length."""

    def step_seconds(self, micro_batches: float) -> float:
        """Seconds of a step of `micro_batches` micro-batches, without all-reduce."""
        return self.overhead_s + micro_batches * self.micro_batch_s


def fit_two_points(first: tuple[float, float], second: tuple[float, float]) -> ComputeTime:
    """Fit the compute time to two steps, each a pair (micro-batches, seconds)."""
    (few_batches, short_s), (many_batches, long_s) = sorted([first, second])
    micro_batch_s = max(0.0, (long_s - short_s) / (many_batches - few_batches))
    return ComputeTime(max(0.0, short_s - few_batches * micro_batch_s), micro_batch_s)


@dataclass(frozen=True)
class ModelWork:
    """Work of a model, independent of the hardware."""

    flops: float
    """FLOPs of forward and backward of a micro-batch of `micro_batch_size` rows."""
    gradient_bytes: float
    """Bytes that a step all-reduces."""
    weight_bytes: float
    """Bytes of the weights that the optimizer updates."""


@dataclass(frozen=True)
class Throughput:
    """Speed of one worker."""

    flops_per_s: float
    """FLOP/s that training reaches in matrix products."""
    bandwidth: float
    """Memory bandwidth of the optimizer step, in bytes per second."""
    source: str
    """Source of the numbers."""
    all_reduce_s_per_byte: float | None = None
    """Seconds that an all-reduce adds to a step per byte of gradients; None if not measured."""

    def compute_time(self, model_work: ModelWork) -> ComputeTime:
        optimizer_s = ADAMW_BYTES_PER_BYTE * model_work.weight_bytes / self.bandwidth
        return ComputeTime(optimizer_s, model_work.flops / self.flops_per_s)


class GpuSpec(NamedTuple):
    """A GPU's data sheet."""

    half_flops_per_s: float
    """FLOP/s in half precision, by dense tensor cores."""
    fp32_flops_per_s: float
    """FLOP/s in fp32: torch disables TF32 by default, and rtrain does not enable it."""
    bandwidth: float
    """Bytes per second."""
    memory_gb: float


# NVIDIA's data sheets. V100: 16 GB, SXM2; A100: 40 GB, SXM4; A100-80G: PCIe, the slower variant; H100, H200: SXM5.
GPU_SPECS: Final[Mapping[str, GpuSpec]] = {
    "V100": GpuSpec(125e12, 15.7e12, 900e9, 16),
    "T4": GpuSpec(65e12, 8.1e12, 320e9, 16),
    "A10": GpuSpec(125e12, 31.2e12, 600e9, 24),
    "A10G": GpuSpec(70e12, 35e12, 600e9, 24),
    "L4": GpuSpec(121e12, 30.3e12, 300e9, 24),
    "L40S": GpuSpec(362e12, 91.6e12, 864e9, 48),
    "A100": GpuSpec(312e12, 19.5e12, 1555e9, 40),
    "A100-80G": GpuSpec(312e12, 19.5e12, 1935e9, 80),
    "H100": GpuSpec(989e12, 67e12, 3350e9, 80),
    "H200": GpuSpec(989e12, 67e12, 4800e9, 141),
}
"""By Ray's accelerator names. Ray calls the 80 GB model A100 too; it counts as 40 GB."""
FALLBACK_GPU: Final = "A10G"
"""Stand-in for a GPU that is not in the table: a small one, so that a plan overestimates the hours."""
FORWARD_SHARE: Final = 1 / 3
"""Forward's share of a micro-batch's time."""
RECOMPUTE_FACTOR: Final = 4 / 3
"""Factor of a micro-batch's time with activation checkpointing: one more forward."""
FLOPS_UTILIZATION: Final = 0.3
"""Share of a GPU's peak that training reaches, an assumption: 0.2 for small encoders, 0.4 for large ones."""
BANDWIDTH_UTILIZATION: Final = 0.8
"""Share of the memory bandwidth that the optimizer step reaches, an assumption."""
CPU_THROUGHPUT: Final = Throughput(100e9, 20e9, "an assumption for a CPU core that computes bf16")
"""About half of the 229e9 FLOP/s that a core of an AMD EPYC (Zen 5) reached with MiniLM: clouds count two threads per
core."""


def assumed_throughput(gpu: str, precision: str = "auto") -> Throughput:
    """Assumed throughput of a GPU model; `FALLBACK_GPU` stands in for an unknown one."""
    spec = GPU_SPECS.get(gpu)
    gpu_spec = spec or GPU_SPECS[FALLBACK_GPU]
    flops = gpu_spec.fp32_flops_per_s if precision == "fp32" else gpu_spec.half_flops_per_s
    description = f"an {gpu}" if spec else f"an {FALLBACK_GPU}, which stands in for the unknown GPU of {gpu}"
    return Throughput(
        FLOPS_UTILIZATION * flops,
        BANDWIDTH_UTILIZATION * gpu_spec.bandwidth,
        f"an assumption: {FLOPS_UTILIZATION:.0%} of the peak of {description}",
    )


def memory_bandwidth(device: str) -> float:
    """Memory bandwidth of the optimizer step, by the device name in a run's log: `cpu`, or a GPU name such as `NVIDIA
    H100 80GB HBM3`. `FALLBACK_GPU` stands in for an unknown GPU."""
    if device == "cpu":
        return CPU_THROUGHPUT.bandwidth
    known_gpus = (word for word in re.findall(r"\w+", device) if word in GPU_SPECS)
    return assumed_throughput(next(known_gpus, FALLBACK_GPU)).bandwidth


def is_encoder_frozen(recipe: Recipe) -> bool:
    """Whether only the head is trained."""
    return recipe.model.freeze == "encoder"


def estimate_work(recipe: Recipe, shape: EncoderShape, row_stats: RowStats) -> ModelWork:
    """Estimate the work of a micro-batch, and the bytes that a step all-reduces and updates. A frozen encoder has no
    backward, and its head's work is negligible."""
    predicts_tokens = recipe.task == "masked_lm"
    window_tokens = np.asarray(row_stats.window_tokens)
    flops = shape.flops(window_tokens, predicts_tokens=predicts_tokens) / len(window_tokens)
    flops *= row_stats.windows_per_row
    if is_encoder_frozen(recipe):
        return ModelWork(FORWARD_SHARE * flops * recipe.train.micro_batch_size, shape.head_bytes, shape.head_bytes)
    weight_bytes = shape.weight_bytes
    # The word embedding synchronizes only the rows that a step touched, which are few.
    gradient_bytes = weight_bytes if predicts_tokens else weight_bytes - shape.embedding_bytes
    all_reduced_bytes = gradient_bytes / 2 if recipe.train.gradient_compression == "bf16" else gradient_bytes
    return ModelWork(flops * recipe.train.micro_batch_size, all_reduced_bytes, weight_bytes)


def micro_batches_per_step(recipe: Recipe, workers: int) -> float:
    """Micro-batches of `micro_batch_size` rows per step, on each of `workers` replicas."""
    return recipe.global_batch_size / workers / recipe.train.micro_batch_size


def optimizer_shares(train: TrainConfig, workers: int) -> int:
    """Number of workers that share the optimizer step."""
    model_parallel_workers = train.tensor_parallel_size * train.pipeline_parallel_size
    return model_parallel_workers * (workers // model_parallel_workers if train.zero_stage else 1)


def measure_throughput(run: Run, models: Path | None = None) -> Throughput:
    """Measure the throughput of a finished run. Raises `UserError` if its log has no completed attempt."""
    from rtrain.models import builder

    started, ended = _last_attempt(run.events(), f"--reference-run: {run}")
    recipe = configuration.load_config(str(run.config)).recipe
    train, workers, device = recipe.train, started["workers"], started["device"]
    shape = read_encoder_shape(builder.resolve_folder(recipe.model.name, models), recipe.model)
    tokens_per_row = max(1, round(ended["real_tokens"] / ended["rows_seen"]))
    model_work = estimate_work(recipe, shape, RowStats(1, 0, 0, (tokens_per_row,), 1.0))
    steps = ended["steps"] - started["step"]
    step_s = ended["seconds"]["train"] / steps
    all_reduce, optimizer_s = ended["gradient_sync"] or {"seconds": 0.0}, 0.0
    if device == "cpu":
        optimizer_s = ADAMW_BYTES_PER_BYTE * model_work.weight_bytes / CPU_THROUGHPUT.bandwidth
        optimizer_s /= optimizer_shares(train, workers)
    compute_s = max(step_s - all_reduce["seconds"] - optimizer_s, 0.1 * step_s)
    if train.gradient_checkpointing and not is_encoder_frozen(recipe):
        compute_s /= RECOMPUTE_FACTOR
    rows_per_worker = ended["rows_seen"] / steps / workers
    flops_per_s = model_work.flops * rows_per_worker / train.micro_batch_size / compute_s
    all_reduce_s_per_byte = all_reduce["seconds"] / all_reduce["bytes"] if all_reduce["seconds"] else None
    source = f"measured by {run.name} on {workers} workers ({device}, {started['precision']})"
    return Throughput(flops_per_s, memory_bandwidth(device), source, all_reduce_s_per_byte)


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
        reason = "--choose-k: this run has fewer than 3 measurements of the gradient noise"
        fix = f"{gradient_noise.MEASURE_HINT}, with the whole model on each worker"
        raise UserError(f"{reason}; {fix}", code="not_measured")
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


def _last_attempt(
    log: Sequence[Mapping[str, Any]], subject: str = "--choose-k: this run"
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The events `started` and `trained` of the newest completed attempt."""
    attempt = events.find_last_trained_attempt(log)
    if attempt is None or attempt[1]["steps"] <= attempt[0]["step"]:
        raise UserError(f"{subject} has not completed: its log has no event `trained`", code="not_finished")
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
    highs = dict.fromkeys(batch_sizes) if high_times is None else high_times
    return [
        FrequencyOption(k, batch_sizes[k], step_times[k], mean_times[k], low_times[k], highs[k])
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
    compute_time = fit_compute_time(calibration, weight_bytes, bandwidth, second_point)
    return calibration, frequency_options(calibration, compute_time, frequencies)


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
    worthwhile = [option.global_batch_size for option in options if conservative_time(option) <= MAX_RELATIVE_TIME]
    max_batch_size = min(math.ceil(noise_scale.high), max(worthwhile))
    return BatchSizePrior(max_batch_size, best_option(options).global_batch_size)


def best_option(options: Sequence[FrequencyOption]) -> FrequencyOption:
    """The fastest option. Among options within 1 % of the best, the smallest batch size wins, since it makes more
    steps."""
    fast_options = [option for option in options if conservative_time(option) <= 1.01]
    return min(fast_options, key=lambda option: option.aggregation_frequency)


def conservative_time(option: FrequencyOption) -> float:
    """Relative time of an option. The noise scale was measured early in a run and grows while a model learns
    (McCandlish et al. 2018 find the same), so the upper bound of its interval is used if there is one."""
    return option.relative_time if option.relative_time_high is None else option.relative_time_high
