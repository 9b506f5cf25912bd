"""SHA-256 of the source's files: many at a time, and remembered for the next start on the same files.

<root>/.digests.json     by file, what its storage said of it, and its SHA-256 then

A file is taken as unchanged only where its storage would tell any change: by the time of the last change of a local
file, which no program can set, or by the tag that an object store gives to each content. Who reads the rows hashes
them again (`rtrain.data.formats.parts`), so that no row is ever stored under the digest of another file.
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

NAME = ".digests.json"
AT_ONCE = 16
"""Files that are hashed at a time: hashing runs outside of Python's global lock, and remote files wait for the net."""
SETTLED_S = 3.0
"""A file that was changed so short a time before it was hashed may be changed again without another time: file systems
count in steps of up to two seconds."""
TAGGED = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores, which give each content a tag. The tags of a web server may be made from size and seconds alone."""

Known = Mapping[str, tuple[str, str]]
"""URI -> (what the storage said of the file, SHA-256)."""


class Digest(NamedTuple):
    """SHA-256 of a file. Without a `stamp` it is not to be remembered."""

    uri: str
    sha256: str
    stamp: str | None


def file_digest(uri: str) -> str:
    with fsspec.open(uri, "rb") as file:
        total = hashlib.sha256()
        while chunk := file.read(1 << 20):
            total.update(chunk)
        return total.hexdigest()


def of(uris: Sequence[str], known: Known) -> list[Digest]:
    """One per file, in their order; read only where `known` does not say it."""

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
    """What earlier starts have left under `root`; nothing where that cannot be read."""
    try:
        document: Any = json.loads((root / NAME).read_text(encoding="utf-8"))
        return {str(uri): (str(stamp), str(sha256)) for uri, (stamp, sha256) in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember(root: Path, found: Sequence[Digest]) -> None:
    """Leave what may be trusted to the next start. Of two that write at once one is lost, which costs a hash."""
    before = known(root)
    after = {**before, **{one.uri: (one.stamp, one.sha256) for one in found if one.stamp is not None}}
    if after != before:
        draft = root / f"{NAME}.{uuid.uuid4().hex[:8]}"
        with suppress(OSError):  # a folder that cannot be written: the next start hashes again
            draft.write_text(json.dumps(after), encoding="utf-8")
            draft.replace(root / NAME)


def forget(root: Path) -> None:
    (root / NAME).unlink(missing_ok=True)


class _Stamp(NamedTuple):
    """What changes whenever a file does."""

    text: str
    changed: float
    """When it was changed last, seconds since 1970; 0 where two changes cannot have one stamp."""


def _stamp(uri: str) -> _Stamp | None:
    """None where the file's storage has nothing that must change with it."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb") as file:  # opened, since a network file system asks its server then
            found = os.fstat(file.fileno())
        text = f"{found.st_ctime_ns} {found.st_mtime_ns} {found.st_size} {found.st_ino} {found.st_dev}"
        return _Stamp(text, max(found.st_ctime, found.st_mtime))
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if not set(protocols) & set(TAGGED):
        return None
    filesystem.invalidate_cache()  # of listings, which may be older than the file
    information = filesystem.info(path)
    tag = information.get("ETag") or information.get("etag")
    return _Stamp(f"{tag} {information['size']}", 0.0) if tag else None
