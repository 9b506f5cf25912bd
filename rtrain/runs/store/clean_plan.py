"""What `rtrain clean` may remove, what is lost by it, and what stays and why. Nothing is removed here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core import manifest
from rtrain.core.errors import hide
from rtrain.core.run_folder import Run
from rtrain.runs.store import disk_usage, run_info, shared_files
from rtrain.runs.store.run_info import Known
from rtrain.runs.store.scan import Inventory
from rtrain.runs.store.shared_files import Shared

Keep = Literal["artifact", "none"]
"""What is kept of a run: all that is finished, or nothing."""


@dataclass(frozen=True)
class Part:
    """A file or folder that may go."""

    path: Path
    size: int
    what: str


@dataclass(frozen=True)
class Removal:
    """What goes of one run, or of what runs share (`run` is None)."""

    name: str
    run: Known | None
    keep: Keep
    parts: tuple[Part, ...] = ()
    lost: tuple[str, ...] = ()
    """What cannot be done afterwards, in words."""
    stays: tuple[str, ...] = ()
    """What was asked for and is left, with the reason."""
    unread: bool = False
    """Whether it is left because a file cannot be read, which is to be mended first."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether all that is rtrain's goes, and with it the folder, unless something else lies in it."""
        return self.run is not None and self.keep == "none" and bool(self.parts)


def of_run(known: Known, keep: Keep, inventory: Inventory) -> list[Removal]:
    """What goes of a run. With a search, what goes of its trials follows."""
    return _of(known, keep, inventory, {one.run.folder for one in (known, *known.trials)})


def of_root(inventory: Inventory, keep: Keep, stores: bool = False) -> list[Removal]:
    """What goes of all runs, and then of what no remaining run uses.

    With `stores` the token stores go as well that only runs use which have ended.
    """
    going = _leaving(inventory) if keep == "none" else set()
    found = [removal for known in inventory.runs for removal in _of(known, keep, inventory, going)]
    gone = {removal.run.run.folder for removal in found if removal.run and removal.whole}
    told = (*inventory.runs, *inventory.linked)
    unread = [known.name for known in told if known.status == "damaged" and known.run.folder not in gone]
    # A run may lie in a folder that cannot be read; in the one that a file system has for itself there is none.
    unread += [name for name in inventory.unread if name != "lost+found"]
    found += [_of_shared(one, gone, stores, keep, unread) for one in inventory.shared]
    left = tuple(Part(path, disk_usage.size(path), disk_usage.LEFT) for path in inventory.drafts)
    return [*found, *([Removal("drafts of killed processes", None, keep, left)] if left else [])]


def _leaving(inventory: Inventory) -> set[Path]:
    """Folders of the runs, and of their trials, that can go together: none is trained, and none is needed by one that
    stays. What stays may need others in its turn."""
    leaving = [known for known in inventory.runs if _busy(known) is None]
    while True:
        going = {one.run.folder for known in leaving for one in (known, *known.trials)}
        free = [known for known in leaving if not needed_by(known, inventory, going)]
        if len(free) == len(leaving):
            return going
        leaving = free


# ----------------------------------------------------------------------------------------------------------- of a run


def _of(known: Known, keep: Keep, inventory: Inventory, going: set[Path]) -> list[Removal]:
    """`going`: folders of the runs that are removed together with this one, and so need nothing of it."""
    if busy := _busy(known):
        return [Removal(known.name, known, keep, stays=(f"{busy} is being trained",))]
    if keep == "none":
        users = needed_by(known, inventory, going)
        if known.versions:  # what a run needs is not known where its settings cannot be read
            others = [one for one in inventory.runs if one.status == "damaged" and one is not known]
            users += [f"{one.name} cannot be read, and may need it" for one in others if one.run.folder not in going]
        if users:
            return [Removal(known.name, known, keep, stays=("; ".join(users),))]
        foreign = [path for one in (known, *known.trials) for path in disk_usage.foreign(one.run)]
        part = Part(known.run.folder, known.size - sum(disk_usage.size(path) for path in foreign), "the whole run")
        stays = tuple(f"{path.relative_to(known.run.folder)}: it is not rtrain's" for path in foreign)
        return [Removal(known.name, known, keep, (part,), _lost_with(known), stays)]
    if known.status == "damaged":
        return [Removal(known.name, known, keep, stays=(f"{known.flaw}; --keep none removes it",))]
    own = _parts(known, keep, ended=known.ended)
    return [own, *(_parts(trial, keep, ended=known.ended) for trial in known.trials)]


def checked(removals: Iterable[Removal]) -> list[Removal]:
    """The removals without those of checkpoints that may be the only good weights: every byte of the artefact that
    stays in their place is read and must be as it was written."""
    return [_checked(removal) for removal in removals]


def _checked(removal: Removal) -> Removal:
    known = removal.run
    if known is None or removal.keep == "none" or not known.ended:
        return removal
    if not any(part.what == disk_usage.CHECKPOINTS for part in removal.parts):
        return removal
    place = known.run.artifact if known.run.finished else known.run.int8
    unread = False
    try:
        wrong = manifest.damage(place)
    except manifest.Unreadable as error:
        wrong, unread = str(error), True
    if not wrong:
        return removal
    parts = tuple(part for part in removal.parts if part.what != disk_usage.CHECKPOINTS)
    reason = f"checkpoints: {place.name} is not known to be whole ({wrong}), and they may be all that is left of it"
    return replace(removal, parts=parts, lost=(), stays=(*removal.stays, reason), unread=unread)


def _busy(known: Known) -> str | None:
    """Name of the run that a process trains: itself, a trial of it, or the search that it is a trial of, which may come
    back to it at any moment."""
    if held := next((one.name for one in (known, *known.trials) if run_info.is_held(one.run)), None):
        return held
    search = Run(known.run.folder.parent)
    if not (search.exists and search.is_search):
        return None
    others = (search, *map(Run, search.folder.glob("trial-*")))
    return f"its search {search.name}" if any(map(run_info.is_held, others)) else None


def needed_by(known: Known, inventory: Inventory, going: Iterable[Path] = ()) -> list[str]:
    """Which other runs need a run's folder, and for what."""
    found, leaving = [], set(going)
    folders = {one.run.folder: one for one in (known, *known.trials)}
    versions = {version for one in folders.values() for version in one.versions}
    for other in (*inventory.every(), *inventory.linked):
        if other.run.folder in leaving or other.run.folder in folders:
            continue
        if other.weights and any(other.weights.is_relative_to(one.place) for one in folders.values()):
            found.append(f"{other.name} was started from its weights (model.name), and reads them when it is resumed")
        elif other.teachers & versions and not other.ended:
            found.append(f"{other.name} is taught by its artefact, and has not ended")
        elif other.winner is not None and other.run.trial(_number(other.winner)).folder == known.run.folder:
            found.append(f"the search {other.name} has chosen it")
    return found


def _parts(known: Known, keep: Keep, *, ended: bool) -> Removal:
    """What goes of a run that stays itself. `ended` also holds for the trials that an ended search did not choose."""
    run = known.run
    parts: list[Part] = []
    lost: list[str] = []
    stays: list[str] = []
    if run.ray.exists():
        parts.append(Part(run.ray, disk_usage.size(run.ray), disk_usage.RAY))
    parts += [Part(path, disk_usage.size(path), disk_usage.LEFT) for path in disk_usage.leftovers(run)]
    updates = checkpoint_format.updates(run.checkpoints)
    held = disk_usage.size(run.checkpoints) if run.checkpoints.exists() else 0
    if run.checkpoints.is_symlink():
        stays.append(f"checkpoints: {run.checkpoints.name} is a link; remove what it leads to by hand")
    elif held and ended:
        inside = [part for part in parts if part.path.parent == run.checkpoints]
        parts = [part for part in parts if part not in inside]
        parts.append(Part(run.checkpoints, held, disk_usage.CHECKPOINTS))
        lost.append(_lost_checkpoints(known, updates))
    elif held:
        stays.append(f"checkpoints, {disk_usage.text(held)}: it has no artefact yet, and goes on from them")
    if known.storage and parts:
        stays.append(f"its copy at {hide(known.storage)}")
    return Removal(known.name, known, keep, tuple(parts), tuple(lost), tuple(stays))


def _lost_checkpoints(known: Known, updates: Sequence[int]) -> str:
    if known.run.finished:
        return "the optimizer's state and the last weights; the artefact has the best ones"
    newest = f"after update {updates[-1]}" if updates else "so far"
    return f"the weights {newest}: it cannot be resumed (`rtrain train --resume`), and has no artefact"


def _lost_with(known: Known) -> tuple[str, ...]:
    if known.kind == "search":
        what = f"the search with its {len(known.trials)} trials and the winner's artefact"
    elif known.run.finished:
        what = "its artefact, scores, predictions, report and log"
    else:
        what = "what it has trained so far, and its log"
    return (what, f"(its copy at {hide(known.storage)} stays)") if known.storage else (what,)


# -------------------------------------------------------------------------------------------------- of what is shared


def _of_shared(one: Shared, gone: set[Path], stores: bool, keep: Keep, unread: Sequence[str]) -> Removal:
    """`unread` are runs of which nobody knows what they use."""
    users = [user for user in one.users if user.run.folder not in gone and _top(user) not in gone]
    parts = tuple(Part(path, disk_usage.size(path), one.what) for path in (one.path, *one.beside))
    names = ", ".join(dict.fromkeys(short_name(user) for user in users))
    is_store = one.path.parent.name == shared_files.TOKENS
    if not users:
        if unread:
            return Removal(one.name, None, keep, stays=(f"{', '.join(unread)} cannot be read, and may use it",))
        if one.users or one.is_settled:
            return Removal(one.name, None, keep, parts, (f"{one.what}: no run uses it",))
        return Removal(one.name, None, keep, stays=("it was made within the hour: a run may be about to begin on it",))
    if is_store and stores:
        if open_runs := [user.name for user in users if not user.ended and user.kind != "trial"]:
            return Removal(one.name, None, keep, stays=(f"{', '.join(open_runs)} can still be resumed on it",))
        what = (
            "until a training or rtrain distill reads them again, no verify --ledger, no quantize, none in the report"
        )
        return Removal(one.name, None, keep, parts, (f"the rows of {names}: {what}",))
    return Removal(one.name, None, keep)


def _top(known: Known) -> Path:
    return known.run.folder.parent if known.kind == "trial" else known.run.folder


def short_name(known: Known) -> str:
    """A trial goes by its search's name."""
    return known.name.rpartition("/")[0] if known.kind == "trial" else known.name


def _number(trial: str) -> int:
    return int(trial.rpartition("-")[2])
