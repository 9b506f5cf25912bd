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

from rtrain.core.ragged import EncodedRow, Floats, Outputs
from serve.batching.engine import EngineThread
from serve.batching.scheduler import BatchLimits, CostModel, QueuedRow, Scheduler, count_padded_tokens

CallResult = TypeVar("CallResult")


class DeadlineExceeded(Exception):
    """The deadline passed before the answer was ready, or would have."""


class EngineError(Exception):
    """The engine failed on a row of this request, alone as well; the cause is chained."""


@dataclass
class BatcherStats:
    """Totals since the start."""

    calls: int = 0
    rows: int = 0
    """Rows given to the engine, those of failed and repeated calls included."""
    tokens: int = 0
    """Those of the rows, padding included."""
    seconds: float = 0.0
    dropped_rows: int = 0
    """Rows dropped before the engine saw them: the client had disconnected, or the deadline had passed or was too near.
    Includes rows that were not tokenized for these reasons."""
    failed_calls: int = 0
    """Engine calls that raised."""


class _BatchRequest:
    """The rows of one `submit`; they may be answered by several engine calls, in any order."""

    def __init__(self, num_rows: int, completion: "asyncio.Future[None]"):
        self.num_rows, self.completion = num_rows, completion
        self.outputs: dict[int, Floats] = {}
        self.error: Exception | None = None

    def set_output(self, position: int, output: Floats) -> None:
        self.outputs[position] = output
        if len(self.outputs) == self.num_rows:
            self.complete()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.complete()

    def complete(self) -> None:
        if not self.completion.done():
            self.completion.set_result(None)


class Batcher:
    """Belongs to one event loop. `run_engine` is called on a thread of its own, one call at a time."""

    def __init__(
        self,
        run_engine: Callable[[list[EncodedRow]], Outputs],
        limits: BatchLimits,
        on_call: Callable[[int, int, float], None] = lambda rows, tokens, seconds: None,
        is_unpadded: bool = False,
    ):
        """`on_call` receives rows, padded tokens and seconds of each engine call, on the engine's thread.
        `is_unpadded`: the engine does not pad."""
        self._run_engine, self._on_call, self._is_unpadded = run_engine, on_call, is_unpadded
        self._cost_model = CostModel()
        self._scheduler = Scheduler(limits, self._cost_model)
        self._thread = EngineThread()
        self._queue_task: asyncio.Task[None] | None = None
        self._call_started_at: float | None = None
        self.stats = BatcherStats()

    @property
    def queued_rows(self) -> int:
        """Rows that no engine call has taken yet."""
        return self._scheduler.queued_rows

    @property
    def queued_tokens(self) -> int:
        return self._scheduler.queued_tokens

    def count_dropped(self, rows: int) -> None:
        """Count rows that were given up before they came here."""
        self.stats.dropped_rows += rows

    @property
    def is_busy(self) -> bool:
        return self._queue_task is not None or self._call_started_at is not None

    async def run_when_idle(self, call: Callable[[], CallResult]) -> CallResult:
        """What `call` gives, on the engine's thread. Rows that come meanwhile wait for it, so that it has to be short,
        and is for an engine that is not `is_busy`."""

        def timed_call() -> CallResult:
            self._call_started_at = time.monotonic()
            try:
                return call()
            finally:
                self._call_started_at = None

        return await self._thread.run(timed_call)

    async def submit(self, encoded: Sequence[EncodedRow], deadline: float, client: str = "") -> list[Floats]:
        """The output for each row of `encoded` (at least one), in its order; `deadline` is on the loop's clock. The
        engine's time is shared out fairly among the values of `client`.

        Raises Overloaded, Expired or EngineError. Where the caller is cancelled, its rows leave the queue.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if deadline <= now:
            self.stats.dropped_rows += len(encoded)
            raise DeadlineExceeded("the deadline passed before the texts could be queued")
        request = _BatchRequest(len(encoded), loop.create_future())
        rows = [
            QueuedRow(request, place, row, client, deadline, self._is_unpadded) for place, row in enumerate(encoded)
        ]
        self._scheduler.enqueue(rows, now)
        if self._queue_task is None:
            self._queue_task = loop.create_task(self._process_queue())
        timer = loop.call_at(deadline, request.complete)
        try:
            await request.completion
            if request.error is not None:
                raise request.error
            if len(request.outputs) < request.num_rows:
                raise DeadlineExceeded("the deadline passed before the answer was ready")
        finally:
            timer.cancel()
            request.complete()
            if len(request.outputs) < request.num_rows:
                self.stats.dropped_rows += self._scheduler.remove(request, client)
        return [request.outputs[position] for position in range(request.num_rows)]

    def current_call_s(self) -> float:
        """Seconds since the current engine call began; 0 if the engine is idle."""
        started_at = self._call_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    def close(self) -> None:
        self._thread.close()

    async def _process_queue(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._scheduler.queued_rows:
                batch, expired_rows = self._scheduler.next_batch(loop.time())
                self.stats.dropped_rows += len(expired_rows)
                for row in expired_rows:
                    self._fail_request(
                        row, DeadlineExceeded("the answer would not have been ready before the deadline")
                    )
                if pending_rows := [row for row in batch if not row.owner.completion.done()]:
                    await self._run_batch(pending_rows)
                self.stats.dropped_rows += len(batch) - len(pending_rows)
        finally:
            self._queue_task = None

    async def _run_batch(self, batch: list[QueuedRow]) -> None:
        loop = asyncio.get_running_loop()
        try:
            outputs, seconds = await self._thread.run(functools.partial(self._call_engine, batch))
        except Exception as error:
            if len(batch) == 1:
                failure = EngineError("the engine failed on this text")
                failure.__cause__ = error
                self._fail_request(batch[0], failure)
                return
            # One bad row must not fail its neighbours: once more, each by itself.
            for row in batch:
                if not row.owner.completion.done() and loop.time() < row.deadline:
                    await self._run_batch([row])
        else:
            self._cost_model.observe(count_padded_tokens(batch), seconds)
            for row, output in zip(batch, outputs, strict=True):
                row.owner.set_output(row.position, output)

    def _fail_request(self, row: QueuedRow, error: Exception) -> None:
        """Drop the whole request of a row: its other rows would be computed in vain."""
        row.owner.fail(error)
        self.stats.dropped_rows += self._scheduler.remove(row.owner, row.client)

    def _call_engine(self, batch: list[QueuedRow]) -> tuple[Outputs, float]:
        """One engine call and its seconds, on the engine's thread, which alone writes these counters."""
        self._call_started_at = started_at = time.monotonic()
        try:
            outputs = self._run_engine([row.encoded for row in batch])
            if len(outputs) != len(batch):
                raise RuntimeError(f"the engine gave {len(outputs)} answers to {len(batch)} texts")
        except Exception:
            self.stats.failed_calls += 1
            raise
        finally:
            self._call_started_at, seconds = None, time.monotonic() - started_at
            tokens = count_padded_tokens(batch)
            self.stats.calls += 1
            self.stats.rows += len(batch)
            self.stats.tokens += tokens
            self.stats.seconds += seconds
            self._on_call(len(batch), tokens, seconds)
        return outputs, seconds
