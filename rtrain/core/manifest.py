"""MANIFEST.json: the size and SHA-256 of every file of a folder. It is written last: its presence means complete."""

import errno
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from rtrain.core import atomic_write
from rtrain.core.errors import TryAgain

NAME = "MANIFEST.json"
SCHEMA_VERSION = 1
PART = 1 << 22
"""Bytes of a file that are read and hashed at a time."""
OTHER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors by which a name is shown to hold no such file. By every other one, it is not known what the file holds."""


class Unreadable(TryAgain):
    """A file that cannot be read now: a mount that is away or a machine short of memory, and no word of damage."""


class Entry(TypedDict):
    """What a manifest records of a file: its size in bytes, and its SHA-256 in hex."""

    size: int
    sha256: str


def entry(path: Path) -> Entry:
    """The entry of a file as it is now."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def entry_of(data: bytes) -> Entry:
    """The entry of a file with these bytes."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write(folder: Path) -> None:
    """Record every file of `folder` by its path in the folder, and sync the files, the folders and the manifest to
    disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / NAME:
            files[path.relative_to(folder).as_posix()] = entry(path)
        atomic_write.sync(path)  # before the manifest, which must never say more than the disk holds
    (folder / NAME).write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
    atomic_write.sync(folder / NAME)
    atomic_write.sync(folder)


def damage(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """What is wrong with the folder, or None. All recorded files are checked: their presence, sizes and hashes.

    The `needed` files must be among the recorded files. Raises `Unreadable` where that cannot be known.
    """
    try:
        document: Any = json.loads((folder / NAME).read_text())
        recorded = {
            name: Entry(size=known["size"], sha256=known["sha256"]) for name, known in document["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError):
            _refuse_unread(folder / NAME, error)
        return f"{NAME} is missing or unreadable"
    if lacking := sorted(set(needed) - set(recorded)):
        return f"{NAME} does not record {lacking[0]}"
    for name, known in recorded.items():
        if wrong := flaw(folder / name, known):
            return f"{name} {wrong}"
    return None


def flaw(path: Path, recorded: Entry, *, size_only: bool = False) -> str | None:
    """What is wrong with a file, or None. With `size_only` the file is not read, and only its size is compared.

    Raises `Unreadable` where it cannot be known.
    """
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != recorded["size"]:
            return f"has {size} bytes instead of {recorded['size']}"
        if not size_only and _sha256(path) != recorded["sha256"]:
            return "does not match its SHA-256"
    except OSError as error:
        _refuse_unread(path, error)
        return "is missing"
    return None


def _refuse_unread(path: Path, error: OSError) -> None:
    if error.errno not in OTHER:
        raise Unreadable(
            f"{path} cannot be read ({error.strerror or error}): whether it is whole is not known, and it stays where "
            "it is. Try again; where that does not help, mend the disk, the mount or the file's permissions."
        ) from error


def _sha256(path: Path) -> str:
    """SHA-256 of a file. It is read in large parts, since each read takes Python's global lock, and a training in the
    same process would wait each time."""
    digest, part = hashlib.sha256(), memoryview(bytearray(min(PART, path.stat().st_size) or 1))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(part):
            digest.update(part[:size])
    return digest.hexdigest()
