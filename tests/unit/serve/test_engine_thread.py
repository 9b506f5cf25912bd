"""The engine thread: calls run in order, and a cancelled call never blocks."""

import asyncio
import functools
import threading

import pytest

from serve.batching.engine import EngineThread


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
