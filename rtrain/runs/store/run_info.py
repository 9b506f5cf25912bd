"""Facts about a run, from its settings, log and folder in any state; the parts of its folder and their bytes."""

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rtrain.config.recipe import TASKS
from rtrain.core import plugins
from rtrain.core.events import ROW_EVENTS
from rtrain.core.run_folder import ARTIFACT_FILE, Run
from rtrain.metrics.registry import get_metric, split_sign
from rtrain.report import summary
from rtrain.report.summary import LATE_EVENTS
from rtrain.tasks import base

Event = dict[str, Any]
PROGRESS_KIND = b'"kind": "progress"'
KIND_PREFIX_BYTES = 64
"""The kind is in these first bytes of a line, after the time."""
MAX_TIME = 1e11
"""Seconds since 1970 (year 5138): a larger time is damaged."""
CHECKPOINTS, ARTIFACTS, RAY, LEFTOVERS, TRIALS, RUN_RECORDS, WHEELS, OTHER_FILES = (
    *("checkpoints", "artifacts", "Ray files", "leftovers", "trials", "record", "wheels", "other files"),
)
"""Parts of a run folder. `leftovers`: drafts of killed processes; `record`: settings, log, scores, predictions, report;
`trials`: trials, and a trial's predictions at rungs; `wheels`: from an import; `other files`: not rtrain's."""
RECORD_PATTERN = re.compile(
    r"config\.yaml|events\.jsonl|decisions\.json|summary\.json|report\.html|baselines\.json|trials\.jsonl|demo\.json"
    r"|best\.yaml|search\.html|study\.(json|html)|trackers\.json|lock|stop_request|placement_group|\.stop_slots"
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


@dataclass(frozen=True)
class HeadlineScore:
    """The headline score of a run."""

    name: str
    value: float
    split: str

    def __str__(self) -> str:
        name, sign = split_sign(self.name)
        return f"{sign * self.value:.4f} {name} ({self.split})"


@dataclass(frozen=True)
class RunInfo:
    """A run, a search with its trials, or a student. Unknown facts are None or empty."""

    run: Run
    name: str
    """Its path relative to the scanned folder."""
    kind: str
    """`run`, `search`, `trial` or `student`."""
    status: str
    """See `run_status`; `damaged` if config.yaml cannot be read."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Content of config.yaml."""
    score: HeadlineScore | None = None
    started_at: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    """From its creation to its last training event."""
    store: Path | None = None
    """The newest token store in its log, which may be removed. Its name is the digest of the rows."""
    trimmed_model: Path | None = None
    """Its model, if the vocabulary was trimmed."""
    bytes_by_part: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part (`rtrain.runs.store.run_info`); those of a search include its trials."""
    winner: str | None = None
    """Name of a search's winner."""
    trials: tuple["RunInfo", ...] = ()
    problem: str | None = None
    kept_by_clean: str | None = None
    """What `rtrain clean` has kept: `artifact`, `none` (the removal was interrupted), or None."""

    @property
    def size(self) -> int:
        return sum(self.bytes_by_part.values())

    @property
    def is_complete(self) -> bool:
        """Whether the training is done: the run, or the winner of the search, has an artifact."""
        if self.kind == "search":
            return any(trial.run.name == self.winner and trial.is_complete for trial in self.trials)
        return self.run.is_finished or (self.run.int8_artifact / ARTIFACT_FILE).is_file()

    @property
    def model(self) -> str:
        """`model.name`: its initial weights."""
        return _text_or_none(_get_section(self.settings, "model").get("name")) or ""

    @cached_property
    def real_path(self) -> Path:
        """The run folder with links resolved."""
        return self.run.folder.resolve()

    @cached_property
    def weights_path(self) -> Path | None:
        """The folder in `model.name` with links resolved; None for a hub name."""
        return Path(self.model).resolve() if Path(self.model).is_absolute() else None

    @property
    def teacher(self) -> str | None:
        """Version of the teacher's artifact."""
        return _text_or_none(_get_section(self.settings, "distill").get("teacher"))

    @property
    def teachers(self) -> frozenset[str]:
        """Versions of all teachers' artifacts."""
        co_teachers = _get_section(self.settings, "distill").get("co_teachers") or ()
        return frozenset(str(version) for version in (self.teacher, *co_teachers) if version)

    @property
    def augmented_rows_path(self) -> str | None:
        """The file with augmented rows of a student."""
        return _text_or_none(_get_section(self.settings, "distill").get("augmented_rows_path"))

    @property
    def data_sources(self) -> tuple[str, ...]:
        """Sources of its rows: files, folders, URLs or hub names."""
        rows = _get_section(self.settings, "data")
        return tuple(str(rows[name]) for name in ("path", "valid", "test") if rows.get(name))

    @property
    def storage(self) -> str | None:
        return _text_or_none(_get_section(self.settings, "cluster").get("storage"))

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Versions of its artifacts."""
        artifact_files = (self.run.artifact / ARTIFACT_FILE, self.run.int8_artifact / ARTIFACT_FILE)
        return tuple(str(_read_json(place).get("version")) for place in artifact_files if place.is_file())


def read_run(run: Run, name: str, kind: str = "run") -> RunInfo:
    """Read a run folder. Damaged content raises no error: the status is `damaged`."""
    parts = bytes_by_part(run)
    try:
        # The safe loader in C is seven times as fast as the one in Python: there may be hundreds of runs.
        settings = yaml.load(run.config.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        return RunInfo(run, name, kind, "damaged", bytes_by_part=parts, problem="its config.yaml cannot be read")
    events = read_events(run.log)
    # A further preparation of a finished run logs events about its rows, but no training.
    training_events = [event for event in events if event["kind"] not in (*LATE_EVENTS, *ROW_EVENTS[1:])]
    stores = [event["store"] for event in events if isinstance(event.get("store"), str)]
    created = next((event for event in events if event["kind"] == "created"), None)
    trimmed_models = [event["model"] for event in events if event["kind"] == "vocabulary" and "model" in event]
    started_at = created["time"] if created else None
    winner_number = next((event.get("winner") for event in reversed(events) if event["kind"] == "searched"), None)
    return RunInfo(
        run,
        name,
        "student" if kind == "run" and _text_or_none(_get_section(settings, "distill").get("teacher")) else kind,
        run_status(run, training_events),
        settings,
        score=_headline_score(str(settings.get("task")), training_events),
        started_at=started_at,
        seconds=training_events[-1]["time"] - started_at if started_at is not None else None,
        store=Path(stores[-1]) if stores else None,
        trimmed_model=Path(trimmed_models[-1]) if trimmed_models else None,
        bytes_by_part=parts,
        winner=run.trial(winner_number).name if isinstance(winner_number, int) and winner_number >= 0 else None,
        problem=None if events or kind == "search" or not run.is_finished else "its log is missing or unreadable",
        kept_by_clean=_text_or_none(
            next((event.get("keep") for event in reversed(events) if event["kind"] == "cleaned"), None)
        ),
    )


def read_search(run: Run, name: str) -> RunInfo:
    """Read a search and its trials. It has the winner's score, and the duration of all trials."""
    search_info = read_run(run, name, "search")
    trials = tuple(
        read_run(Run(folder), f"{name}/{folder.name}", "trial")
        for folder in sorted(run.folder.glob("trial-[0-9]*"))
        if Run(folder).exists
    )
    winner = next((trial for trial in trials if trial.run.name == search_info.winner), None)
    scored_trials = [trial for trial in trials if trial.score]
    shown_trial = winner or max(
        scored_trials, key=lambda trial: trial.score.value if trial.score else 0.0, default=None
    )
    trial_times = [
        (trial.started_at, trial.started_at + (trial.seconds or 0.0))
        for trial in trials
        if trial.started_at is not None
    ]
    shown_status = search_info.status
    if shown_status != "damaged":
        open_status = "running" if is_locked(run) else "interrupted"
        shown_status = winner.status if winner else open_status
    return replace(
        search_info,
        status=shown_status,
        score=shown_trial.score if shown_trial else None,
        started_at=min((first for first, _ in trial_times), default=None),
        seconds=max(last for _, last in trial_times) - min(first for first, _ in trial_times) if trial_times else None,
        store=next((trial.store for trial in trials if trial.store), None),
        trials=trials,
    )


def _headline_score(task: str, log: list[Event]) -> HeadlineScore | None:
    """Return the headline score on the test rows, else the best one on the validation rows."""
    if task not in (*TASKS, *plugins.list_names("task")):  # of another rtrain version, or of a plug-in
        return None
    headline = get_metric(base.get_task(task).output).headline
    values_by_split = [
        (event.get("split"), float(value))
        for event in log
        if event["kind"] == "evaluated"
        and isinstance(scores := event.get("scores"), dict)
        and isinstance(value := scores.get(headline), int | float)
    ]
    test_values = [value for split, value in values_by_split if split == "test"]
    validation_values = [value for split, value in values_by_split if split == "valid"]
    if test_values:
        return HeadlineScore(headline, test_values[-1], "test")
    return HeadlineScore(headline, max(validation_values), "valid") if validation_values else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _get_section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ------------------------------------------------------------------------------------------------------------ the log


def read_events(log: Path) -> list[Event]:
    """Return the events of a log in order, with the newest `progress` event only. Invalid lines are skipped.

    A log of a million steps takes a second; parsing all of its lines would take ten.
    """
    try:
        lines = log.read_bytes().split(b"\n")
    except OSError:  # it may be removed meanwhile
        return []
    newest = max((place for place, line in enumerate(lines) if _is_progress(line)), default=None)
    return list(_parse_events(line for place, line in enumerate(lines) if place == newest or not _is_progress(line)))


def _is_progress(line: bytes) -> bool:
    return line.find(PROGRESS_KIND, 0, KIND_PREFIX_BYTES) >= 0


def _parse_events(lines: Iterator[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if not (isinstance(event, dict) and isinstance(event.get("kind"), str)):
            continue
        timestamp = event.get("time")
        if isinstance(timestamp, int | float) and 0 <= timestamp < MAX_TIME:
            yield event


def run_status(run: Run, log: list[Event]) -> str:
    """Return one of `rtrain.report.summary.STATUSES`, `running`, or `new` without an attempt.

    A run without an end in its log and without a lock was killed: it is `interrupted`.
    """
    logged_status = summary.run_status(log)
    if logged_status != "running":
        return logged_status
    if is_locked(run):
        return "running"
    return "interrupted" if any(event["kind"] == "started" for event in log) else "new"


def is_locked(run: Run) -> bool:
    """Return whether a process holds the run's lock (`rtrain.runs.run_folders.lock`). On storage without locks it is
    False."""
    try:
        with run.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# ----------------------------------------------------------------------------- parts of a run folder, and their bytes


def bytes_by_part(run: Run) -> dict[str, int]:
    """Return a run's bytes by part."""
    totals: Counter[str] = Counter()
    for path in list_folder(run.folder):
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
        if path.name == WHEELS and {item.suffix for item in list_folder(path)} == {".whl"}:
            return WHEELS
        return TRIALS if re.fullmatch(r"trial-\d+|rungs", path.name) else OTHER_FILES
    return RUN_RECORDS if RECORD_PATTERN.fullmatch(path.name) else OTHER_FILES


def list_foreign_files(run: Run) -> list[Path]:
    """Return paths directly in the run folder that rtrain did not write."""
    return [path for path in list_folder(run.folder) if find_part(run, path) == OTHER_FILES]


def is_draft(path: Path) -> bool:
    """Return whether the path is a draft, which rtrain renames when it is written. An `.old` copy whose successor is
    missing is not: it is the last copy."""
    match = DRAFT_PATTERN.fullmatch(path.name)
    is_last_copy = match and path.name.endswith(".old") and not path.with_name(match["name"] or "").exists()
    return match is not None and not is_last_copy


def find_leftovers(run: Run) -> list[Path]:
    """Return the abandoned drafts in the run folder and among its checkpoints."""
    drafts = [path for path in list_folder(run.folder) if is_draft(path)]
    drafts += [path for path in list_folder(run.checkpoints) if path.name.startswith(".step-")]
    return [path for path in drafts if is_inactive(path)]


def is_inactive(path: Path, now: float | None = None) -> bool:
    """Return whether no file was written for `INACTIVE_S`."""
    moment = time.time() if now is None else now
    try:
        paths = [path, *path.rglob("*")] if path.is_dir() else [path]
        return moment - max(path.lstat().st_mtime for path in paths) > INACTIVE_S
    except OSError:
        return False  # it appears or vanishes meanwhile


def list_folder(folder: Path) -> list[Path]:
    """Return the sorted paths in a folder; none if it is missing or unreadable."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


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


def format_bytes(size: float) -> str:
    """Format bytes: 934 B, 12 kB, 4.6 GB; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
