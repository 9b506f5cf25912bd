"""Peak memory of a command and of its Ray session; pages that processes share are counted once."""

import contextlib
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

from rtrain import ray_internals

INTERVAL_S = 3.0
"""Between two samples. Reading the page counts of twenty processes takes 0.1 s of a core; peaks last for seconds."""
_FIELD = re.compile(r"^(Pss|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


class PeakMemory:
    """A context manager whose thread samples the memory in use; `peak_mb` is the largest sum seen.

    A sum has the proportional set sizes of this process, of its descendants and of those of the Ray session's raylet,
    and the pages of /dev/shm that are new and mapped by none of them: objects that no process reads at the moment.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._shm_before = _shm_used()
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
            self.peak_mb = max(self.peak_mb, self.sample_mb())  # once more at the end: a command may be short

    def sample_mb(self) -> float:
        total = shared = 0
        for pid in session_processes():
            with contextlib.suppress(OSError):  # a process that ended since it was listed, or is not ours to read
                fields = dict(_FIELD.findall(Path(f"/proc/{pid}/smaps_rollup").read_text()))
                total += int(fields.get("Pss", 0)) * 1024
                shared += int(fields.get("Pss_Shmem", 0)) * 1024
        unmapped = max(0, _shm_used() - self._shm_before - shared)
        return (total + unmapped) / 1e6


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


def _shm_used() -> int:
    """Bytes in use in /dev/shm; 0 where there is no such file system, as on a Mac."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize
