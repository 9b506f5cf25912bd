"""A profile's workers and its document, made of figures that can be added up by hand."""

from collections.abc import Mapping
from typing import Any

from rtrain.parallel.timeline import SENDS, WAITS, Span
from rtrain.profiling import measurements
from rtrain.profiling.cases import Length
from rtrain.profiling.measurements import Update, Worker
from rtrain.profiling.profile import KIND, VERSION
from rtrain.trainer import step_timing
from rtrain.trainer.step_timing import Window

LENGTH = Length(updates=4, warm_up=2)
MS = 1_000_000
"""Nanoseconds."""


def worker(rank: int = 0, *, slower: int = 1, cores: int = 2, host: str = "here") -> Worker:
    """Seven updates of 100 ms times `slower`, 10 ms of which are idle; the last one ends with a checkpoint of 50 ms.
    Its clock's zero is an hour after 1970 and a second more for each rank."""
    updates, at = [], 5 * MS
    for number in range(LENGTH.until):
        last = number == LENGTH.until - 1
        wall = 100 * slower * MS + last * 50 * MS
        ends = [at + part * slower * MS for part in (5, 35, 80, 90)]
        spans = [
            Span(step_timing.GET_BATCH, at, ends[0]),
            Span(step_timing.FORWARD, ends[0], ends[1]),
            Span(SENDS, ends[1] + 10 * slower * MS, ends[1] + 30 * slower * MS),
            Span(WAITS, ends[2] - 5 * slower * MS, ends[2]),
            Span(SENDS, ends[2] - 5 * slower * MS, ends[2]),
            Span(step_timing.BACKWARD, ends[1], ends[2]),
            Span(step_timing.OPTIMIZER, ends[2], ends[3]),
        ]
        if last:
            spans.append(Span(step_timing.CHECKPOINT, at + wall - 50 * MS, at + wall))
        updates.append(Update(Window(number, at, at + wall, tuple(spans)), rows=8, passes=2, real_tokens=200))
        at += wall
    seconds = sum(one.window.wall for one in updates) / 1e9
    return Worker(rank, host, cores, seconds / 2, seconds, (3600 + rank) * 1_000_000_000, tuple(updates))


def row(workers: int = 1, *, slower: int = 1, cores: int = 2, **facts: Any) -> dict[str, Any]:
    """A row of a profile's document."""
    known: dict[str, Any] = {
        **{"name": f"workers={workers}", "settings": {"train.workers": workers}, "precision": "fp32"},
        **{"device": "cpu", "rows_per_update": 8 * workers, "order_digest": "ab" * 32},
        **{"save_every": 25, "run_updates": 1000},
    }
    made = [worker(rank, slower=slower, cores=cores) for rank in range(workers)]
    return measurements.of_row(measurements.Facts(**{**known, **facts}), made, LENGTH)


def document(*rows: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        **{"kind": KIND, "version": VERSION, "name": "intent-profile", "recipe": "intent", "task": "classification"},
        **{"model": "minilm", "time": 0.0, "length": {"updates": LENGTH.updates, "warm_up": LENGTH.warm_up}},
        "machine": {"host": "here", "cores": 2, "processor": "a processor", "load": [0.5, 2.5]},
        "rows": list(rows) or [row()],
        **changed,
    }
