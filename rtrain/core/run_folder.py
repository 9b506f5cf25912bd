"""A run's folder: the names of everything in it, its log, and what was decided once for all of its starts."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from rtrain.core import atomic_write, events, json_files
from rtrain.core.errors import UserError, meant

ARTIFACT = "artifact.json"
"""The file by which an artefact's folder is known (`rtrain.inference.artifact`)."""


class Run:
    """What a run is handed on as. Nothing is read or written before it is asked for.

    The log is read once: later calls read what was added since. So an object is for one thread and one process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._log = events.Tail(folder, whole=True)
        self._events: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        return self.folder.name

    # ------------------------------------------------------------------------------------------------------ the files

    @property
    def config(self) -> Path:
        """The complete configuration; where it is, there is a run."""
        return self.folder / "config.yaml"

    @property
    def log(self) -> Path:
        return self.folder / events.NAME

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def artifact(self) -> Path:
        """The deployable folder of a finished run."""
        return self.folder / "artifact"

    @property
    def int8(self) -> Path:
        """Where `rtrain quantize` puts the artefact's int8 version."""
        return self.folder / "artifact-int8"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def predictions(self, split: str) -> Path:
        """The rows of a split with their answers."""
        return self.folder / f"predictions-{split}.parquet"

    def scores(self, split: str) -> Path:
        """All that is measured of a split."""
        return self.folder / f"scores-{split}.json"

    @property
    def baselines(self) -> Path:
        """Scores of simple models on the same rows."""
        return self.folder / "baselines.json"

    @property
    def store(self) -> Path | None:
        """The newest token store that the log names, where it is still there: it lies beside the run, not in it."""
        places = [Path(event["store"]) for event in self.events() if "store" in event]
        return places[-1] if places and (places[-1] / "manifest.json").is_file() else None

    @property
    def ray(self) -> Path:
        """Ray Train's own files, a folder a start."""
        return self.folder / "ray"

    @property
    def lock(self) -> Path:
        """Held by the process that trains the run."""
        return self.folder / "lock"

    @property
    def notice(self) -> Path:
        """There while the running start is asked to end after the coming update."""
        return self.folder / "notice"

    @property
    def placement_group(self) -> Path:
        """The id of the placement group that the running start holds."""
        return self.folder / "placement_group"

    def rung(self, update: int) -> Path:
        """The answers to the validation rows at a rung of a search (`training.rungs`)."""
        return self.folder / "rungs" / f"update-{update:08d}.safetensors"

    def stalled(self, rank: int | str) -> Path:
        """Traceback of a worker, by rank, that hung in the newest start; empty where it did not. `*` for a pattern."""
        return self.folder / f"stalled-{rank}.txt"

    def profile(self, rank: int | str) -> Path:
        """Where the time of each update went on a worker, by rank, in a start that was profiled. `*` for a pattern."""
        return self.folder / f"profile-{rank}.json"

    def tracebacks(self) -> list[Path]:
        """Those that hung workers left."""
        return [path for path in sorted(self.folder.glob(self.stalled("*").name)) if path.stat().st_size]

    def traceback(self, name: str) -> Path:
        """A new file for the traceback of what failed under that name."""
        return self.folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.txt"

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        """Whether the run has its artefact, which appears whole or not at all."""
        return (self.artifact / ARTIFACT).is_file()

    # -------------------------------------------------------------------------------------------------------- the log

    def append(self, kind: str, **fields: Any) -> None:
        """Add an event to the log."""
        events.append(self.folder, kind, **fields)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """All events so far, or those of some kinds, the oldest first."""
        self._events += self._log.new()
        return [event for event in self._events if not kinds or event["kind"] in kinds]

    def first(self, *kinds: str) -> dict[str, Any] | None:
        return next(iter(self.events(*kinds)), None)

    def last(self, *kinds: str) -> dict[str, Any] | None:
        return next(reversed(self.events(*kinds)), None)

    # ------------------------------------------------------------------------------------------------------ a search

    @property
    def trials(self) -> Path:
        """Where a search lists its trials, once it has ended: one JSON object a line."""
        return self.folder / "trials.jsonl"

    @property
    def study_table(self) -> Path:
        """The table of a study of aggregation frequencies, as JSON."""
        return self.folder / "study.json"

    @property
    def study_page(self) -> Path:
        return self.folder / "study.html"

    @property
    def search_page(self) -> Path:
        """What a search has come to, as a page."""
        return self.folder / "search.html"

    @property
    def best(self) -> Path:
        """The settings of a search's winner, complete; `rtrain train` takes them."""
        return self.folder / "best.yaml"

    @property
    def is_search(self) -> bool:
        return self.trials.is_file() or next(self.folder.glob("trial-[0-9]*/config.yaml"), None) is not None

    def trial(self, number: int) -> "Run":
        """A trial of a search: a run in its folder."""
        return Run(self.folder / f"trial-{number:03d}")

    @property
    def winner(self) -> "Run | None":
        """The trial that a search has chosen. None for a run that is no search, or a search that has not chosen."""
        event = self.last("searched")
        return None if event is None else self.trial(event["best"])

    @property
    def is_of_students(self) -> bool:
        """Whether its configuration is that of a student, or of a search over students."""
        import yaml  # not at the top: `rtrain predict` has no use for it

        try:
            document = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            known: bool = document["distill"]["teacher"] is not None
            return known
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            return False

    @property
    def resumed_by(self) -> str:
        """The command that goes on with it; TEACHER stands for the run of a student's teacher, of which it knows the
        version alone."""
        search = self.is_search
        words = ["tune"] if search else ["train"]
        if self.is_of_students:
            words = ["distill", "TEACHER", *(["--search"] if search else [])]
        return shlex.join(["rtrain", *words, "--resume", "--out", str(self.folder)])

    # -------------------------------------------------------------------------------------------------- the decisions

    @property
    def decisions(self) -> dict[str, Any]:
        """What was measured, or depends on the machine, and so was decided once for all ranks and starts; by name.

        Rank 0 alone reads and keeps decisions, and tells the other ranks (`ranks.decided`): a mounted folder may hide
        from them what was just written.
        """
        path = self.folder / "decisions.json"
        return json_files.read(path) if path.is_file() else {}

    def decide(self, name: str, value: Any) -> Any:
        """The decision of that name: what was decided before, else `value`, which is then kept."""
        known = self.decisions
        if name in known:
            return known[name]
        path = self.folder / "decisions.json"
        atomic_write.write_text(path, json.dumps({**known, name: value}))
        return value


# --------------------------------------------------------------------------------------------- what a folder stands for


def chosen(folder: Path) -> Run:
    """The run that a folder stands for: itself, or the winner of the search that the folder holds.

    Raises `UserError` where the folder holds neither, or where the search has not chosen yet.
    """
    run = Run(folder)
    if not run.exists:
        parent = Run(folder.parent)
        inside = (folder / ARTIFACT).is_file() and parent.exists
        near = f"did you mean {parent}?" if inside else meant(folder)
        hint = near or "name the folder that --out named"
        raise UserError(f"{folder} holds no run (no {run.config.name}); {hint}", code="not_a_run")
    if (winner := run.winner) is not None:
        if not winner.exists:
            raise UserError(
                f"{folder} has chosen {winner.name}, which is gone; name the folder of another trial", code="not_found"
            )
        return winner
    if run.is_search:
        raise UserError(
            f"{folder} is a search that has not chosen its winner yet; go on with: {run.resumed_by}",
            code="not_finished",
        )
    return run


def artifact_of(folder: Path) -> Path:
    """The artefact that a folder stands for: itself, or that of the run or of the search's winner that it holds.

    A run's float artefact comes first, since all scores of the run are its own; the int8 one is taken where it is the
    only one. A folder that holds none of all these is returned as it is: whoever reads it as an artefact refuses it.
    Raises `UserError` for a run that has no artefact yet.
    """
    run = Run(folder)
    if (folder / ARTIFACT).is_file() or not (run.exists or run.finished):
        return folder
    found = chosen(folder) if run.exists else run
    for place in (found.artifact, found.int8):
        if (place / ARTIFACT).is_file():
            return place
    raise UserError(
        f"{found} has no artefact yet, as its training has not ended; go on with: {run.resumed_by}", code="not_finished"
    )


def near(path: Path) -> Path:
    """A path as a user would write it: relative where it lies in the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def shown(path: Path) -> str:
    """A path as it can be pasted behind a command."""
    return shlex.quote(str(near(path)))
