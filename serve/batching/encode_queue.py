"""The queue before the tokenizer: requests that arrive together are tokenized together.

Clients that receive answers of one engine call send their next requests at the same time. One tokenizer call for
all of them costs less than one call each. Requests are dropped from the queue if the client disconnects or the deadline
passes. `rtrain.tasks.encode` turns a text into token ids.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rtrain.core.ragged import EncodedRow
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve.batching.batcher import DeadlineExceeded

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 20_000
"""Most characters tokenised at once on the event loop; a request of more goes to another thread: half a second of it
would hold up every other request."""


class _EncodeRequest(NamedTuple):
    texts: Sequence[Input]
    characters: int
    deadline: float
    is_disconnected: Callable[[], bool]
    future: "asyncio.Future[list[EncodedRow]]"


class Encoder:
    """Belongs to one event loop."""

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


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the texts could be tokenised")


def count_characters(text: Input) -> int:
    """The characters of a text, or of all parts of a pair."""
    return len(text) if isinstance(text, str) else sum(len(part or "") for part in text.values())
