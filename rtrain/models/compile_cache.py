"""Cache of an engine's compiled graphs, so that the next process loads them faster.

The cache is in the user's cache folder: an artifact's folder may be read-only, and its manifest lists all of its
files.
"""

import contextlib
import gzip
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rtrain.core import atomic_write, env
from rtrain.core.engines import COMPRESSED_SUFFIX

MAX_CACHED = 8
"""Artifacts whose graphs are kept, the most recently loaded ones."""


def cache_folder(version: str) -> Path | None:
    """Return the cache folder for an artifact of this version, created if needed; None if caching is impossible or
    disabled.

    The version is a digest of everything that determines the outputs, so no other model can load this graph.
    """
    root = os.environ.get(env.CACHE_ENV)
    if not root or not version:
        return None
    path = Path(root) / "openvino" / version
    if path.is_dir():
        if not os.access(path, os.R_OK | os.W_OK):
            return None
        with contextlib.suppress(OSError):  # the folder may belong to another user
            os.utime(path)  # `_evict` reads the time of last use
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    _evict(path.parent)
    return path


def read_compressed(path: Path) -> bytes:
    """Read a compressed graph file."""
    return gzip.decompress(path.read_bytes())


def content_size(path: Path) -> int:
    """Size of the content in bytes; of a gzip file from its last four bytes (RFC 1952)."""
    if not path.name.endswith(COMPRESSED_SUFFIX):
        return path.stat().st_size
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def unpack_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """Unpack a graph's compressed files into `folder`, once. Raises `OSError` for missing files."""
    targets = [folder / path.name.removesuffix(COMPRESSED_SUFFIX) for path in files]
    for path, target in zip(files, targets, strict=True):
        if not target.is_file() or target.stat().st_size != content_size(path):
            with atomic_write.replace_file(target) as draft:  # another process may be loading it
                draft.write_bytes(read_compressed(path))
    return targets


def _evict(root: Path) -> None:
    """Remove all but the `MAX_CACHED` most recently used entries. Other processes may do the same."""
    with contextlib.suppress(OSError):
        ordered = sorted(root.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in ordered[MAX_CACHED:]:
            shutil.rmtree(old, ignore_errors=True)
