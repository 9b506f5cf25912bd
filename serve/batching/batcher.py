"""Greedy batching on one engine thread, without timers: a lone request goes at once, and what queues up behind a busy
engine goes next, as `scheduler` decides.

Waiting for company, as batchers do that collect for some milliseconds, makes a lone request slower and wins nothing
under load, where the queue fills while the engine works.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rtrain.core.ragged import Encoded, Floats, Outputs
from serve.batching.engine import EngineThread
from serve.batching.scheduler import Cost, Limits, Row, Scheduler, padded

Value = TypeVar("Value")


class Expired(Exception):
    """The deadline passed before the answer was ready, or would have."""


class EngineError(Exception):
    """The engine failed on a row of this request, alone as well; the cause is chained."""


@dataclass
class Stats:
    """Totals since the start."""

    calls: int = 0
    rows: int = 0
    """Rows given to the engine, those of failed and repeated calls included."""
    tokens: int = 0
    """Those of the rows, padding included."""
    seconds: float = 0.0
    dropped: int = 0
    """Rows whose client had gone, or whose deadline had passed or was too near, before the engine saw them; those that
    were not tokenised for that too."""
    failures: int = 0
    """Engine calls that raised."""


class _Request:
    """The rows of one `submit`; they may be answered by several engine calls, in any order."""

    def __init__(self, rows: int, over: "asyncio.Future[None]"):
        self.rows, self.over = rows, over
        self.results: dict[int, Floats] = {}
        self.error: Exception | None = None

    def put(self, position: int, output: Floats) -> None:
        self.results[position] = output
        if len(self.results) == self.rows:
            self.end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.end()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Batcher:
    """Belongs to one event loop. `run` is called on a thread of its own, one call at a time."""

    def __init__(
        self,
        run: Callable[[list[Encoded]], Outputs],
        limits: Limits,
        on_call: Callable[[int, int, float], None] = lambda rows, tokens, seconds: None,
        is_unpadded: bool = False,
    ):
        """`on_call` is told the rows, padded tokens and seconds of each engine call, on the engine's thread.
        `is_unpadded`: the engine pads nothing."""
        self._run, self._on_call, self._is_unpadded = run, on_call, is_unpadded
        self._cost = Cost()
        self._queue = Scheduler(limits, self._cost)
        self._thread = EngineThread()
        self._worker: asyncio.Task[None] | None = None
        self._call_began: float | None = None
        self.stats = Stats()

    @property
    def waiting(self) -> int:
        """Rows that no engine call has taken yet."""
        return self._queue.rows

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    def count_dropped(self, rows: int) -> None:
        """Count rows that were given up before they came here."""
        self.stats.dropped += rows

    @property
    def busy(self) -> bool:
        return self._worker is not None or self._call_began is not None

    async def aside(self, call: Callable[[], Value]) -> Value:
        """What `call` gives, on the engine's thread. Rows that come meanwhile wait for it, so that it has to be short,
        and is for an engine that is not `busy`."""

        def timed() -> Value:
            self._call_began = time.monotonic()
            try:
                return call()
            finally:
                self._call_began = None

        return await self._thread.run(timed)

    async def submit(self, encoded: Sequence[Encoded], deadline: float, client: str = "") -> list[Floats]:
        """The output for each row of `encoded` (at least one), in its order; `deadline` is on the loop's clock. The
        engine's time is shared out fairly among the values of `client`.

        Raises Overloaded, Expired or EngineError. Where the caller is cancelled, its rows leave the queue.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if deadline <= now:
            self.stats.dropped += len(encoded)
            raise Expired("the deadline passed before the texts could be queued")
        request = _Request(len(encoded), loop.create_future())
        rows = [Row(request, place, row, client, deadline, self._is_unpadded) for place, row in enumerate(encoded)]
        self._queue.put(rows, now)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        timer = loop.call_at(deadline, request.end)
        try:
            await request.over
            if request.error is not None:
                raise request.error
            if len(request.results) < request.rows:
                raise Expired("the deadline passed before the answer was ready")
        finally:
            timer.cancel()
            request.end()
            if len(request.results) < request.rows:
                self.stats.dropped += self._queue.remove(request, client)
        return [request.results[position] for position in range(request.rows)]

    def stalled_s(self) -> float:
        """Seconds that the engine call in progress has taken so far; 0 where there is none."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        self._thread.close()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue.rows:
                batch, late = self._queue.take(loop.time())
                self.stats.dropped += len(late)
                for row in late:
                    self._fail(row, Expired("the answer would not have been ready before the deadline"))
                if awaited := [row for row in batch if not row.owner.over.done()]:
                    await self._answer(awaited)
                self.stats.dropped += len(batch) - len(awaited)
        finally:
            self._worker = None

    async def _answer(self, batch: list[Row]) -> None:
        loop = asyncio.get_running_loop()
        try:
            outputs, seconds = await self._thread.run(functools.partial(self._call, batch))
        except Exception as error:
            if len(batch) == 1:
                failure = EngineError("the engine failed on this text")
                failure.__cause__ = error
                self._fail(batch[0], failure)
                return
            # One bad row must not fail its neighbours: once more, each by itself.
            for row in batch:
                if not row.owner.over.done() and loop.time() < row.deadline:
                    await self._answer([row])
        else:
            self._cost.learn(padded(batch), seconds)
            for row, output in zip(batch, outputs, strict=True):
                row.owner.put(row.position, output)

    def _fail(self, row: Row, error: Exception) -> None:
        """Give up the whole request of a row: what is left of it would be answered in vain."""
        row.owner.fail(error)
        self.stats.dropped += self._queue.remove(row.owner, row.client)

    def _call(self, batch: list[Row]) -> tuple[Outputs, float]:
        """One engine call and its seconds, on the engine's thread, which alone writes these counters."""
        self._call_began = began = time.monotonic()
        try:
            outputs = self._run([row.encoded for row in batch])
            if len(outputs) != len(batch):
                raise RuntimeError(f"the engine gave {len(outputs)} answers to {len(batch)} texts")
        except Exception:
            self.stats.failures += 1
            raise
        finally:
            self._call_began, seconds = None, time.monotonic() - began
            tokens = padded(batch)
            self.stats.calls += 1
            self.stats.rows += len(batch)
            self.stats.tokens += tokens
            self.stats.seconds += seconds
            self._on_call(len(batch), tokens, seconds)
        return outputs, seconds
