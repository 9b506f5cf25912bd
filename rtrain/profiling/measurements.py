"""Measurements of a profile, from the files of its workers (`rtrain.trainer.profiler`)."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.parallel.timeline import TimeSpan
from rtrain.profiling.cases import ProfileLength
from rtrain.trainer import step_timing
from rtrain.trainer.step_timing import STEP_PARTS, StepWindow


@dataclass(frozen=True)
class ProfiledStep:
    window: StepWindow
    rows: int
    """Rows on this worker, as are micro-batches and tokens."""
    micro_batches: int
    real_tokens: int


@dataclass(frozen=True)
class ProfiledWorker:
    rank: int
    host: str
    cores: int
    """Cores that the process may use."""
    cpu_seconds: float
    """CPU seconds of the process, all threads, over all steps."""
    seconds: float
    """Wall seconds of all steps."""
    epoch: int
    """Nanoseconds since 1970 at its clock's zero."""
    steps: tuple[ProfiledStep, ...]


def read_worker(path: Path) -> ProfiledWorker:
    document = json_files.load_json_object(path)
    steps = tuple(_parse_step(entry) for entry in document.pop("steps"))
    return ProfiledWorker(**document, steps=steps)


def _parse_step(entry: Mapping[str, Any]) -> ProfiledStep:
    spans = tuple(TimeSpan(*span) for span in entry["spans"])
    window = StepWindow(entry["step_number"], entry["start"], entry["stop"], spans)
    return ProfiledStep(window, *(entry[name] for name in ("rows", "micro_batches", "real_tokens")))


@dataclass(frozen=True)
class ProfiledRunInfo:
    """Settings and results of a row."""

    name: str
    settings: Mapping[str, Any]
    precision: str
    device: str
    global_batch_size: int
    order_digest: str
    """Digest of the rows of all trained steps, in order."""
    save_every: int
    """Steps between two checkpoints in a run of the recipe."""
    run_steps: int
    """Steps of a full run of the recipe."""
    workers_per_replica: int = 1
    """Workers per replica; each reports the replica's rows."""


def summarize_row(info: ProfiledRunInfo, workers: Sequence[ProfiledWorker], length: ProfileLength) -> dict[str, Any]:
    """Build a row of the profile's JSON document. Times are seconds; the `parts` of a worker add up to its `step_s`.

    Raises `UserError` if a worker has not trained all steps of `length`.
    """
    steps_by_rank = {worker.rank: _measured_steps(worker, length) for worker in workers}
    worker_summaries = [_summarize_worker(worker, steps_by_rank[worker.rank]) for worker in workers]
    step_s = statistics.fmean(worker_summary["step_s"] for worker_summary in worker_summaries)
    steps = list(zip(*steps_by_rank.values(), strict=True))
    counts = {
        name: statistics.fmean(sum(getattr(step, name) for step in worker_steps) for worker_steps in steps)
        / info.workers_per_replica
        for name in ("rows", "real_tokens", "micro_batches")
    }
    save_times = [_checkpoint_seconds(step) for worker in workers for step in worker.steps if _checkpoint_seconds(step)]
    mean_save_s = statistics.fmean(save_times) if save_times else 0.0
    return {
        "name": info.name,
        "settings": dict(info.settings),
        "workers": len(workers),
        "precision": info.precision,
        "device": info.device,
        "global_batch_size": info.global_batch_size,
        "micro_batches_per_step": round(counts["micro_batches"] * info.workers_per_replica / len(workers), 3),
        "step_s": step_s,
        "median_step_s": statistics.median(
            step.window.wall / 1e9 for steps in steps_by_rank.values() for step in steps
        ),
        "rows_per_second": counts["rows"] / step_s,
        "real_tokens_per_second": counts["real_tokens"] / step_s,
        "worker_summaries": worker_summaries,
        "checkpoint": {"seconds": mean_save_s, "every": info.save_every, "per_step": mean_save_s / info.save_every},
        "order_digest": info.order_digest,
        "run_steps": info.run_steps,
        "hosts": {worker.host: worker.cores for worker in workers},
    }


def _measured_steps(worker: ProfiledWorker, length: ProfileLength) -> list[ProfiledStep]:
    """Measured steps: without warm-up, and without the last, which ends with a checkpoint."""
    if len(worker.steps) != length.total_steps:
        raise UserError(
            f"worker {worker.rank} trained {len(worker.steps)} of {length.total_steps} steps: the attempt was "
            "interrupted; profile again",
            code="interrupted",
        )
    return list(worker.steps[length.warm_up_steps : -1])


def _summarize_worker(worker: ProfiledWorker, steps: Sequence[ProfiledStep]) -> dict[str, Any]:
    parts_by_step = [step_timing.break_down(step.window) for step in steps]
    mean_parts = {
        name: statistics.fmean(parts.nanoseconds[name] for parts in parts_by_step) / 1e9 for name in STEP_PARTS
    }
    return {
        "rank": worker.rank,
        "host": worker.host,
        "step_s": statistics.fmean(step.window.wall for step in steps) / 1e9,
        "parts": mean_parts,
        "hidden": statistics.fmean(parts.hidden for parts in parts_by_step) / 1e9,
        "cores_busy": round(worker.cpu_seconds / worker.seconds, 3),
        "steps": [
            {
                "step": step.window.step_number,
                "seconds": step.window.wall / 1e9,
                "parts": {name: value / 1e9 for name, value in parts.nanoseconds.items()},
                "hidden": parts.hidden / 1e9,
            }
            for step, parts in zip(steps, parts_by_step, strict=True)
        ],
    }


def _checkpoint_seconds(step: ProfiledStep) -> float:
    """Seconds of the step's checkpoint; 0 without one."""
    return step_timing.break_down(step.window).nanoseconds[step_timing.CHECKPOINT] / 1e9
