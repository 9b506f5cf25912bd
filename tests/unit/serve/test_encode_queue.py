"""Texts of several requests, tokenised together and told apart again."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rtrain.core.ragged import EncodedRow
from rtrain.inference.predictor import InputError, Predictor
from rtrain.tasks.base import Input
from serve.batching.batcher import DeadlineExceeded
from serve.batching.encode_queue import Encoder
from tests.support import serving
from tests.support.tiny import CORPUS

predictor = serving.predictor  # fixture


class Calls:
    """The predictor's own `encode`, with a record of its calls."""

    def __init__(self, predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
        self._encode, self.texts, self.threads = predictor.encode, list[Sequence[Input]](), list[threading.Thread]()
        monkeypatch.setattr(predictor, "encode", self)

    def __call__(self, texts: Sequence[Input]) -> list[EncodedRow]:
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
    encoded = together(predictor, *requests)
    assert len(calls.texts) == 1
    assert encoded == [predictor.encode(texts) for texts in requests]


def test_a_text_that_cannot_be_read_fails_its_own_request_alone(calls: Calls, predictor: Predictor) -> None:
    before, bad, after = together(predictor, [CORPUS[0]], [CORPUS[1], " "], [CORPUS[2]])
    assert isinstance(bad, InputError)
    assert bad.position == 1
    assert (before, after) == (predictor.encode([CORPUS[0]]), predictor.encode([CORPUS[2]]))


def test_long_texts_go_to_another_thread_and_many_short_ones_take_turns(calls: Calls, predictor: Predictor) -> None:
    requests = [["x" * 15_000], ["y" * 15_000], ["z" * 25_000], ["w"]]
    encoded = together(predictor, *requests)
    is_main_thread = [thread is threading.main_thread() for thread in calls.threads]
    sizes = [sum(map(len, texts)) for texts in calls.texts]
    assert sorted(zip(sizes, is_main_thread, strict=True)) == [(15_000, True), (15_001, True), (25_000, False)]
    assert encoded == [predictor.encode(texts) for texts in requests]


def test_texts_of_who_has_left_or_whose_deadline_has_passed_are_counted_and_not_tokenised(
    calls: Calls, predictor: Predictor
) -> None:
    dropped: list[int] = []

    async def main() -> list[Any]:
        encoder, now = Encoder(predictor, dropped.append), asyncio.get_running_loop().time()
        requests = [
            encoder.encode([CORPUS[0]], is_disconnected=lambda: True),
            encoder.encode([CORPUS[1], CORPUS[2]], deadline=now),
            encoder.encode(["x" * 30_000] * 4, deadline=now),
            encoder.encode([CORPUS[3]], deadline=now + 60),
        ]
        return await asyncio.gather(*requests, return_exceptions=True)

    gone, late, long, remaining = asyncio.run(main())
    assert isinstance(gone, asyncio.CancelledError)
    assert isinstance(late, DeadlineExceeded)
    assert isinstance(long, DeadlineExceeded)
    assert remaining == predictor.encode([CORPUS[3]])
    assert calls.texts[0] == [CORPUS[3]]
    assert sorted(dropped) == [1, 2, 4]


def test_long_texts_that_wait_for_a_thread_are_not_tokenised_once_nobody_awaits_them(
    calls: Calls, predictor: Predictor
) -> None:
    dropped: list[int] = []

    async def main() -> None:
        busy = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            threads.submit(busy.wait)
            gone = asyncio.create_task(Encoder(predictor, dropped.append).encode(["x" * 30_000]))
            await asyncio.sleep(0.01)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            busy.set()

    asyncio.run(main())
    assert calls.texts == []
    assert dropped == [1]
