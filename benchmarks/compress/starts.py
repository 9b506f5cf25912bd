"""How long rtrain's commands take from the start of their process to an answer."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

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


def serve_s(artifact: Path) -> float:
    """Seconds of `rtrain serve ARTIFACT`, from the process's start until it has answered a request."""
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
            return time.monotonic() - started
        finally:
            process.terminate()
            process.wait()


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
