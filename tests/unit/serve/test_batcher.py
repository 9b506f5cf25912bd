"""The batcher alone: engine calls, and the outputs of each request."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.ragged import EncodedRow, Floats, TokenWindow
from rtrain.inference.predictor import InputError, Predictor
from rtrain.tasks.base import Input
from serve.batching.batcher import Batcher, DeadlineExceeded, Encoder, EngineError, EngineThread
from serve.batching.scheduler import BatchLimits
from tests.support.tiny import CORPUS

BAD = 13
FAR_DEADLINE = 60.0


def row(value: int, tokens: int = 8) -> EncodedRow:
    return EncodedRow([value] * tokens, [TokenWindow(tokens, tokens)], False, [])


def numbers(answer: list[Floats]) -> list[list[float]]:
    return [output.tolist() for output in answer]


class Engine:
    """Answers a row by twice its first token, fails on BAD, records the calls and can be held inside one."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.lengths: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, encoded: list[EncodedRow]) -> Floats:
        values = [row.ids[0] for row in encoded]
        self.calls.append(values)
        self.lengths.append([len(row.ids) for row in encoded])
        assert self.gate.wait(10)
        if BAD in values:
            raise ValueError("bad row")
        return np.array([[2 * value] for value in values], dtype=np.float32)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@contextmanager
def batching(engine: Callable[[list[EncodedRow]], Floats], rows: int = 4, queue: int = 100) -> Iterator[Batcher]:
    batcher = Batcher(engine, BatchLimits(max_batch_size=rows, max_queued_inputs=queue))
    yield batcher
    batcher.close()


def deadline(seconds: float = FAR_DEADLINE) -> float:
    return asyncio.get_running_loop().time() + seconds


async def submit_and_hold(batcher: Batcher, engine: Engine) -> "asyncio.Task[list[Floats]]":
    """The request of row 0, inside the engine until the gate opens."""
    engine.gate.clear()
    task = asyncio.create_task(batcher.submit([row(0)], deadline()))
    while not engine.calls:
        await asyncio.sleep(0.001)
    return task


async def queued(batcher: Batcher, *rows: EncodedRow, seconds: float = FAR_DEADLINE) -> "asyncio.Task[list[Floats]]":
    before = batcher.queued_rows
    task = asyncio.create_task(batcher.submit(rows, deadline(seconds)))
    await asyncio.sleep(0)
    assert batcher.queued_rows == before + len(rows)
    return task


def test_a_lone_request_is_one_call_of_its_own() -> None:
    async def main() -> None:
        engine = Engine()
        with batching(engine) as batcher:
            answer = await batcher.submit([row(3)], deadline())
            assert numbers(answer) == [[6]]
            assert engine.calls == [[3]]
            assert (batcher.stats.calls, batcher.stats.rows, batcher.queued_rows) == (1, 1, 0)

    run(main)


def test_requests_that_arrive_while_the_engine_works_share_the_next_call() -> None:
    async def main() -> None:
        engine = Engine()
        with batching(engine) as batcher:
            first = await submit_and_hold(batcher, engine)
            other_tasks = [await queued(batcher, row(value)) for value in (1, 2, 3)]
            engine.gate.set()
            assert [numbers(answer) for answer in await asyncio.gather(first, *other_tasks)] == [
                [[0]],
                [[2]],
                [[4]],
                [[6]],
            ]
            assert engine.calls == [[0], [1, 2, 3]]

    run(main)


def test_rows_past_their_deadline_never_reach_the_engine() -> None:
    async def main() -> None:
        engine = Engine()
        with batching(engine) as batcher:
            first = await submit_and_hold(batcher, engine)
            late = await queued(batcher, row(1), seconds=0.01)
            remaining = await queued(batcher, row(2))
            with pytest.raises(DeadlineExceeded):
                await late
            engine.gate.set()
            await asyncio.gather(first, remaining)
            assert engine.calls == [[0], [2]]
            assert (batcher.stats.dropped_rows, batcher.queued_rows) == (1, 0)

    run(main)


def test_what_is_left_of_a_failed_request_leaves_the_queue() -> None:
    async def main() -> None:
        engine = Engine()
        with batching(engine, rows=1) as batcher:
            with pytest.raises(EngineError):
                await batcher.submit([row(BAD), row(1), row(2)], deadline())
            await batcher.submit([row(3)], deadline())
            assert engine.calls == [[BAD], [3]]
            assert (batcher.stats.dropped_rows, batcher.queued_rows) == (2, 0)

    run(main)


def test_an_engine_that_gives_too_few_answers_fails_the_request() -> None:
    async def main() -> None:
        with batching(lambda encoded: np.zeros((0, 1), dtype=np.float32)) as batcher:
            with pytest.raises(EngineError) as failed:
                await batcher.submit([row(1)], deadline())
            assert repr(failed.value.__cause__) == "RuntimeError('the engine gave 0 answers to 1 texts')"

    run(main)


def test_a_call_that_does_not_return_is_seen_from_outside() -> None:
    async def main() -> None:
        engine = Engine()
        with batching(engine) as batcher:
            assert batcher.current_call_s() == 0.0
            first = await submit_and_hold(batcher, engine)
            assert batcher.current_call_s() > 0.0
            engine.gate.set()
            await first
            assert batcher.current_call_s() == 0.0

    run(main)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.lists(st.integers(2, 200), min_size=1, max_size=9), min_size=1, max_size=8),
    rows=st.integers(1, 6),
)
def test_every_request_gets_its_own_answers_in_order_and_each_row_is_computed_once(
    requests: list[list[int]], rows: int
) -> None:
    async def main() -> None:
        engine = Engine()
        values = iter(range(1000, 2000))
        texts = [[row(next(values), tokens) for tokens in lengths] for lengths in requests]
        with batching(engine, rows=rows, queue=1000) as batcher:
            answers = await asyncio.gather(*(batcher.submit(request, deadline()) for request in texts))
        for request, answer in zip(texts, answers, strict=True):
            assert numbers(answer) == [[2 * encoded.ids[0]] for encoded in request]
        computed = sorted(value for call in engine.calls for value in call)
        assert computed == [encoded.ids[0] for request in texts for encoded in request]
        assert max(map(len, engine.calls)) <= rows

    run(main)


def test_calls_come_in_their_order_on_one_thread_that_is_not_the_loop_s() -> None:
    calls: list[tuple[int, threading.Thread]] = []

    def call(number: int) -> int:
        calls.append((number, threading.current_thread()))
        if number == 2:
            raise ValueError("no answer")
        return 10 * number

    async def main() -> list[object]:
        thread = EngineThread()
        results = await asyncio.gather(
            *(thread.run(functools.partial(call, number)) for number in range(4)), return_exceptions=True
        )
        thread.close()
        return list(results)

    first, second, third, fourth = asyncio.run(main())
    assert (first, second, fourth) == (0, 10, 30)
    assert isinstance(third, ValueError)
    assert [number for number, _ in calls] == [0, 1, 2, 3]
    [thread] = {thread for _, thread in calls}
    assert thread is not threading.main_thread()
    thread.join(10)
    assert not thread.is_alive()


def test_a_call_that_nobody_awaits_any_more_is_not_begun_and_one_that_comes_too_late_is_told() -> None:
    entered, over, called = threading.Event(), threading.Event(), list[str]()

    def hold() -> str:
        entered.set()
        over.wait(10)
        return "held"

    async def main() -> None:
        thread = EngineThread()
        hold_task = asyncio.create_task(thread.run(hold))
        calls = [functools.partial(called.append, name) for name in ("left", "late")]
        left, late = (asyncio.create_task(thread.run(call)) for call in calls)
        await asyncio.to_thread(entered.wait, 10)
        left.cancel()
        thread.close()
        over.set()
        assert await hold_task == "held"
        for waits in (late, asyncio.create_task(thread.run(hold))):
            with pytest.raises(RuntimeError):
                await asyncio.wait_for(waits, 10)
        with pytest.raises(asyncio.CancelledError):
            await left

    asyncio.run(main())
    assert called == []


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
