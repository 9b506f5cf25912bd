"""What a job takes along: the files of the folder that git tracks, and nothing else."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from rtrain.core.errors import UserError

MOST_BYTES = 5_000_000
LARGEST = 10
NOT_NEEDED = ("benchmarks/", "docs/", "tests/")
"""Folders of rtrain's own checkout that no job needs; they are more than half of it."""
OWN = "rtrain/cluster/jobs/entry.py"
"""By this file rtrain's own checkout is known."""
IGNORES = ".rayignore"
"""Ray's client leaves out what such a file names; it stays here, since all that is tracked goes along."""


@dataclass(frozen=True)
class Upload:
    root: Path
    files: tuple[tuple[str, int], ...]
    """(path, bytes), the largest first."""
    left: int
    """Files that git neither tracks nor ignores, which stay here."""

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)

    def text(self) -> str:
        told = f"{len(self.files)} tracked files, {self.size / 1e6:.1f} MB"
        name, size = self.files[0] if self.files else ("none", 0)
        stay = f"; {self.left} untracked stay here" if self.left else ""
        return f"{told}, the largest {name} ({size / 1e6:.2f} MB){stay}"


def of(folder: Path, most: int = MOST_BYTES) -> Upload:
    """The files of the git work tree that `folder` is the root of, with those of its submodules; of rtrain's own, those
    that a job needs. Raises `UserError` where it is none or a part of one, where they are more than `most` bytes, where
    a submodule is not here, and where a link leads to what is not tracked: what it leads to would go along."""
    root = Path("".join(_git(folder, "rev-parse", "--show-toplevel")).removesuffix("\n"))
    if root.resolve() != folder.resolve():
        raise UserError(
            f"{folder} is a part of the checkout {root}, and a job takes it along as a whole; call it there, or "
            f"write --folder {shlex.quote(str(root))}",
            code="part_of_checkout",
        )
    tracked = _git(folder, "ls-files", "-z", "--recurse-submodules")
    own = {folder.resolve() / name for name in tracked}
    if OWN in tracked:
        tracked = [name for name in tracked if not name.startswith(NOT_NEEDED)]
    there = [one for name in tracked for one in _meant(folder, name, own) if PurePosixPath(one).name != IGNORES]
    files = [(name, (folder / name).stat().st_size) for name in there]
    found = Upload(
        folder,
        tuple(sorted(files, key=lambda file: (-file[1], file[0]))),
        len(_git(folder, "ls-files", "-z", "--others", "--exclude-standard")),
    )
    if found.size > most:
        listed = "\n".join(f"  {size / 1e6:8.2f} MB  {name}" for name, size in found.files[:LARGEST])
        raise UserError(
            f"{folder}: its tracked files are {found.size / 1e6:.1f} MB, and a job takes {most / 1e6:.0f} along; the "
            f"largest:\n{listed}\nKeep data out of git, and on the storage of the nodes; or give --most-mb",
            code="too_large",
        )
    return found


def _meant(folder: Path, name: str, own: Set[Path]) -> list[str]:
    """The files for which a tracked name stands: one; for a link to a folder those that git tracks there (`own`, whole
    paths), under the link's name; none where it was deleted."""
    path = folder / name
    if not os.path.lexists(path):
        return []
    leads = path.resolve()
    if path.is_symlink() and path.is_dir():
        inner = [str(PurePosixPath(name, one.relative_to(leads))) for one in own if leads in one.parents]
        found = [one for one in sorted(inner) if (folder / one).is_file()]
    elif path.is_dir():
        raise UserError(
            f"{path} is a repository in this one, and git lists no file of it here: git submodule update --init "
            f"{shlex.quote(name)}, or take it out of git",
            code="missing_submodule",
        )
    else:
        found = [name]
    if not found or any((folder / one).resolve() not in own for one in found):
        raise UserError(
            f"{path} leads to {leads}, which git does not track here; take it out of git", code="untracked_link"
        )
    return found


@contextmanager
def copied(upload: Upload) -> Iterator[Path]:
    """A folder with copies of the files, for as long as the block runs."""
    with TemporaryDirectory(prefix="rtrain-upload-") as folder:
        for name, _ in upload.files:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(upload.root / name, target)
        yield Path(folder)


def _git(folder: Path, *words: str) -> list[str]:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError(
            "git is not here, by which the files of a job are chosen; install it", code="not_installed"
        ) from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            f"{folder} is no git work tree ({reason[-1] if reason else 'git failed'}), and a job takes along what git "
            "tracks; name one with --folder, make one (git init), or use ray job submit, which takes all files",
            code="no_git",
        )
    try:
        return [name.decode() for name in done.stdout.split(b"\0") if name]
    except UnicodeDecodeError as error:
        name = ascii(os.fsdecode(error.object))
        raise UserError(
            f"{folder}: the name {name} is no UTF-8, and Ray takes no such file along; rename it", code="not_utf8"
        ) from None
