"""The removal that a plan lists. Killed at any moment, it leaves a consistent run, and the rest goes the next time."""

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
from rtrain.runs.store.clean_plan import Part, Removal


def carry_out(removals: Iterable[Removal]) -> int:
    """Remove the parts; returns their bytes. Raises `UserError` where the disk refuses, or a run is being trained, with
    each of these, when all the others are removed."""
    freed, refused = 0, []
    for removal in removals:
        if not removal.parts:
            continue
        try:
            if removal.run is None:
                _each(removal.parts)
            else:
                _of_run(removal, removal.run.run)
            freed += removal.size
        except UserError as error:
            refused.append(str(error))
    if refused:
        raise UserError("\n".join(refused), code="not_removed")
    return freed


def _of_run(removal: Removal, run: Run) -> None:
    """Nobody trains the run meanwhile. What is about to go is logged first: whoever resumes the run after a removal
    that was cut short is told why a part is missing."""
    try:
        with run_folders.hold(run):
            named = [part.path.relative_to(run.folder).as_posix() for part in removal.parts]
            run.append("cleaned", keep=removal.keep, bytes=removal.size, removed=named)
            if removal.whole:
                _whole(run)
            else:
                _each(removal.parts)
    except OSError as error:
        raise _refused(run.folder, error) from None


def _whole(run: Run) -> None:
    """The settings go last and the log before them: while something is left, it is a run that `rtrain runs` lists. What
    is not rtrain's stays, and with it the folder."""
    last, foreign = {run.log: 1, run.lock: 2, run.config: 3}, disk_usage.foreign(run)
    for path in sorted(run.folder.iterdir(), key=lambda path: (last.get(path, 0), path.name)):
        if path in foreign:
            continue
        if (
            disk_usage.part_of(run, path) == disk_usage.TRIALS
            and path.name.startswith("trial-")
            and not path.is_symlink()
        ):
            _whole(Run(path))
        else:
            discard(path)
    if not any(run.folder.iterdir()):
        run.folder.rmdir()


def _each(parts: Iterable[Part]) -> None:
    for part in parts:
        try:
            discard(part.path)
        except OSError as error:
            raise _refused(part.path, error) from None


def discard(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder. A folder's name goes first, so that a kill leaves a
    draft, and never half an artefact or checkpoint under its name."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        path.unlink()
        return
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    if hidden != path:
        path.rename(hidden)
    shutil.rmtree(hidden)


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} could not be removed: {error.strerror or error}; what is listed still is left as it was",
        code="not_removed",
    )
