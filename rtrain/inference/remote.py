"""Artifacts by URL: fetched once into this user's cache, by their digest, and verified like local artifacts.

A URL, s3://bucket/path/artifact, is a folder of fsspec: the artifact, or its run. Its MANIFEST.json is read each time,
and the SHA-256 of it is the digest, which may follow the URL: #sha256=HEX.

An incomplete download, or one with another digest, never gets its name in the cache.
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

DIGEST_PATTERN = re.compile(r"sha256=([0-9a-fA-F]{64})")
ARTIFACT_FOLDERS = ("", Run(Path()).artifact.name, Run(Path()).int8_artifact.name)
"""Folders of an artifact under a URL: the URL itself or, for a run, the folders of its artifacts."""
PrintLine = Callable[[str], None]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder, with a folder for each digest. It may be removed at any time."""
    root = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "rtrain" / "artifacts"


def is_cached(folder: Path, root: Path | None = None) -> bool:
    """Whether a folder is in the cache, and must not be changed: it is a copy of its URL."""
    return folder.resolve().is_relative_to((root or cache_folder()).resolve())


def fetch_artifact(address: str, root: Path | None = None, print_line: PrintLine = lambda line: None) -> Path:
    """Return the folder of the artifact of a URL in the cache `root`, fetched unless it is there intact. `print_line`
    reports downloads.

    Raises `UserError` for a URL that cannot or must not be read, and `ArtifactError` for a folder that is no artifact,
    is damaged, or has another digest.
    """
    url, digest = _split_address(address)
    root = root or cache_folder()
    if urlsplit(url).scheme in ("http", "https"):
        raise UserError(
            f"{_redact_url(url)}: a folder cannot be listed over http(s); fetch it, and name the folder here",
            code="unknown_scheme",
        )
    return _fetch_folder(url, digest, root, print_line)


def _split_address(address: str) -> tuple[str, str | None]:
    """(URL, digest in hex)"""
    url, fragment = urldefrag(address)
    match = DIGEST_PATTERN.fullmatch(fragment)
    if fragment and match is None:
        raise UserError(
            f"{_redact_url(url)}: invalid fragment {fragment!r}; write #sha256= and 64 hexadecimal digits",
            code="invalid_digest",
        )
    return url, match[1].lower() if match else None


def _redact_url(url: str) -> str:
    """Format a URL for a message, without user and query, which may be secret."""
    url_parts = urlsplit(url)
    return f"{url_parts.scheme}://{url_parts.netloc.rpartition('@')[2]}{url_parts.path}"


def _is_safe_path(name: str) -> bool:
    path = PurePosixPath(name)
    is_relative = (
        bool(name) and name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    )
    return is_relative and ".." not in path.parts


def _fetch_folder(url: str, digest: str | None, root: Path, print_line: PrintLine) -> Path:
    import fsspec

    filesystem, path = _call_storage(url, lambda: fsspec.core.url_to_fs(url))
    _call_storage(url, filesystem.invalidate_cache)  # other processes write here too
    candidate_paths = [f"{str(path).rstrip('/')}/{name}".rstrip("/") for name in ARTIFACT_FOLDERS]
    exists_by_path: dict[str, bool] = _call_storage(
        url, lambda: {path: filesystem.exists(f"{path}/{manifest.FILE_NAME}") for path in candidate_paths}
    )
    artifact_path = next((path for path in candidate_paths if exists_by_path[path]), None)
    if artifact_path is None:
        raise ArtifactError(
            f"{_redact_url(url)} is neither an artifact nor a run with one (no {manifest.FILE_NAME})",
            code="not_an_artifact",
        )
    manifest_bytes: bytes = _call_storage(url, lambda: filesystem.cat_file(f"{artifact_path}/{manifest.FILE_NAME}"))
    manifest_digest = hashlib.sha256(manifest_bytes).hexdigest()
    if digest not in (None, manifest_digest):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} has the SHA-256 {manifest_digest}, not {digest}",
            code="other_digest",
        )
    final_path = root / manifest_digest
    if final_path.is_dir() and manifest.find_damage(final_path) is None:
        return final_path
    shutil.rmtree(final_path, ignore_errors=True)
    with _open_draft(final_path) as draft:
        print_line(f"fetching {_redact_url(url)}")
        staging_folder = draft / "inside"
        staging_folder.mkdir()
        for name in _list_manifest_files(url, manifest_bytes):
            (staging_folder / name).parent.mkdir(parents=True, exist_ok=True)
            _call_storage(
                url,
                lambda name=name: filesystem.get_file(f"{artifact_path}/{name}", str(staging_folder / name)),  # type: ignore[misc]
            )
        (staging_folder / manifest.FILE_NAME).write_bytes(manifest_bytes)
        if (problem := manifest.find_damage(staging_folder)) is not None:
            raise ArtifactError(
                f"{_redact_url(url)} is damaged, or was changed while it was fetched: {problem}; nothing of it was "
                "kept",
                code="damaged_artifact",
            )
        try:
            atomic_write.publish_folder(staging_folder, final_path)
        except OSError:  # another process may have been faster: then its copy stands
            if not final_path.is_dir():
                raise
    return final_path


def _list_manifest_files(url: str, document: bytes) -> list[str]:
    try:
        names = list(json.loads(document)["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} cannot be read", code="unreadable"
        ) from None
    if unsafe_name := next((name for name in names if not _is_safe_path(name)), None):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} names {unsafe_name!r}, which leads out of the folder",
            code="unsafe_path",
        )
    return names


def _call_storage(url: str, operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except Exception as error:  # every kind of storage has errors of its own
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{_redact_url(url)} cannot be fetched: {reason}. Credentials come from the environment; s3:// needs the "
            "extra "
            "s3, gs:// gcsfs",
            code="unreachable",
        ) from error


@contextmanager
def _open_draft(final_path: Path) -> Iterator[Path]:
    """A draft of `final_path`, which is gone with the block; what killed fetches have left goes first."""
    try:
        atomic_write.remove_stale_drafts(final_path)
        draft = atomic_write.Draft(final_path)
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that can"
        raise UserError(
            f"{final_path.parent} cannot be written ({error.strerror}); {fix}", code="not_writable"
        ) from None
    try:
        yield draft.folder
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
