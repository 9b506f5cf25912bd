"""A machine of a rehearsed cluster: the ancestor of all processes on the machine, which end with it.

python -m rtrain.rehearsal.machines.machine FOLDER NAME OWNER -- COMMAND [-- COMMAND ...]

The first command is the machine's Ray: when it ends, the machine ends. The others run beside it. OWNER is the process
id of the rehearsal: a killed rehearsal leaves no machine behind. Orphaned processes become this process's children
(Linux: a child subreaper), so that none gets lost.

SIGTERM ends the machine like a cloud's terminate call. SIGUSR1 is a loss of power: all processes are killed at once.
Only the standard library and psutil are imported, for a fast start.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from rtrain.rehearsal.machines.machine_registry import EndReason, MachineRegistry

POWER_CUT = signal.SIGUSR1
SHUTDOWN_GRACE_S = 5.0
"""Seconds for a machine to shut down."""
POLL_INTERVAL_S = 0.1
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def split_at_dashes(words: Sequence[str]) -> list[list[str]]:
    """Split the words at `--` into commands."""
    commands: list[list[str]] = []
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


class MachineProcess:
    def __init__(self, registry: MachineRegistry, name: str, owner_pid: int):
        self._registry, self._name, self._owner_pid = registry, name, owner_pid
        self._end_reason: EndReason | None = None

    def run(self, commands: Sequence[Sequence[str]]) -> None:
        """Run the machine until all its processes have ended."""
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
    """Ids of the children that ended since the last call."""
    ended_pids = set[int]()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended_pids
        if pid == 0:
            return ended_pids
        ended_pids.add(pid)


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
    MachineProcess(MachineRegistry(Path(folder)), name, int(owner_pid)).run(split_at_dashes(command_words))


if __name__ == "__main__":
    main(sys.argv[1:])
