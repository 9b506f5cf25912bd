"""Drafts: hidden folders in which a job writes before it moves them to their final name, `.<name>.<8 hex digits>`.

A job that fails removes its draft; one that is killed cannot, so the next job of the same name does. Several jobs may
write drafts of one name at a time, on several machines, so what lives must be told from what is left over:

- The writer holds a lock (flock) on a file of the draft, which the kernel takes back however the process ends. Neither
  an age nor a process id tells a killed writer from a slow one, or from another machine's.
- A free lock proves the writer dead only to those who would have seen it held: some shared storage keeps locks to one
  machine, or to one mount. So the writer notes its kernel and mount; elsewhere a free lock counts only after a day in
  which nothing was written.
"""

import fcntl
import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

LOCK = "writer.lock"
SILENT_S = 24 * 3600
"""A living writer adds a shard within minutes; the rest is room for suspended machines and wrong clocks."""


class Draft:
    """A new draft of `final`, this process's own until it is released or the process ends."""

    def __init__(self, final: Path):
        self.folder = _new_name(final)
        self.folder.mkdir(parents=True)
        self._lock: int | None = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        with suppress(OSError):  # storage without locks: then the age alone tells
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # After the lock: a draft that says where its lock counts is never seen unlocked while its writer lives.
            os.write(self._lock, _where(self._lock))

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def sweep(final: Path) -> None:
    """Remove the drafts of `final` that no living process writes."""
    for folder in final.parent.glob(f".{final.name}.*"):
        # Swept or finished by another process meanwhile, or not ours to write: no reason to stop a job.
        with suppress(OSError):
            if _is_dead(folder):
                # Moved before it is emptied: should its writer live after all, then its own move to the final name
                # fails, where otherwise a store that is just finished could be emptied.
                shutil.rmtree(folder.rename(_new_name(final)), ignore_errors=True)


def _new_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")


def _is_dead(folder: Path) -> bool:
    with suppress(FileNotFoundError), (folder / LOCK).open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # storage without locks
        else:
            if file.read() == _where(file.fileno()):
                return True
    written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - written > SILENT_S


def _where(lock: int) -> bytes:
    """The kernel that runs this process, and the mount of an open file: who shares both sees each other's locks."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = socket.gethostname()
    return f"{kernel} {os.fstat(lock).st_dev}".encode()
