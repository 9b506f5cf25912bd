"""The endpoints under load, each a program of its own on one core, and the engine alone."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import sides
from benchmarks.serve.load import body, pin_command

READY_S = 180.0
INTERVAL_S = 0.1
ENDING_S = 60.0


@dataclass(frozen=True)
class Side:
    """A program that answers POST /predict; `command` lacks its port."""

    command: tuple[str, ...]
    port_option: bool = False
    """Whether the port is an option --port; else it is the last argument."""

    def started_at(self, port: int) -> list[str]:
        return [*self.command, *(("--port",) if self.port_option else ()), str(port)]


def make_sides(student: Path, parent: Path, settings: Sequence[str] = ()) -> dict[str, Side]:
    """All sides by name. `student` is the int8 artifact that five of them serve, `parent` the float model."""
    command = (sys.executable, "-m", "rtrain", "serve", str(student), "--ungated")
    options = tuple(word for assignment in settings for word in ("--set", assignment))
    peer = (sys.executable, "-m", "benchmarks.serve.peers")
    return {
        "rtrain": Side((*command, *options), port_option=True),
        "standalone": Side((*command, "--standalone", *options), port_option=True),
        "stock": Side((*peer, "stock", str(student))),
        "uvicorn": Side((*peer, "uvicorn", str(student))),
        "pipeline": Side((*peer, "pipeline", str(parent))),
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Running:
    url: str
    process: psutil.Process

    def tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def command(self, *words: str) -> str:
        """What `rtrain serve` says of this endpoint, on stdout and stderr."""
        port = str(urllib.parse.urlsplit(self.url).port)
        line = [sys.executable, "-m", "rtrain", "serve", *words, "--port", port]
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout or done.stderr

    def memory_mb(self) -> float:
        return memory_mb(self.tree())


def memory_mb(processes: Iterable[psutil.Process]) -> float:
    """Memory of these processes; pages that they share are counted once (PSS)."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total / 1e6


@contextlib.contextmanager
def running(side: Side, core: int | None, log: Path) -> Iterator[Running]:
    """The side, once it answers. All its processes keep to `core`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/predict"
    command = [*pin_command(core), *side.started_at(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
        try:
            give_up = time.monotonic() + READY_S
            while not answers(url):
                if process.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit(f"{' '.join(command)} does not answer; see {log}")
                time.sleep(INTERVAL_S)
            yield Running(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def environment() -> dict[str, str]:
    return {**sides.own_environment(), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def answers(url: str) -> bool:
    request = urllib.request.Request(url, body("Where is my parcel?"), {"content-type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as reply:
            return bool(json.load(reply))
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


# ----------------------------------------------------------------------------------------------------- the engine alone

RAW = """
import json, sys, time
from pathlib import Path
from rtrain.inference.predictor import Predictor
predictor = Predictor.load(Path(sys.argv[1]), threads=1)
texts, calls = json.load(sys.stdin), int(sys.argv[2])
found = []
for number in range(calls):
    began = time.perf_counter()
    predictor([texts[number % len(texts)]], {"top_k": 1})
    found.append(time.perf_counter() - began)
print(json.dumps(found[len(texts):] or found))
"""


def raw(artifact: Path, texts: Sequence[str], calls: int, core: int | None) -> dict[str, float]:
    """The same engine in a plain loop, a text at a time, tokens and decoding included: `p50_ms` and `rps`."""
    with tempfile.TemporaryFile("w+") as stdin:
        json.dump(list(texts), stdin)
        stdin.seek(0)
        command = [*pin_command(core), sys.executable, "-c", RAW, str(artifact), str(calls)]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True, env=environment())
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return {"p50_ms": 1e3 * statistics.median(seconds), "rps": len(seconds) / sum(seconds)}


def cores() -> tuple[int | None, int | None]:
    """One core for the server and one for the client, where there are two."""
    available_cores: list[Any] = sorted(os.sched_getaffinity(0))
    return (available_cores[0], available_cores[1]) if len(available_cores) > 1 else (None, None)
