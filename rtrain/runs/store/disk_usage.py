"""What a run's folder is made of, and how many bytes each part has."""

import os
import re
import time
from collections import Counter
from pathlib import Path

from rtrain.core.run_folder import ARTIFACT, Run

CHECKPOINTS, ARTIFACTS, RAY, LEFT, TRIALS, RECORD, WHEELS, OTHER = (
    *("checkpoints", "artefacts", "Ray's own files", "leftovers", "trials", "record", "wheels", "other files"),
)
"""Parts of a run's folder. `leftovers` are drafts of processes that were killed; `record` is what tells of the run:
its settings, log, scores, predictions and report; `trials` has what a search asked of a trial too; `wheels` came with
an imported run; `other files` are not rtrain's."""
RECORDS = re.compile(
    r"config\.yaml|events\.jsonl|decisions\.json|summary\.json|report\.html|baselines\.json|trials\.jsonl|demo\.json"
    r"|best\.yaml|search\.html|study\.(json|html)|mlflow\.json|lock|notice|placement_group|\.ending"
    r"|profile-\d+\.json"
    r"|scores-\w+\.json|predictions-[\w.-]+\.parquet|stalled-\d+\.txt|[\w.-]+-\d{8}-\d{6}\.txt"
)
TEXTS = re.compile(r"predictions-[\w.-]+\.parquet|report\.html")
"""Records that hold the texts of rows."""
DRAFT = re.compile(r"\.(?P<name>.+)\.(?:[0-9a-f]{8}|old)|\..+\.draft|\.predictions-[\w.-]+|(?:decisions|config)\.draft")
SETTLED_S = 3600
"""Seconds without a write after which a draft has no writer: `rtrain quantize` holds no lock while it writes one."""


def size(path: Path) -> int:
    """Bytes of a file, or of all files under a folder; no link is followed, and what vanishes meanwhile has none."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(_of_entry(entry) for entry in entries)
    except OSError:
        return 0


def _of_entry(entry: os.DirEntry[str]) -> int:
    return size(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size


def parts(run: Run) -> dict[str, int]:
    """Bytes of a run by part."""
    found: Counter[str] = Counter()
    for path in _inside(run.folder):
        found[part_of(run, path)] += size(path)
    return dict(found)


def part_of(run: Run, path: Path) -> str:
    """The part that a file or folder directly under the run's folder belongs to."""
    if path.name in (run.checkpoints.name, run.ray.name):
        return CHECKPOINTS if path == run.checkpoints else RAY
    if is_draft(path):
        return LEFT
    if path.is_dir():
        if path in (run.artifact, run.int8) or (path / ARTIFACT).is_file():
            return ARTIFACTS
        if path.name == WHEELS and {one.suffix for one in _inside(path)} == {".whl"}:
            return WHEELS
        return TRIALS if re.fullmatch(r"trial-\d+|rungs", path.name) else OTHER
    return RECORD if RECORDS.fullmatch(path.name) else OTHER


def foreign(run: Run) -> list[Path]:
    """What lies directly in the run's folder and is not rtrain's."""
    return [path for path in _inside(run.folder) if part_of(run, path) == OTHER]


def is_draft(path: Path) -> bool:
    """Whether a name is one under which rtrain writes before it moves. The older version of a thing that is gone
    itself is none: it is all that is left of it."""
    match = DRAFT.fullmatch(path.name)
    alone = match and path.name.endswith(".old") and not path.with_name(match["name"] or "").exists()
    return match is not None and not alone


def leftovers(run: Run) -> list[Path]:
    """Drafts in the folder, and among its checkpoints, that nobody has written to for `SETTLED_S`."""
    drafts = [path for path in _inside(run.folder) if is_draft(path)]
    drafts += [path for path in _inside(run.checkpoints) if path.name.startswith(".update-")]
    return [path for path in drafts if is_settled(path)]


def is_settled(path: Path, now: float | None = None) -> bool:
    """Whether nothing in a file or folder was written for `SETTLED_S`."""
    moment = time.time() if now is None else now
    try:
        every = [path, *path.rglob("*")] if path.is_dir() else [path]
        return moment - max(one.lstat().st_mtime for one in every) > SETTLED_S
    except OSError:
        return False  # it goes or comes while it is looked at


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text(size: float) -> str:
    """Bytes for a person: 934 B, 12 kB, 4.6 GB; of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
