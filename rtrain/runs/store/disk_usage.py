"""Parts of a run folder and their bytes."""

import os
import re
import time
from collections import Counter
from pathlib import Path

from rtrain.core.run_folder import ARTIFACT_FILE, Run

CHECKPOINTS, ARTIFACTS, RAY, LEFTOVERS, TRIALS, RUN_RECORDS, WHEELS, OTHER_FILES = (
    *("checkpoints", "artifacts", "Ray files", "leftovers", "trials", "record", "wheels", "other files"),
)
"""Parts of a run folder. `leftovers`: drafts of killed processes; `record`: settings, log, scores, predictions, report;
`trials`: trials, and a trial's predictions at rungs; `wheels`: from an import; `other files`: not rtrain's."""
RECORD_PATTERN = re.compile(
    r"config\.yaml|events\.jsonl|decisions\.json|summary\.json|report\.html|baselines\.json|trials\.jsonl|demo\.json"
    r"|best\.yaml|search\.html|study\.(json|html)|mlflow\.json|lock|stop_request|placement_group|\.stop_slots"
    r"|profile-\d+\.json"
    r"|scores-\w+\.json|predictions-[\w.-]+\.parquet|hang-\d+\.txt|[\w.-]+-\d{8}-\d{6}\.txt"
)
TEXT_RECORD_PATTERN = re.compile(r"predictions-[\w.-]+\.parquet|report\.html")
"""Records with the texts of rows."""
DRAFT_PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?:[0-9a-f]{8}|old)|\..+\.draft|\.predictions-[\w.-]+|(?:decisions|config)\.draft"
)
INACTIVE_S = 3600
"""Seconds without a write after which a draft counts as abandoned: `rtrain quantize` writes without a lock."""


def measure_bytes(path: Path) -> int:
    """Return the bytes of a file or folder. Links are not followed; vanished files count 0."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(_entry_bytes(entry) for entry in entries)
    except OSError:
        return 0


def _entry_bytes(entry: os.DirEntry[str]) -> int:
    return (
        measure_bytes(Path(entry.path))
        if entry.is_dir(follow_symlinks=False)
        else entry.stat(follow_symlinks=False).st_size
    )


def bytes_by_part(run: Run) -> dict[str, int]:
    """Return a run's bytes by part."""
    totals: Counter[str] = Counter()
    for path in _list_folder(run.folder):
        totals[find_part(run, path)] += measure_bytes(path)
    return dict(totals)


def find_part(run: Run, path: Path) -> str:
    """Return the part of a file or folder directly in the run folder."""
    if path.name in (run.checkpoints.name, run.ray_storage.name):
        return CHECKPOINTS if path == run.checkpoints else RAY
    if is_draft(path):
        return LEFTOVERS
    if path.is_dir():
        if path in (run.artifact, run.int8_artifact) or (path / ARTIFACT_FILE).is_file():
            return ARTIFACTS
        if path.name == WHEELS and {item.suffix for item in _list_folder(path)} == {".whl"}:
            return WHEELS
        return TRIALS if re.fullmatch(r"trial-\d+|rungs", path.name) else OTHER_FILES
    return RUN_RECORDS if RECORD_PATTERN.fullmatch(path.name) else OTHER_FILES


def list_foreign_files(run: Run) -> list[Path]:
    """Return paths directly in the run folder that rtrain did not write."""
    return [path for path in _list_folder(run.folder) if find_part(run, path) == OTHER_FILES]


def is_draft(path: Path) -> bool:
    """Return whether the path is a draft, which rtrain renames when it is written. An `.old` copy whose successor is
    missing is not: it is the last copy."""
    match = DRAFT_PATTERN.fullmatch(path.name)
    is_last_copy = match and path.name.endswith(".old") and not path.with_name(match["name"] or "").exists()
    return match is not None and not is_last_copy


def find_leftovers(run: Run) -> list[Path]:
    """Return the abandoned drafts in the run folder and among its checkpoints."""
    drafts = [path for path in _list_folder(run.folder) if is_draft(path)]
    drafts += [path for path in _list_folder(run.checkpoints) if path.name.startswith(".step-")]
    return [path for path in drafts if is_inactive(path)]


def is_inactive(path: Path, now: float | None = None) -> bool:
    """Return whether no file was written for `INACTIVE_S`."""
    moment = time.time() if now is None else now
    try:
        paths = [path, *path.rglob("*")] if path.is_dir() else [path]
        return moment - max(path.lstat().st_mtime for path in paths) > INACTIVE_S
    except OSError:
        return False  # it appears or vanishes meanwhile


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def format_bytes(size: float) -> str:
    """Format bytes: 934 B, 12 kB, 4.6 GB; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
