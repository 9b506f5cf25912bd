"""Greedy batching on one engine thread, without timers: a lone request goes at once, and what queues up behind a busy
engine goes next, as `scheduler` decides.

Waiting for company, as batchers do that collect for some milliseconds, makes a lone request slower and wins nothing
under load, where the queue fills while the engine works.
"""

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from rtrain.core.ragged import EncodedRow, Floats, Outputs
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve.batching.scheduler import BatchLimits, CostModel, QueuedRow, Scheduler, count_padded_tokens

logger = logging.getLogger(__name__)
INLINE_CHARACTERS = 20_000
"""Most characters tokenised at once on the event loop; a request of more goes to another thread: half a second of it
would hold up every other request."""
CLOSED_MESSAGE = "the engine's thread has ended"
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


class _EncodeRequest(NamedTuple):
    texts: Sequence[Input]
    characters: int
    deadline: float
    is_disconnected: Callable[[], bool]
    future: "asyncio.Future[list[EncodedRow]]"


class Encoder:
    """Tokenizes requests that arrive together in one call, which costs less than one call each: clients that receive
    answers of one engine call send their next requests at the same time. Belongs to one event loop."""

    def __init__(self, predictor: Predictor, on_drop: Callable[[int], None] = lambda texts: None):
        """`on_drop` receives the number of texts of a request that were not tokenized because nobody would get the
        answer."""
        self._predictor, self._on_drop = predictor, on_drop
        self._pending: deque[_EncodeRequest] = deque()

    async def encode(
        self, texts: Sequence[Input], deadline: float = math.inf, is_disconnected: Callable[[], bool] = lambda: False
    ) -> list[EncodedRow]:
        """Return the tokens of each text.

        Args:
            deadline: time on the clock of the event loop.
            is_disconnected: returns whether the client has disconnected; the request is cancelled then.

        Raises:
            InputError: a text is invalid; names its index in this request.
            DeadlineExceeded: the deadline passed in the queue.
        """
        characters = sum(map(count_characters, texts))
        if characters > INLINE_CHARACTERS:
            return await self._encode_in_thread(texts, deadline)
        loop = asyncio.get_running_loop()
        if not self._pending:
            # Runs after all tasks of this turn of the loop, since they may bring texts too, and after the next turn, in
            # which the loop learns of clients that disconnected right after their requests.
            loop.call_soon(loop.call_soon, self._encode_pending)
        self._pending.append(_EncodeRequest(texts, characters, deadline, is_disconnected, loop.create_future()))
        return await self._pending[-1].future

    async def _encode_in_thread(self, texts: Sequence[Input], deadline: float) -> list[EncodedRow]:
        """On another thread; all of them may be busy for a while."""
        loop, is_started = asyncio.get_running_loop(), False

        def encode() -> list[EncodedRow]:
            nonlocal is_started
            if loop.time() >= deadline:
                raise _deadline_exceeded()
            is_started = True
            return self._predictor.encode(texts)

        try:
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                return await asyncio.to_thread(encode)
        except TimeoutError:
            raise _deadline_exceeded() from None
        finally:
            if not is_started:
                self._on_drop(len(texts))

    def _encode_pending(self) -> None:
        """Tokenize the pending texts, up to the limit of one turn of the loop; the next turn takes the rest."""
        loop = asyncio.get_running_loop()
        batch: list[_EncodeRequest] = []
        characters = 0
        while self._pending:
            request = self._pending[0]
            if self._is_pending(request, loop.time()):
                if batch and characters + request.characters > INLINE_CHARACTERS:
                    loop.call_soon(self._encode_pending)
                    break
                characters += request.characters
                batch.append(request)
            self._pending.popleft()
        if batch:
            self._encode_requests(batch)

    def _is_pending(self, request: _EncodeRequest, now: float) -> bool:
        """Raises nothing: an error about one request is its own, and must not keep those behind it waiting for ever."""
        try:
            if not request.future.done() and request.is_disconnected():
                request.future.cancel()
            elif not request.future.done() and request.deadline <= now:
                request.future.set_exception(_deadline_exceeded())
            if request.future.done():
                self._on_drop(len(request.texts))
        except Exception as error:
            if request.future.done():
                logger.exception("texts that were dropped could not be counted")
            else:
                request.future.set_exception(error)
        return not request.future.done()

    def _encode_requests(self, requests: list[_EncodeRequest]) -> None:
        try:
            encoded = iter(self._predictor.encode([text for request in requests for text in request.texts]))
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
                return
            # One bad text must not fail its neighbours: once more, each request by itself.
            for request in requests:
                self._encode_requests([request])
        else:
            for request in requests:
                request.future.set_result([next(encoded) for _ in request.texts])


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

        Raises `scheduler.Overloaded`, DeadlineExceeded or EngineError. Where the caller is cancelled, its rows leave
        the queue.
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


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the texts could be tokenised")


def count_characters(text: Input) -> int:
    """The characters of a text, or of all parts of a pair, features included."""
    if isinstance(text, str):
        return len(text)
    return sum(count_characters(part) if isinstance(part, Mapping) else len(part or "") for part in text.values())


class _EngineCall(NamedTuple):
    call: Callable[[], Any]
    future: "asyncio.Future[Any]"


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


class EngineThread:
    """Calls an engine for one event loop, one call at a time, in order. An executor of the standard library takes 27 us
    of processor time for each call, this takes 11."""

    def __init__(self) -> None:
        """It begins with the first call."""
        self._calls: SimpleQueue[_EngineCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, call: Callable[[], CallResult]) -> CallResult:
        """Result of the call on the engine's thread, or its exception. A call whose caller is cancelled before it
        begins never runs. Raises `RuntimeError` after `close`."""
        if self._closed:
            raise RuntimeError(CLOSED_MESSAGE)
        if self._thread is None:
            # A call that does not return keeps no process from ending.
            self._thread = threading.Thread(target=self._run_calls, name="engine", daemon=True)
            self._thread.start()
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls.put(_EngineCall(call, future))
        return await future

    def close(self) -> None:
        """End with the call in progress; later ones are not begun, and raise `RuntimeError`."""
        self._closed = True
        self._calls.put(None)

    def _run_calls(self) -> None:
        while (engine_call := self._calls.get()) is not None:
            if self._closed:
                _set_threadsafe(engine_call.future, engine_call.future.set_exception, RuntimeError(CLOSED_MESSAGE))
            elif not engine_call.future.cancelled():
                _execute(engine_call)


def _execute(engine_call: _EngineCall) -> None:
    future = engine_call.future
    try:
        value = engine_call.call()
    except BaseException as error:  # whatever it is, it is the caller's
        _set_threadsafe(future, future.set_exception, error)
    else:
        _set_threadsafe(future, future.set_result, value)


def _set_threadsafe(future: "asyncio.Future[Any]", setter: Callable[..., Any], *value: object) -> None:
    def set_unless_done() -> None:
        if not future.done():
            setter(*value)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
        future.get_loop().call_soon_threadsafe(set_unless_done)
