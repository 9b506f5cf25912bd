"""Texts to tokens: requests that arrive together are tokenised together.

The answers of one engine call leave together, and so do the next requests of those who got them. A call of the
tokenizer for all of them costs less than one for each.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from rtrain.batch import Encoded
from rtrain.predict import Predictor
from rtrain.tasks.base import Input

INLINE_CHARACTERS = 20_000
"""Most characters tokenised at once on the event loop; a request of more goes to another thread: half a second of it
would hold up every other request."""


class _Waiting(NamedTuple):
    texts: Sequence[Input]
    characters: int
    found: "asyncio.Future[list[Encoded]]"


class Encoder:
    """Belongs to one event loop."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor
        self._waiting: list[_Waiting] = []

    async def encode(self, texts: Sequence[Input]) -> list[Encoded]:
        """Tokens of each text. Raises InputError, with the text's place in this request."""
        characters = sum(map(characters_of, texts))
        if characters > INLINE_CHARACTERS:
            return await asyncio.to_thread(self._predictor.encode, texts)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # After the steps of all tasks that this turn of the loop has woken: they may bring texts too.
            loop.call_soon(self._encode)
        self._waiting.append(_Waiting(texts, characters, loop.create_future()))
        return await self._waiting[-1].found

    def _encode(self) -> None:
        """Tokenise what has come, as far as it may be done at once, and the rest in the next turn."""
        count, characters = 0, 0
        for one in self._waiting:
            characters += one.characters
            if count and characters > INLINE_CHARACTERS:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._encode)
        self._answer([one for one in taken if not one.found.done()])

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


def characters_of(text: Input) -> int:
    """The characters of a text, or of all parts of a pair."""
    return len(text) if isinstance(text, str) else sum(len(part or "") for part in text.values())
