"""`rtrain export`: a run's artefacts, and what is told of it, in one file for a machine without network."""

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
from rtrain.core.run_folder import ARTIFACT, Run, shown
from rtrain.inference import artifact
from rtrain.runs.store import bundle, disk_usage


@dataclass(frozen=True)
class Sent:
    """What an export has written."""

    file: Path
    run: str
    size: int
    files: int
    stayed: tuple[str, ...]
    """What of the folder was not carried, beside checkpoints."""
    with_texts: tuple[str, ...]
    """Carried files that hold the texts of rows."""


def check(run: Run, out: Path, int8: bool = False) -> None:
    """Raise `UserError` for a run without artefact, and for a file that exists or cannot be made."""
    if int8 and not (run.int8 / ARTIFACT).is_file():
        raise UserError(
            f"--int8: {run} has no int8 artefact; make it with: rtrain quantize {shown(run.folder)}", code="no_artefact"
        )
    if not (run.finished or (run.int8 / ARTIFACT).is_file()):
        raise UserError(f"{run} has no artefact to carry; finish its training first", code="no_artefact")
    if out.exists():
        raise UserError(f"--out: {out} exists already; name another file, or remove it", code="already_exists")
    if not out.parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; make it, or name another", code="not_found")


@dataclass(frozen=True)
class Verdict:
    """What the gate has said of an artefact that goes."""

    folder: Path
    verdict: str | None
    """None where it has not looked at it, or at another one in its place."""
    refusal: str | None
    """Why it was refused."""

    @property
    def name(self) -> str:
        return self.folder.name

    def __str__(self) -> str:
        if self.verdict is not None:
            return f"{self.name}: {self.verdict}" + (f": {self.refusal}" if self.refusal else "")
        return f"{self.name}: not looked at"


def verdicts(run: Run, int8: bool = False) -> list[Verdict]:
    """The gate's verdict on each artefact that goes."""
    found = []
    for folder in [run.int8] if int8 else [run.artifact, run.int8]:
        if (folder / ARTIFACT).is_file():
            document: Any = artifact.document_of(folder)
            gate, version = document.get("gate"), document["version"]
            own = gate is not None and gate.get("version") == version
            found.append(Verdict(folder, gate["verdict"] if own else None, artifact.refusal(gate, version)))
    return found


def admit(found: Iterable[Verdict]) -> None:
    """Refuse to carry what the gate has refused, as `rtrain serve` refuses to serve it."""
    for one in found:
        if one.refusal is not None:
            reason = (
                f"artefact {one.folder} was refused by the gate: {one.refusal}. To carry it all the same: --ungated"
            )
            raise UserError(reason, code="refused_by_gate")


def send(
    run: Run,
    name: str,
    out: Path,
    int8: bool = False,
    wheels: Iterable[Path] = (),
    install: str = "",
    *,
    texts: bool = True,
) -> Sent:
    """Write the parcel of a finished run, whole or not at all. Equal files give equal bytes, whenever they were made.

    `name` is that of the folder that it becomes; with `int8` the int8 artefact goes alone; without `texts`
    files that hold the texts of rows stay here. Raises `UserError` as
    `check` does, and where the disk refuses.
    """
    check(run, out, int8)
    go, stayed = bundle.carried(run, int8, texts)
    found = {f"{bundle.RUN}/{path}": run.folder / path for path in go}
    found |= {f"{bundle.WHEELS}/{path.name}": path for path in wheels}
    try:
        with atomic_write.replacement(out) as draft:
            _write(draft, name, found, install)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}", code="not_written") from None
    return Sent(out, name, out.stat().st_size, len(found), tuple(stayed), tuple(filter(disk_usage.TEXTS.fullmatch, go)))


def _write(draft: Path, name: str, files: dict[str, Path], install: str) -> None:
    entries = {path: manifest.entry(source) for path, source in sorted(files.items())}
    text = install.encode()
    if install:
        entries[bundle.INSTALL] = manifest.entry_of(text)
    document = {"schema_version": bundle.SCHEMA_VERSION, "run": name, "rtrain": __version__, "files": entries}
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, manifest.NAME, json.dumps(document, indent=1, sort_keys=True).encode())
        if install:
            _add(tar, bundle.INSTALL, text)
        for path, source in sorted(files.items()):
            member = _member(path, entries[path]["size"])
            with source.open("rb") as file:
                tar.addfile(member, file)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_member(name, len(data)), io.BytesIO(data))


def _member(name: str, size: int) -> tarfile.TarInfo:
    """No time, owner or mode of this machine: they would make other bytes of the same run."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
