"""Scan a folder of runs: runs, searches, students, shared items, unreadable folders and drafts."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs.store import disk_usage, run_info, shared_files
from rtrain.runs.store.run_info import RunInfo
from rtrain.runs.store.shared_files import SharedItem

MAX_DEPTH = 3
"""Maximum depth of runs below the root: a demo or a drill has a folder for its runs."""


@dataclass(frozen=True)
class Inventory:
    """Result of a scan of `root`."""

    root: Path
    runs: tuple[RunInfo, ...]
    """Runs, searches and students. Trials belong to their searches."""
    linked: tuple[RunInfo, ...] = ()
    """Runs behind links, and their trials: they may use shared items here, but are not managed here."""
    shared: tuple[SharedItem, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Unreadable folders, which may hold runs."""
    drafts: tuple[Path, ...] = ()
    """Drafts of killed processes."""

    def iter_runs(self) -> Iterator[RunInfo]:
        """Yield the runs, each followed by its trials."""
        for info in self.runs:
            yield info
            yield from info.trials

    def find(self, folder: Path) -> RunInfo | None:
        return next((run for run in self.iter_runs() if run.run.folder == folder), None)

    @property
    def size(self) -> int:
        items: list[RunInfo | SharedItem] = [*self.runs, *self.shared]
        return sum(item.size for item in items) + sum(disk_usage.measure_bytes(path) for path in self.drafts)


@dataclass
class _ScanResult:
    runs: list[RunInfo] = field(default_factory=list)
    linked: list[RunInfo] = field(default_factory=list)
    shared_folders: list[Path] = field(default_factory=list)
    """Hidden folders with shared items."""
    unreadable: list[str] = field(default_factory=list)
    drafts: list[Path] = field(default_factory=list)


def scan_folder(root: Path) -> Inventory:
    """Scan an absolute path, which may be a run folder itself. Nothing is written.

    Damaged runs and foreign files are listed. Raises `UserError` if the folder does not exist.

    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; name the folder of the runs", code="not_found")
    if Run(root).exists:
        return Inventory(root, (_read_run_info(Run(root), root.name),))
    scan = _ScanResult()
    _scan_into(root, root, scan, MAX_DEPTH)
    local_paths = {run.real_path for run in scan.runs}
    linked_runs = [trial for run in scan.linked if run.real_path not in local_paths for trial in (run, *run.trials)]
    all_runs = [trial for run in scan.runs for trial in (run, *run.trials)] + linked_runs
    shared_items = [item for place in scan.shared_folders for item in shared_files.list_shared(root, place, all_runs)]
    scan.drafts += [path for place in scan.shared_folders for path in shared_files.find_dead_drafts(place)]
    return Inventory(
        root, tuple(scan.runs), tuple(linked_runs), tuple(shared_items), tuple(scan.unreadable), tuple(scan.drafts)
    )


def scan_surroundings(folder: Path) -> Inventory:
    """Scan the siblings of a run, or of a trial's search: they may need it."""
    run = Run(folder)
    return scan_folder(folder.parent.parent if Run(folder.parent).exists and run.exists else folder.parent)


def _scan_into(root: Path, folder: Path, scan: _ScanResult, depth: int) -> None:
    for path in _list_children(folder):
        name = path.relative_to(root).as_posix()
        if not path.is_dir():
            continue
        if path.is_symlink():
            if holds_run(path):
                scan.linked.append(_read_run_info(Run(path), name))
        elif path.name in shared_files.CATEGORY_BY_FOLDER:
            scan.shared_folders.append(path)
        elif path.name.startswith(".") and (path / atomic_write.LOCK_FILE).exists():
            scan.drafts += [path] if path in shared_files.find_dead_drafts(folder) else []
        elif not os.access(path, os.R_OK | os.X_OK):
            scan.unreadable.append(name)
        elif holds_run(path):
            scan.runs.append(_read_run_info(Run(path), name))
        elif depth > 1:
            _scan_into(root, path, scan, depth - 1)


def _read_run_info(run: Run, name: str) -> RunInfo:
    if not run.exists:
        bytes_by_part = disk_usage.bytes_by_part(run)
        return RunInfo(run, name, "run", "damaged", bytes_by_part=bytes_by_part, problem=f"it has no {run.config.name}")
    return run_info.read_search(run, name) if run.is_search else run_info.read_run(run, name)


def holds_run(folder: Path) -> bool:
    """Return whether a folder is a run folder, with or without config.yaml."""
    run = Run(folder)
    return run.exists or run.log.is_file() or next(run.checkpoints.glob("step-*"), None) is not None


def _list_children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
