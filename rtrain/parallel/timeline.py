"""What a worker does when, within an update: spans of its monotonic clock, by what they are for."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
"""Spans of an update in which the worker computes."""
WAITS = "exchange"
"""Spans in which the worker stands still for an exchange."""
SENDS = "sending"
"""Spans from the start of a part of an exchange to its end; the worker computes beside it or waits for it."""


class Span(NamedTuple):
    kind: str
    start: int
    """Nanoseconds, of a clock that is the same for all processes of a machine."""
    stop: int


MOST = 1 << 16
"""Spans that are kept where nobody takes them; an update of a thousand passes has two thousand."""


class Timeline:
    """The spans of one worker since they were last taken. It is always kept: a span costs a microsecond."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns):
        self.now = now
        self.settle: Callable[[], None] | None = None
        """Called before a span ends: on a GPU, a profile waits there for the kernels that the span has launched."""
        self._spans: deque[Span] = deque(maxlen=MOST)

    def during(self, kind: str) -> "_During":
        """Around what is to be a span."""
        return _During(self, kind)

    def add(self, kind: str, start: int, stop: int) -> None:
        """A span that was measured elsewhere; any thread may add one."""
        self._spans.append(Span(kind, start, stop))

    def take(self) -> list[Span]:
        """All spans since the last call, in the order of their ends."""
        taken, self._spans = self._spans, deque(maxlen=MOST)
        return list(taken)


class _During:
    """A context manager; one that `contextlib` makes would take three times as long."""

    __slots__ = ("_kind", "_start", "_timeline")

    def __init__(self, timeline: Timeline, kind: str):
        self._timeline, self._kind = timeline, kind

    def __enter__(self) -> None:
        self._start = self._timeline.now()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        if timeline.settle is not None:
            timeline.settle()
        timeline.add(self._kind, self._start, timeline.now())
