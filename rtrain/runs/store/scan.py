"""Scan a folder of runs: runs, searches, students, shared items, unreadable folders and drafts.

Shared items lie in hidden folders beside the runs: token stores, copies of hub models and data sets, initial weights of
students, trimmed models.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rtrain.core import atomic_write, hub
from rtrain.core.errors import UserError
from rtrain.core.run_folder import ROWS_FOLDER, Run
from rtrain.runs.store import run_info
from rtrain.runs.store.run_info import RunInfo

MAX_DEPTH = 3
"""Maximum depth of runs below the root: a demo or a drill has a folder for its runs."""
TOKENS_FOLDER, STUDENTS_FOLDER, VOCABULARIES_FOLDER, COPIES_FOLDER = ".tokens", ".students", ".vocabularies", ".copies"
CATEGORY_BY_FOLDER = {
    TOKENS_FOLDER: "token store",
    STUDENTS_FOLDER: "start of a student",
    VOCABULARIES_FOLDER: "trimmed model",
    COPIES_FOLDER: "copies of rows",
    ROWS_FOLDER: "rows from Python",
    hub.COPY_FOLDERS["model"]: "copy of a model",
    hub.COPY_FOLDERS["dataset"]: "copy of a data set",
}
"""Category of the items in each hidden folder."""


@dataclass(frozen=True)
class SharedItem:
    """A token store or a copy, and the runs that use it."""

    path: Path
    name: str
    """Its path relative to the scanned folder."""
    category: str
    size: int
    users: tuple[RunInfo, ...] = ()

    @property
    def measurement_files(self) -> list[Path]:
        """Files with measurements of a token store, beside it."""
        return sorted(self.path.parent.glob(f".{self.path.name}.*.json"))

    @property
    def is_inactive(self) -> bool:
        """Whether it is too old to have just been created for a starting run."""
        return run_info.is_inactive(self.path)


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
        return sum(item.size for item in items) + sum(run_info.measure_bytes(path) for path in self.drafts)


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
    shared_items = [item for place in scan.shared_folders for item in list_shared(root, place, all_runs)]
    scan.drafts += [path for place in scan.shared_folders for path in find_dead_drafts(place)]
    return Inventory(
        root, tuple(scan.runs), tuple(linked_runs), tuple(shared_items), tuple(scan.unreadable), tuple(scan.drafts)
    )


def scan_surroundings(folder: Path) -> Inventory:
    """Scan the siblings of a run, or of a trial's search: they may need it."""
    run = Run(folder)
    return scan_folder(folder.parent.parent if Run(folder.parent).exists and run.exists else folder.parent)


@dataclass
class _ScanResult:
    runs: list[RunInfo] = field(default_factory=list)
    linked: list[RunInfo] = field(default_factory=list)
    shared_folders: list[Path] = field(default_factory=list)
    """Hidden folders with shared items."""
    unreadable: list[str] = field(default_factory=list)
    drafts: list[Path] = field(default_factory=list)


def _scan_into(root: Path, folder: Path, scan: _ScanResult, depth: int) -> None:
    for path in run_info.list_folder(folder):
        name = path.relative_to(root).as_posix()
        if not path.is_dir():
            continue
        if path.is_symlink():
            if holds_run(path):
                scan.linked.append(_read_run_info(Run(path), name))
        elif path.name in CATEGORY_BY_FOLDER:
            scan.shared_folders.append(path)
        elif path.name.startswith(".") and (path / atomic_write.LOCK_FILE).exists():
            scan.drafts += [path] if path in find_dead_drafts(folder) else []
        elif not os.access(path, os.R_OK | os.X_OK):
            scan.unreadable.append(name)
        elif holds_run(path):
            scan.runs.append(_read_run_info(Run(path), name))
        elif depth > 1:
            _scan_into(root, path, scan, depth - 1)


def _read_run_info(run: Run, name: str) -> RunInfo:
    if not run.exists:
        bytes_by_part = run_info.bytes_by_part(run)
        return RunInfo(run, name, "run", "damaged", bytes_by_part=bytes_by_part, problem=f"it has no {run.config.name}")
    return run_info.read_search(run, name) if run.is_search else run_info.read_run(run, name)


def holds_run(folder: Path) -> bool:
    """Return whether a folder is a run folder, with or without config.yaml."""
    run = Run(folder)
    return run.exists or run.log.is_file() or next(run.checkpoints.glob("step-*"), None) is not None


# ------------------------------------------------------------------------------------------------------- shared items


def list_shared(root: Path, folder: Path, run_infos: Iterable[RunInfo]) -> list[SharedItem]:
    """Return the items of a hidden folder, with their users. Users are matched by digest or name, since a folder of
    runs may have been moved."""
    runs = list(run_infos)
    items = []
    for path in run_info.list_folder(folder):
        if path.name.startswith(".") or not path.is_dir():
            continue
        # The name of the packaged model's copy has its digest (`rtrain.runs.nodes`), which is in no setting.
        is_packaged = folder.name == hub.COPY_FOLDERS["model"] and path.name.startswith(f"{hub.PACKAGED_MODEL}@")
        name = hub.PACKAGED_MODEL if is_packaged else path.name
        users = tuple(run for run in runs if name in _used_names(run, folder.name))
        items.append(
            SharedItem(
                path,
                path.relative_to(root).as_posix(),
                CATEGORY_BY_FOLDER[folder.name],
                run_info.measure_bytes(path),
                users,
            )
        )
    return items


def _used_names(info: RunInfo, folder: str) -> set[str]:
    """Return the names in a hidden folder that a run uses."""
    if folder == TOKENS_FOLDER:
        return {info.store.name} if info.store else set()
    if folder == STUDENTS_FOLDER:
        return {Path(info.model).name}
    if folder == VOCABULARIES_FOLDER:
        return {info.trimmed_model.name} if info.trimmed_model else set()
    if folder == COPIES_FOLDER:
        return {Path(info.augmented_rows_path).parent.name} if info.augmented_rows_path else set()
    if folder == ROWS_FOLDER:
        return {Path(source).parent.name for source in info.data_sources}
    kind: hub.RepoType = "model" if folder == hub.COPY_FOLDERS["model"] else "dataset"
    names = [info.model] if kind == "model" else info.data_sources
    copied_rows = {Path(text).parent.name for text in names}  # of a database (`rtrain.data.tables`)
    return copied_rows | {
        hub.copy_folder(kind, name, Path()).name for text in names if (name := hub.parse_hub_name(text))
    }


def find_dead_drafts(folder: Path) -> list[Path]:
    """Return the drafts of killed writers directly in a folder."""
    dead_drafts = []
    for path in run_info.list_folder(folder):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) and path.is_dir() and (path / atomic_write.LOCK_FILE).exists():
            try:
                is_dead = atomic_write.is_stale(path)
            except OSError:
                continue
            dead_drafts += [path] if is_dead else []
    return dead_drafts
