"""The processor time of Ray's own processes while a profile's workers train."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from rtrain.ray_internals import session_processes

BEGIN, END = "first_rows", "trained"
"""Events between which is measured."""
GROUPS = (
    ("raylet", "raylet"),
    ("gcs_server", "cluster state (GCS)"),
    ("dashboard", "agents and dashboard"),
    ("agent", "agents and dashboard"),
    ("Agent", "agents and dashboard"),
    ("log_monitor", "agents and dashboard"),
    ("monitor.py", "autoscaler"),
    ("TrainController", "controller of the workers"),
    ("TrainWorker", "workers"),
    ("ray::", "data tasks and idle processes"),
)
"""What a process is, by the first of these words that its command has."""
DRIVER, WORKERS, OTHER = "driver", "workers", "other"

Seen = Mapping[tuple[int, float], tuple[str, float]]
"""(group, CPU seconds) by a process's id and the time at which it was made."""


class Processes:
    """Called with each event of a run; of this machine alone."""

    def __init__(self) -> None:
        self._first: tuple[float, Seen] | None = None
        self._last: tuple[float, Seen] | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == BEGIN:
            self._first = time.monotonic(), seen()
        elif event["kind"] == END:
            self._last = time.monotonic(), seen()

    def told(self) -> dict[str, float]:
        """Cores that each group of processes has kept busy, the largest first, without the workers, which tell it
        themselves. Empty where the run has not come to its end."""
        if self._first is None or self._last is None:
            return {}
        (begun, first), (ended, last) = self._first, self._last
        return busy(first, last, ended - begun)


def busy(first: Seen, last: Seen, seconds: float) -> dict[str, float]:
    """Cores in use by group between two looks, `seconds` apart. A process that has ended since is left out."""
    sums: dict[str, float] = {}
    for process, (group, cpu) in last.items():
        before = first[process][1] if process in first else 0.0
        sums[group] = sums.get(group, 0.0) + max(0.0, cpu - before) / max(seconds, 1e-9)
    sums.pop(WORKERS, None)
    return {name: round(value, 4) for name, value in sorted(sums.items(), key=lambda one: -one[1])}


def seen() -> Seen:
    """The processes of this session."""
    found: dict[tuple[int, float], tuple[str, float]] = {}
    own = psutil.Process().pid
    for pid in session_processes():
        with contextlib.suppress(psutil.Error):  # one that has ended since it was listed
            process = psutil.Process(pid)
            times = process.cpu_times()
            group = DRIVER if pid == own else group_of(process.cmdline())
            found[pid, process.create_time()] = group, times.user + times.system
    return found


def group_of(command: Sequence[str]) -> str:
    """What a process is by its command line. Ray names its worker processes by what they run: `ray::` and a name."""
    shown = " ".join(command[:4]) if command and not command[0].startswith("ray::") else "".join(command[:1])
    return next((group for word, group in GROUPS if word in shown), OTHER)
