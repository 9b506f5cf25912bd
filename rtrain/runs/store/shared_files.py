"""Items that runs share, in hidden folders beside them: token stores, copies of hub models and data sets, initial
weights of students, trimmed models."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtrain.core import atomic_write, hub
from rtrain.runs.store import disk_usage
from rtrain.runs.store.run_info import RunInfo

TOKENS_FOLDER, STUDENTS_FOLDER, VOCABULARIES_FOLDER, COPIES_FOLDER = ".tokens", ".students", ".vocabularies", ".copies"
CATEGORY_BY_FOLDER = {
    TOKENS_FOLDER: "token store",
    STUDENTS_FOLDER: "start of a student",
    VOCABULARIES_FOLDER: "trimmed model",
    COPIES_FOLDER: "copies of rows",
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
        return disk_usage.is_inactive(self.path)


def list_shared(root: Path, folder: Path, run_infos: Iterable[RunInfo]) -> list[SharedItem]:
    """Return the items of a hidden folder, with their users. Users are matched by digest or name, since a folder of
    runs may have been moved."""
    runs = list(run_infos)
    items = []
    for path in _list_folder(folder):
        if path.name.startswith(".") or not path.is_dir():
            continue
        # The name of the packaged model's copy has its digest (`rtrain.runs.node_checks`), which is in no setting.
        is_packaged = folder.name == hub.COPY_FOLDERS["model"] and path.name.startswith(f"{hub.PACKAGED_MODEL}@")
        name = hub.PACKAGED_MODEL if is_packaged else path.name
        users = tuple(run for run in runs if name in _used_names(run, folder.name))
        items.append(
            SharedItem(
                path,
                path.relative_to(root).as_posix(),
                CATEGORY_BY_FOLDER[folder.name],
                disk_usage.measure_bytes(path),
                users,
            )
        )
    return items


def find_dead_drafts(folder: Path) -> list[Path]:
    """Return the drafts of killed writers directly in a folder."""
    dead_drafts = []
    for path in _list_folder(folder):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) and path.is_dir() and (path / atomic_write.LOCK_FILE).exists():
            try:
                is_dead = atomic_write.is_stale(path)
            except OSError:
                continue
            dead_drafts += [path] if is_dead else []
    return dead_drafts


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # an unreadable folder is kept
        return []


def _used_names(run_info: RunInfo, folder: str) -> set[str]:
    """Return the names in a hidden folder that a run uses."""
    if folder == TOKENS_FOLDER:
        return {run_info.store.name} if run_info.store else set()
    if folder == STUDENTS_FOLDER:
        return {Path(run_info.model).name}
    if folder == VOCABULARIES_FOLDER:
        return {run_info.trimmed_model.name} if run_info.trimmed_model else set()
    if folder == COPIES_FOLDER:
        return {Path(run_info.augmented_rows_path).parent.name} if run_info.augmented_rows_path else set()
    kind: hub.RepoType = "model" if folder == hub.COPY_FOLDERS["model"] else "dataset"
    names = [run_info.model] if kind == "model" else run_info.data_sources
    return {hub.copy_folder(kind, name, Path()).name for text in names if (name := hub.parse_hub_name(text))}
