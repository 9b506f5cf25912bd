"""Texts to tokens: requests that arrive together are tokenised together.

The answers of one engine call leave together, and so do the next requests of those who got them. A call of the
tokenizer for all of them costs less than one for each. Nothing is tokenised whose client has left, or whose deadline
has passed, while it waited.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rtrain.core.ragged import Encoded
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve.batching.batcher import Expired

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 20_000
"""Most characters tokenised at once on the event loop; a request of more goes to another thread: half a second of it
would hold up every other request."""


class _Waiting(NamedTuple):
    texts: Sequence[Input]
    characters: int
    deadline: float
    has_left: Callable[[], bool]
    found: "asyncio.Future[list[Encoded]]"


class Encoder:
    """Belongs to one event loop."""

    def __init__(self, predictor: Predictor, on_drop: Callable[[int], None] = lambda texts: None):
        """`on_drop` is told how many texts of a request were not tokenised, since nobody would have had the answer."""
        self._predictor, self._on_drop = predictor, on_drop
        self._waiting: deque[_Waiting] = deque()

    async def encode(
        self, texts: Sequence[Input], deadline: float = math.inf, has_left: Callable[[], bool] = lambda: False
    ) -> list[Encoded]:
        """Tokens of each text. `deadline` is on the loop's clock; `has_left`: whether the client is known to have left,
        for which this is cancelled. Raises InputError, with the text's place in this request, or Expired."""
        characters = sum(map(characters_of, texts))
        if characters > INLINE_CHARACTERS:
            return await self._encode_apart(texts, deadline)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # After the steps of all tasks that this turn of the loop has woken: they may bring texts too. And after the
            # next turn, in which it is told of clients that have left as soon as they had asked.
            loop.call_soon(loop.call_soon, self._encode)
        self._waiting.append(_Waiting(texts, characters, deadline, has_left, loop.create_future()))
        return await self._waiting[-1].found

    async def _encode_apart(self, texts: Sequence[Input], deadline: float) -> list[Encoded]:
        """On another thread; all of them may be busy for a while."""
        loop, begun = asyncio.get_running_loop(), False

        def encode() -> list[Encoded]:
            nonlocal begun
            if loop.time() >= deadline:
                raise _expired()
            begun = True
            return self._predictor.encode(texts)

        try:
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                return await asyncio.to_thread(encode)
        except TimeoutError:
            raise _expired() from None
        finally:
            if not begun:
                self._on_drop(len(texts))

    def _encode(self) -> None:
        """Tokenise what has come, as far as it may be done at once, and the rest in the next turn."""
        loop = asyncio.get_running_loop()
        taken: list[_Waiting] = []
        characters = 0
        while self._waiting:
            one = self._waiting[0]
            if self._is_awaited(one, loop.time()):
                if taken and characters + one.characters > INLINE_CHARACTERS:
                    loop.call_soon(self._encode)
                    break
                characters += one.characters
                taken.append(one)
            self._waiting.popleft()
        if taken:
            self._answer(taken)

    def _is_awaited(self, one: _Waiting, now: float) -> bool:
        """Raises nothing: an error about one request is its own, and must not keep those behind it waiting for ever."""
        try:
            if not one.found.done() and one.has_left():
                one.found.cancel()
            elif not one.found.done() and one.deadline <= now:
                one.found.set_exception(_expired())
            if one.found.done():
                self._on_drop(len(one.texts))
        except Exception as error:
            if one.found.done():
                logger.exception("texts that were dropped could not be counted")
            else:
                one.found.set_exception(error)
        return not one.found.done()

    def _answer(self, taken: list[_Waiting]) -> None:
        try:
            encoded = iter(self._predictor.encode([text for one in taken for text in one.texts]))
        except Exception as error:
            if len(taken) == 1:
                taken[0].found.set_exception(error)
                return
            # One bad text must not fail its neighbours: once more, each request by itself.
            for one in taken:
                self._answer([one])
        else:
            for one in taken:
                one.found.set_result([next(encoded) for _ in one.texts])


def _expired() -> Expired:
    return Expired("the deadline passed before the texts could be tokenised")


def characters_of(text: Input) -> int:
    """The characters of a text, or of all parts of a pair."""
    return len(text) if isinstance(text, str) else sum(len(part or "") for part in text.values())
