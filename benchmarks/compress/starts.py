"""How long rtrain's commands take from the start of their process to an answer."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import sides

TEXT = "Where is my parcel?"
MOST_S = 180.0
"""Longest wait for an endpoint."""
INTERVAL_S = 0.05


def cold_s(artifact: Path) -> float:
    """Seconds of `rtrain predict ARTIFACT TEXT`, from the process's start until it has printed its answer and ended."""
    started = time.monotonic()
    command = [sys.executable, "-m", "rtrain", "predict", str(artifact), TEXT]
    done = subprocess.run(command, env=sides.own_environment(), capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"rtrain predict {artifact} ended with {done.returncode}: {done.stderr.strip()}")
    return seconds


class Served(NamedTuple):
    seconds: float
    """From the process's start until it has answered a request."""
    processor_s: float
    """Processor seconds that all its processes have used until then."""


def serve_s(artifact: Path) -> Served:
    """What `rtrain serve ARTIFACT` takes."""
    port = _free_port()
    command = [sys.executable, "-m", "rtrain", "serve", str(artifact), "--port", str(port), "--ungated"]
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(command, env=sides.own_environment(), stdout=output, stderr=output)
        try:
            while not _answers(port):
                if process.poll() is not None or time.monotonic() - started > MOST_S:
                    output.seek(0)
                    raise SystemExit(f"rtrain serve {artifact} did not answer: {output.read().decode()[-2000:]}")
                time.sleep(INTERVAL_S)
            return Served(time.monotonic() - started, _processor_s(process.pid))
        finally:
            process.terminate()
            process.wait()


def _processor_s(pid: int) -> float:
    """Processor seconds of a process, of its living descendants and of those that they have waited for."""
    total, first = 0.0, psutil.Process(pid)
    for one in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            spent = one.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _answers(port: int) -> bool:
    body, kind = json.dumps({"inputs": TEXT}).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body, kind)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            return bool(json.load(reply))
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
