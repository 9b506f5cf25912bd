"""A machine of a rehearsed cluster: the ancestor of all processes on the machine, which end with it.

python -m rtrain.rehearsal.machine FOLDER NAME OWNER -- COMMAND [-- COMMAND ...]

The first command is the machine's Ray: when it ends, the machine ends. The others run beside it. OWNER is the process
id of the rehearsal: a killed rehearsal leaves no machine behind. Orphaned processes become this process's children
(Linux: a child subreaper), so that none gets lost. SIGTERM ends the machine like a cloud's terminate call. SIGUSR1 is a
loss of power: all processes are killed at once.

The registry has one file per event of a machine. Ray's autoscaler requests machines from several processes and threads,
`cloud.SimulatedCloud` starts them, and machines record their own end. Each file is written once and atomically by one
of them, without locks. Imports are few, for a fast start.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from rtrain.core import atomic_write

EndReason = Literal["terminated", "killed", "left", "down"]
"""Why a machine ended: the autoscaler terminated it, it was killed, its Ray exited (as after a drain), or the whole
cluster was taken down."""
POWER_CUT = signal.SIGUSR1
SHUTDOWN_GRACE_S = 5.0
"""Seconds for a machine to shut down."""
POLL_INTERVAL_S = 0.1
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


@dataclass(frozen=True)
class MachineRecord:
    name: str
    """The autoscaler's id of the machine."""
    type: str
    """Its node type in the cluster's file."""
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    tags: Mapping[str, str]
    """Tags of the autoscaler."""
    requested_at: float
    """Time of the request, in seconds since 1970."""
    pid: int | None = None
    """Process of the machine, once started; all its processes descend from it."""
    is_unwanted: bool = False
    """Whether the autoscaler requested its termination."""
    ended_at: float | None = None
    end_reason: EndReason | None = None


class MachineRegistry:
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def request_machine(
        self, node_type: str, resources: Mapping[str, float], labels: Mapping[str, str], tags: Mapping[str, str]
    ) -> str:
        """Request a machine of the type `node_type`; returns its unique name."""
        name = self._reserve_name(node_type)
        request = {"type": node_type, "resources": dict(resources), "labels": dict(labels), "tags": dict(tags)}
        self._write(name, "requested", {"name": name, **request, "requested_at": time.time()})
        return name

    def record_start(self, name: str, pid: int) -> None:
        self._write(name, "started", {"pid": pid})

    def request_end(self, name: str) -> None:
        self._write(name, "unwanted", {"is_unwanted": True})

    def record_end(self, name: str, end_reason: EndReason) -> None:
        """Record the end; the first reason counts, since a killed machine is terminated later too."""
        if not self._file(name, "ended").is_file():
            self._write(name, "ended", {"ended_at": time.time(), "end_reason": end_reason})

    def set_tags(self, name: str, tags: Mapping[str, str]) -> None:
        self._write(name, "tags", {"tags": dict(tags)})

    def exhaust_capacity(self) -> None:
        """Reject further requests, like a cloud without spot capacity."""
        self._write("cloud", "sold-out", {})

    @property
    def is_exhausted(self) -> bool:
        return self._file("cloud", "sold-out").is_file()

    def all_machines(self) -> dict[str, MachineRecord]:
        """All machines by name, in the order of their requests."""
        machines = {}
        for path in self.folder.glob("*.requested"):
            document: dict[str, Any] = {}
            for suffix in ("requested", "tags", "started", "unwanted", "ended"):
                if (part_file := path.with_suffix(f".{suffix}")).is_file():
                    document |= json.loads(part_file.read_text())
            machines[path.stem] = MachineRecord(**document)
        return dict(sorted(machines.items(), key=lambda item: (item[1].requested_at, item[0])))

    def live_machines(self) -> dict[str, MachineRecord]:
        """Machines that have not ended, including those not started yet."""
        return {name: machine for name, machine in self.all_machines().items() if machine.ended_at is None}

    def _reserve_name(self, node_type: str) -> str:
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._file(f"{node_type}-{number}", "taken"), os.O_CREAT | os.O_EXCL))
                break
        return f"{node_type}-{number}"

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _write(self, name: str, suffix: str, document: Mapping[str, Any]) -> None:
        atomic_write.write_text(self._file(name, suffix), json.dumps(document))


class MachineProcess:
    def __init__(self, registry: MachineRegistry, name: str, owner_pid: int):
        self._registry, self._name, self._owner_pid = registry, name, owner_pid
        self._end_reason: EndReason | None = None

    def run(self, commands: Sequence[Sequence[str]]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, POWER_CUT):
            signal.signal(number, self._handle_signal)
        adopt_orphans()
        processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
        ended_pids = set[int]()
        while self._end_reason is None and processes[0].pid not in ended_pids:
            ended_pids |= _reap_children()
            if not psutil.pid_exists(self._owner_pid):
                self._end_reason = "down"
            time.sleep(POLL_INTERVAL_S)
        if self._end_reason not in (None, "killed"):
            for process in processes:
                if process.pid not in ended_pids:
                    process.terminate()
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
            while self._end_reason != "killed" and processes[0].pid not in ended_pids and time.monotonic() < deadline:
                ended_pids |= _reap_children()
                time.sleep(POLL_INTERVAL_S)
        _kill_descendants()
        self._registry.record_end(self._name, self._end_reason or "left")

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._end_reason = "killed" if number == POWER_CUT else "down" if number == signal.SIGINT else "terminated"


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _reap_children() -> set[int]:
    ended_pids = set[int]()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended_pids.add(pid)
    return ended_pids


def _kill_descendants() -> None:
    """Kill all descendants, repeatedly: a process may still start others."""
    while remaining := psutil.Process().children(recursive=True):
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap_children()
        time.sleep(0.01)


def main(arguments: Sequence[str]) -> None:
    folder, name, owner_pid, *command_words = arguments
    groups = itertools.groupby(command_words, lambda word: word == "--")
    commands = [list(words) for is_separator, words in groups if not is_separator]
    MachineProcess(MachineRegistry(Path(folder)), name, int(owner_pid)).run(commands)


if __name__ == "__main__":
    main(sys.argv[1:])
