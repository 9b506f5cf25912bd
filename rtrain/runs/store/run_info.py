"""What is known of one run: read from its settings, its log and its folder, whatever state they are in."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rtrain.config.recipe import TASKS
from rtrain.core.run_folder import ARTIFACT, Run
from rtrain.metrics.registry import as_read, metric_for
from rtrain.report import summary
from rtrain.report.summary import AFTERWARDS
from rtrain.runs.store import disk_usage
from rtrain.tasks import base

Event = dict[str, Any]
PROGRESS = b'"kind": "progress"'
KIND_WITHIN = 64
"""Bytes of a line in which its kind stands: it follows the time."""
LATEST = 1e11
"""Seconds since 1970, in the year 5138: a time past it is damage, and no calendar shows it."""
OF_ROWS = (
    *("tokens_reused", "strategy", "vocabulary", "bad_rows"),
    *("unlabelled", "head", "labels", "overlap", "texts", "conflicts"),
)
"""What the log says of a run's rows whenever it is asked for (`runs.preparing.TOLD`), but for their first reading."""


@dataclass(frozen=True)
class Score:
    """The headline of a run's scores."""

    name: str
    value: float
    split: str

    def __str__(self) -> str:
        name, sign = as_read(self.name)
        return f"{sign * self.value:.4f} {name} ({self.split})"


@dataclass(frozen=True)
class Known:
    """A run, a search with its trials, or a student. What its folder does not tell is None or empty."""

    run: Run
    name: str
    """Its path in the folder that was looked at."""
    kind: str
    """`run`, `search`, `trial` or `student`."""
    status: str
    """As `status`; `damaged` where config.yaml cannot be read."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """config.yaml as it stands."""
    score: Score | None = None
    began: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    """From its creation to the last that was logged of its training."""
    store: Path | None = None
    """The token store that its log names last, whether it is there or not. Its name is the digest of its rows."""
    trimmed: Path | None = None
    """Its model, where that was cut to the pieces of its rows."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part (`rtrain.runs.store.disk_usage`). A search has its trials' in its own."""
    winner: str | None = None
    """Name of the trial that a search has chosen."""
    trials: tuple["Known", ...] = ()
    flaw: str | None = None
    cleaned: str | None = None
    """What `rtrain clean` has kept of it: `artifact`, `none` (it was interrupted), or None."""

    @property
    def size(self) -> int:
        return sum(self.parts.values())

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train: it has its artefact or, for a search, its winner has."""
        if self.kind == "search":
            return any(trial.run.name == self.winner and trial.ended for trial in self.trials)
        return self.run.finished or (self.run.int8 / ARTIFACT).is_file()

    @property
    def model(self) -> str:
        """`model.name`: the weights that it started from."""
        return _text(_section(self.settings, "model").get("name")) or ""

    @cached_property
    def place(self) -> Path:
        """The folder by its real path: that of its name may lead through links."""
        return self.run.folder.resolve()

    @cached_property
    def weights(self) -> Path | None:
        """The folder that `model.name` names, by its real path; None for a name of the hub."""
        return Path(self.model).resolve() if Path(self.model).is_absolute() else None

    @property
    def teacher(self) -> str | None:
        """Version of the artefact that it was distilled from."""
        return _text(_section(self.settings, "distill").get("teacher"))

    @property
    def teachers(self) -> frozenset[str]:
        """Versions of all artefacts that it learns from."""
        others = _section(self.settings, "distill").get("co_teachers") or ()
        return frozenset(str(version) for version in (self.teacher, *others) if version)

    @property
    def copied(self) -> str | None:
        """The file with copies of a student's rows."""
        return _text(_section(self.settings, "distill").get("copied"))

    @property
    def data(self) -> tuple[str, ...]:
        """The names of its rows: files, folders, addresses or hub names."""
        rows = _section(self.settings, "data")
        return tuple(str(rows[name]) for name in ("path", "valid", "test") if rows.get(name))

    @property
    def storage(self) -> str | None:
        return _text(_section(self.settings, "cluster").get("storage"))

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Versions of its artefacts."""
        places = (self.run.artifact / ARTIFACT, self.run.int8 / ARTIFACT)
        return tuple(str(_document(place).get("version")) for place in places if place.is_file())


def read(run: Run, name: str, kind: str = "run") -> Known:
    """What the run's folder tells. Raises nothing for what is in it: a damaged one is told as such."""
    parts = disk_usage.parts(run)
    try:
        # The safe loader in C, which makes plain values alone, is seven times as fast: there may be hundreds of runs.
        settings = yaml.load(run.config.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        return Known(run, name, kind, "damaged", parts=parts, flaw="its config.yaml cannot be read")
    events = skim(run.log)
    # A finished run that is asked for again logs what is known of its rows, and trains no more.
    training = [event for event in events if event["kind"] not in (*AFTERWARDS, *OF_ROWS)]
    stores = [event["store"] for event in events if isinstance(event.get("store"), str)]
    created = next((event for event in events if event["kind"] == "created"), None)
    folders = [event["model"] for event in events if event["kind"] == "vocabulary" and "model" in event]
    began = created["time"] if created else None
    chosen = next((event.get("best") for event in reversed(events) if event["kind"] == "searched"), None)
    return Known(
        run,
        name,
        "student" if kind == "run" and _text(_section(settings, "distill").get("teacher")) else kind,
        status(run, training),
        settings,
        score=_score(str(settings.get("task")), training),
        began=began,
        seconds=training[-1]["time"] - began if began is not None else None,
        store=Path(stores[-1]) if stores else None,
        trimmed=Path(folders[-1]) if folders else None,
        parts=parts,
        winner=run.trial(chosen).name if isinstance(chosen, int) and chosen >= 0 else None,
        flaw=None if events or kind == "search" or not run.finished else "its log is missing or unreadable",
        cleaned=_text(next((event.get("keep") for event in reversed(events) if event["kind"] == "cleaned"), None)),
    )


def read_search(run: Run, name: str) -> Known:
    """A search: its own folder, and its trials. It shows the winner's score, and the time of them all."""
    own = read(run, name, "search")
    trials = tuple(
        read(Run(folder), f"{name}/{folder.name}", "trial")
        for folder in sorted(run.folder.glob("trial-[0-9]*"))
        if Run(folder).exists
    )
    best = next((trial for trial in trials if trial.run.name == own.winner), None)
    scored = [trial for trial in trials if trial.score]
    shown = best or max(scored, key=lambda trial: trial.score.value if trial.score else 0.0, default=None)
    begun = [(trial.began, trial.began + (trial.seconds or 0.0)) for trial in trials if trial.began is not None]
    shown_status = own.status
    if shown_status != "damaged":
        open_status = "running" if is_held(run) else "interrupted"
        shown_status = best.status if best else open_status
    return replace(
        own,
        status=shown_status,
        score=shown.score if shown else None,
        began=min((first for first, _ in begun), default=None),
        seconds=max(last for _, last in begun) - min(first for first, _ in begun) if begun else None,
        store=next((trial.store for trial in trials if trial.store), None),
        trials=trials,
    )


def _score(task: str, log: list[Event]) -> Score | None:
    """The headline on the test rows, else the best of those on the validation rows."""
    if task not in TASKS:  # of another rtrain
        return None
    headline = metric_for(base.get(task).output).headline
    found = [
        (event.get("split"), float(value))
        for event in log
        if event["kind"] == "evaluated"
        and isinstance(scores := event.get("scores"), dict)
        and isinstance(value := scores.get(headline), int | float)
    ]
    tested = [value for split, value in found if split == "test"]
    held_out = [value for split, value in found if split == "valid"]
    if tested:
        return Score(headline, tested[-1], "test")
    return Score(headline, max(held_out), "valid") if held_out else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------------------------ the log


def skim(log: Path) -> list[Event]:
    """The events of a log, the oldest first; of its progress the newest alone. Lines that are no events are left out.

    A log of a million updates takes a second; parsing all of its lines would take ten.
    """
    try:
        lines = log.read_bytes().split(b"\n")
    except OSError:  # it may go while it is looked at
        return []
    newest = max((place for place, line in enumerate(lines) if _is_progress(line)), default=None)
    return list(_parsed(line for place, line in enumerate(lines) if place == newest or not _is_progress(line)))


def _is_progress(line: bytes) -> bool:
    return line.find(PROGRESS, 0, KIND_WITHIN) >= 0


def _parsed(lines: Iterator[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if not (isinstance(event, dict) and isinstance(event.get("kind"), str)):
            continue
        at = event.get("time")
        if isinstance(at, int | float) and 0 <= at < LATEST:
            yield event


def status(run: Run, log: list[Event]) -> str:
    """One of `rtrain.report.summary.STATUSES`, or `running`, or `new` where no start was logged.

    A run whose log is open and whose lock nobody holds was killed: it is `interrupted`.
    """
    told = summary.status(log)
    if told != "running":
        return told
    if is_held(run):
        return "running"
    return "interrupted" if any(event["kind"] == "started" for event in log) else "new"


def is_held(run: Run) -> bool:
    """Whether a process trains the run (`rtrain.runs.run_folders.hold`). Storage without locks cannot tell, and counts
    as free."""
    try:
        with run.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
