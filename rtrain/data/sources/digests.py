"""SHA-256 of the source's files, computed in parallel and cached for the next start on the same files.

<root>/.digests.json     by file: its stamp (time, size and tag from the storage), and its SHA-256

A file counts as unchanged only if its storage would show any change: a local file by the time of its last change, which
no program can set, an object by the tag that the store gives to each content. The tasks that read the rows hash the
files again (`rtrain.data.sources.file_ranges`), so no row is stored under the digest of another file.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rtrain.core import json_files

CACHE_FILE = ".digests.json"
MAX_THREADS = 16
"""Files that are hashed at a time: hashing runs outside Python's global lock, and reading remote files is mostly
waiting."""
MIN_UNCHANGED_S = 3.0
"""Seconds without a change before a file's digest is cached. File systems have a time resolution of up to two seconds,
so two quick changes can have the same time."""
ETAG_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores, whose ETag depends on the content. A web server may derive it from size and seconds alone."""

DigestCache = Mapping[str, tuple[str, str]]
"""(text of the stamp, SHA-256) by URI."""


class FileDigest(NamedTuple):
    """SHA-256 of a file; cached if it has a `stamp`."""

    uri: str
    sha256: str
    stamp: str | None


def hash_file(uri: str) -> str:
    """SHA-256 of a file's stored (compressed) bytes, in hex."""
    with fsspec.open(uri, "rb") as file:
        hasher = hashlib.sha256()
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
        return hasher.hexdigest()


def hash_tokenizer(folder: Path) -> str:
    """SHA-256 of a folder's tokenizer.json, without its settings of truncation and padding, which an artifact takes
    from its run."""
    document = json_files.load_json_object(folder / "tokenizer.json") | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def compute_digests(uris: Sequence[str], cache: DigestCache) -> list[FileDigest]:
    """The digest of each file, in their order. A file is read only if `cache` has no digest for its present stamp."""

    def compute_digest(uri: str) -> FileDigest:
        started_at, stamp = time.time(), _read_stamp(uri)
        if stamp is not None and cache.get(uri, ("", ""))[0] == stamp.text:
            return FileDigest(uri, cache[uri][1], stamp.text)
        sha256 = hash_file(uri)
        is_stable = stamp is not None and stamp.changed_at < started_at - MIN_UNCHANGED_S and _read_stamp(uri) == stamp
        return FileDigest(uri, sha256, stamp.text if stamp and is_stable else None)

    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(uris)))) as threads:
        return list(threads.map(compute_digest, uris))


def load_cache(root: Path) -> DigestCache:
    """The cached digests under `root`; empty if unreadable."""
    try:
        document: Any = json.loads((root / CACHE_FILE).read_text(encoding="utf-8"))
        return {str(uri): (str(stamp), str(sha256)) for uri, (stamp, sha256) in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def update_cache(root: Path, file_digests: Sequence[FileDigest]) -> None:
    """Cache the digests that have a stamp. If two processes write at once, the digests of one are lost and computed
    again when needed."""
    old_cache = load_cache(root)
    new_cache = {
        **old_cache,
        **{digest.uri: (digest.stamp, digest.sha256) for digest in file_digests if digest.stamp is not None},
    }
    if new_cache != old_cache:
        draft = root / f"{CACHE_FILE}.{uuid.uuid4().hex[:8]}"
        with suppress(OSError):  # where the folder cannot be written, the next start hashes again
            draft.write_text(json.dumps(new_cache), encoding="utf-8")
            draft.replace(root / CACHE_FILE)


def clear_cache(root: Path) -> None:
    """Delete the cache under `root`, since an entry was wrong."""
    (root / CACHE_FILE).unlink(missing_ok=True)


class _Stamp(NamedTuple):
    """Facts of a file that change whenever the file does."""

    text: str
    changed_at: float
    """Time of the last change, in seconds since 1970; 0 for storage that gives every change its own stamp."""


def _read_stamp(uri: str) -> _Stamp | None:
    """The stamp of a file; None if its storage keeps no fact that must change with the file."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb") as file:  # opening makes a network file system ask its server
            stat = os.fstat(file.fileno())
        text = f"{stat.st_ctime_ns} {stat.st_mtime_ns} {stat.st_size} {stat.st_ino} {stat.st_dev}"
        return _Stamp(text, max(stat.st_ctime, stat.st_mtime))
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if not set(protocols) & set(ETAG_PROTOCOLS):
        return None
    filesystem.invalidate_cache()  # a cached listing may be older than the file
    information = filesystem.info(path)
    tag = information.get("ETag") or information.get("etag")
    return _Stamp(f"{tag} {information['size']}", 0.0) if tag else None
