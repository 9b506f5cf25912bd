"""MANIFEST.json: the size and SHA-256 of every file of a folder. It is written last: its presence means complete."""

import errno
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from rtrain.core import atomic_write
from rtrain.core.errors import TemporaryFailureError

FILE_NAME = "MANIFEST.json"
SCHEMA_VERSION = 1
READ_CHUNK_BYTES = 1 << 22
"""Bytes per read."""
NOT_A_FILE_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that prove a file missing. After any other error, the content of the file is unknown."""


class UnreadableFileError(TemporaryFailureError):
    """A file that cannot be read at the moment (missing mount, lack of memory) and is possibly intact."""


class FileEntry(TypedDict):
    """A file's entry in a manifest: its size in bytes and its SHA-256 in hex."""

    size: int
    sha256: str


def compute_entry(path: Path) -> FileEntry:
    """The entry of a file as it is now."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def entry_from_bytes(data: bytes) -> FileEntry:
    """The entry of a file with these bytes."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_manifest(folder: Path) -> None:
    """Record every file of `folder` by its path in the folder, and sync the files, the folders and the manifest to
    disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / FILE_NAME:
            files[path.relative_to(folder).as_posix()] = compute_entry(path)
        atomic_write.sync(path)  # before the manifest, which must only record files on disk
    (folder / FILE_NAME).write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
    atomic_write.sync(folder / FILE_NAME)
    atomic_write.sync(folder)


def find_damage(folder: Path, required: Iterable[str] = ()) -> str | None:
    """Return the problem of a folder, or None. Existence, size and hash of all recorded files are checked.

    The `required` files must be recorded. Raises `UnreadableFileError` where a file cannot be read.
    """
    try:
        document: Any = json.loads((folder / FILE_NAME).read_text())
        entries = {
            name: FileEntry(size=entry["size"], sha256=entry["sha256"]) for name, entry in document["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError):
            _raise_if_unreadable(folder / FILE_NAME, error)
        return f"{FILE_NAME} is missing or unreadable"
    if missing := sorted(set(required) - set(entries)):
        return f"{FILE_NAME} does not record {missing[0]}"
    for name, entry in entries.items():
        if problem := find_file_problem(folder / name, entry):
            return f"{name} {problem}"
    return None


def find_file_problem(path: Path, entry: FileEntry, *, size_only: bool = False) -> str | None:
    """Return the problem of a file, or None. With `size_only` the file is not read, and only its size is compared.

    Raises `UnreadableFileError` where it cannot be read.
    """
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != entry["size"]:
            return f"has {size} bytes instead of {entry['size']}"
        if not size_only and _sha256(path) != entry["sha256"]:
            return "does not match its SHA-256"
    except OSError as error:
        _raise_if_unreadable(path, error)
        return "is missing"
    return None


def _raise_if_unreadable(path: Path, error: OSError) -> None:
    if error.errno not in NOT_A_FILE_ERRORS:
        raise UnreadableFileError(
            f"{path} cannot be read ({error.strerror or error}): whether it is intact is unknown, so it is not "
            "moved. Try again; if that does not help, fix the disk, the mount or the file's permissions."
        ) from error


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file. It is read in large parts, since each read takes the GIL, and a training in the
    same process would wait each time."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_CHUNK_BYTES, path.stat().st_size) or 1))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
