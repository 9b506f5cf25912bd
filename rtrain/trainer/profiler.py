"""Timing of steps: means for the run's log, or all spans for a profile."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core import env
from rtrain.parallel import collectives, dtensor_utils
from rtrain.trainer import step, step_timing
from rtrain.trainer.step_timing import StepWindow

if TYPE_CHECKING:
    from rtrain.parallel.base import Strategy


class StepProfiler:
    """Profiler of one worker's steps. With a `path` all spans are kept and written at the end of the attempt.

    A profile on a GPU waits for the kernels at the end of each stage. Otherwise the spans there measure kernel
    launches, and waiting counts for the stage that reads a result.
    """

    def __init__(self, strategy: "Strategy", path: Path | None = None):
        self._strategy, self._path, self._is_first = strategy, path, True
        self._totals, self._windows = step_timing.StageTotals(), list[dict[str, Any]]()
        device = dtensor_utils.module_device(strategy.module)
        if path is not None and device.type == "cuda":
            import torch

            strategy.timeline.synchronize = lambda: torch.cuda.synchronize(device)
        strategy.timeline.pop_spans()
        self._start, self._start_cpu = strategy.timeline.now(), time.process_time_ns()
        self._step_start = self._start

    def end_step(self, step_number: int, step_result: step.StepResult) -> None:
        """Record the end of step `step_number`; the next one begins."""
        timeline = self._strategy.timeline
        window = StepWindow(step_number, self._step_start, timeline.now(), tuple(timeline.pop_spans()))
        self._step_start = window.stop
        if self._path is not None:
            counts = {
                "rows": step_result.rows,
                "micro_batches": step_result.micro_batches,
                "real_tokens": step_result.real_tokens,
            }
            self._windows.append({**vars(window), **counts})
        if not self._is_first:  # the first step waits for the start of the stream, which is timed as `first_batch`
            self._totals.add(step_timing.break_down(window))
        self._is_first = False

    def event_fields(self) -> list[dict[str, float]]:
        """Fields of the `trained` event for each worker: mean seconds of a step by part, `hidden`, and `cores_busy`
        (processor time over wall time). Called on every rank."""
        if self._path is not None:
            self._path.write_text(json.dumps({**self._worker_info(), "steps": self._windows}), encoding="utf-8")
        times = [time.process_time_ns() - self._start_cpu, self._strategy.timeline.now() - self._start]
        vectors = collectives.all_gather_object([*times, *self._totals.to_vector()])
        if not self._totals.steps:
            return []
        return [
            {**step_timing.event_fields(sums), "cores_busy": round(cpu / max(1, wall), 3)}
            for cpu, wall, *sums in vectors
        ]

    def _worker_info(self) -> dict[str, Any]:
        """Identity of the worker; `epoch` is the Unix time in nanoseconds at its clock's zero."""
        return {
            "rank": collectives.rank(),
            "host": os.uname().nodename,
            "cores": env.available_cores(),
            "cpu_seconds": (time.process_time_ns() - self._start_cpu) / 1e9,
            "seconds": (self._strategy.timeline.now() - self._start) / 1e9,
            "epoch": time.time_ns() - time.perf_counter_ns(),
        }
