"""MANIFEST.json: the size and SHA-256 of every file of a folder. Written last, so that its presence means complete."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypedDict

NAME = "MANIFEST.json"
SCHEMA_VERSION = 1


class Entry(TypedDict):
    """What a manifest records of a file."""

    size: int
    sha256: str


def entry(path: Path) -> Entry:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def write(folder: Path) -> None:
    """Record every file of `folder`, and put files and manifest on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != NAME:
            files[path.name] = entry(path)
            _sync(path)
    (folder / NAME).write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
    _sync(folder / NAME)


def damage(folder: Path) -> str | None:
    """What is wrong with the folder, or None: presence, sizes and hashes of all recorded files are checked."""
    try:
        document: Any = json.loads((folder / NAME).read_text())
        recorded = {
            name: Entry(size=known["size"], sha256=known["sha256"]) for name, known in document["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} is missing or unreadable"
    for name, known in recorded.items():
        if wrong := flaw(folder / name, known):
            return f"{name} {wrong}"
    return None


def flaw(path: Path, recorded: Entry, *, size_only: bool = False) -> str | None:
    """What is wrong with a file, or None. With `size_only`, what shows without reading it."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != recorded["size"]:
        return f"has {size} bytes instead of {recorded['size']}"
    if not size_only and _sha256(path) != recorded["sha256"]:
        return "does not match its SHA-256"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
