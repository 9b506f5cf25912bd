"""Timeline of a worker within a step: spans of its monotonic clock, by kind."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
"""Spans in which the worker computes."""
COMM_WAIT = "comm_wait"
"""Spans in which the worker waits for communication."""
COMM_ASYNC = "comm_async"
"""Spans from the start of an asynchronous collective to its end; the worker computes or waits meanwhile."""


class TimeSpan(NamedTuple):
    kind: str
    start: int
    """Nanoseconds, of a clock that is the same for all processes of a machine."""
    stop: int


MAX_SPANS = 1 << 16
"""Largest number of kept spans if nobody reads them; a step of a thousand micro-batches has two thousand."""


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
