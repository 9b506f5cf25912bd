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
from rtrain.cluster.rehearsal.machines import metadata
from rtrain.cluster.rehearsal.machines.book import Book, Machine
from rtrain.cluster.rehearsal.machines.cloud import Cloud, Start
from rtrain.cluster.rehearsal.machines.commands import File
from rtrain.cluster.rehearsal.machines.network import Network, Result
from rtrain.cluster.rehearsal.machines.nodes import Nodes
from rtrain.cluster.rehearsal.machines.own import Own
from rtrain.cluster.rehearsal.plan import Plan
from rtrain.errors import UserError

Say = Callable[[str], None]
UP_WITHIN_S = 300.0
GONE_WITHIN_S = 15.0
SHARED_MEMORY = Path("/dev/shm")
DASHBOARD_METRIC_PORT = 44227
"""Ray's own (2.60)."""


@dataclass(frozen=True)
class Site:
    """Where the machines of a cluster are."""

    make: Callable[[Machine], Start]
    address: Callable[[], str]
    """HOST:PORT of the head's control service."""
    api_port: int
    """Leads to the job API, on this machine's loopback."""
    metrics_port: int
    """The dashboard's own."""
    own: Own | None = None
    """Where each machine is made by the file's own commands."""

    def at_head(self, act: Callable[[], Result]) -> Result:
        """What `act` returns where the head's loopback is its own."""
        return act() if self.own is None else self.own.at_head(act)

    def unplug(self, machine: str) -> None:
        if self.own is not None:
            self.own.network.unplug(machine)

    def left(self) -> list[str]:
        return [] if self.own is None else self.own.network.left()


@dataclass
class Up:
    """A cluster that is up."""

    plan: Plan
    book: Book
    cloud: Cloud
    told: metadata.Machines
    """What the metadata services say to each machine."""
    site: Site
    jobs: Jobs
    head: str
    """Name of the head's machine."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Every machine that there was, once all of them have ended."""
    left: list[str] = field(default_factory=list)
    """What was left behind, once it has been taken down."""

    @property
    def address(self) -> str:
        """HOST:PORT of the head's control service."""
        return self.site.address()


@contextmanager
def up(
    plan: Plan,
    logs: Path,
    say: Say,
    own: tuple[File, Path] | None = None,
    beside: Callable[[Network], Mapping[str, str]] = lambda network: {},
    lean: bool = False,
) -> Iterator[Up]:
    """The cluster of `plan`, for as long as the block runs. `logs` is a folder for what its machines print. With `own`,
    a cluster's file and the folder that it is in, each machine is made by the file's own commands (`own.Own`); `beside`
    returns what the head has in its environment beside, such as the address of a Redis in that network. `lean`: see
    `nodes.Nodes`."""
    if sys.platform != "linux":
        raise UserError(
            "a cluster is rehearsed on Linux alone: elsewhere a machine's processes cannot be kept together"
        )
    before = _shared_memory()
    # Ray's sockets lie under it, and the path of a socket has about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token())
    # Ray reads them when it is imported, and shows them in every call of this process to the cluster.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    book, told = Book(folder / "book"), metadata.Machines(metadata.Told)
    made: Up | None = None
    site = _shared(plan, folder, token, told, lean) if own is None else _apart(plan, folder, told, *own, beside)
    try:
        with site as found, Cloud(book, found.make, logs, found.unplug) as cloud:
            head = book.ask(plan.head.name, plan.head.resources, plan.head.labels, head_tags(plan))
            jobs = await_head(cloud, book, head, f"http://127.0.0.1:{found.api_port}", say)
            made = Up(plan, book, cloud, told, found, jobs, head)
            yield made
        made.machines = book.all()
        made.left += [f"{name} had to be killed" for name in cloud.killed_late]
    finally:
        _keep_autoscaler_log(folder, logs)
        left = _processes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        left += [f"shared memory {name}" for name in _unused(_shared_memory() - before)]
        if folder.exists():
            left.append(str(folder))
        if made is not None:
            made.left += [*left, *made.site.left()]


@contextmanager
def _shared(plan: Plan, folder: Path, token: Path, told: metadata.Machines, lean: bool) -> Iterator[Site]:
    """All machines have this one's address, and ports that are free here."""
    import ray.util

    autoscaler = folder / "autoscaler.yaml"
    autoscaler.write_text(yaml.safe_dump(plan.autoscaler_file(str(folder / "book"))))
    port, dashboard, *monitors = free_ports(4)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    with metadata.serving(told) as services:
        make = Nodes(plan, folder, token, autoscaler, address, dashboard, services, (monitors[0], monitors[1]), lean)
        yield Site(make, lambda: address, dashboard, monitors[1])


@contextmanager
def _apart(
    plan: Plan,
    folder: Path,
    told: metadata.Machines,
    file: File,
    source: Path,
    beside: Callable[[Network], Mapping[str, str]],
) -> Iterator[Site]:
    """Each machine has an address of its own, and the file's ports."""
    with Own(plan, file, source, folder, _token(), told) as make:
        make.environ = beside(make.network)
        yield Site(make, lambda: make.address, make.api_port, DASHBOARD_METRIC_PORT, make)


@functools.cache
def _token() -> str:
    """One for all clusters of a process: Ray keeps the first one that it has read."""
    return secrets.token_hex(32)


def head_tags(plan: Plan) -> dict[str, str]:
    from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    return {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: plan.head.name}


def await_head(cloud: Cloud, book: Book, head: str, api: str, say: Say) -> Jobs:
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
            raise UserError("\n".join(["the head does not come up; its last lines:", *lines]))
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


def _unused(names: set[str]) -> list[str]:
    """Those of the files of shared memory that nobody has mapped. What a living process has mapped is that process's,
    which is none of the cluster's: all of these have ended."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return sorted(name for name in names if (SHARED_MEMORY / name).exists() and str(SHARED_MEMORY / name) not in mapped)


def _keep_autoscaler_log(folder: Path, logs: Path) -> None:
    """It says why nodes were started and ended; the rest of Ray's own files goes."""
    for path in (*folder.glob("*/session_2*/logs/*"), *folder.glob("*/tmp/ray/session_2*/logs/*")):
        if path.name.startswith(("monitor.", "autoscaler")) and path.is_file():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, logs / path.name)
