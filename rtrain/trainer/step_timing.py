"""Breakdown of a step's time into parts, from the spans of a worker's timeline. Pure.

Each moment of a step counts once. Exposed gradient synchronization takes precedence over the stage around it; each
stage has the rest of its spans; the remainder is idle. So the parts add up to the step, to the nanosecond. Overlapped
communication is reported as `hidden` and is no part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtrain.parallel.timeline import (
    BACKWARD as BACKWARD,
    COMM_ASYNC,
    COMM_WAIT,
    FORWARD as FORWARD,
    OPTIMIZER as OPTIMIZER,
    TimeSpan,
)

Interval = tuple[int, int]
"""[start, stop) in nanoseconds."""

GET_BATCH, EVALUATE, CHECKPOINT = "get_batch", "evaluate", "checkpoint"
STAGES = (GET_BATCH, FORWARD, BACKWARD, OPTIMIZER, EVALUATE, CHECKPOINT)
"""Stages of a worker; spans of these kinds never overlap in a timeline."""
GRADIENT_SYNC, IDLE = "gradient_sync", "idle"
STEP_PARTS = (GET_BATCH, FORWARD, BACKWARD, GRADIENT_SYNC, OPTIMIZER, EVALUATE, CHECKPOINT, IDLE)
"""All parts of a step, in display order."""


# ---------------------------------------------------------------------------------------------------------- intervals


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order, without empty ones."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
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


# ---------------------------------------------------------------------------------------------------------- a step


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


def break_down(window: StepWindow) -> StepBreakdown:
    """Break down the time of a step."""
    exposed_intervals = clip_intervals(exposed_comm(window.spans), window.start, window.stop)
    send_intervals = merge_intervals((span.start, span.stop) for span in window.spans if span.kind == COMM_ASYNC)
    hidden = total_length(
        subtract_intervals(clip_intervals(send_intervals, window.start, window.stop), exposed_intervals)
    )
    nanoseconds, covered = {GRADIENT_SYNC: total_length(exposed_intervals)}, exposed_intervals
    for stage in STAGES:
        stage_intervals = merge_intervals((span.start, span.stop) for span in window.spans if span.kind == stage)
        if uncovered := subtract_intervals(clip_intervals(stage_intervals, window.start, window.stop), covered):
            covered = merge_intervals([*covered, *uncovered])
        nanoseconds[stage] = total_length(uncovered)
    nanoseconds[IDLE] = window.wall - total_length(covered)
    return StepBreakdown({name: nanoseconds[name] for name in STEP_PARTS}, hidden)


class StageTotals:
    """Nanoseconds by part, summed over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.nanoseconds = dict.fromkeys(STEP_PARTS, 0)
        self.hidden = 0

    def add(self, breakdown: StepBreakdown) -> None:
        self.steps += 1
        self.hidden += breakdown.hidden
        for name, value in breakdown.nanoseconds.items():
            self.nanoseconds[name] += value

    def to_vector(self) -> list[int]:
        """Serialize to numbers for a gather between workers; `event_fields` reads them."""
        return [self.steps, self.hidden, *self.nanoseconds.values()]


def event_fields(vector: Sequence[int]) -> dict[str, float]:
    """Mean seconds of a step by part, and `hidden`, from the numbers of `StageTotals.to_vector`."""
    steps, hidden, *values = vector
    totals = {**dict(zip(STEP_PARTS, values, strict=True)), "hidden": hidden}
    return {name: round(value / max(1, steps) / 1e9, 6) for name, value in totals.items()}
