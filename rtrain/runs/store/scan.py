"""What lies under a folder of runs: runs, searches, students, what they share, and what is none of these."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs.store import disk_usage, run_info, shared_files
from rtrain.runs.store.run_info import Known
from rtrain.runs.store.shared_files import Shared

DEPTH = 3
"""Folders below the root in which runs are sought: a demo or a drill keeps its runs in a folder of their own."""


@dataclass(frozen=True)
class Inventory:
    """All that lies under `root`."""

    root: Path
    runs: tuple[Known, ...]
    """Runs, searches and students; trials are in their searches."""
    linked: tuple[Known, ...] = ()
    """Those behind links, and their trials: they use what lies here, and are not looked after here."""
    shared: tuple[Shared, ...] = ()
    unread: tuple[str, ...] = ()
    """Folders that cannot be read: a run may lie in them."""
    drafts: tuple[Path, ...] = ()
    """Left by killed processes, beside the runs and among what they share."""

    def every(self) -> Iterator[Known]:
        """The runs, each followed by its trials."""
        for known in self.runs:
            yield known
            yield from known.trials

    def of(self, folder: Path) -> Known | None:
        return next((known for known in self.every() if known.run.folder == folder), None)

    @property
    def size(self) -> int:
        held: list[Known | Shared] = [*self.runs, *self.shared]
        return sum(one.size for one in held) + sum(disk_usage.size(path) for path in self.drafts)


@dataclass
class _Found:
    runs: list[Known] = field(default_factory=list)
    linked: list[Known] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    """Hidden folders that hold what runs share."""
    unread: list[str] = field(default_factory=list)
    drafts: list[Path] = field(default_factory=list)


def look(root: Path) -> Inventory:
    """What lies under an absolute path, which may be that of a run itself. Nothing is written.

    Raises `UserError` where there is no such folder. What is damaged or strange in it is listed as what it is.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; name the one that holds the runs", code="not_found")
    if Run(root).exists:
        return Inventory(root, (_read(Run(root), root.name),))
    found = _Found()
    _walk(root, root, found, DEPTH)
    here = {run.place for run in found.runs}
    linked = [one for run in found.linked if run.place not in here for one in (run, *run.trials)]
    known = [one for run in found.runs for one in (run, *run.trials)] + linked
    kept = [one for place in found.places for one in shared_files.inside(root, place, known)]
    found.drafts += [path for place in found.places for path in shared_files.dead_drafts(place)]
    return Inventory(root, tuple(found.runs), tuple(linked), tuple(kept), tuple(found.unread), tuple(found.drafts))


def around(folder: Path) -> Inventory:
    """What lies around a run, or around the search that a trial belongs to: the runs that may need something of it."""
    run = Run(folder)
    return look(folder.parent.parent if Run(folder.parent).exists and run.exists else folder.parent)


def _walk(root: Path, folder: Path, found: _Found, depth: int) -> None:
    for path in _children(folder):
        name = path.relative_to(root).as_posix()
        if not path.is_dir():
            continue
        if path.is_symlink():
            if holds_run(path):
                found.linked.append(_read(Run(path), name))
        elif path.name in shared_files.KINDS:
            found.places.append(path)
        elif path.name.startswith(".") and (path / atomic_write.LOCK).exists():
            found.drafts += [path] if path in shared_files.dead_drafts(folder) else []
        elif not os.access(path, os.R_OK | os.X_OK):
            found.unread.append(name)
        elif holds_run(path):
            found.runs.append(_read(Run(path), name))
        elif depth > 1:
            _walk(root, path, found, depth - 1)


def _read(run: Run, name: str) -> Known:
    if not run.exists:
        parts = disk_usage.parts(run)
        return Known(run, name, "run", "damaged", parts=parts, flaw=f"it has no {run.config.name}")
    return run_info.read_search(run, name) if run.is_search else run_info.read(run, name)


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's, also where its config.yaml is lost."""
    run = Run(folder)
    return run.exists or run.log.is_file() or next(run.checkpoints.glob("update-*"), None) is not None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
