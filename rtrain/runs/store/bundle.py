"""The form of the file that carries a run to another machine: a tar of plain files, each under its SHA-256.

MANIFEST.json   first: the run's name, rtrain's version, and size and SHA-256 of every other file
INSTALL.txt     with wheels: the commands for a machine that has nothing yet
run/...         the run's artefacts, and what is told of it
wheels/...      what answering needs, where it was asked for

It holds no pickle: only kinds of files that nothing in rtrain, and nothing that loads an artefact, unpickles.
"""

from pathlib import Path, PurePosixPath

from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report.live import trackers
from rtrain.runs.store import disk_usage

SCHEMA_VERSION = 1
RUN, WHEELS, INSTALL = "run", disk_usage.WHEELS, "INSTALL.txt"
SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".html", ".parquet", ".safetensors", ".txt", ".xml", ".model"})
"""Suffixes of the files of a run that go. `pytorch_model.bin` is not among them: it would be unpickled."""
NAMES = frozenset(
    f"{name}{end}" for engine in engines.ENGINES.values() for name in engine.files for end in ("", engines.PACKED)
)
"""Files of an engine, whatever their suffix."""
MOST_FILES = 10_000


class NoParcel(UserError):
    """A file that no `rtrain export` has made, or that was changed or cut short since."""

    code = "damaged_parcel"


def carried(run: Run, int8: bool = False, texts: bool = True) -> tuple[list[str], list[str]]:
    """(files of a run that go, those that stay behind), by their paths in its folder, sorted.

    Checkpoints, Ray's own files and leftovers are in neither: they are never carried. With `int8` nor is the float
    artefact, and without `texts` no file that holds the texts of rows.
    """
    never = (run.lock, run.notice, run.placement_group, run.folder / trackers.RUN_ID, *([run.artifact] if int8 else []))
    go: list[str] = []
    stay: list[str] = []
    for top in sorted(run.folder.iterdir()):
        part = disk_usage.part_of(run, top)
        if part in (disk_usage.CHECKPOINTS, disk_usage.RAY, disk_usage.LEFT, disk_usage.TRIALS) or top in never:
            continue
        if not texts and disk_usage.TEXTS.fullmatch(top.name):
            continue
        if part in (disk_usage.OTHER, disk_usage.WHEELS) or top.is_symlink():
            stay.append(top.name)
            continue
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            name = path.relative_to(run.folder).as_posix()
            if path.is_file():
                fit = not path.is_symlink() and flaw(f"{RUN}/{name}") is None
                (go if fit else stay).append(name)
    return sorted(go), sorted(stay)


def flaw(name: str) -> str | None:
    """Why a path cannot be in a parcel, or None: it leads elsewhere, on whatever system, or is of another kind."""
    path = PurePosixPath(name)
    plain = name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    inside = len(path.parts) > 1 and path.parts[0] in (RUN, WHEELS)
    if not plain or ".." in path.parts or not (inside or name == INSTALL):
        return "has no place in a parcel of rtrain export"
    if path.parts[0] == RUN and path.suffix not in SUFFIXES and path.name not in NAMES:
        return "is of a kind that no run holds"
    if path.parts[0] == WHEELS and (len(path.parts) > 2 or path.suffix != ".whl"):
        return "is no wheel"
    return None


def refuse_run_name(name: object) -> str:
    """The name of the run's folder. Raises `NoParcel` for what cannot be one."""
    if isinstance(name, str) and name and name == Path(name).name and name.isprintable() and name[0] not in ".-":
        return name
    raise NoParcel(f"{name!r} is no name of a run; nothing was unpacked")
