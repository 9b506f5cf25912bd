"""Atomic and durable writes. Every file that a resume rests on is written by this module.

`replace_file`, `publish_folder` and `replace_folder` give a draft its final name. All three sync it to disk first:
without fsync, a machine that loses its power may keep the name and lose the content.

A draft is a hidden file or folder, `.<name>.<8 hex digits>`. A failing job removes its draft. A killed job cannot, so
the next job of the same name removes it. Several jobs may write drafts of one name at a time, on several machines:

- The writer of a folder holds a lock (flock) on a file of the draft, which the kernel releases however the process
  ends. Neither an age nor a process id would distinguish a killed writer from a slow one, or from a writer on another
  machine.
- Some shared storage keeps locks to one machine, or to one mount, where a free lock does not prove that the writer is
  dead. So the writer records its kernel and mount in the file. A process with another kernel or mount removes a draft
  with a free lock only after a day without a write.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_FILE = "writer.lock"
STALE_AFTER_S = 24 * 3600
"""Seconds without a write after which a draft counts as abandoned. A live writer adds a shard within minutes; the rest
allows for suspended machines and wrong clocks."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
EXCHANGE_UNSUPPORTED_ERRORS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of renameat2 where the kernel or the file system, NFS for example, cannot exchange two names."""


class Draft:
    """A new draft of `final_path`. It belongs to this process until it is released, or the process ends."""

    def __init__(self, final_path: Path):
        self.folder = _draft_path(final_path)
        self.folder.mkdir(parents=True)
        self._lock: int | None = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        with suppress(OSError):  # on storage without locks, only the age decides
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Written under the lock: a draft with the scope of its lock must never be unlocked while its writer lives.
            os.write(self._lock, _lock_scope(self._lock))

    def release(self) -> None:
        """Release the lock. The folder stays."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def remove_stale_drafts(final_path: Path) -> None:
    """Remove the drafts of `final_path` without a live writer."""
    for folder in final_path.parent.glob(f".{final_path.name}.*"):
        # Another process may have removed or published it meanwhile, or this user must not write it.
        with suppress(OSError):
            if is_stale(folder):
                # Moved before it is emptied: if its writer is alive after all, the writer's own move to the final name
                # fails. Otherwise a store that was just published could be emptied.
                shutil.rmtree(folder.rename(_draft_path(final_path)), ignore_errors=True)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a draft for the block to write, which then replaces `path` atomically and durably.

    If the block or the disk fails, or the process is killed, the earlier file stays complete.
    """
    draft = _draft_path(path)
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the disk's error is the one to raise
            draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file, atomically and durably."""
    with replace_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def publish_folder(draft: Path, final_path: Path) -> None:
    """Give a complete folder its final name, durably. Raises `OSError` if a folder with files has that name."""
    sync_tree(draft)
    draft.rename(final_path)
    sync(final_path.parent)


def replace_folder(draft: Path, final_path: Path) -> None:
    """Replace the folder `final_path` by a complete draft, durably, and remove the old folder.

    The exchange of two names is atomic. On a file system without it, the old folder is moved away, and back if the new
    one cannot be moved; a process that is killed in between leaves it as `.<name>.old`.
    """
    sync_tree(draft)
    previous_folder = final_path.with_name(f".{final_path.name}.old")
    if not final_path.exists():
        draft.rename(final_path)
    else:
        try:
            _exchange_names(draft, final_path)
        except OSError as error:
            if error.errno not in EXCHANGE_UNSUPPORTED_ERRORS:
                raise
            shutil.rmtree(previous_folder, ignore_errors=True)
            final_path.rename(previous_folder)
            try:
                draft.rename(final_path)
            except BaseException:
                previous_folder.rename(final_path)
                raise
    sync(final_path.parent)
    for folder in (draft, previous_folder):
        shutil.rmtree(folder, ignore_errors=True)


def _exchange_names(first: Path, second: Path) -> None:
    """Exchange the names of two folders, atomically (renameat2, Linux 3.15). Raises `OSError`."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE):
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), str(first), None, str(second))


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write all files and folders of `folder` to disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def _draft_path(final_path: Path) -> Path:
    return final_path.with_name(f".{final_path.name}.{uuid.uuid4().hex[:8]}")


def is_stale(folder: Path) -> bool:
    """Return whether the draft has no live writer. Raises `OSError` if it vanishes meanwhile."""
    with suppress(FileNotFoundError), (folder / LOCK_FILE).open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # storage without locks
        else:
            if file.read() == _lock_scope(file.fileno()):
                return True
    last_write = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - last_write > STALE_AFTER_S


def _lock_scope(lock: int) -> bytes:
    """The kernel that runs this process, and the mount of an open file. Processes that share both see each other's
    locks."""
    try:
        kernel_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel_id = socket.gethostname()
    return f"{kernel_id} {os.fstat(lock).st_dev}".encode()
