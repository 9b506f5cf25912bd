"""Peak memory of a command and of its Ray session; pages that processes share are counted once."""

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rtrain import ray_internals

INTERVAL_S = 3.0
"""Between two samples. Reading the page counts of twenty processes takes 0.1 s of a core; peaks last for seconds."""
LISTED_MB = 10.0
"""Processes with less are left out of a list."""
TITLE = 60
"""Most characters of a process's command in a list."""
_FIELD = re.compile(r"^(Pss|Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


class Size(NamedTuple):
    """A process's memory in bytes."""

    whole: int
    """Its proportional set size."""
    anonymous: int
    """What of it is in no file: its data, without its program."""
    shared: int
    """What of it is in /dev/shm."""


class PeakMemory:
    """A context manager whose thread samples the memory in use; `peak_mb` is the largest sum seen, `at_peak` says when
    it was and what held it.

    A sum has the proportional set sizes of this process, of its descendants and of those of the Ray session's raylet,
    and the pages of /dev/shm that are new and mapped by none of them: objects that no process reads at the moment.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self.at_peak: dict[str, Any] = {}
        """`stage` and, the largest first, `processes`: `title`, `mb`, `anonymous_mb`."""
        self.stage = ""
        """What the command does just now."""
        self._sizes: dict[int, Size] = {}
        self._shm_before = shared_memory_used()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._done.wait(INTERVAL_S)
            total = self.sample_mb()  # once more at the end: a command may be short
            if total > self.peak_mb:
                self.peak_mb, self.at_peak = total, {"stage": self.stage, "processes": _listed(self._sizes)}

    def sample_mb(self) -> float:
        self._sizes = _sizes()
        shared = sum(size.shared for size in self._sizes.values())
        unmapped = max(0, shared_memory_used() - self._shm_before - shared)
        return (sum(size.whole for size in self._sizes.values()) + unmapped) / 1e6


def _sizes() -> dict[int, Size]:
    """By process id."""
    found = {}
    for pid in session_processes():
        with contextlib.suppress(OSError):  # a process that ended since it was listed, or is not ours to read
            fields = dict(_FIELD.findall(Path(f"/proc/{pid}/smaps_rollup").read_text()))
            found[pid] = Size(*(int(fields.get(name, 0)) * 1024 for name in ("Pss", "Pss_Anon", "Pss_Shmem")))
    return found


def _listed(sizes: Mapping[int, Size]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for pid, size in sorted(sizes.items(), key=lambda one: one[1].whole, reverse=True):
        if size.whole >= LISTED_MB * 1e6:
            with contextlib.suppress(psutil.Error):
                title = " ".join(psutil.Process(pid).cmdline())[:TITLE]
                held = {"mb": round(size.whole / 1e6), "anonymous_mb": round(size.anonymous / 1e6)}
                found.append({"title": title, **held})
    return found


def session_processes() -> Iterable[int]:
    """Ids of this process, its descendants, and those of its raylet, which in a job is not a descendant itself."""
    roots = [psutil.Process()]
    node = _ray_session()
    if node:
        roots += [process for process in psutil.process_iter() if _is_of(process, node)]
    pids: set[int] = set()
    for root in roots:
        with contextlib.suppress(psutil.Error):
            pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}
    return sorted(pids)


def _ray_session() -> str | None:
    folder = ray_internals.session_folder()
    return None if folder is None else str(folder)


def _is_of(process: psutil.Process, session: str) -> bool:
    try:
        return any(session in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def shared_memory_used() -> int:
    """Bytes in use in /dev/shm; 0 where there is no such file system, as on a Mac."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize
