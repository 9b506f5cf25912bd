"""What runs share, beside them: token stores, copies of hub models and data sets, what students start from, and models
of fewer pieces."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtrain.core import atomic_write, hub
from rtrain.runs.store import disk_usage
from rtrain.runs.store.run_info import Known

TOKENS, STUDENTS, VOCABULARIES, COPIES = ".tokens", ".students", ".vocabularies", ".copies"
KINDS = {
    TOKENS: "token store",
    STUDENTS: "start of a student",
    VOCABULARIES: "trimmed model",
    COPIES: "copies of rows",
    hub.FOLDERS["model"]: "copy of a model",
    hub.FOLDERS["dataset"]: "copy of a data set",
}
"""What lies in the hidden folders beside runs."""


@dataclass(frozen=True)
class Shared:
    """A token store or a copy, and the runs that use it."""

    path: Path
    name: str
    """Its path in the folder that was looked at."""
    what: str
    size: int
    users: tuple[Known, ...] = ()

    @property
    def beside(self) -> list[Path]:
        """Files that were measured on a token store and are kept beside it."""
        return sorted(self.path.parent.glob(f".{self.path.name}.*.json"))

    @property
    def is_settled(self) -> bool:
        """Whether it is so old that no run which is about to begin has just made it."""
        return disk_usage.is_settled(self.path)


def inside(root: Path, folder: Path, known: Iterable[Known]) -> list[Shared]:
    """What one of the hidden folders holds. Runs are told by the digest or the name that they use, not by a path: a
    folder of runs may have been moved."""
    every = list(known)
    found = []
    for path in _listed(folder):
        if path.name.startswith(".") or not path.is_dir():
            continue
        # The packaged model's copy is called by its digest too (`rtrain.runs.node_checks`), which no settings name.
        packaged = folder.name == hub.FOLDERS["model"] and path.name.startswith(f"{hub.PACKAGED}@")
        name = hub.PACKAGED if packaged else path.name
        users = tuple(one for one in every if name in _used(one, folder.name))
        found.append(Shared(path, path.relative_to(root).as_posix(), KINDS[folder.name], disk_usage.size(path), users))
    return found


def dead_drafts(folder: Path) -> list[Path]:
    """Drafts directly in a folder whose writers were killed."""
    found = []
    for path in _listed(folder):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) and path.is_dir() and (path / atomic_write.LOCK).exists():
            try:
                dead = atomic_write.is_dead(path)
            except OSError:
                continue
            found += [path] if dead else []
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # it stays, with all that is in it
        return []


def _used(known: Known, folder: str) -> set[str]:
    """Names in a hidden folder that a run uses."""
    if folder == TOKENS:
        return {known.store.name} if known.store else set()
    if folder == STUDENTS:
        return {Path(known.model).name}
    if folder == VOCABULARIES:
        return {known.trimmed.name} if known.trimmed else set()
    if folder == COPIES:
        return {Path(known.copied).parent.name} if known.copied else set()
    kind: hub.Kind = "model" if folder == hub.FOLDERS["model"] else "dataset"
    names = [known.model] if kind == "model" else known.data
    return {hub.place(kind, name, Path()).name for text in names if (name := hub.parse(text))}
