"""Where a machine keeps the graphs that an engine has compiled, so that the next process loads them sooner.

Beside no artefact, whose folder may be read-only and whose files are all in its manifest: in the user's own folder.
"""

import contextlib
import gzip
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from rtrain.core import env
from rtrain.core.engines import PACKED

KEPT = 8
"""Artefacts whose graphs are kept: those that were loaded last."""


def folder(version: str) -> Path | None:
    """The folder for an artefact of that version, made if need be; None where nothing is kept, or nothing can be.

    The version is a digest of all that answers, so another model never meets the graph of this one.
    """
    root = os.environ.get(env.CACHE)
    if not root or not version:
        return None
    found = Path(root) / "openvino" / version
    if found.is_dir():
        if not os.access(found, os.R_OK | os.W_OK):
            return None
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(found)  # by which `_forget` knows when it was used
        return found
    try:
        found.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        found.mkdir(exist_ok=True)
    except OSError:
        return None
    _forget(found.parent)
    return found


def contents(path: Path) -> bytes:
    """What a compressed file of a graph holds."""
    return gzip.decompress(path.read_bytes())


def size(path: Path) -> int:
    """Bytes of a file's content: of a compressed one by its last four (RFC 1952)."""
    if not path.name.endswith(PACKED):
        return path.stat().st_size
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def unpacked(files: Sequence[Path], into: Path) -> list[Path]:
    """A graph's compressed files, unpacked once into the folder `into`. Raises `OSError` where it does not hold
    them."""
    found = [into / path.name.removesuffix(PACKED) for path in files]
    for path, plain in zip(files, found, strict=True):
        if not plain.is_file() or plain.stat().st_size != size(path):
            draft = plain.with_name(f".{plain.name}.{uuid.uuid4().hex[:8]}")
            try:
                with draft.open("wb") as file:
                    file.write(contents(path))
                    file.flush()
                    os.fsync(file.fileno())  # else a machine that stops now may leave the name without the bytes
                draft.rename(plain)  # at once: another process may be loading it
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    return found


def _forget(root: Path) -> None:
    """Remove all but the `KEPT` that were used last. Another process may be doing the same."""
    with contextlib.suppress(OSError):
        ordered = sorted(root.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in ordered[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
