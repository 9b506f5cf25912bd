"""Greedy batching on one engine thread, without timers: a lone request goes at once, and what queues up behind a busy
engine goes next, grouped by length.

Waiting for company, as batchers do that collect for some milliseconds, makes a lone request slower and wins nothing
under load, where the queue fills while the engine works. One engine call takes rows of one length bucket, so that short
texts are not padded to a long neighbour; which bucket is decided by the row that has waited longest, so none starves.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from rtrain.batch import Encoded, Floats, Outputs

SHORTEST_BUCKET = 16
"""In tokens. Shorter rows share a bucket: below this length a call costs about the same whatever the length."""
RATE_WEIGHT = 0.1
"""Weight of the newest engine call in the moving average of seconds per row."""


class Overloaded(Exception):
    """The queue is full; `retry_after` is the time, in whole seconds, in which the engine should have emptied it."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many texts are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class Expired(Exception):
    """The deadline passed before the answer was ready."""


class EngineError(Exception):
    """The engine failed on a row of this request, alone as well; the cause is chained."""


@dataclass
class Stats:
    """Totals since the start."""

    calls: int = 0
    rows: int = 0
    """Rows given to the engine, those of failed and repeated calls included."""
    seconds: float = 0.0
    dropped: int = 0
    """Rows whose client had gone, or whose deadline had passed, before the engine saw them."""
    failures: int = 0
    """Engine calls that raised."""


class _Request:
    """The rows of one `submit`; they may be answered by several engine calls, in any order."""

    def __init__(self, rows: int, deadline: float, over: "asyncio.Future[None]"):
        self.rows, self.deadline, self.over = rows, deadline, over
        self.results: dict[int, Floats] = {}
        self.error: EngineError | None = None

    def put(self, position: int, output: Floats) -> None:
        self.results[position] = output
        if len(self.results) == self.rows:
            self.end()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.end()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def wanted(self, now: float) -> bool:
        return not self.over.done() and now < self.deadline


class _Row(NamedTuple):
    number: int
    """Order of arrival."""
    request: _Request
    position: int
    encoded: Encoded


def bucket(tokens: int) -> int:
    """The length to which a row may be padded: the next power of two."""
    return max(SHORTEST_BUCKET, 1 << (tokens - 1).bit_length())


class Batcher:
    """Belongs to one event loop. `run` is called on a thread of its own, one call at a time."""

    def __init__(
        self,
        run: Callable[[list[Encoded]], Outputs],
        max_batch_rows: int,
        max_queue_rows: int,
        on_call: Callable[[int, float], None] = lambda rows, seconds: None,
        max_batch_tokens: int | None = None,
    ):
        """`on_call` is told the rows and seconds of each engine call, on the engine's thread. `max_batch_tokens` are
        those of a call, padding included; a row of more goes alone."""
        self._run, self._on_call = run, on_call
        self._max_batch_rows, self._max_queue_rows = max_batch_rows, max_queue_rows
        self._max_batch_tokens = max_batch_tokens
        self._queues: dict[int, deque[_Row]] = {}  # by bucket; none is empty
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._worker: asyncio.Task[None] | None = None
        self._call_began: float | None = None
        self._row_seconds = 0.0
        self.stats = Stats()

    @property
    def waiting(self) -> int:
        """Rows that no engine call has taken yet."""
        return sum(len(queue) for queue in self._queues.values())

    async def submit(self, encoded: Sequence[Encoded], deadline: float) -> list[Floats]:
        """The output for each row of `encoded` (at least one), in its order; `deadline` is on the loop's clock.

        Raises Overloaded, Expired or EngineError. Where the caller is cancelled, its rows leave the queue.
        """
        loop = asyncio.get_running_loop()
        if deadline <= loop.time():
            self.stats.dropped += len(encoded)
            raise Expired("the deadline passed before the texts could be queued")
        # A request larger than the whole queue is let in alone: it could come back for ever and find no room.
        if self.waiting and self.waiting + len(encoded) > self._max_queue_rows:
            raise Overloaded(max(1, math.ceil(self.waiting * self._row_seconds)))
        request = _Request(len(encoded), deadline, loop.create_future())
        for position, row in enumerate(encoded):
            queue = self._queues.setdefault(bucket(len(row.ids)), deque())
            queue.append(_Row(next(self._numbers), request, position, row))
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            await asyncio.wait([request.over], timeout=deadline - loop.time())
            if request.error is not None:
                raise request.error
            if len(request.results) < request.rows:
                raise Expired("the deadline passed before the answer was ready")
        finally:
            request.end()
            if len(request.results) < request.rows:
                self._forget(request)
        return [request.results[position] for position in range(request.rows)]

    def stalled_s(self) -> float:
        """Seconds that the engine call in progress has taken so far; 0 where there is none."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, request: _Request) -> None:
        for length, queue in list(self._queues.items()):
            kept = deque(row for row in queue if row.request is not request)
            self.stats.dropped += len(queue) - len(kept)
            if kept:
                self._queues[length] = kept
            else:
                del self._queues[length]

    async def _work(self) -> None:
        try:
            while batch := self._take(asyncio.get_running_loop().time()):
                await self._answer(batch)
        finally:
            self._worker = None

    def _take(self, now: float) -> list[_Row]:
        """The next engine call: rows of the bucket whose first row has waited longest."""
        batch: list[_Row] = []
        windows, longest = 0, 0
        while self._queues and not batch:
            length = min(self._queues, key=lambda length: self._queues[length][0].number)
            queue = self._queues[length]
            while queue and len(batch) < self._max_batch_rows:
                row = queue[0]
                if row.request.wanted(now):
                    windows += len(row.encoded.windows)
                    longest = max(longest, *(window.tokens for window in row.encoded.windows))
                    if batch and self._max_batch_tokens is not None and windows * longest > self._max_batch_tokens:
                        break  # the first of its bucket: none that came later goes before it
                    batch.append(row)
                else:
                    self.stats.dropped += 1
                queue.popleft()
            if not queue:
                del self._queues[length]
        return batch

    async def _answer(self, batch: list[_Row]) -> None:
        loop = asyncio.get_running_loop()
        try:
            outputs = await loop.run_in_executor(self._thread, self._call, [row.encoded for row in batch])
        except Exception as error:
            if len(batch) == 1:
                failure = EngineError("the engine failed on this text")
                failure.__cause__ = error
                batch[0].request.fail(failure)
                return
            # One bad row must not fail its neighbours: once more, each by itself.
            for row in batch:
                if row.request.wanted(loop.time()):
                    await self._answer([row])
        else:
            for row, output in zip(batch, outputs, strict=True):
                row.request.put(row.position, output)

    def _call(self, encoded: list[Encoded]) -> Outputs:
        """One engine call, on the engine's thread, which alone writes these counters."""
        self._call_began = began = time.monotonic()
        try:
            outputs = self._run(encoded)
            if len(outputs) != len(encoded):
                raise RuntimeError(f"the engine gave {len(outputs)} answers to {len(encoded)} texts")
            return outputs
        except Exception:
            self.stats.failures += 1
            raise
        finally:
            self._call_began, seconds = None, time.monotonic() - began
            weight = RATE_WEIGHT if self.stats.calls else 1.0
            self._row_seconds += weight * (seconds / len(encoded) - self._row_seconds)
            self.stats.calls += 1
            self.stats.rows += len(encoded)
            self.stats.seconds += seconds
            self._on_call(len(encoded), seconds)
