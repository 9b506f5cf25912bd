"""Throughput of a worker: measured by a finished run, or assumed from a table. Pure, except for reading a run's log."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rtrain import config as configuration
from rtrain.config import Recipe, TrainConfig
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
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
        return ComputeTime(
            ADAMW_BYTES_PER_BYTE * model_work.weight_bytes / self.bandwidth, model_work.flops / self.flops_per_s
        )


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
    flops_per_row = (
        shape.flops(window_tokens, predicts_tokens=predicts_tokens) / len(window_tokens) * row_stats.windows_per_row
    )
    if is_encoder_frozen(recipe):
        return ModelWork(
            FORWARD_SHARE * flops_per_row * recipe.train.micro_batch_size, shape.head_bytes, shape.head_bytes
        )
    weight_bytes = shape.weight_bytes
    # The word embedding synchronizes only the rows that a step touched, which are few.
    gradient_bytes = weight_bytes if predicts_tokens else weight_bytes - shape.embedding_bytes
    all_reduced_bytes = gradient_bytes / 2 if recipe.train.gradient_compression == "bf16" else gradient_bytes
    return ModelWork(flops_per_row * recipe.train.micro_batch_size, all_reduced_bytes, weight_bytes)


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

    attempt = events.find_last_trained_attempt(run.events())
    if attempt is None or attempt[1]["steps"] <= attempt[0]["step"] or not attempt[1]["rows_seen"]:
        reason = f"--reference-run: {run} has not completed, so its step time is unknown"
        raise UserError(reason, code="not_finished")
    started, ended = attempt
    recipe = configuration.load_config(str(run.config)).recipe
    train, workers, device = recipe.train, started["workers"], started["device"]
    shape = read_encoder_shape(builder.resolve_folder(recipe.model.name, models), recipe.model)
    tokens_per_row = max(1, round(ended["real_tokens"] / ended["rows_seen"]))
    model_work = estimate_work(recipe, shape, RowStats(1, 0, 0, (tokens_per_row,), 1.0))
    steps = ended["steps"] - started["step"]
    step_s = ended["seconds"]["train"] / steps
    all_reduce = ended["gradient_sync"] or {"seconds": 0.0}
    optimizer_s = (
        0.0
        if device != "cpu"
        else ADAMW_BYTES_PER_BYTE
        * model_work.weight_bytes
        / CPU_THROUGHPUT.bandwidth
        / optimizer_shares(train, workers)
    )
    recomputes = train.gradient_checkpointing and not is_encoder_frozen(recipe)
    compute_s = max(step_s - all_reduce["seconds"] - optimizer_s, 0.1 * step_s) / (
        RECOMPUTE_FACTOR if recomputes else 1
    )
    rows_per_worker = ended["rows_seen"] / steps / workers
    flops_per_s = model_work.flops * rows_per_worker / train.micro_batch_size / compute_s
    all_reduce_s_per_byte = all_reduce["seconds"] / all_reduce["bytes"] if all_reduce["seconds"] else None
    source = f"measured by {run.name} on {workers} workers ({device}, {started['precision']})"
    return Throughput(flops_per_s, memory_bandwidth(device), source, all_reduce_s_per_byte)
