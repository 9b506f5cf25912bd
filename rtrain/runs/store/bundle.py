"""`rtrain export` and `rtrain import`: a run in one file for a machine without network, a tar of plain files with their
SHA-256 digests.

MANIFEST.json   first: the run's name, rtrain's version, and size and SHA-256 of every other file
INSTALL.txt     with wheels: the commands for a machine without rtrain
run/...         the run's artifacts and records
wheels/...      optional: the packages for inference, as wheels of the installed versions

It holds no pickle: no loader of rtrain or of an artifact unpickles these kinds of files. An int8 artifact needs neither
torch nor transformers, and `rtrain predict` does not need Ray: the smallest set of wheels has some 150 MB, and all of
rtrain several hundred.
"""

import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import rtrain
from rtrain import __version__
from rtrain.core import atomic_write, engines, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import ARTIFACT_FILE, Run, quote_path
from rtrain.inference import artifact
from rtrain.report import trackers
from rtrain.runs.store import run_info

SCHEMA_VERSION = 1
RUN_FOLDER, WHEELS_FOLDER, INSTALL_FILE = "run", run_info.WHEELS, "INSTALL.txt"
ALLOWED_SUFFIXES = frozenset(
    {".json", ".jsonl", ".yaml", ".html", ".parquet", ".safetensors", ".txt", ".xml", ".model"}
)
"""Allowed suffixes of a run's files. `pytorch_model.bin` is not allowed: loaders unpickle it."""
ENGINE_FILES = frozenset(
    f"{name}{end}"
    for engine in engines.ENGINES.values()
    for name in engine.files
    for end in ("", engines.COMPRESSED_SUFFIX)
)
"""Files of engines, with any suffix."""
MAX_FILES = 10_000
EXTRACT_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python's own member filter, in addition to `_check_members`; Python 3.11 supports it since 3.11.4."""
Purpose = Literal["predict", "serve", "all"]
"""Use of the other machine: `rtrain predict`, also `rtrain serve`, or all of rtrain."""
PURPOSES: dict[Purpose, str] = {"predict": "predict", "serve": "serve", "all": "use all of rtrain"}
PREDICT_PACKAGES = ("fsspec", "numpy", "pyarrow", "pydantic", "PyYAML", "regex", "rich", "tokenizers", "typer")
"""Needed by the command line, by inference, and for files of rows (pyarrow)."""
SERVE_PACKAGES = ("ray[data,serve]", "fastapi-offline", "limits", "prometheus_client", "psutil", "scipy", "starlette")
WHEEL_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rtrain", "serve", "tune")
"""Files of a checkout from which rtrain's own wheel is built."""
BUILD_TIME = "315532800"
"""Time of the files in rtrain's own wheel: 1980, the earliest in a zip. Equal files give equal bytes."""
MAX_ERROR_LINES = 5
"""Last lines of pip's output in an error."""


class InvalidBundle(UserError):
    """The file is not a bundle of `rtrain export`, or was changed or truncated."""

    code = "invalid_bundle"


def select_files(run: Run, int8: bool = False, with_texts: bool = True) -> tuple[list[str], list[str]]:
    """Return (included files, left out files), as sorted paths in the run folder.

    Checkpoints, Ray files and leftovers are in neither. `int8` excludes the float artifact; without `with_texts`, files
    with the texts of rows are excluded.
    """
    excluded = (
        run.lock,
        run.stop_request,
        run.placement_group,
        run.folder / trackers.STATE_FILE,
        *([run.artifact] if int8 else []),
    )
    included: list[str] = []
    left_out: list[str] = []
    for entry in sorted(run.folder.iterdir()):
        part = run_info.find_part(run, entry)
        if part in (run_info.CHECKPOINTS, run_info.RAY, run_info.LEFTOVERS, run_info.TRIALS) or entry in excluded:
            continue
        if not with_texts and run_info.TEXT_RECORD_PATTERN.fullmatch(entry.name):
            continue
        if part in (run_info.OTHER_FILES, run_info.WHEELS) or entry.is_symlink():
            left_out.append(entry.name)
            continue
        for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
            name = path.relative_to(run.folder).as_posix()
            if path.is_file():
                is_allowed = not path.is_symlink() and path_problem(f"{RUN_FOLDER}/{name}") is None
                (included if is_allowed else left_out).append(name)
    return sorted(included), sorted(left_out)


def path_problem(name: str) -> str | None:
    """Return why a path is invalid in a bundle, or None: it leaves the folder on some system, or has an invalid
    kind."""
    path = PurePosixPath(name)
    is_plain = name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    is_in_folder = len(path.parts) > 1 and path.parts[0] in (RUN_FOLDER, WHEELS_FOLDER)
    if not is_plain or ".." in path.parts or not (is_in_folder or name == INSTALL_FILE):
        return "is not a valid path in a bundle of rtrain export"
    if path.parts[0] == RUN_FOLDER and path.suffix not in ALLOWED_SUFFIXES and path.name not in ENGINE_FILES:
        return "is not a kind of file of a run"
    if path.parts[0] == WHEELS_FOLDER and (len(path.parts) > 2 or path.suffix != ".whl"):
        return "is not a wheel"
    return None


def validate_run_name(name: object) -> str:
    """Return the name of the run folder. Raises `InvalidBundle` for an invalid name."""
    if isinstance(name, str) and name and name == Path(name).name and name.isprintable() and name[0] not in ".-":
        return name
    raise InvalidBundle(f"{name!r} is not a valid name of a run; nothing was unpacked")


# ------------------------------------------------------------------------------------------------------------- export


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
    included, left_out = select_files(run, int8, with_texts)
    source_by_path = {f"{RUN_FOLDER}/{path}": run.folder / path for path in included}
    source_by_path |= {f"{WHEELS_FOLDER}/{path.name}": path for path in wheels}
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
        tuple(filter(run_info.TEXT_RECORD_PATTERN.fullmatch, included)),
    )


def _write_bundle(draft: Path, name: str, files: dict[str, Path], install: str) -> None:
    entries = {path: manifest.compute_entry(source) for path, source in sorted(files.items())}
    text = install.encode()
    if install:
        entries[INSTALL_FILE] = manifest.entry_from_bytes(text)
    document = {"schema_version": SCHEMA_VERSION, "run": name, "rtrain": __version__, "files": entries}
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as tar:
        _add_bytes(tar, manifest.FILE_NAME, json.dumps(document, indent=1, sort_keys=True).encode())
        if install:
            _add_bytes(tar, INSTALL_FILE, text)
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


# ------------------------------------------------------------------------------------------------------------- import


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
    run_folder = out or root / validate_run_name(document["run"])
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
        draft_run = draft.folder / RUN_FOLDER
        if not Run(draft_run).exists:
            raise InvalidBundle(f"{bundle_file} has no run (no {Run(draft_run).config.name}); nothing was unpacked")
        wheels = draft.folder / WHEELS_FOLDER
        if wheels.is_dir():
            wheels.rename(draft_run / WHEELS_FOLDER)
        Run(draft_run).append_event(
            "imported", file=bundle_file.name, files=len(members), rtrain=document.get("rtrain")
        )
        atomic_write.publish_folder(draft_run, run_folder)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    wheels_folder = run_folder / WHEELS_FOLDER
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
    if (version := document.get("schema_version")) != SCHEMA_VERSION:
        raise InvalidBundle(
            f"{bundle_file} has schema version {version}, and this rtrain reads {SCHEMA_VERSION}; use the "
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
        if problem := path_problem(member.name):
            raise InvalidBundle(f"{member.name!r} {problem}; nothing was unpacked")
        if member.name in members or member.name not in recorded_files:
            problem = "is duplicate" if member.name in members else f"is not recorded in {manifest.FILE_NAME}"
            raise InvalidBundle(f"{member.name!r} {problem}; nothing was unpacked")
        members[member.name] = member
        if len(members) > MAX_FILES:
            raise InvalidBundle(f"more than {MAX_FILES:,} files; nothing was unpacked")
    if missing := sorted(set(recorded_files) - set(members)):
        raise InvalidBundle(f"{missing[0]!r} is missing: the file is truncated; fetch it again")
    return list(members.values())


# ------------------------------------------------------------------------------------------------------------- wheels


def required_packages(purpose: Purpose, engine_names: Iterable[str]) -> list[str]:
    """Return the names of the packages for artifacts of these engines, without their dependencies."""
    if purpose == "all":
        requirements = metadata.requires("rtrain") or ()
        needed = [line for line in requirements if "extra ==" not in line or 'extra == "train"' in line]
        return sorted({_requirement_name(line) for line in needed}, key=str.lower)
    names = {*PREDICT_PACKAGES, *(SERVE_PACKAGES if purpose == "serve" else ())}
    for name in engine_names:
        spec = engines.ENGINES.get(name)
        names.update(spec.packages if spec and spec.packages else (name,))
    return sorted(names, key=str.lower)


def fetch_wheels(purpose: Purpose, engine_names: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels, and build rtrain's own, into an empty folder. Raises `UserError` if pip fails."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in installed_constraints()), encoding="utf-8")
    _run_pip(download_arguments(required_packages(purpose, engine_names), constraints, folder))
    _build_own_wheel(folder)
    constraints.unlink()
    return sorted(folder.glob("*.whl"))


def download_arguments(names: Sequence[str], constraints: Path, folder: Path) -> list[str]:
    """Return pip's arguments. Wheels only: the other machine has no build tools."""
    return ["download", "--only-binary=:all:", "--dest", str(folder), "--constraint", str(constraints), *names]


def installed_constraints() -> list[str]:
    """Return `name==version` of all installed packages but rtrain, as pip constraints.

    Without the local part (`+cpu`): an index that has the same version in another build serves as well.
    """
    constraint_by_name: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() != "rtrain":
            constraint_by_name.setdefault(name.lower(), f"{name}=={distribution.version.partition('+')[0]}")
    return [constraint_by_name[name] for name in sorted(constraint_by_name)]


def install_command(folder: str) -> str:
    """Return the command that installs the wheels of a folder without an index."""
    return f"python -m pip install --no-index --no-deps {folder}/*.whl"


def torch_build_warning(names: Iterable[str]) -> str | None:
    """Return a warning about torch: PyPI has the CUDA build in place of this machine's build."""
    version = metadata.version("torch") if "torch" in names else ""
    if "+" not in version or any(os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")):
        return None
    build = version.partition("+")[2]
    return (
        f"torch here is {version}; PyPI has its CUDA build in that place, of gigabytes. For this one set "
        f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{build}"
    )


def format_instructions(run: str, file: str, purpose: Purpose) -> str:
    """Return INSTALL.txt: the commands for a machine without rtrain."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    platform_text = f"{version}, {platform.system()} {platform.machine()}"
    return (
        f"The run {run}, and the wheels that it takes to {PURPOSES[purpose]}: {platform_text}.\n\n"
        f"tar -xf {shlex.quote(file)} wheels\n"
        f"{version} -m venv env\n"
        f". env/bin/activate\n"
        f"{install_command('wheels')}\n"
        f"rtrain import {shlex.quote(file)}\n"
    )


def _build_own_wheel(folder: Path) -> None:
    """Build rtrain's own wheel from its checkout, or download it."""
    checkout = Path(rtrain.__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        _run_pip(["download", "--no-deps", "--dest", str(folder), f"rtrain=={rtrain.__version__}"])
        return
    copy = folder / "checkout"  # a build writes files into its folder
    copy.mkdir()
    for name in WHEEL_SOURCES:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy / name)
    _run_pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(copy)])
    shutil.rmtree(copy)


def _run_pip(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": BUILD_TIME, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    arguments_line = [sys.executable, "-m", "pip", *arguments]
    completed = subprocess.run(arguments_line, capture_output=True, text=True, env=environment, check=False)
    if completed.returncode:
        error_lines = "\n  ".join(completed.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
        raise UserError(
            f"pip could not fetch the wheels:\n  {error_lines}\nThis machine must reach a package index "
            "(PIP_INDEX_URL, "
            "PIP_EXTRA_INDEX_URL); export without --with-wheels where the other machine has rtrain already.",
            code="unreachable",
        )


def _requirement_name(requirement: str) -> str:
    """Return name and extras of a requirement, without its version."""
    end = next((place for place, char in enumerate(requirement) if char in "<>=!~; "), len(requirement))
    return requirement[:end]
