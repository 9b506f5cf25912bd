"""Files that a job uploads: the git-tracked files of the folder, and nothing else."""

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

MAX_UPLOAD_BYTES = 5_000_000
MAX_LISTED_FILES = 10
EXCLUDED_FOLDERS = ("benchmarks/", "docs/", "tests/")
"""Folders of rtrain's own checkout that no job needs: more than half of it."""
PACKAGE_MARKER = "rtrain/cluster/jobs/entry.py"
"""File that identifies rtrain's own checkout."""
RAY_IGNORE_FILE = ".rayignore"
"""Ray's client skips files listed in such a file; it is not uploaded, since all tracked files are."""


@dataclass(frozen=True)
class Upload:
    root: Path
    files: tuple[tuple[str, int], ...]
    """(path, bytes), largest first."""
    untracked_files: int
    """Untracked files that are not ignored; they are not uploaded."""

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def describe(self) -> str:
        summary = f"{len(self.files)} tracked files, {self.total_bytes / 1e6:.1f} MB"
        name, size = self.files[0] if self.files else ("none", 0)
        untracked_note = f"; {self.untracked_files} untracked files are not uploaded" if self.untracked_files else ""
        return f"{summary}, the largest {name} ({size / 1e6:.2f} MB){untracked_note}"


def collect_upload(folder: Path, max_bytes: int = MAX_UPLOAD_BYTES) -> Upload:
    """Collect the tracked files of the git work tree whose root is `folder`, submodules included; of rtrain's own
    checkout only the needed ones. Raises `UserError` if `folder` is not a work tree's root, for more than `max_bytes`
    bytes, for a missing submodule, and for a link to an untracked file, which would be uploaded."""
    root = Path("".join(_run_git(folder, "rev-parse", "--show-toplevel")).removesuffix("\n"))
    if root.resolve() != folder.resolve():
        raise UserError(
            f"{folder} is a part of the checkout {root}, which a job uploads as a whole; run the command there, or "
            f"write --folder {shlex.quote(str(root))}",
            code="part_of_checkout",
        )
    tracked_names = _run_git(folder, "ls-files", "-z", "--recurse-submodules")
    tracked_paths = {folder.resolve() / name for name in tracked_names}
    if PACKAGE_MARKER in tracked_names:
        tracked_names = [name for name in tracked_names if not name.startswith(EXCLUDED_FOLDERS)]
    existing_names = [
        file
        for name in tracked_names
        for file in _expand_tracked(folder, name, tracked_paths)
        if PurePosixPath(file).name != RAY_IGNORE_FILE
    ]
    files = [(name, (folder / name).stat().st_size) for name in existing_names]
    upload = Upload(
        folder,
        tuple(sorted(files, key=lambda file: (-file[1], file[0]))),
        len(_run_git(folder, "ls-files", "-z", "--others", "--exclude-standard")),
    )
    if upload.total_bytes > max_bytes:
        largest_files = "\n".join(f"  {size / 1e6:8.2f} MB  {name}" for name, size in upload.files[:MAX_LISTED_FILES])
        raise UserError(
            f"{folder}: its tracked files are {upload.total_bytes / 1e6:.1f} MB; the maximum is "
            f"{max_bytes / 1e6:.0f} MB. The largest:\n"
            f"{largest_files}\nKeep data out of git, on storage of the nodes, or raise --max-mb",
            code="too_large",
        )
    return upload


def _expand_tracked(folder: Path, name: str, tracked_paths: Set[Path]) -> list[str]:
    """Expand a tracked name into files: itself; for a link to a folder the tracked files in it (`tracked_paths`,
    absolute), under the link's name; nothing if it was deleted."""
    path = folder / name
    if not os.path.lexists(path):
        return []
    target = path.resolve()
    if path.is_symlink() and path.is_dir():
        linked_names = [
            str(PurePosixPath(name, tracked_path.relative_to(target)))
            for tracked_path in tracked_paths
            if target in tracked_path.parents
        ]
        names = [linked_name for linked_name in sorted(linked_names) if (folder / linked_name).is_file()]
    elif path.is_dir():
        raise UserError(
            f"{path} is a submodule without files here: run git submodule update --init "
            f"{shlex.quote(name)}, or take it out of git",
            code="missing_submodule",
        )
    else:
        names = [name]
    if not names or any((folder / name).resolve() not in tracked_paths for name in names):
        raise UserError(
            f"{path} leads to {target}, which git does not track here; take it out of git", code="untracked_link"
        )
    return names


@contextmanager
def temporary_copy(upload: Upload) -> Iterator[Path]:
    """A folder with copies of the files, while the block runs."""
    with TemporaryDirectory(prefix="rtrain-upload-") as folder:
        for name, _ in upload.files:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(upload.root / name, target)
        yield Path(folder)


def _run_git(folder: Path, *words: str) -> list[str]:
    try:
        completed = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is missing; install it: a job uploads tracked files", code="not_installed") from None
    if completed.returncode:
        reason = completed.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            f"{folder} is not a git work tree ({reason[-1] if reason else 'git failed'}); a job uploads tracked files. "
            "Name one with --folder, create one (git init), or use ray job submit",
            code="no_git",
        )
    try:
        return [name.decode() for name in completed.stdout.split(b"\0") if name]
    except UnicodeDecodeError as error:
        name = ascii(os.fsdecode(error.object))
        raise UserError(
            f"{folder}: the name {name} is not UTF-8, which Ray cannot upload; rename it", code="not_utf8"
        ) from None
