"""Artefacts by address: fetched once into this user's cache, by their digest, and verified as local ones are.

An address, s3://bucket/path/artifact, is a folder that fsspec knows: the artefact, or the run that holds it. Its
MANIFEST.json is read each time, and its SHA-256 is the digest, which may stand behind the address: #sha256=HEX.

What is half fetched, or is not what the digest says, never has its name in the cache.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag, urlsplit

from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.inference.artifact import ArtifactError

DIGEST = re.compile(r"sha256=([0-9a-fA-F]{64})")
FOLDERS = ("", Run(Path()).artifact.name, Run(Path()).int8.name)
"""Where an address may hold an artefact: at itself or, of a run, in the folders of the run's artefacts."""
Say = Callable[[str], None]


def cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of what was fetched, each artefact in a folder of its digest. All of it may be removed at any time."""
    root = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "rtrain" / "artifacts"


def is_copy(folder: Path, root: Path | None = None) -> bool:
    """Whether a folder is in the cache: what is written into it makes it another artefact than its address's."""
    return folder.resolve().is_relative_to((root or cache()).resolve())


def fetch(address: str, root: Path | None = None, say: Say = lambda line: None) -> Path:
    """The folder of the artefact at an address, in the cache `root`; nothing is fetched that is there already, and
    whole. `say` is told what is fetched.

    Raises `UserError` for an address that cannot be read, or must not be, and `ArtifactError` for what is there and is
    no artefact, is damaged, or is another one than the digest's.
    """
    url, digest = _parts(address)
    root = root or cache()
    if urlsplit(url).scheme in ("http", "https"):
        raise UserError(
            f"{_shown(url)}: a folder cannot be listed over http(s); fetch it, and name the folder here",
            code="unknown_scheme",
        )
    return _folder(url, digest, root, say)


def _parts(address: str) -> tuple[str, str | None]:
    """(URL, digest in hex)"""
    url, fragment = urldefrag(address)
    found = DIGEST.fullmatch(fragment)
    if fragment and found is None:
        raise UserError(
            f"{_shown(url)}: behind # stands {fragment!r}; write sha256= and 64 hexadecimal digits",
            code="invalid_digest",
        )
    return url, found[1].lower() if found else None


def _shown(url: str) -> str:
    """A URL for a message: without what may be a secret, its user and its query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    plain = (
        bool(name) and name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    )
    return plain and ".." not in path.parts


def _folder(url: str, digest: str | None, root: Path, say: Say) -> Path:
    import fsspec

    files, path = _tried(url, lambda: fsspec.core.url_to_fs(url))
    _tried(url, files.invalidate_cache)  # others write here too
    places = [f"{str(path).rstrip('/')}/{name}".rstrip("/") for name in FOLDERS]
    is_there: dict[str, bool] = _tried(url, lambda: {each: files.exists(f"{each}/{manifest.NAME}") for each in places})
    place = next((each for each in places if is_there[each]), None)
    if place is None:
        raise ArtifactError(
            f"{_shown(url)} is no artefact, and no run that has one (no {manifest.NAME} is there)",
            code="not_an_artifact",
        )
    document: bytes = _tried(url, lambda: files.cat_file(f"{place}/{manifest.NAME}"))
    found = hashlib.sha256(document).hexdigest()
    if digest not in (None, found):
        raise ArtifactError(
            f"the {manifest.NAME} of {_shown(url)} has the SHA-256 {found}, and not {digest}", code="other_digest"
        )
    final = root / found
    if final.is_dir() and manifest.damage(final) is None:
        return final
    shutil.rmtree(final, ignore_errors=True)
    with _drafted(final) as draft:
        say(f"fetching {_shown(url)}")
        inside = draft / "inside"
        inside.mkdir()
        for name in _recorded(url, document):
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            _tried(url, lambda name=name: files.get_file(f"{place}/{name}", str(inside / name)))  # type: ignore[misc]
        (inside / manifest.NAME).write_bytes(document)
        if (problem := manifest.damage(inside)) is not None:
            raise ArtifactError(
                f"{_shown(url)} is damaged, or was changed while it was fetched: {problem}; nothing of it was kept",
                code="damaged_artifact",
            )
        try:
            atomic_write.publish_folder(inside, final)
        except OSError:  # another process may have been faster: then its copy stands
            if not final.is_dir():
                raise
    return final


def _recorded(url: str, document: bytes) -> list[str]:
    try:
        names = list(json.loads(document)["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(f"the {manifest.NAME} of {_shown(url)} cannot be read", code="unreadable") from None
    if wrong := next((name for name in names if not _is_plain(name)), None):
        raise ArtifactError(
            f"the {manifest.NAME} of {_shown(url)} names {wrong!r}, which leads out of the folder",
            code="unsafe_path",
        )
    return names


def _tried(url: str, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:  # every kind of storage has errors of its own
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{_shown(url)} cannot be fetched: {reason}. Credentials come from the environment; s3:// needs the extra "
            "s3, gs:// gcsfs",
            code="unreachable",
        ) from error


@contextmanager
def _drafted(final: Path) -> Iterator[Path]:
    """A draft of `final`, which is gone with the block; what killed fetches have left goes first."""
    try:
        atomic_write.sweep(final)
        draft = atomic_write.Draft(final)
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that can"
        raise UserError(f"{final.parent} cannot be written ({error.strerror}); {fix}", code="not_writable") from None
    try:
        yield draft.folder
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
