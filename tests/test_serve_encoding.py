"""Texts of several requests, tokenised together and told apart again."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rtrain.batch import Encoded
from rtrain.predict import InputError, Predictor
from rtrain.tasks.base import Input
from serve.batching.encoding import Encoder
from tests import serving
from tests.tiny import CORPUS

predictor = serving.predictor  # fixture


class Calls:
    """The predictor's own `encode`, and what it was asked."""

    def __init__(self, predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
        self._encode, self.texts, self.threads = predictor.encode, list[Sequence[Input]](), list[threading.Thread]()
        monkeypatch.setattr(predictor, "encode", self)

    def __call__(self, texts: Sequence[Input]) -> list[Encoded]:
        self.texts.append(list(texts))
        self.threads.append(threading.current_thread())
        return self._encode(texts)


@pytest.fixture
def calls(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(predictor, monkeypatch)


def together(predictor: Predictor, *requests: Sequence[Input]) -> list[Any]:
    async def main() -> list[Any]:
        encoder = Encoder(predictor)
        return await asyncio.gather(*map(encoder.encode, requests), return_exceptions=True)

    return asyncio.run(main())


def test_requests_of_one_turn_are_one_call_and_each_gets_its_own_tokens(calls: Calls, predictor: Predictor) -> None:
    pair = {"text": CORPUS[3], "text_pair": CORPUS[4]}
    requests: list[list[Input]] = [[CORPUS[0]], [CORPUS[1], CORPUS[2]], [pair, CORPUS[5]]]
    found = together(predictor, *requests)
    assert len(calls.texts) == 1
    assert found == [predictor.encode(texts) for texts in requests]


def test_a_text_that_cannot_be_read_fails_its_own_request_alone(calls: Calls, predictor: Predictor) -> None:
    before, bad, after = together(predictor, [CORPUS[0]], [CORPUS[1], " "], [CORPUS[2]])
    assert isinstance(bad, InputError)
    assert bad.position == 1
    assert (before, after) == (predictor.encode([CORPUS[0]]), predictor.encode([CORPUS[2]]))


def test_long_texts_go_to_another_thread_and_many_short_ones_take_turns(calls: Calls, predictor: Predictor) -> None:
    requests = [["x" * 15_000], ["y" * 15_000], ["z" * 25_000], ["w"]]
    found = together(predictor, *requests)
    here = [thread is threading.main_thread() for thread in calls.threads]
    sizes = [sum(map(len, texts)) for texts in calls.texts]
    assert sorted(zip(sizes, here, strict=True)) == [(15_000, True), (15_001, True), (25_000, False)]
    assert found == [predictor.encode(texts) for texts in requests]


def test_a_request_that_nobody_awaits_is_not_tokenised(calls: Calls, predictor: Predictor) -> None:
    async def main() -> None:
        encoder = Encoder(predictor)
        gone = asyncio.create_task(encoder.encode([CORPUS[0]]))
        kept = asyncio.create_task(encoder.encode([CORPUS[1]]))
        await asyncio.sleep(0)
        gone.cancel()
        assert await kept == predictor.encode([CORPUS[1]])

    asyncio.run(main())
    assert calls.texts[0] == [CORPUS[1]]
