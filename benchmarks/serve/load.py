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

MAX_LATENESS_S = 0.01
"""A request that begins later than this after it was due is a late one."""
MAX_LATE_SHARE = 0.01
"""Share of late requests beyond which the client, not the endpoint, was measured."""
MAX_CONNECTIONS = 3800
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


class ClientTooLate(Exception):
    """The client was late, so the measurement does not describe the endpoint."""


BEST: Mapping[str, Any] = {"top_k": 1}
"""Request parameters: the best label only, as every other side answers. Without it rtrain ranks and writes all of
them, 4.6 kB of 77."""


def body(text: str, parameters: Mapping[str, Any] = BEST) -> bytes:
    return json.dumps({"inputs": text, "parameters": parameters}).encode()


def pin_command(core: int | None) -> list[str]:
    return [] if core is None else ["taskset", "-c", str(core)]


def run_closed_loop(
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
        done = subprocess.run([*pin_command(core), *command], capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.partition("RESULT ")[2])
    return {
        "rps": summary["requests"] / (summary["us"] / 1e6),
        "p50_ms": summary["p50_us"] / 1e3,
        "p99_ms": summary["p99_us"] / 1e3,
        "errors": summary["errors"],
    }


def run_flood(url: str, text: str, rate: float, seconds: float, core: int | None = None) -> "OpenLoop":
    """What h2load sees at `rate` requests a second, more than the endpoint can answer: a client in Python would be late
    itself. A connection that waits asks nothing further, so that there are as many of them as rate and limits allow.
    Milliseconds count from when a request was sent."""
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is not installed (Debian: apt-get install nghttp2-client)")
    connections = max(1, min(MAX_CONNECTIONS, round(rate)))
    with tempfile.TemporaryDirectory() as folder:
        content, log = Path(folder, "body.json"), Path(folder, "log.tsv")
        content.write_bytes(body(text))
        command = ["h2load", "--h1", "-t1", f"-c{connections}", f"--rps={rate / connections}", f"-D{seconds:.0f}"]
        options = [f"--data={content}", "--header=content-type: application/json", f"--log-file={log}", url]
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for ever for a connection that was refused
            timeout = seconds + WAIT_S
            subprocess.run(
                [*pin_command(core), *command, *options], stdout=subprocess.DEVNULL, check=True, timeout=timeout
            )
        return parse_h2load_log(log.read_text())


def parse_h2load_log(text: str) -> "OpenLoop":
    """h2load's log, a line each: microseconds of the epoch, status (-1: no answer), microseconds to the answer."""
    log = OpenLoop()
    for line in text.splitlines():
        if len(parts := line.split("\t")) == 3:  # the last may be cut off
            log.add(max(0, int(parts[1])), int(parts[2]) / 1e3)
    return log


# ------------------------------------------------------------------------------------------------------------ open loop


@dataclass
class OpenLoop:
    """Result of an open loop: milliseconds from the due time of a request to its answer, by status; 0: no answer."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    late: int = 0
    retried: int = 0
    """Requests that were sent a second time, after a reset, a 500 or a 503."""
    retry_statuses: dict[int, int] = field(default_factory=dict)
    """How the second attempts ended, by status."""

    @property
    def requests(self) -> int:
        return sum(map(len, self.ms.values()))

    def add(self, status: int, ms: float) -> None:
        self.ms.setdefault(status, []).append(ms)

    def share_late(self) -> float:
        return self.late / max(1, self.requests)

    def percentile(self, share: float, status: int = 200) -> float:
        """Percentile by rank of the answers that have that status; NaN without such answers."""
        ranked = sorted(self.ms.get(status, []))
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """The moments, from 0, at which requests are due."""
    draw, now, times = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        times.append(now)
    return times


class _Connections:
    """Kept-alive connections to one host; as many as are wanted at once."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, content: bytes) -> int:
        """The status of the answer; 0 where the connection was cut or refused."""
        pair = None
        try:
            pair = self._pop_idle() or await asyncio.open_connection(self._host, self._port)
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

    def _pop_idle(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Most recently used idle connection. Connections that the server has closed are skipped, as in every HTTP
        client: a request on one would count as lost."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _run_open_loop(url: str, texts: Sequence[str], rate: float, seconds: float, seed: int) -> OpenLoop:
    parts, loop = urlsplit(url), OpenLoop()
    connections = _Connections(parts.hostname or "", parts.port or 80)
    bodies = [body(text) for text in texts]
    began = time.perf_counter()

    async def ask(number: int, moment: float) -> None:
        loop.late += time.perf_counter() - began - moment > MAX_LATENESS_S
        content = bodies[number % len(bodies)]
        status = await connections.post(parts.path, content)
        loop.add(status, 1e3 * (time.perf_counter() - began - moment))
        if status in (0, 500, 503):
            loop.retried += 1
            second = await connections.post(parts.path, content)
            loop.retry_statuses[second] = loop.retry_statuses.get(second, 0) + 1

    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(arrival_times(rate, seconds, seed)):
            wait = moment - (time.perf_counter() - began)
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(ask(number, moment))
    connections.close()
    return loop


def run_open_loop(
    url: str, texts: Sequence[str], rate: float, seconds: float, seed: int = 0, void: bool = True
) -> OpenLoop:
    """An open loop of `rate` requests a second. Raises `ClientTooLate` if more than 1 % began late, unless `void` is
    False: an overloaded machine starves its own client as well."""
    loop = asyncio.run(_run_open_loop(url, texts, rate, seconds, seed))
    if void and loop.share_late() > MAX_LATE_SHARE:
        raise ClientTooLate(f"{100 * loop.share_late():.1f} % of the requests began late")
    return loop


def main() -> None:
    """Run `run_open_loop` in a process that can be pinned: arguments as JSON on stdin, the result on stdout."""
    arguments = json.load(sys.stdin)
    loop = run_open_loop(**arguments)
    print(json.dumps({"ms": loop.ms, "late": loop.late, "retried": loop.retried, "again": loop.retry_statuses}))


def run_open_loop_on_core(core: int | None, **arguments: Any) -> OpenLoop:
    """Run `run_open_loop` in its own process on one core."""
    command = [*pin_command(core), sys.executable, "-m", "benchmarks.serve.load"]
    done = subprocess.run(command, input=json.dumps(arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        if last and ClientTooLate.__name__ in last[0]:
            raise ClientTooLate(last[0].partition(": ")[2])
        raise SystemExit(done.stderr)
    read = json.loads(done.stdout)
    by_status = {int(status): ms for status, ms in read["ms"].items()}
    return OpenLoop(by_status, read["late"], read["retried"], {int(status): n for status, n in read["again"].items()})


if __name__ == "__main__":
    main()
