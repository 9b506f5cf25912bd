"""MANIFEST.json: the size and SHA-256 of every file of a folder. Written last, so that its presence means complete."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "MANIFEST.json"
SCHEMA_VERSION = 1


def write(folder: Path) -> None:
    """Record every file of `folder`, and put files and manifest on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != NAME:
            files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
            _sync(path)
    (folder / NAME).write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
    _sync(folder / NAME)


def damage(folder: Path) -> str | None:
    """What is wrong with the folder, or None: presence, sizes and hashes of all recorded files are checked."""
    try:
        document: Any = json.loads((folder / NAME).read_text())
        recorded = {name: (entry["size"], entry["sha256"]) for name, entry in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} is missing or unreadable"
    for name, (size, sha256) in recorded.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _sha256(path) != sha256:
            return f"{name} does not match its SHA-256"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
