"""Parts of the benchmark in which somebody means harm: floods of sockets beside good clients, and guessed keys."""

import asyncio
import contextlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.serve import load
from benchmarks.serve.load import Open
from benchmarks.serve.parts import Work, capacity, replicas
from benchmarks.serve.sides import Running, cores, memory_mb, running, sides_of
from serve.door import keys as door

SOCKETS = 500
HUGE = 1 << 30
"""Bytes of the body that is sent in chunks."""
CHUNK = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
DRIP_S = 1.0
GOOD = 0.3
"""Share of what the endpoint can do that good clients ask for."""
GUESSES = 2000
"""Requests with each key."""
LOOK_S = 0.2
HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def drip(port: int, first: bytes, each: bytes, seconds: float) -> str:
    """How a client ends that sends some bytes, and then a few each second: the status that it got, or `cut`, or `open`
    where it is still there."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "refused"
    answer = asyncio.create_task(reader.read(16))
    give_up = time.monotonic() + seconds
    try:
        writer.write(first)
        while not answer.done() and time.monotonic() < give_up:
            writer.write(each)
            await asyncio.wait({answer}, timeout=DRIP_S)
        return status_of(await answer) if answer.done() else "open"
    except OSError:
        return "cut"
    finally:
        answer.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer
        writer.close()


async def huge(port: int) -> str:
    """How a body of `HUGE` bytes ends that declares no length, and after how many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer, sent = asyncio.create_task(reader.read(16)), 0
    try:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while sent < HUGE and not answer.done():
            writer.write(CHUNK)
            await writer.drain()
            sent += 1 << 16
        return f"{status_of(await answer)} after {sent / 1e6:.1f} MB"
    except OSError:
        return f"cut after {sent / 1e6:.1f} MB"
    finally:
        answer.cancel()
        writer.close()


def status_of(answer: bytes) -> str:
    words = answer.split()
    return words[1].decode() if len(words) > 1 else "cut"


async def _many(port: int, first: bytes, each: bytes, seconds: float) -> dict[str, int]:
    return dict(Counter(await asyncio.gather(*(drip(port, first, each, seconds) for _ in range(SOCKETS)))))


async def _huge(port: int, seconds: float) -> dict[str, int]:
    return {await huge(port): 1}


async def _nothing(port: int, seconds: float) -> dict[str, int]:
    return {}


FLOODS: dict[str, Callable[[int, float], Coroutine[Any, Any, dict[str, int]]]] = {
    "slow bodies": lambda port, s: _many(port, HEAD + b"content-length: 100000\r\n\r\n{", b" ", s),
    "half heads": lambda port, s: _many(port, HEAD, b"x-a: b\r\n", s),
    "body of 1 GiB": _huge,
}


def floods(work: Work) -> dict[str, Any]:
    """Good clients beside each flood, and without: their p99, and the memory of HAProxy and of the replica."""
    server, client = cores()
    found: dict[str, Any] = {}
    with running(sides_of(work.student, work.parent, work.settings)["rtrain"], server, work.log("floods")) as one:
        rate, port = GOOD * capacity(one, work, client), urlsplit(one.url).port or 0
        for name, flood in {"none": _nothing, **FLOODS}.items():
            with ThreadPoolExecutor(2) as pool:
                given = {"url": one.url, "texts": list(work.texts), "rate": rate, "seconds": work.seconds}
                before = _memory(one)
                good = pool.submit(load.opened_on, client, **given, void=False)
                bad = pool.submit(asyncio.run, flood(port, work.seconds))
                most = before
                while not good.done():
                    most = [max(pair) for pair in zip(most, _memory(one), strict=True)]
                    time.sleep(LOOK_S)
                found[name] = {
                    **_seen(good.result()),
                    "haproxy_grown_mb": most[0] - before[0],
                    "replica_grown_mb": most[1] - before[1],
                    "ended": bad.result(),
                }
    return {"rate": rate, **found}


def _seen(loop: Open) -> dict[str, Any]:
    ok = loop.ms.get(200, [])
    p50_ms, p99_ms = loop.percentile(0.5), loop.percentile(0.99)
    return {"requests": loop.requests, "errors": loop.requests - len(ok), "p50_ms": p50_ms, "p99_ms": p99_ms}


def _memory(one: Running) -> list[float]:
    """MB of HAProxy and of the replicas."""
    tree = [each for each in one.tree() if each.is_running()]
    proxies = [each for each in tree if _called(each) == "haproxy"]
    return [memory_mb(proxies), memory_mb(replicas(one))]


def _called(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


# ----------------------------------------------------------------------------------------------------------------- keys


def keys(work: Work) -> dict[str, Any]:
    """Whether the time of a 401 tells how much of a key is right: keys that are wrong from the first, or at the last
    character of the secret, and one of no record, asked in turn; Welch's t of each pair. By the custom of such tests
    (dudect, Reparaz et al. 2017) a t beyond 4.5 is a leak."""
    server, _ = cores()
    path = work.folder / "keys.json"
    path.unlink(missing_ok=True)
    right = door.add(path, "right", ("predict", "metrics"))
    tried = guesses(right)
    side = sides_of(work.student, work.parent, (*work.settings, f"serve.keys={path}"))["rtrain"]
    took: dict[str, list[float]] = {name: [] for name in tried}
    with running(replace(side, key=right), server, work.log("keys")) as one:
        parts = urlsplit(one.url)
        with contextlib.closing(HTTPConnection(parts.hostname or "", parts.port, timeout=20)) as connection:
            order = [name for name in tried for _ in range(GUESSES)]
            random.Random(0).shuffle(order)
            for name in order:
                began = time.perf_counter()
                connection.request("GET", "/info", headers={"authorization": f"Bearer {tried[name]}"})
                answer = connection.getresponse()
                answer.read()
                took[name].append(time.perf_counter() - began)
                if answer.status != (200 if name == "right" else 401):
                    raise SystemExit(f"{answer.status} to a key that is {name}")
    return judged(took)


def guesses(right: str) -> dict[str, str]:
    """A key, and what is tried in its place."""

    def other(place: int) -> str:
        return right[:place] + ("A" if right[place] != "A" else "B") + right[place + 1 :]

    secret = right.index("_", len("rtrain_")) + 1
    unknown = f"rtrain_{'0' * 8}_{right[secret:]}"
    return {"right": right, "wrong at first": other(secret), "wrong at last": other(len(right) - 1), "unknown": unknown}


def judged(took: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and t of each pair of wrong ones. The slowest tenth is left out: it is what else the machine did."""
    kept = {name: sorted(seconds)[: math.ceil(0.9 * len(seconds))] for name, seconds in took.items()}
    wrong = [name for name in kept if name != "right"]
    pairs = [(one, other) for place, one in enumerate(wrong) for other in wrong[place + 1 :]]
    t = {f"{one}, {other}": welch(kept[one], kept[other]) for one, other in pairs}
    medians = {name: 1e6 * statistics.median(seconds) for name, seconds in kept.items()}
    return {"median_us": medians, "t": t, "worst_t": max(map(abs, t.values()))}


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Welch's t of two samples."""
    spread = statistics.variance(one) / len(one) + statistics.variance(other) / len(other)
    return (statistics.fmean(one) - statistics.fmean(other)) / math.sqrt(spread) if spread else 0.0
