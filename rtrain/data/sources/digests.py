"""SHA-256 of the source's files: many at a time, and remembered for the next start on the same files.

<root>/.digests.json     by file: its stamp (what the storage said of it), and its SHA-256 at that time

A file counts as unchanged only if its storage would show any change: a local file by the time of its last change, which
no program can set, an object by the tag that the store gives to each content. The tasks that read the rows hash the
files again (`rtrain.data.sources.file_ranges`), so that no row is ever stored under the digest of another file.
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

NAME = ".digests.json"
AT_ONCE = 16
"""Files that are hashed at a time: hashing runs outside Python's global lock, and reading remote files is mostly
waiting."""
SETTLED_S = 3.0
"""Seconds for which a file must have been left alone before its digest is remembered. File systems count time in steps
of up to two seconds, so that two changes in quick succession can carry the same time."""
TAGGED = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores, which give each content its own tag. A web server may make its tags from size and seconds alone."""

Known = Mapping[str, tuple[str, str]]
"""(text of the stamp, SHA-256) by URI."""


class Digest(NamedTuple):
    """SHA-256 of a file. It may be remembered if it has a `stamp`."""

    uri: str
    sha256: str
    stamp: str | None


def file_digest(uri: str) -> str:
    """SHA-256 of a file's bytes as they are stored, in hex."""
    with fsspec.open(uri, "rb") as file:
        total = hashlib.sha256()
        while chunk := file.read(1 << 20):
            total.update(chunk)
        return total.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of what decides a folder's tokens: its tokenizer.json without the lengths to which others cut and pad,
    which an artifact has of its run."""
    document = json_files.read(folder / "tokenizer.json") | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def of(uris: Sequence[str], known: Known) -> list[Digest]:
    """The digest of each file, in their order. A file is read only if `known` has no digest for its present stamp."""

    def one(uri: str) -> Digest:
        begin, stamp = time.time(), _stamp(uri)
        if stamp is not None and known.get(uri, ("", ""))[0] == stamp.text:
            return Digest(uri, known[uri][1], stamp.text)
        sha256 = file_digest(uri)
        sound = stamp is not None and stamp.changed < begin - SETTLED_S and _stamp(uri) == stamp
        return Digest(uri, sha256, stamp.text if stamp and sound else None)

    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(uris)))) as threads:
        return list(threads.map(one, uris))


def known(root: Path) -> Known:
    """The digests that earlier starts have left under `root`; none if they cannot be read."""
    try:
        document: Any = json.loads((root / NAME).read_text(encoding="utf-8"))
        return {str(uri): (str(stamp), str(sha256)) for uri, (stamp, sha256) in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember(root: Path, found: Sequence[Digest]) -> None:
    """Leave the digests that have a stamp to the next start. If two processes write at once, the digests of one are
    lost, and are made again when they are needed."""
    before = known(root)
    after = {**before, **{one.uri: (one.stamp, one.sha256) for one in found if one.stamp is not None}}
    if after != before:
        draft = root / f"{NAME}.{uuid.uuid4().hex[:8]}"
        with suppress(OSError):  # where the folder cannot be written, the next start hashes again
            draft.write_text(json.dumps(after), encoding="utf-8")
            draft.replace(root / NAME)


def forget(root: Path) -> None:
    """Remove what is remembered under `root`, since some of it was wrong."""
    (root / NAME).unlink(missing_ok=True)


class _Stamp(NamedTuple):
    """Facts of a file that change whenever the file does."""

    text: str
    changed: float
    """Time of the last change, in seconds since 1970; 0 for storage that gives every change its own stamp."""


def _stamp(uri: str) -> _Stamp | None:
    """The stamp of a file; None if its storage keeps no fact that must change with the file."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb") as file:  # opening makes a network file system ask its server
            found = os.fstat(file.fileno())
        text = f"{found.st_ctime_ns} {found.st_mtime_ns} {found.st_size} {found.st_ino} {found.st_dev}"
        return _Stamp(text, max(found.st_ctime, found.st_mtime))
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if not set(protocols) & set(TAGGED):
        return None
    filesystem.invalidate_cache()  # a cached listing may be older than the file
    information = filesystem.info(path)
    tag = information.get("ETag") or information.get("etag")
    return _Stamp(f"{tag} {information['size']}", 0.0) if tag else None
