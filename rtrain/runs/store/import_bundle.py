"""`rtrain import`: a run out of its parcel, every byte checked before anything has its final name."""

import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs.store import bundle
from rtrain.runs.store.bundle import NoParcel

FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python's own refusal of what `_checked` refuses already; Python 3.11 has it from 3.11.4 on."""


@dataclass(frozen=True)
class Received:
    run: Run
    files: int
    size: int
    wheels: Path | None
    """Folder of the wheels that came with the run."""


def receive(file: Path, out: Path | None, root: Path) -> Received:
    """Unpack a parcel as the run folder `out`, by default `<root>/<name of the run>`.

    Raises `UserError` where the name is in use, and `NoParcel` for a file that is no parcel, holds what a parcel does
    not hold (links, devices, paths that lead elsewhere), or does not match its SHA-256. Nothing is left of it then.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            return _unpack(file, tar, out, root)
    except tarfile.TarError as error:
        raise NoParcel(f"{file} is no file of rtrain export, or was cut short ({error})") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {file}", code="not_found") from None
    except OSError as error:
        raise UserError(f"{file} cannot be unpacked: {error}", code="unreadable") from None


def _unpack(file: Path, tar: tarfile.TarFile, out: Path | None, root: Path) -> Received:
    document = _manifest(file, tar)
    final = out or root / bundle.refuse_run_name(document["run"])
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"--out: {final} is in use; name a new folder with --out", code="already_exists")
    members = _checked(tar, document["files"])
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = atomic_write.Draft(final)  # what a kill leaves of it goes with `rtrain clean`
    try:
        (draft.folder / manifest.NAME).write_text(json.dumps(document), encoding="utf-8")
        for member in members:
            tar.extract(member, draft.folder, set_attrs=False, **FILTER)
        if wrong := manifest.damage(draft.folder):
            raise NoParcel(f"{file} was changed after it was made: {wrong}; fetch it again. Nothing was unpacked.")
        unpacked = draft.folder / bundle.RUN
        if not Run(unpacked).exists:
            raise NoParcel(f"{file} holds no run (no {Run(unpacked).config.name}); nothing was unpacked")
        wheels = draft.folder / bundle.WHEELS
        if wheels.is_dir():
            wheels.rename(unpacked / bundle.WHEELS)
        Run(unpacked).append("imported", file=file.name, files=len(members), rtrain=document.get("rtrain"))
        atomic_write.publish_folder(unpacked, final)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    came = final / bundle.WHEELS
    size = sum(member.size for member in members)
    return Received(Run(final), len(members), size, came if came.is_dir() else None)


def _manifest(file: Path, tar: tarfile.TarFile) -> dict[str, Any]:
    first = tar.next()
    if first is None or first.name != manifest.NAME or not first.isreg():
        raise NoParcel(f"{file} is no file of rtrain export (no {manifest.NAME} in its first place)")
    content = tar.extractfile(first)
    try:
        document = json.loads(content.read()) if content else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict) or "run" not in document:
        raise NoParcel(f"{file}: its {manifest.NAME} cannot be read")
    if (version := document.get("schema_version")) != bundle.SCHEMA_VERSION:
        raise NoParcel(
            f"{file} is of schema {version}, this rtrain reads {bundle.SCHEMA_VERSION}; use that version",
            code="other_version",
        )
    return document


def _checked(tar: tarfile.TarFile, recorded: dict[str, Any]) -> list[tarfile.TarInfo]:
    """The members behind the manifest: plain files with plain paths, each recorded, each once, none lacking."""
    members: dict[str, tarfile.TarInfo] = {}
    while (member := tar.next()) is not None:
        if not member.isreg() or member.issparse():
            raise NoParcel(
                f"{member.name!r} is a link, a device or a folder, which no parcel holds; nothing was unpacked"
            )
        if wrong := bundle.flaw(member.name):
            raise NoParcel(f"{member.name!r} {wrong}; nothing was unpacked")
        if member.name in members or member.name not in recorded:
            wrong = "is there twice" if member.name in members else f"is not recorded in {manifest.NAME}"
            raise NoParcel(f"{member.name!r} {wrong}; nothing was unpacked")
        members[member.name] = member
        if len(members) > bundle.MOST_FILES:
            raise NoParcel(f"more than {bundle.MOST_FILES:,} files; nothing was unpacked")
    if lacking := sorted(set(recorded) - set(members)):
        raise NoParcel(f"{lacking[0]!r} is recorded and lacking: the file was cut short; fetch it again")
    return list(members.values())
