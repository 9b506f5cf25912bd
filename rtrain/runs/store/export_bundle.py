"""`rtrain export`: a run's artifacts and records in one file, for a machine without network."""

import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import __version__
from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import ARTIFACT_FILE, Run, quote_path
from rtrain.inference import artifact
from rtrain.runs.store import bundle, disk_usage


@dataclass(frozen=True)
class ExportResult:
    """Result of an export."""

    file: Path
    run_name: str
    num_bytes: int
    num_files: int
    left_out: tuple[str, ...]
    """Files of the folder that were not exported, without checkpoints."""
    files_with_texts: tuple[str, ...]
    """Exported files that hold the texts of rows."""


def check_export(run: Run, out: Path, int8: bool = False) -> None:
    """Raise `UserError` for a run without an artifact, and for a file that exists or cannot be created."""
    if int8 and not (run.int8_artifact / ARTIFACT_FILE).is_file():
        raise UserError(
            f"--int8: {run} has no int8 artifact; make it with: rtrain quantize {quote_path(run.folder)}",
            code="no_artifact",
        )
    if not (run.is_finished or (run.int8_artifact / ARTIFACT_FILE).is_file()):
        raise UserError(f"{run} has no artifact to export; finish its training first", code="no_artifact")
    if out.exists():
        raise UserError(f"--out: {out} exists already; name another file, or remove it", code="already_exists")
    if not out.parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; make it, or name another", code="not_found")


@dataclass(frozen=True)
class ArtifactVerdict:
    """The gate's verdict on an exported artifact."""

    folder: Path
    verdict: str | None
    """None without a verdict on this version."""
    rejection_reason: str | None
    """Reason of a rejection."""

    @property
    def name(self) -> str:
        return self.folder.name

    def __str__(self) -> str:
        if self.verdict is not None:
            return f"{self.name}: {self.verdict}" + (f": {self.rejection_reason}" if self.rejection_reason else "")
        return f"{self.name}: no verdict"


def load_verdicts(run: Run, int8: bool = False) -> list[ArtifactVerdict]:
    """Return the gate's verdicts on the exported artifacts."""
    verdicts = []
    for folder in [run.int8_artifact] if int8 else [run.artifact, run.int8_artifact]:
        if (folder / ARTIFACT_FILE).is_file():
            document: Any = artifact.read_artifact_json(folder)
            gate, version = document.get("gate"), document["version"]
            is_current = gate is not None and gate.get("version") == version
            verdicts.append(
                ArtifactVerdict(
                    folder, gate["verdict"] if is_current else None, artifact.rejection_reason(gate, version)
                )
            )
    return verdicts


def require_accepted(verdicts: Iterable[ArtifactVerdict]) -> None:
    """Refuse to export artifacts that the gate has rejected, as `rtrain serve` refuses to serve them."""
    for verdict in verdicts:
        if verdict.rejection_reason is not None:
            message = (
                f"artifact {verdict.folder} was rejected by the gate: {verdict.rejection_reason}. Export "
                "it "
                "with --ungated"
            )
            raise UserError(message, code="refused_by_gate")


def export_bundle(
    run: Run,
    name: str,
    out: Path,
    int8: bool = False,
    wheels: Iterable[Path] = (),
    install: str = "",
    *,
    with_texts: bool = True,
) -> ExportResult:
    """Write the bundle of a finished run, atomically and reproducibly: equal files give equal bytes.

    Args:
        name: name of the run folder after the import.
        int8: export the int8 artifact only.
        with_texts: export files with the texts of rows.

    Raises:
        UserError: see `check_export`; or the file cannot be written.

    """
    check_export(run, out, int8)
    included, left_out = bundle.select_files(run, int8, with_texts)
    source_by_path = {f"{bundle.RUN_FOLDER}/{path}": run.folder / path for path in included}
    source_by_path |= {f"{bundle.WHEELS_FOLDER}/{path.name}": path for path in wheels}
    try:
        with atomic_write.replace_file(out) as draft:
            _write_bundle(draft, name, source_by_path, install)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}", code="not_written") from None
    return ExportResult(
        out,
        name,
        out.stat().st_size,
        len(source_by_path),
        tuple(left_out),
        tuple(filter(disk_usage.TEXT_RECORD_PATTERN.fullmatch, included)),
    )


def _write_bundle(draft: Path, name: str, files: dict[str, Path], install: str) -> None:
    entries = {path: manifest.compute_entry(source) for path, source in sorted(files.items())}
    text = install.encode()
    if install:
        entries[bundle.INSTALL_FILE] = manifest.entry_from_bytes(text)
    document = {"schema_version": bundle.SCHEMA_VERSION, "run": name, "rtrain": __version__, "files": entries}
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as tar:
        _add_bytes(tar, manifest.FILE_NAME, json.dumps(document, indent=1, sort_keys=True).encode())
        if install:
            _add_bytes(tar, bundle.INSTALL_FILE, text)
        for path, source in sorted(files.items()):
            member = _make_member(path, entries[path]["size"])
            with source.open("rb") as file:
                tar.addfile(member, file)


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_make_member(name, len(data)), io.BytesIO(data))


def _make_member(name: str, size: int) -> tarfile.TarInfo:
    """Return a tar member without time, owner or mode of this machine, for reproducible bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
