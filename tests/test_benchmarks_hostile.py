"""The benchmark's floods and guessed keys: against a server that says what it is told to."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.serve import hostile
from serve.door import keys


def served(answer: bytes, after: int, flood: Callable[[int], Awaitable[str]]) -> str:
    """How a flood ends against a server that says this after so many bytes, and closes the connection."""

    async def main() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(after)
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await asyncio.wait_for(flood(server.sockets[0].getsockname()[1]), 20)

    return asyncio.run(main())


@pytest.mark.parametrize(("answer", "end"), [(b"HTTP/1.1 408 Request Time-out\r\n\r\n", "408"), (b"", "cut")])
def test_a_slow_client_tells_how_it_has_ended(monkeypatch: pytest.MonkeyPatch, answer: bytes, end: str) -> None:
    monkeypatch.setattr(hostile, "DRIP_S", 0.01)
    assert served(answer, 20, lambda port: hostile.drip(port, b"POST / HTT", b"x", 20)) == end


def test_one_that_nobody_cuts_off_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "DRIP_S", 0.01)
    assert served(b"", 1 << 20, lambda port: hostile.drip(port, b"POST / HTT", b"x", 0.1)) == "open"


def test_a_body_without_an_end_tells_when_it_was_refused() -> None:
    said = served(b"HTTP/1.1 413 Too Large\r\n\r\n", 1 << 20, hostile.huge)
    assert said.startswith(("413 after ", "cut after "))
    assert 1 <= float(said.split()[2]) < 100


def test_guesses_are_keys_by_their_form_and_wrong_where_they_say() -> None:
    right = "rtrain_0badcafe_" + "x" * 43
    tried = hostile.guesses(right)
    assert tried.pop("right") == right
    assert len({*tried.values(), right}) == 4
    for guess in tried.values():
        assert keys._BEARER.fullmatch(b"Bearer " + guess.encode())
    wrong = [[place for place, one in enumerate(guess) if one != right[place]] for guess in tried.values()]
    assert [found[0] for found in wrong] == [16, 58, 7 + 1]


def test_times_that_differ_are_told_apart_and_others_are_not() -> None:
    draw = random.Random(0)
    took = {
        name: [draw.gauss(mean, 1e-5) for _ in range(2000)]
        for name, mean in {"right": 3e-4, "a": 1e-4, "b": 1e-4, "c": 1.1e-4}.items()
    }
    found = hostile.judged(took)
    assert abs(found["t"]["a, b"]) < 4.5 < found["worst_t"]
    assert found["worst_t"] == max(abs(found["t"][pair]) for pair in ("a, c", "b, c"))
    assert found["median_us"]["right"] == pytest.approx(300, rel=0.05)
