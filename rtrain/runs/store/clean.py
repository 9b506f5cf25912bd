"""Remove the items of a plan. A kill leaves a consistent run; the next call removes the rest."""

import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from rtrain.runs.store import disk_usage
from rtrain.runs.store.clean_plan import Removal, RemovalItem


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
    removal_order, foreign = {run.log: 1, run.lock: 2, run.config: 3}, disk_usage.list_foreign_files(run)
    for path in sorted(run.folder.iterdir(), key=lambda path: (removal_order.get(path, 0), path.name)):
        if path in foreign:
            continue
        if (
            disk_usage.find_part(run, path) == disk_usage.TRIALS
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
        f"{path} could not be removed: {error.strerror or error}; the remaining parts are unchanged",
        code="not_removed",
    )
