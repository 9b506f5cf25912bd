"""Where the time of an update went: its stages, from the spans of a worker's timeline. Pure.

Each moment of an update counts once. While a worker stands still for an exchange, that is the exchange's, whatever
stage it is in; of the rest each stage has its own; what is left is idle. So the parts add up to the update, to the
nanosecond. The part of an exchange that is hidden behind computation is told beside them: it is no time of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtrain.parallel.timeline import (
    BACKWARD as BACKWARD,
    FORWARD as FORWARD,
    OPTIMIZER as OPTIMIZER,
    SENDS,
    WAITS,
    Span,
)

Interval = tuple[int, int]
"""[start, stop) in nanoseconds."""

GET_BATCH, EVALUATE, CHECKPOINT = "get_batch", "evaluate", "checkpoint"
STAGES = (GET_BATCH, FORWARD, BACKWARD, OPTIMIZER, EVALUATE, CHECKPOINT)
"""What a worker does itself; a timeline's spans of these kinds never overlap."""
EXCHANGE, IDLE = WAITS, "idle"
PARTS = (GET_BATCH, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, EVALUATE, CHECKPOINT, IDLE)
"""All parts of an update, in the order in which they are shown."""


# ---------------------------------------------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order; empty ones are left out."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments of `intervals` that are in none of `others`; both are what `union` returns."""
    found: list[Interval] = []
    place = 0
    for start, stop in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        ahead = place
        while ahead < len(others) and others[ahead][0] < stop:
            if others[ahead][0] > start:
                found.append((start, others[ahead][0]))
            start = max(start, others[ahead][1])
            ahead += 1
        if start < stop:
            found.append((start, stop))
    return found


def within(intervals: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """The moments of `intervals`, which `union` returned, from `start` until `stop`."""
    return [(max(start, one), min(stop, other)) for one, other in intervals if one < stop and other > start]


def length(intervals: Iterable[Interval]) -> int:
    """The nanoseconds of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


# ---------------------------------------------------------------------------------------------------------- an update


@dataclass(frozen=True)
class Window:
    """An update of one worker: from where the last one ended to where all was done that follows its step."""

    number: int
    start: int
    stop: int
    spans: tuple[Span, ...]

    @property
    def wall(self) -> int:
        """Nanoseconds."""
        return self.stop - self.start


@dataclass(frozen=True)
class Parts:
    """Where the nanoseconds of a window went."""

    of: Mapping[str, int]
    """By part (`PARTS`); their sum is the window."""
    hidden: int
    """Nanoseconds of an exchange while the worker computed."""


def exposed(spans: Sequence[Span]) -> list[Interval]:
    """The moments in which the worker stood still for an exchange.

    Those in which it says so; and in a backward pass, once the last part of the gradient is on its way, all until that
    part and those before it have arrived: no gradient is left to compute then.
    """
    found = [(one.start, one.stop) for one in spans if one.kind == WAITS]
    sent = [one for one in spans if one.kind == SENDS]
    for backward in spans if sent else ():
        if backward.kind == BACKWARD:
            own = [one for one in sent if backward.start <= one.start < backward.stop]
            last = max((one.start for one in own), default=0)
            found += [(max(last, one.start), min(one.stop, backward.stop)) for one in own]
    return union(found)


def parts(window: Window) -> Parts:
    """Where the time of an update went."""
    stood = within(exposed(window.spans), window.start, window.stop)
    sent = union((one.start, one.stop) for one in window.spans if one.kind == SENDS)
    hidden = length(without(within(sent, window.start, window.stop), stood))
    found, taken = {EXCHANGE: length(stood)}, stood
    for stage in STAGES:
        whole = union((one.start, one.stop) for one in window.spans if one.kind == stage)
        if own := without(within(whole, window.start, window.stop), taken):
            taken = union([*taken, *own])
        found[stage] = length(own)
    found[IDLE] = window.wall - length(taken)
    return Parts({name: found[name] for name in PARTS}, hidden)


class Sums:
    """Nanoseconds by part over many updates, without keeping these."""

    def __init__(self) -> None:
        self.updates = 0
        self.of = dict.fromkeys(PARTS, 0)
        self.hidden = 0

    def add(self, found: Parts) -> None:
        self.updates += 1
        self.hidden += found.hidden
        for name, value in found.of.items():
            self.of[name] += value

    def vector(self) -> list[int]:
        """As numbers in a row, for an exchange between workers; `told` reads them."""
        return [self.updates, self.hidden, *self.of.values()]


def told(vector: Sequence[int]) -> dict[str, float]:
    """Mean seconds of an update by part, and `hidden`, of what `Sums.vector` gave."""
    updates, hidden, *values = vector
    named = {**dict(zip(PARTS, values, strict=True)), "hidden": hidden}
    return {name: round(value / max(1, updates) / 1e9, 6) for name, value in named.items()}
