"""A head that is started as cluster.yaml starts it, on this machine."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import STARTUP
from tests.unit.cluster import test_yaml as cluster

STARTED_WITHIN_S, JOB_WITHIN_S, ENDED_WITHIN_S = 120, 1000, 20
# What the file's head has from its machine, and a test must not take from this one.
LOCAL = ("--num-cpus=4", f"--object-store-memory={300 << 20}", "--block")


@dataclass(frozen=True)
class Head:
    folder: Path
    api: str
    environ: dict[str, str]
    """Variables of a user who may submit jobs."""

    @property
    def token(self) -> str:
        return Path(self.environ["RAY_AUTH_TOKEN_PATH"]).read_text()

    def submit(self, project: Path, *entrypoint: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit` as cluster.yaml shows it; returns when the job has ended, with its log."""
        command = ["ray", "job", "submit", "--address", self.api, "--working-dir", str(project), "--"]
        return subprocess.run(
            [*command, *entrypoint],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_WITHIN_S,
        )

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(self.token).json()
        return found

    def ask(self, token: str | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.get(f"{self.api}/api/jobs/", headers=headers, trust_env=False)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def local_command(folder: Path) -> tuple[list[str], int]:
    """The file's `ray start` for this machine, with free ports for the fixed ones; and the dashboard's port."""
    _, words = cluster.start_command("head_start_ray_commands")
    # Ray takes the range of the workers' ports as given, also where another program has one of them.
    dropped = ("--autoscaling-config=", "--min-worker-port=", "--max-worker-port=")
    words = [word for word in words if not word.startswith(dropped)]
    fixed = [word for word in words if re.fullmatch(r"--[a-z-]*port=\d+", word)]
    ports = dict(zip(fixed, free_ports(len(fixed)), strict=True))
    chosen = [f"{word.partition('=')[0]}={ports[word]}" if word in ports else word for word in words]
    dashboard = next(port for word, port in ports.items() if word.startswith("--dashboard-port="))
    return [*chosen, *LOCAL, f"--temp-dir={folder / 'ray'}"], dashboard


def environment(folder: Path) -> dict[str, str]:
    """The file's environment on this machine: `folder` is the home, this Python comes first on PATH."""
    ours = str(Path(sys.executable).parent)
    given = {
        "PATH": f"{ours}:{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder / "ray"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": STARTUP,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no other node could take over; Ray waits 30 s for it
    }
    cluster.make_token(folder)
    return cluster.environment("head_start_ray_commands", folder, **given)


def related(folder: Path) -> dict[psutil.Process, str]:
    """Processes that belong to the head, by command line, current folder or environment, and what they call themselves.

    Ray's processes change their command lines, and those of a job have its uploaded folder as their own.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            traces = [" ".join(process.cmdline()), process.cwd(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # the first includes zombies
            continue
        if process.pid != os.getpid() and any(str(folder) in trace for trace in traces):
            found[process] = traces[0][:100]
    return found


def end(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """End the head as its user would; returns what was still running after that, and ends it too."""
    process.terminate()
    give_up = time.monotonic() + ENDED_WITHIN_S
    while (process.poll() is None or related(folder)) and time.monotonic() < give_up:
        time.sleep(0.2)
    left = related(folder)
    for one in left:
        one.kill()
    process.wait()
    return list(left.values())


@contextmanager
def started() -> Iterator[Head]:
    # Ray's sockets lie under it, and the path of a socket has about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    environ = environment(folder)
    command, port = local_command(folder)
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    head = Head(folder, f"http://127.0.0.1:{port}", environ)
    try:
        await_api(head, process)
        yield head
    finally:
        left = end(process, folder)
        said = (folder / "head.log").read_text()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == [], said


def await_api(head: Head, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + STARTED_WITHIN_S
    while True:
        assert process.poll() is None, (head.folder / "head.log").read_text()
        assert time.monotonic() < give_up, (head.folder / "head.log").read_text()
        try:
            if head.ask(head.token).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
