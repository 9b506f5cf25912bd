"""Artefacts by address: fetched once into this user's cache, by their digest, and verified as local ones are.

s3://bucket/path/artifact            a folder at any address that fsspec knows: the artefact, or the run that holds it.
                                     Its MANIFEST.json is read each time, and its SHA-256 is the digest
https://host/name.tar.gz#sha256=HEX  an archive (.tar, .tar.gz, .tgz) of an artefact, or a file of `rtrain export`. The
                                     SHA-256 is the archive's, and required; http is for this machine alone

What is half fetched, or is not what the digest says, never has its name in the cache.
"""

import hashlib
import http.client
import ipaddress
import json
import lzma
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urldefrag, urlsplit

from rtrain import drafts, manifest
from rtrain.artifact import ArtifactError
from rtrain.errors import UserError
from rtrain.run import ARTIFACT, Run, artifact_of

DIGEST = re.compile(r"sha256=([0-9a-fA-F]{64})")
ARCHIVES = (".tar", ".tar.gz", ".tgz")
ANSWER_S = 30.0
"""Seconds without a byte after which a server is given up."""
PART = 1 << 20
FOLDERS = ("", Run(Path()).artifact.name, Run(Path()).int8.name)
"""Where an address may hold an artefact: at itself or, of a run, in the folders of the run's artefacts."""
UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading an archive raises: tarfile passes on what gzip and xz make of bytes that are none of theirs."""
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python's own refusal of what `_unpack` refuses already; Python 3.11 has it from 3.11.4 on."""
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
    if urlsplit(url).path.lower().endswith(ARCHIVES):
        if digest is None:
            fix = f"write {_shown(url)}#sha256=HEX with what sha256sum prints of the file"
            raise UserError(f"{_shown(url)} is an archive without a digest, so that it could be anything; {fix}")
        return _archive(url, digest, root, say)
    if urlsplit(url).scheme in ("http", "https"):
        raise UserError(f"{_shown(url)} names no archive; one file is fetched by http(s): {', '.join(ARCHIVES)}")
    return _folder(url, digest, root, say)


def _parts(address: str) -> tuple[str, str | None]:
    """(URL, digest in hex)"""
    url, fragment = urldefrag(address)
    found = DIGEST.fullmatch(fragment)
    if fragment and found is None:
        raise UserError(f"{_shown(url)}: behind # stands {fragment!r}; write sha256= and 64 hexadecimal digits")
    _refuse_open(url)
    if urlsplit(url).scheme in ("http", "https") and "@" in urlsplit(url).netloc:
        raise UserError(f"{_shown(url)}: http(s) sends no user's name that stands in an address; leave it out")
    return url, found[1].lower() if found else None


def _shown(url: str) -> str:
    """A URL for a message: without what may be a secret, its user and its query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _refuse_open(url: str) -> None:
    """Refuse http to other machines: who is between could learn what is fetched, and hold it back."""
    if urlsplit(url).scheme == "http" and not _is_loopback(urlsplit(url).hostname or ""):
        raise UserError(f"{_shown(url)}: http is for this machine alone; write https")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ------------------------------------------------------------------------------------------------------------ archives


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        _refuse_open(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _archive(url: str, digest: str, root: Path, say: Say) -> Path:
    final = root / digest
    if (known := _whole(final)) is not None:
        return known
    with _Fetching(final) as draft:
        say(f"fetching {_shown(url)}")
        file, inside = draft / "archive", draft / "inside"
        inside.mkdir()
        found = _download(url, file)
        if found != digest:
            raise ArtifactError(f"{_shown(url)} has the SHA-256 {found}, and not {digest}; nothing of it was kept")
        _unpack(url, file, inside)
        if _inside(inside) is None:
            raise ArtifactError(f"{_shown(url)} holds no artefact (no {ARTIFACT}); pack the artefact's folder")
        return _kept(inside, final, url)


def _download(url: str, file: Path) -> str:
    """Write what a URL holds into a file; returns its SHA-256."""
    total, size = hashlib.sha256(), 0
    try:
        with _opened(url) as read, file.open("wb") as write:
            while part := read.read(PART):
                total.update(part)
                size += write.write(part)
            # Python raises nothing where a server of a known number of bytes hangs up: so many are left.
            missing = getattr(read, "length", None) or 0
    except urllib.error.HTTPError as error:
        raise UserError(
            f"{_shown(url)} answers {error.code} {error.reason}; is the address right, and is it open?"
        ) from None
    except http.client.InvalidURL:  # its own words may hold the query
        raise UserError(f"{_shown(url)} cannot be fetched: it is no URL; write e.g. a blank as %20") from None
    except (OSError, EOFError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{_shown(url)} cannot be fetched: {reason}") from None
    if missing:
        raise UserError(f"{_shown(url)} ended after {size:,} of {size + missing:,} bytes; try again")
    return total.hexdigest()


def _opened(url: str) -> IO[bytes]:
    if urlsplit(url).scheme in ("http", "https"):
        found: IO[bytes] = urllib.request.build_opener(_Redirects).open(url, timeout=ANSWER_S)
        return found
    files, path = _storage(url)
    opened: IO[bytes] = _tried(url, lambda: files.open(path, "rb"))
    return opened


def _unpack(url: str, file: Path, out: Path) -> None:
    """Unpack plain files with plain paths; anything else is refused, and with it the archive."""
    try:
        with tarfile.open(file, "r:*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ArtifactError(f"{_shown(url)}: {member.name!r} is a link or a device; nothing was unpacked")
                if not _is_plain(name := member.name.removeprefix("./")):
                    raise ArtifactError(f"{_shown(url)}: {member.name!r} leads out of the folder; nothing was unpacked")
                member.name = name
                tar.extract(member, out, set_attrs=False, **FILTER)
    except UNREADABLE as error:
        raise ArtifactError(f"{_shown(url)} is no archive that can be read ({error}); pack it with tar") from None


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    plain = (
        bool(name) and name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    )
    return plain and ".." not in path.parts


def _inside(folder: Path) -> Path | None:
    """The artefact in what was unpacked: at its top, or in its one folder, or in the run that is there."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    for place in (folder, *folders):
        found = artifact_of(place) if Run(place).finished or (place / Run(place).int8.name).is_dir() else place
        if (found / ARTIFACT).is_file():
            return found
    return None


# ------------------------------------------------------------------------------------------------------------- folders


def _folder(url: str, digest: str | None, root: Path, say: Say) -> Path:
    files, path = _storage(url)
    path = path.rstrip("/")
    place = next((one for one in (f"{path}/{name}".rstrip("/") for name in FOLDERS) if _has(url, files, one)), None)
    if place is None:
        raise ArtifactError(f"{_shown(url)} is no artefact, and no run that has one (no {manifest.NAME} is there)")
    document: bytes = _tried(url, lambda: files.cat_file(f"{place}/{manifest.NAME}"))
    found = hashlib.sha256(document).hexdigest()
    if digest not in (None, found):
        raise ArtifactError(f"the {manifest.NAME} of {_shown(url)} has the SHA-256 {found}, and not {digest}")
    final = root / found
    if (known := _whole(final)) is not None:
        return known
    with _Fetching(final) as draft:
        say(f"fetching {_shown(url)}")
        inside = draft / "inside"
        inside.mkdir()
        for name in _recorded(url, document):
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            _tried(url, lambda name=name: files.get_file(f"{place}/{name}", str(inside / name)))  # type: ignore[misc]
        (inside / manifest.NAME).write_bytes(document)
        return _kept(inside, final, url)


def _recorded(url: str, document: bytes) -> list[str]:
    try:
        names = list(json.loads(document)["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(f"the {manifest.NAME} of {_shown(url)} cannot be read") from None
    if wrong := next((name for name in names if not _is_plain(name)), None):
        raise ArtifactError(f"the {manifest.NAME} of {_shown(url)} names {wrong!r}, which leads out of the folder")
    return names


def _has(url: str, files: Any, place: str) -> bool:
    return bool(_tried(url, lambda: files.exists(f"{place}/{manifest.NAME}")))


def _storage(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it)"""
    import fsspec

    files, path = _tried(url, lambda: fsspec.core.url_to_fs(url))
    _tried(url, files.invalidate_cache)  # others write here too
    return files, str(path)


def _tried(url: str, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:  # every kind of storage has errors of its own
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{_shown(url)} cannot be fetched: {reason}. Credentials come from the environment; s3:// needs the extra "
            "s3, gs:// gcsfs"
        ) from error


# ----------------------------------------------------------------------------------------------------------- the cache


class _Fetching:
    """A draft of `final`, which is gone with the block; what killed fetches have left goes first."""

    def __init__(self, final: Path):
        self._final = final

    def __enter__(self) -> Path:
        try:
            drafts.sweep(self._final)
            self._draft = drafts.Draft(self._final)
        except OSError as error:
            fix = "set XDG_CACHE_HOME to a folder that can"
            raise UserError(f"{self._final.parent} cannot be written ({error.strerror}); {fix}") from None
        return self._draft.folder

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._draft.folder, ignore_errors=True)
        self._draft.release()


def _whole(final: Path) -> Path | None:
    """The artefact in a folder of the cache, where it is there and undamaged; what is damaged is removed."""
    place = _inside(final)
    if place is not None and manifest.damage(place) is None:
        return place
    shutil.rmtree(final, ignore_errors=True)
    return None


def _kept(inside: Path, final: Path, url: str) -> Path:
    """Give what was fetched its name. Another process may have been faster: then its copy stands."""
    place = _inside(inside)
    assert place is not None
    if (problem := manifest.damage(place)) is not None:
        raise ArtifactError(
            f"{_shown(url)} is damaged, or was changed while it was fetched: {problem}; nothing of it was kept"
        )
    try:
        drafts.publish_folder(inside, final)
    except OSError:
        if not final.is_dir():
            raise
    return final / place.relative_to(inside)
