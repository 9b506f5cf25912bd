"""`rtrain clean`: a plan with the items to remove, the consequences and reasons to keep; then the removal.

A kill leaves a consistent run; the next call removes the rest.
"""

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core import manifest
from rtrain.core.errors import UserError, redact
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from rtrain.runs.store import run_info, scan
from rtrain.runs.store.run_info import RunInfo
from rtrain.runs.store.scan import Inventory, SharedItem

Keep = Literal["artifact", "none"]
"""Kept part of a run: its artifact and results, or nothing."""


@dataclass(frozen=True)
class RemovalItem:
    """A file or folder to remove."""

    path: Path
    size: int
    category: str


@dataclass(frozen=True)
class Removal:
    """The removal of parts of a run, or of a shared item (`run` is None)."""

    name: str
    run: RunInfo | None
    keep: Keep
    items: tuple[RemovalItem, ...] = ()
    consequences: tuple[str, ...] = ()
    """Consequences, as messages."""
    kept_reasons: tuple[str, ...] = ()
    """Why requested parts are kept, as messages."""
    is_unreadable: bool = False
    """Parts are kept because a file cannot be read."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.items)

    @property
    def removes_run(self) -> bool:
        """Whether the run folder is removed, except for foreign files."""
        return self.run is not None and self.keep == "none" and bool(self.items)


def plan_run_removal(info: RunInfo, keep: Keep, inventory: Inventory) -> list[Removal]:
    """Return the removal of a run, followed by those of its trials."""
    return _plan_run(info, keep, inventory, {trial.run.folder for trial in (info, *info.trials)})


def plan_root_removal(inventory: Inventory, keep: Keep, with_stores: bool = False) -> list[Removal]:
    """Return the removals of all runs, and of shared items that no remaining run uses.

    With `with_stores`, token stores of complete runs are removed too.
    """
    removable = _removable_folders(inventory) if keep == "none" else set()
    removals = [removal for run in inventory.runs for removal in _plan_run(run, keep, inventory, removable)]
    removed_folders = {removal.run.run.folder for removal in removals if removal.run and removal.removes_run}
    listed_runs = (*inventory.runs, *inventory.linked)
    unreadable = [run.name for run in listed_runs if run.status == "damaged" and run.run.folder not in removed_folders]
    # An unreadable folder may hold a run; the file system's own lost+found does not.
    unreadable += [name for name in inventory.unreadable if name != "lost+found"]
    removals += [
        _plan_shared_removal(item, removed_folders, with_stores, keep, unreadable) for item in inventory.shared
    ]
    draft_items = tuple(
        RemovalItem(path, run_info.measure_bytes(path), run_info.LEFTOVERS) for path in inventory.drafts
    )
    return [*removals, *([Removal("drafts of killed processes", None, keep, draft_items)] if draft_items else [])]


def _removable_folders(inventory: Inventory) -> set[Path]:
    """Return the folders of runs and trials that can be removed together: none is in use, and no remaining run needs
    one."""
    candidates = [run for run in inventory.runs if _find_busy_run(run) is None]
    while True:
        folders = {trial.run.folder for candidate in candidates for trial in (candidate, *candidate.trials)}
        unneeded = [candidate for candidate in candidates if not list_dependents(candidate, inventory, folders)]
        if len(unneeded) == len(candidates):
            return folders
        candidates = unneeded


# -------------------------------------------------------------------------------------------------- the plan of a run


def _plan_run(info: RunInfo, keep: Keep, inventory: Inventory, removed_folders: set[Path]) -> list[Removal]:
    """`removed_folders`: folders of runs that are removed together with this one."""
    removal = Removal(info.name, info, keep)
    if busy_name := _find_busy_run(info):
        return [replace(removal, kept_reasons=(f"{busy_name} is being trained",))]
    if keep == "artifact":
        if info.status == "damaged":
            return [replace(removal, kept_reasons=(f"{info.problem}; --keep none removes it",))]
        return [_plan_leftovers(run, keep, is_complete=info.is_complete) for run in (info, *info.trials)]
    dependents = list_dependents(info, inventory, removed_folders)
    if info.versions:  # the needs of a damaged run are unknown
        dependents += [
            f"{run.name} cannot be read, and may need it"
            for run in inventory.runs
            if run.status == "damaged" and run is not info and run.run.folder not in removed_folders
        ]
    if dependents:
        return [replace(removal, kept_reasons=("; ".join(dependents),))]
    foreign = [path for run in (info, *info.trials) for path in run_info.list_foreign_files(run.run)]
    size = info.size - sum(run_info.measure_bytes(path) for path in foreign)
    kept_reasons = tuple(f"{path.relative_to(info.run.folder)}: not a file of rtrain" for path in foreign)
    items = (RemovalItem(info.run.folder, size, "the whole run"),)
    return [Removal(info.name, info, keep, items, _describe_lost_run(info), kept_reasons)]


def _find_busy_run(info: RunInfo) -> str | None:
    """Return the name of the run in use: itself, one of its trials, or its search, which may resume it at any
    moment."""
    if locked_name := next((trial.name for trial in (info, *info.trials) if run_info.is_locked(trial.run)), None):
        return locked_name
    search = Run(info.run.folder.parent)
    if not (search.exists and search.is_search):
        return None
    related_runs = (search, *map(Run, search.folder.glob("trial-*")))
    return f"its search {search.name}" if any(map(run_info.is_locked, related_runs)) else None


def list_dependents(info: RunInfo, inventory: Inventory, removed_folders: Iterable[Path] = ()) -> list[str]:
    """Return messages about other runs that need this run."""
    dependents, removed = [], set(removed_folders)
    folders = {trial.run.folder: trial for trial in (info, *info.trials)}
    versions = {version for folder in folders.values() for version in folder.versions}
    for other in (*inventory.iter_runs(), *inventory.linked):
        if other.run.folder in removed or other.run.folder in folders:
            continue
        if other.weights_path and any(
            other.weights_path.is_relative_to(folder.real_path) for folder in folders.values()
        ):
            dependents.append(
                f"{other.name} was started from its weights (model.name), and reads them when it is resumed"
            )
        elif other.teachers & versions and not other.is_complete:
            dependents.append(f"{other.name} is a student of its artifact, and has not ended")
        elif other.winner is not None and other.run.trial(_trial_number(other.winner)).folder == info.run.folder:
            dependents.append(f"it is the winner of the search {other.name}")
    return dependents


def _plan_leftovers(info: RunInfo, keep: Keep, *, is_complete: bool) -> Removal:
    """Return the removal of files that a complete run does not need. `is_complete` is true for all trials of an ended
    search."""
    run = info.run
    items: list[RemovalItem] = []
    consequences: list[str] = []
    kept_reasons: list[str] = []
    if run.ray_storage.exists():
        items.append(RemovalItem(run.ray_storage, run_info.measure_bytes(run.ray_storage), run_info.RAY))
    items += [
        RemovalItem(path, run_info.measure_bytes(path), run_info.LEFTOVERS) for path in run_info.find_leftovers(run)
    ]
    checkpoint_steps = checkpoint_format.list_steps(run.checkpoints)
    checkpoint_bytes = run_info.measure_bytes(run.checkpoints) if run.checkpoints.exists() else 0
    if run.checkpoints.is_symlink():
        kept_reasons.append(f"checkpoints: {run.checkpoints.name} is a link; remove its target by hand")
    elif checkpoint_bytes and is_complete:
        nested_items = [part for part in items if part.path.parent == run.checkpoints]
        items = [part for part in items if part not in nested_items]
        items.append(RemovalItem(run.checkpoints, checkpoint_bytes, run_info.CHECKPOINTS))
        consequences.append(_describe_lost_checkpoints(info, checkpoint_steps))
    elif checkpoint_bytes:
        kept_reasons.append(
            f"checkpoints, {run_info.format_bytes(checkpoint_bytes)}: it has no artifact yet, and resumes from them"
        )
    if info.storage and items:
        kept_reasons.append(f"its remote copy at {redact(info.storage)}")
    return Removal(info.name, info, keep, tuple(items), tuple(consequences), tuple(kept_reasons))


def _describe_lost_checkpoints(info: RunInfo, checkpoint_steps: Sequence[int]) -> str:
    if info.run.is_finished:
        return "the optimizer state and the last weights; the artifact has the best ones"
    last_step = f"after step {checkpoint_steps[-1]}" if checkpoint_steps else "so far"
    return f"the weights {last_step}: it cannot be resumed (`rtrain train --resume`), and has no artifact"


def _describe_lost_run(info: RunInfo) -> tuple[str, ...]:
    if info.kind == "search":
        content = f"the search with its {len(info.trials)} trials and the winner's artifact"
    elif info.run.is_finished:
        content = "its artifact, scores, predictions, report and log"
    else:
        content = "its training so far, and its log"
    return (content, f"(its remote copy at {redact(info.storage)} stays)") if info.storage else (content,)


def verify_removals(removals: Iterable[Removal]) -> list[Removal]:
    """Return the removals without checkpoints of runs whose artifact is damaged. Every byte of the artifact is read and
    compared with its digest."""
    return [_verify_removal(removal) for removal in removals]


def _verify_removal(removal: Removal) -> Removal:
    info = removal.run
    if info is None or removal.keep == "none" or not info.is_complete:
        return removal
    if not any(part.category == run_info.CHECKPOINTS for part in removal.items):
        return removal
    artifact_folder = info.run.artifact if info.run.is_finished else info.run.int8_artifact
    is_unreadable = False
    try:
        damage = manifest.find_damage(artifact_folder)
    except manifest.UnreadableFileError as error:
        damage, is_unreadable = str(error), True
    if not damage:
        return removal
    items = tuple(part for part in removal.items if part.category != run_info.CHECKPOINTS)
    reason = f"checkpoints: {artifact_folder.name} cannot be verified ({damage}), so they may be the only good weights"
    return replace(
        removal, items=items, consequences=(), kept_reasons=(*removal.kept_reasons, reason), is_unreadable=is_unreadable
    )


def _top_folder(info: RunInfo) -> Path:
    return info.run.folder.parent if info.kind == "trial" else info.run.folder


def short_name(info: RunInfo) -> str:
    """Return the run's name; for a trial, the name of its search."""
    return info.name.rpartition("/")[0] if info.kind == "trial" else info.name


def _trial_number(trial: str) -> int:
    return int(trial.rpartition("-")[2])


# ------------------------------------------------------------------------------------------ the plan of a shared item


def _plan_shared_removal(
    shared_item: SharedItem, removed_folders: set[Path], with_stores: bool, keep: Keep, unreadable: Sequence[str]
) -> Removal:
    """`unreadable`: damaged runs, which may use any shared item."""
    removal = Removal(shared_item.name, None, keep)
    users = [user for user in shared_item.users if not removed_folders & {user.run.folder, _top_folder(user)}]
    items = tuple(
        RemovalItem(path, run_info.measure_bytes(path), shared_item.category)
        for path in (shared_item.path, *shared_item.measurement_files)
    )
    if not users:
        if unreadable:
            return replace(removal, kept_reasons=(f"{', '.join(unreadable)} cannot be read, and may use it",))
        if shared_item.users or shared_item.is_inactive:
            return replace(removal, items=items, consequences=(f"{shared_item.category}: no run uses it",))
        return replace(removal, kept_reasons=("it was created within the hour: a run may be about to use it",))
    if with_stores and shared_item.path.parent.name == scan.TOKENS_FOLDER:
        if open_runs := [user.name for user in users if not user.is_complete and user.kind != "trial"]:
            return replace(removal, kept_reasons=(f"{', '.join(open_runs)} can still be resumed on it",))
        names = ", ".join(dict.fromkeys(short_name(user) for user in users))
        consequence = "verify --ledger, quantize and the report's rows need a training or rtrain distill to read them"
        return replace(removal, items=items, consequences=(f"the rows of {names}: {consequence} again",))
    return removal


# -------------------------------------------------------------------------------------------------------- the removal


def remove_all(removals: Iterable[Removal]) -> int:
    """Remove all items and return their bytes. After the others, raises `UserError` with each run in use and each disk
    error."""
    freed_bytes, errors = 0, []
    for removal in removals:
        if not removal.items:
            continue
        try:
            if removal.run is None:
                _remove_items(removal.items)
            else:
                _remove_from_run(removal, removal.run.run)
            freed_bytes += removal.size
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors), code="not_removed")
    return freed_bytes


def _remove_from_run(removal: Removal, run: Run) -> None:
    """Remove items under the run's lock. They are logged first, so that a resume after an interrupted removal can name
    the reason."""
    try:
        with run_folders.lock(run):
            relative_paths = [part.path.relative_to(run.folder).as_posix() for part in removal.items]
            run.append_event("cleaned", keep=removal.keep, bytes=removal.size, removed=relative_paths)
            if removal.removes_run:
                _remove_run(run)
            else:
                _remove_items(removal.items)
    except OSError as error:
        raise _not_removed_error(run.folder, error) from None


def _remove_run(run: Run) -> None:
    """Remove the log and then the settings last, so `rtrain runs` lists a partly removed run. Foreign files stay, with
    the folder."""
    removal_order, foreign = {run.log: 1, run.lock: 2, run.config: 3}, run_info.list_foreign_files(run)
    for path in sorted(run.folder.iterdir(), key=lambda path: (removal_order.get(path, 0), path.name)):
        if path in foreign:
            continue
        if (
            run_info.find_part(run, path) == run_info.TRIALS
            and path.name.startswith("trial-")
            and not path.is_symlink()
        ):
            _remove_run(Run(path))
        else:
            remove_path(path)
    if not any(run.folder.iterdir()):
        run.folder.rmdir()


def _remove_items(items: Iterable[RemovalItem]) -> None:
    for item in items:
        try:
            remove_path(item.path)
        except OSError as error:
            raise _not_removed_error(item.path, error) from None


def remove_path(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder. A folder is renamed first, so that a kill leaves a draft,
    never a partial artifact or checkpoint under its name."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        path.unlink()
        return
    hidden_path = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    if hidden_path != path:
        path.rename(hidden_path)
    shutil.rmtree(hidden_path)


def _not_removed_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} could not be removed: {error.strerror or error}; the remaining parts are unchanged", code="not_removed"
    )
