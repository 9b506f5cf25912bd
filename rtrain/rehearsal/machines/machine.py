"""A machine of a rehearsed cluster: a process that everything on the machine descends from, and ends with.

    python -m rtrain.rehearsal.machines.machine FOLDER NAME OWNER -- COMMAND [-- COMMAND ...]

The first command is the machine's Ray: where that ends, the machine ends. The others run beside it. `OWNER` is the
process whose cluster it is: a rehearsal that is killed leaves no machine behind. Processes whose parents have ended
become this one's children (Linux: a child subreaper), so that none gets lost.

SIGTERM ends it as a cloud that is told to terminate an instance does. SIGUSR1 is a loss of power: everything is killed
at once, and nothing gets to say goodbye. Only the standard library and psutil are imported: it is up in a moment.
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

from rtrain.rehearsal.machines.machine_registry import Book, Why

POWER_CUT = signal.SIGUSR1
GOODBYE_S = 5.0
"""Seconds that a machine which is told to end has for it."""
LOOK_EVERY_S = 0.1
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def parts(words: Sequence[str]) -> list[list[str]]:
    """Commands that are parted by `--`."""
    found: list[list[str]] = []
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


class Machine:
    def __init__(self, book: Book, name: str, owner: int):
        self._book, self._name, self._owner = book, name, owner
        self._told: Why | None = None

    def run(self, commands: Sequence[Sequence[str]]) -> None:
        """Return once nothing of the machine runs any more."""
        for number in (signal.SIGTERM, signal.SIGINT, POWER_CUT):
            signal.signal(number, self._hear)
        adopt_orphans()
        started = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
        ended = set[int]()
        while self._told is None and started[0].pid not in ended:
            ended |= _reap()
            if not psutil.pid_exists(self._owner):
                self._told = "down"
            time.sleep(LOOK_EVERY_S)
        if self._told not in (None, "killed"):
            for one in started:
                if one.pid not in ended:
                    one.terminate()
            give_up = time.monotonic() + GOODBYE_S
            while self._told != "killed" and started[0].pid not in ended and time.monotonic() < give_up:
                ended |= _reap()
                time.sleep(LOOK_EVERY_S)
        _kill_all()
        self._book.ended(self._name, self._told or "left")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = "killed" if number == POWER_CUT else "down" if number == signal.SIGINT else "terminated"


def adopt_orphans() -> None:
    """Have processes whose parents end become children of this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _reap() -> set[int]:
    """Ids of the children that have ended since the last call."""
    found = set[int]()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.add(pid)


def _kill_all() -> None:
    """Again and again, since what is about to be killed may still start others."""
    while left := psutil.Process().children(recursive=True):
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _reap()
        time.sleep(0.01)


def main(arguments: Sequence[str]) -> None:
    folder, name, owner, *rest = arguments
    Machine(Book(Path(folder)), name, int(owner)).run(parts(rest))


if __name__ == "__main__":
    main(sys.argv[1:])
