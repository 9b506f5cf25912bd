"""Format of the file that moves a run to another machine: a tar of plain files with their SHA-256 digests.

MANIFEST.json   first: the run's name, rtrain's version, and size and SHA-256 of every other file
INSTALL.txt     with wheels: the commands for a machine without rtrain
run/...         the run's artifacts and records
wheels/...      optional: the packages for inference

It holds no pickle: no loader of rtrain or of an artifact unpickles these kinds of files.
"""

from pathlib import Path, PurePosixPath

from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report.live import trackers
from rtrain.runs.store import disk_usage

SCHEMA_VERSION = 1
RUN_FOLDER, WHEELS_FOLDER, INSTALL_FILE = "run", disk_usage.WHEELS, "INSTALL.txt"
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
        run.folder / trackers.RUN_ID_FILE,
        *([run.artifact] if int8 else []),
    )
    included: list[str] = []
    left_out: list[str] = []
    for entry in sorted(run.folder.iterdir()):
        part = disk_usage.find_part(run, entry)
        if (
            part in (disk_usage.CHECKPOINTS, disk_usage.RAY, disk_usage.LEFTOVERS, disk_usage.TRIALS)
            or entry in excluded
        ):
            continue
        if not with_texts and disk_usage.TEXT_RECORD_PATTERN.fullmatch(entry.name):
            continue
        if part in (disk_usage.OTHER_FILES, disk_usage.WHEELS) or entry.is_symlink():
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
