"""Where the time of a worker's steps goes: a timeline of spans, the breakdown of a step, and the profiler of a run.

Each moment of a step counts once. Exposed gradient synchronization takes precedence over the stage around it; each
stage has the rest of its spans; the remainder is idle. So the parts add up to the step, to the nanosecond. Overlapped
communication is reported as `hidden` and is no part.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain.core import env
from rtrain.parallel import collectives

if TYPE_CHECKING:
    import torch

GET_BATCH, FORWARD, BACKWARD, OPTIMIZER = "get_batch", "forward", "backward", "optimizer"
EVALUATE, CHECKPOINT = "evaluate", "checkpoint"
STAGES = (GET_BATCH, FORWARD, BACKWARD, OPTIMIZER, EVALUATE, CHECKPOINT)
"""Stages of a worker; spans of these kinds never overlap in a timeline."""
COMM_WAIT = "comm_wait"
"""Spans in which the worker waits for communication."""
COMM_ASYNC = "comm_async"
"""Spans from the start of an asynchronous collective to its end; the worker computes or waits meanwhile."""
GRADIENT_SYNC, IDLE = "gradient_sync", "idle"
STEP_PARTS = (GET_BATCH, FORWARD, BACKWARD, GRADIENT_SYNC, OPTIMIZER, EVALUATE, CHECKPOINT, IDLE)
"""All parts of a step, in display order."""
MAX_SPANS = 1 << 16
"""Largest number of kept spans if nobody reads them; a step of a thousand micro-batches has two thousand."""


class TimeSpan(NamedTuple):
    kind: str
    start: int
    """Nanoseconds, of a clock that is the same for all processes of a machine."""
    stop: int


class Timeline:
    """The spans of one worker since the last read. It is always on: a span costs a microsecond."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns):
        self.now = now
        self.synchronize: Callable[[], None] | None = None
        """Called before a span ends. On a GPU, a profile waits there for the kernels of the span."""
        self._spans: deque[TimeSpan] = deque(maxlen=MAX_SPANS)

    def span(self, kind: str) -> "_SpanContext":
        """Record a span around the block."""
        return _SpanContext(self, kind)

    def add_span(self, kind: str, start: int, stop: int) -> None:
        """Add a span that was measured elsewhere, from any thread."""
        self._spans.append(TimeSpan(kind, start, stop))

    def pop_spans(self) -> list[TimeSpan]:
        """Return all spans since the last call, in the order of their ends."""
        spans, self._spans = self._spans, deque(maxlen=MAX_SPANS)
        return list(spans)


class _SpanContext:
    """A context manager; `contextlib`'s takes three times as long."""

    __slots__ = ("_kind", "_start", "_timeline")

    def __init__(self, timeline: Timeline, kind: str):
        self._timeline, self._kind = timeline, kind

    def __enter__(self) -> None:
        self._start = self._timeline.now()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        if timeline.synchronize is not None:
            timeline.synchronize()
        timeline.add_span(self._kind, self._start, timeline.now())


class StepProfiler:
    """Profiler of one worker's steps: means for the run's log. With a `path` all spans are kept and written at the end.

    A profile on a GPU waits for the kernels at the end of each stage. Otherwise the spans there measure kernel
    launches, and waiting counts for the stage that reads a result.
    """

    def __init__(self, timeline: Timeline, device: "torch.device", path: Path | None = None):
        self._timeline, self._path = timeline, path
        self._is_first, self._steps, self._totals = True, 0, Counter[str]()
        self._windows: list[dict[str, Any]] = []
        if path is not None and device.type == "cuda":
            import torch

            timeline.synchronize = lambda: torch.cuda.synchronize(device)
        timeline.pop_spans()
        self._start, self._start_cpu = timeline.now(), time.process_time_ns()
        self._step_start = self._start

    def end_step(self, step_number: int, **counts: int) -> None:
        """Record the end of step `step_number`, and its `counts` (rows, tokens); the next one begins."""
        window = StepWindow(step_number, self._step_start, self._timeline.now(), tuple(self._timeline.pop_spans()))
        self._step_start = window.stop
        if self._path is not None:
            self._windows.append({**vars(window), **counts})
        if not self._is_first:  # the first step waits for the start of the stream, which is timed as `first_batch`
            breakdown = break_down(window)
            self._steps += 1
            self._totals.update({**breakdown.nanoseconds, "hidden": breakdown.hidden})
        self._is_first = False

    def event_fields(self) -> list[dict[str, float]]:
        """Fields of the `trained` event for each worker: mean seconds of a step by part, `hidden`, and `cores_busy`
        (processor time over wall time). Called on every rank."""
        cpu, wall = time.process_time_ns() - self._start_cpu, self._timeline.now() - self._start
        if self._path is not None:
            worker = {
                "rank": collectives.rank(),
                "host": os.uname().nodename,
                "cores": env.available_cores(),
                "cpu_seconds": cpu / 1e9,
                "seconds": wall / 1e9,
                "epoch": time.time_ns() - time.perf_counter_ns(),  # Unix time in nanoseconds at the clock's zero
            }
            self._path.write_text(json.dumps({**worker, "steps": self._windows}), encoding="utf-8")
        means = {name: round(self._totals[name] / max(1, self._steps) / 1e9, 6) for name in (*STEP_PARTS, "hidden")}
        workers = collectives.all_gather_object({**means, "cores_busy": round(cpu / max(1, wall), 3)})
        return workers if self._steps else []


# ---------------------------------------------------------------------------------------------------------- breakdown


@dataclass(frozen=True)
class StepWindow:
    """A step of one worker: from the end of the previous step to the end of everything that follows the optimizer."""

    step_number: int
    start: int
    stop: int
    spans: tuple[TimeSpan, ...]

    @property
    def wall(self) -> int:
        """Nanoseconds."""
        return self.stop - self.start


@dataclass(frozen=True)
class StepBreakdown:
    """Breakdown of a window's nanoseconds."""

    nanoseconds: Mapping[str, int]
    """Part (`STEP_PARTS`) -> nanoseconds; their sum is the window."""
    hidden: int
    """Nanoseconds of communication during computation."""


def break_down(window: StepWindow) -> StepBreakdown:
    """Break down the time of a step. Pure."""

    def intervals_of(kind: str) -> list[Interval]:
        merged = merge_intervals((span.start, span.stop) for span in window.spans if span.kind == kind)
        return clip_intervals(merged, window.start, window.stop)

    covered = clip_intervals(exposed_comm(window.spans), window.start, window.stop)
    hidden = total_length(subtract_intervals(intervals_of(COMM_ASYNC), covered))
    nanoseconds = {GRADIENT_SYNC: total_length(covered)}
    for stage in STAGES:
        uncovered = subtract_intervals(intervals_of(stage), covered)
        covered = merge_intervals([*covered, *uncovered])
        nanoseconds[stage] = total_length(uncovered)
    nanoseconds[IDLE] = window.wall - total_length(covered)
    return StepBreakdown({name: nanoseconds[name] for name in STEP_PARTS}, hidden)


Interval = tuple[int, int]
"""[start, stop) in nanoseconds."""


def exposed_comm(spans: Sequence[TimeSpan]) -> list[Interval]:
    """Intervals in which the worker waits for communication.

    These are the explicit waits, and in a backward pass the time after the last bucket was sent until all buckets have
    arrived: no gradient is left to compute then.
    """
    intervals = [(span.start, span.stop) for span in spans if span.kind == COMM_WAIT]
    sends = [span for span in spans if span.kind == COMM_ASYNC]
    for backward in spans if sends else ():
        if backward.kind == BACKWARD:
            backward_sends = [span for span in sends if backward.start <= span.start < backward.stop]
            last_send = max((span.start for span in backward_sends), default=0)
            intervals += [(max(last_send, span.start), min(span.stop, backward.stop)) for span in backward_sends]
    return merge_intervals(intervals)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order, without empty ones."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def subtract_intervals(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Subtract `removed` from `intervals`; both are merged."""
    rest: list[Interval] = []
    first = 0
    for start, stop in intervals:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        index = first
        while index < len(removed) and removed[index][0] < stop:
            if removed[index][0] > start:
                rest.append((start, removed[index][0]))
            start = max(start, removed[index][1])
            index += 1
        if start < stop:
            rest.append((start, stop))
    return rest


def clip_intervals(intervals: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """Clip merged `intervals` to [start, stop)."""
    return [(max(start, begin), min(stop, end)) for begin, end in intervals if begin < stop and end > start]


def total_length(intervals: Iterable[Interval]) -> int:
    """Total nanoseconds of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)
