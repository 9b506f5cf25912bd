"""The cluster of a file on this machine: brought up, and taken down with nothing left behind."""

import functools
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from rtrain.cluster.jobs.client import Jobs
from rtrain.core.errors import UserError
from rtrain.rehearsal.machines import metadata
from rtrain.rehearsal.machines.cloud import Cloud
from rtrain.rehearsal.machines.machine_registry import Book, Machine
from rtrain.rehearsal.machines.ray_nodes import Nodes
from rtrain.rehearsal.plan import Plan

Say = Callable[[str], None]
UP_WITHIN_S = 300.0
GONE_WITHIN_S = 15.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Up:
    """A cluster that is up."""

    plan: Plan
    book: Book
    cloud: Cloud
    told: metadata.Machines
    """What the metadata services say to each machine."""
    address: str
    """HOST:PORT of the head's control service."""
    metrics_port: int
    """The dashboard's own."""
    jobs: Jobs
    head: str
    """Name of the head's machine."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Every machine that there was, once all of them have ended."""
    left: list[str] = field(default_factory=list)
    """What was left behind, once it has been taken down."""


@contextmanager
def up(plan: Plan, logs: Path, say: Say) -> Iterator[Up]:
    """The cluster of `plan`, for as long as the block runs. `logs` is a folder for what its machines print."""
    if sys.platform != "linux":
        reason = "a cluster is rehearsed on Linux alone: elsewhere a machine's processes cannot be kept together"
        raise UserError(reason, code="unsupported_platform")
    before = _shared_memory()
    # Ray's sockets lie under it, and the path of a socket has about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    # Ray reads them when it is imported, and shows them in every call of this process to the cluster.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    import ray.util
    from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    book, told = Book(folder / "book"), metadata.Machines(metadata.Told)
    autoscaler = folder / "autoscaler.yaml"
    autoscaler.write_text(yaml.safe_dump(plan.autoscaler_file(str(book.folder))))
    port, dashboard, *monitors = free_ports(4)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    tags = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: plan.head.name}
    made: Up | None = None
    try:
        with metadata.serving(told) as services:
            monitor_ports = monitors[0], monitors[1]
            make = Nodes(plan, folder, token, autoscaler, address, dashboard, services, monitor_ports)
            with Cloud(book, make, logs) as cloud:
                head = book.ask(plan.head.name, plan.head.resources, plan.head.labels, tags)
                jobs = _await_head(cloud, book, head, f"http://127.0.0.1:{dashboard}", say)
                made = Up(plan, book, cloud, told, address, monitors[1], jobs, head)
                yield made
        made.machines = book.all()
        made.left += [f"{name} had to be killed" for name in cloud.killed_late]
    finally:
        _keep_autoscaler_log(folder, logs)
        left = _processes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        left += [f"shared memory {name}" for name in unmapped(_shared_memory() - before)]
        if folder.exists():
            left.append(str(folder))
        if made is not None:
            made.left += left


@functools.cache
def _token() -> str:
    """One for all clusters of a process: Ray keeps the first one that it has read."""
    return secrets.token_hex(32)


def _await_head(cloud: Cloud, book: Book, head: str, api: str, say: Say) -> Jobs:
    """The job API, once it answers."""
    say("starting the head")
    give_up = time.monotonic() + UP_WITHIN_S
    while True:
        with suppress(UserError):
            jobs = Jobs(api)
            jobs.all()
            return jobs
        if head not in book.up() or time.monotonic() > give_up:
            lines = cloud.log_of(head).strip().splitlines()[-8:]
            raise UserError("\n".join(["the head does not come up; its last lines:", *lines]), code="no_head")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _processes(folder: Path) -> list[str]:
    """What still runs of the cluster: programs whose command line, folder or environment names its own folder."""
    give_up = time.monotonic() + GONE_WITHIN_S
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                traces = [" ".join(process.cmdline()), process.cwd(), *process.environ().values()]
                if process.pid != os.getpid() and any(str(folder) in trace for trace in traces):
                    found.append(f"process {process.pid} ({traces[0][:80]})")
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.5)


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def unmapped(names: set[str]) -> list[str]:
    """Those of the files of shared memory that nobody has mapped. What a living process has mapped is that process's,
    which is none of the cluster's: all of these have ended."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return sorted(name for name in names if (SHARED_MEMORY / name).exists() and str(SHARED_MEMORY / name) not in mapped)


def _keep_autoscaler_log(folder: Path, logs: Path) -> None:
    """It says why nodes were started and ended; the rest of Ray's own files goes."""
    for path in folder.glob("*/session_2*/logs/*"):
        if path.name.startswith(("monitor.", "autoscaler")) and path.is_file():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, logs / path.name)
