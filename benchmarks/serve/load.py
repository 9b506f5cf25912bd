"""Clients of an endpoint: a closed loop by wrk, an open loop whose requests begin when they are due, a flood by h2load.

An open loop by a public tool would start all of its connections at once and tick them together; ours draws the gaps
between requests from an exponential distribution (Poisson arrivals), with the rate and a seed alone. A latency counts
from the moment at which the request was due, so that a client that comes late hides nothing.
"""

import asyncio
import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LATE_S = 0.01
"""A request that begins later than this after it was due is a late one."""
MOST_LATE = 0.01
"""Share of late requests beyond which the client, not the endpoint, was measured."""
MOST_CONNECTIONS = 3800
"""A flood has no more connections; the endpoint takes 4,096 at least."""
WAIT_S = 20.0
"""Seconds that a flood may last beyond its time."""

SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
local bodies = {%s}
local turn = 0
request = function()
  turn = turn %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[turn])
end
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\\nRESULT {"requests": %%d, "us": %%d, "p50_us": %%d, "p99_us": %%d, "errors": %%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


class Void(Exception):
    """The client was late: what it measured is not the endpoint."""


BEST: Mapping[str, Any] = {"top_k": 1}
"""What is asked for: the best label, which every other side answers with. Without it rtrain ranks and writes all of
them, 4.6 kB of 77."""


def body(text: str, parameters: Mapping[str, Any] = BEST) -> bytes:
    return json.dumps({"inputs": text, "parameters": parameters}).encode()


def pinned(core: int | None) -> list[str]:
    return [] if core is None else ["taskset", "-c", str(core)]


def closed(
    url: str,
    texts: Sequence[str],
    connections: int,
    seconds: float,
    core: int | None = None,
    parameters: Mapping[str, Any] = BEST,
) -> dict[str, Any]:
    """What wrk finds: `rps`, `p50_ms`, `p99_ms`, `errors`. Each connection asks again once it is answered."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed (Debian: apt-get install wrk)")
    quoted = ",".join("[==[" + body(text, parameters).decode() + "]==]" for text in texts)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT % quoted)
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "20s", "-s", script.name, url]
        done = subprocess.run([*pinned(core), *command], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.partition("RESULT ")[2])
    return {
        "rps": found["requests"] / (found["us"] / 1e6),
        "p50_ms": found["p50_us"] / 1e3,
        "p99_ms": found["p99_us"] / 1e3,
        "errors": found["errors"],
    }


def flooded(url: str, text: str, rate: float, seconds: float, core: int | None = None) -> "Open":
    """What h2load sees at `rate` requests a second, more than the endpoint can answer: a client in Python would be late
    itself. A connection that waits asks nothing further, so that there are as many of them as rate and limits allow.
    Milliseconds count from when a request was sent."""
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is not installed (Debian: apt-get install nghttp2-client)")
    connections = max(1, min(MOST_CONNECTIONS, round(rate)))
    with tempfile.TemporaryDirectory() as folder:
        content, log = Path(folder, "body.json"), Path(folder, "log.tsv")
        content.write_bytes(body(text))
        command = ["h2load", "--h1", "-t1", f"-c{connections}", f"--rps={rate / connections}", f"-D{seconds:.0f}"]
        given = [f"--data={content}", "--header=content-type: application/json", f"--log-file={log}", url]
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for ever for a connection that was refused
            timeout = seconds + WAIT_S
            subprocess.run([*pinned(core), *command, *given], stdout=subprocess.DEVNULL, check=True, timeout=timeout)
        return logged(log.read_text())


def logged(text: str) -> "Open":
    """h2load's log, a line each: microseconds of the epoch, status (-1: no answer), microseconds to the answer."""
    found = Open()
    for line in text.splitlines():
        if len(parts := line.split("\t")) == 3:  # the last may be cut off
            found.add(max(0, int(parts[1])), int(parts[2]) / 1e3)
    return found


# ------------------------------------------------------------------------------------------------------------ open loop


@dataclass
class Open:
    """What an open loop saw: milliseconds from when a request was due to its answer, by status; 0: no answer."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    late: int = 0
    retried: int = 0
    """Requests that were sent a second time, after a reset, a 500 or a 503."""
    again: dict[int, int] = field(default_factory=dict)
    """How the second attempts ended, by status."""

    @property
    def requests(self) -> int:
        return sum(map(len, self.ms.values()))

    def add(self, status: int, ms: float) -> None:
        self.ms.setdefault(status, []).append(ms)

    def share_late(self) -> float:
        return self.late / max(1, self.requests)

    def percentile(self, share: float, status: int = 200) -> float:
        """By rank, of the answers of that status; NaN without one."""
        ranked = sorted(self.ms.get(status, []))
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def due(rate: float, seconds: float, seed: int) -> list[float]:
    """The moments, from 0, at which requests are due."""
    draw, now, found = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        found.append(now)
    return found


class _Connections:
    """Kept-alive connections to one host; as many as are wanted at once."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, content: bytes) -> int:
        """The status of the answer; 0 where the connection was cut or refused."""
        pair = None
        try:
            pair = self._taken() or await asyncio.open_connection(self._host, self._port)
            reader, writer = pair
            head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            writer.write(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
            headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status, length = int(headers.split(maxsplit=2)[1]), headers.partition("content-length:")[2].split("\r\n")[0]
            await reader.readexactly(int(length))
        except (OSError, asyncio.IncompleteReadError, ValueError):
            if pair is not None:
                pair[1].close()
            return 0
        if "connection: close" in headers:
            writer.close()
        else:
            self._idle.append(pair)
        return status

    def _taken(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The connection that was used last. One that the server has closed because nothing was asked over it is passed
        over, as every client of HTTP does: asked again, it would count as a lost request."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _opened(url: str, texts: Sequence[str], rate: float, seconds: float, seed: int) -> Open:
    parts, found = urlsplit(url), Open()
    connections = _Connections(parts.hostname or "", parts.port or 80)
    bodies = [body(text) for text in texts]
    began = time.perf_counter()

    async def ask(number: int, moment: float) -> None:
        found.late += time.perf_counter() - began - moment > LATE_S
        content = bodies[number % len(bodies)]
        status = await connections.post(parts.path, content)
        found.add(status, 1e3 * (time.perf_counter() - began - moment))
        if status in (0, 500, 503):
            found.retried += 1
            second = await connections.post(parts.path, content)
            found.again[second] = found.again.get(second, 0) + 1

    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(due(rate, seconds, seed)):
            wait = moment - (time.perf_counter() - began)
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(ask(number, moment))
    connections.close()
    return found


def opened(url: str, texts: Sequence[str], rate: float, seconds: float, seed: int = 0, void: bool = True) -> Open:
    """An open loop of `rate` requests a second. Raises `Void` where more than 1 % began late, unless told not to: an
    overloaded machine starves its own client as well."""
    found = asyncio.run(_opened(url, texts, rate, seconds, seed))
    if void and found.share_late() > MOST_LATE:
        raise Void(f"{100 * found.share_late():.1f} % of the requests began late")
    return found


def main() -> None:
    """In a process of its own, so that it can be pinned: the arguments of `opened` as JSON on stdin, and its find."""
    given = json.load(sys.stdin)
    found = opened(**given)
    print(json.dumps({"ms": found.ms, "late": found.late, "retried": found.retried, "again": found.again}))


def opened_on(core: int | None, **given: Any) -> Open:
    """`opened` in a process of its own, on one core."""
    command = [*pinned(core), sys.executable, "-m", "benchmarks.serve.load"]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        if last and "Void" in last[0]:
            raise Void(last[0].partition(": ")[2])
        raise SystemExit(done.stderr)
    read = json.loads(done.stdout)
    by_status = {int(status): ms for status, ms in read["ms"].items()}
    return Open(by_status, read["late"], read["retried"], {int(status): n for status, n in read["again"].items()})


if __name__ == "__main__":
    main()
