"""The batcher alone: engine calls, and the outputs of each request."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.ragged import EncodedRow, Floats, TokenWindow
from serve.batching.batcher import Batcher, DeadlineExceeded, EngineError
from serve.batching.scheduler import BatchLimits

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
