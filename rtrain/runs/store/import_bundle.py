"""`rtrain import`: unpack a run from its bundle. All digests are verified before the folder is published."""

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
from rtrain.runs.store.bundle import InvalidBundle

EXTRACT_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python's own member filter, in addition to `_check_members`; Python 3.11 supports it since 3.11.4."""


@dataclass(frozen=True)
class ImportResult:
    run: Run
    files: int
    size: int
    wheels: Path | None
    """Folder of the wheels in the bundle."""


def import_bundle(bundle_file: Path, out: Path | None, root: Path) -> ImportResult:
    """Unpack a bundle as the run folder `out`, by default `<root>/<name of the run>`.

    Nothing is left after an error.

    Raises:
        UserError: the folder is in use.
        InvalidBundle: the file is not a bundle, has invalid members (links, devices, paths outside the run), or does
            not match its SHA-256.

    """
    try:
        with tarfile.open(bundle_file, "r:") as tar:
            return _unpack(bundle_file, tar, out, root)
    except tarfile.TarError as error:
        raise InvalidBundle(f"{bundle_file} is not a bundle of rtrain export, or is truncated ({error})") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {bundle_file}", code="not_found") from None
    except OSError as error:
        raise UserError(f"{bundle_file} cannot be unpacked: {error}", code="unreadable") from None


def _unpack(bundle_file: Path, tar: tarfile.TarFile, out: Path | None, root: Path) -> ImportResult:
    document = _read_manifest(bundle_file, tar)
    run_folder = out or root / bundle.validate_run_name(document["run"])
    if run_folder.exists() and (not run_folder.is_dir() or any(run_folder.iterdir())):
        raise UserError(f"--out: {run_folder} is in use; name a new folder with --out", code="already_exists")
    members = _check_members(tar, document["files"])
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    draft = atomic_write.Draft(run_folder)  # `rtrain clean` removes it after a kill
    try:
        (draft.folder / manifest.FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
        for member in members:
            tar.extract(member, draft.folder, set_attrs=False, **EXTRACT_FILTER)
        if damage := manifest.find_damage(draft.folder):
            raise InvalidBundle(
                f"{bundle_file} does not match its digests: {damage}; fetch it again. Nothing was unpacked."
            )
        draft_run = draft.folder / bundle.RUN_FOLDER
        if not Run(draft_run).exists:
            raise InvalidBundle(f"{bundle_file} has no run (no {Run(draft_run).config.name}); nothing was unpacked")
        wheels = draft.folder / bundle.WHEELS_FOLDER
        if wheels.is_dir():
            wheels.rename(draft_run / bundle.WHEELS_FOLDER)
        Run(draft_run).append_event(
            "imported", file=bundle_file.name, files=len(members), rtrain=document.get("rtrain")
        )
        atomic_write.publish_folder(draft_run, run_folder)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    wheels_folder = run_folder / bundle.WHEELS_FOLDER
    size = sum(member.size for member in members)
    return ImportResult(Run(run_folder), len(members), size, wheels_folder if wheels_folder.is_dir() else None)


def _read_manifest(bundle_file: Path, tar: tarfile.TarFile) -> dict[str, Any]:
    first_member = tar.next()
    if first_member is None or first_member.name != manifest.FILE_NAME or not first_member.isreg():
        raise InvalidBundle(
            f"{bundle_file} is not a bundle of rtrain export: its first member is not {manifest.FILE_NAME}"
        )
    content = tar.extractfile(first_member)
    try:
        document = json.loads(content.read()) if content else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict) or "run" not in document:
        raise InvalidBundle(f"{bundle_file}: its {manifest.FILE_NAME} cannot be read")
    if (version := document.get("schema_version")) != bundle.SCHEMA_VERSION:
        raise InvalidBundle(
            f"{bundle_file} has schema version {version}, and this rtrain reads {bundle.SCHEMA_VERSION}; use the "
            "rtrain that wrote it",
            code="other_version",
        )
    return document


def _check_members(tar: tarfile.TarFile, recorded_files: dict[str, Any]) -> list[tarfile.TarInfo]:
    """Return the members after the manifest. Each must be a plain file with a safe path, recorded, and present once."""
    members: dict[str, tarfile.TarInfo] = {}
    while (member := tar.next()) is not None:
        if not member.isreg() or member.issparse():
            raise InvalidBundle(
                f"{member.name!r} is a link, a device or a folder, which are invalid in a bundle; nothing was unpacked"
            )
        if problem := bundle.path_problem(member.name):
            raise InvalidBundle(f"{member.name!r} {problem}; nothing was unpacked")
        if member.name in members or member.name not in recorded_files:
            problem = "is duplicate" if member.name in members else f"is not recorded in {manifest.FILE_NAME}"
            raise InvalidBundle(f"{member.name!r} {problem}; nothing was unpacked")
        members[member.name] = member
        if len(members) > bundle.MAX_FILES:
            raise InvalidBundle(f"more than {bundle.MAX_FILES:,} files; nothing was unpacked")
    if missing := sorted(set(recorded_files) - set(members)):
        raise InvalidBundle(f"{missing[0]!r} is missing: the file is truncated; fetch it again")
    return list(members.values())
