"""The updates of a start, watched: where their time went, in the mean for the run's log, or all of it for a profile."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core import env
from rtrain.parallel import collectives, dtensor_utils
from rtrain.trainer import step, step_timing
from rtrain.trainer.step_timing import Window

if TYPE_CHECKING:
    from rtrain.parallel.base import Exchange


class Watched:
    """One worker's updates, from now on. With a `path` all spans are kept, and written there when the start ends.

    A profile on a GPU waits for the kernels of each stage at its end. Else the spans there are those of launching them,
    and what the worker waits for belongs to whatever stage asks for a result.
    """

    def __init__(self, exchange: "Exchange", path: Path | None = None):
        self._exchange, self._path, self._first = exchange, path, True
        self._sums, self._kept = step_timing.Sums(), list[dict[str, Any]]()
        device = dtensor_utils.device(exchange.module)
        if path is not None and device.type == "cuda":
            import torch

            exchange.timeline.settle = lambda: torch.cuda.synchronize(device)
        exchange.timeline.take()
        self._start, self._cpu = exchange.timeline.now(), time.process_time_ns()
        self._began = self._start

    def end(self, number: int, done: step.Done) -> None:
        """Update `number` has ended, and the next one begins."""
        timeline = self._exchange.timeline
        window = Window(number, self._began, timeline.now(), tuple(timeline.take()))
        self._began = window.stop
        if self._path is not None:
            counts = {"rows": done.rows, "passes": done.passes, "real_tokens": done.real_tokens}
            self._kept.append({**vars(window), **counts})
        if not self._first:  # the first one waits for the stream to begin, which is told as `first_batch`
            self._sums.add(step_timing.parts(window))
        self._first = False

    def told(self) -> list[dict[str, float]]:
        """Mean seconds of an update by part, and `hidden`; `cores_busy`, processor time for time, of its process in all
        of its updates: of each worker. Called on every rank."""
        if self._path is not None:
            self._path.write_text(json.dumps({**self._place(), "windows": self._kept}), encoding="utf-8")
        times = [time.process_time_ns() - self._cpu, self._exchange.timeline.now() - self._start]
        vectors = collectives.every([*times, *self._sums.vector()])
        if not self._sums.updates:
            return []
        return [{**step_timing.told(sums), "cores_busy": round(cpu / max(1, wall), 3)} for cpu, wall, *sums in vectors]

    def _place(self) -> dict[str, Any]:
        """Where and when this worker was: `epoch` is what its clock's zero is in nanoseconds since 1970."""
        return {
            "rank": collectives.own(),
            "host": os.uname().nodename,
            "cores": env.cores(),
            "cpu_seconds": (time.process_time_ns() - self._cpu) / 1e9,
            "seconds": (self._exchange.timeline.now() - self._start) / 1e9,
            "epoch": time.time_ns() - time.perf_counter_ns(),
        }
