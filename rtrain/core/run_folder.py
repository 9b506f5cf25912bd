"""A run's folder: the names of its files, its log, and the decisions shared by all of its attempts."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from rtrain.core import atomic_write, events, json_files, plugins
from rtrain.core.errors import UserError, suggest_path

ARTIFACT_FILE = "artifact.json"
"""The file that marks an artifact's folder (`rtrain.inference.artifact`)."""
ROWS_FOLDER = ".rows"
"""Folder beside the runs with the rows that Python programs passed in memory (`rtrain.api.rows`)."""


class Run:
    """The folder of a run. Nothing is read or written before a call needs it.

    The log is read incrementally, so an object is for one thread and one process.
    """

    def __init__(self, folder: Path):
        self.folder, self.name = folder, folder.name
        self._log = events.EventTail(folder, from_start=True)
        self._events: list[dict[str, Any]] = []

        self.config = folder / "config.yaml"
        """The complete configuration; it marks a folder as a run."""
        self.log = folder / events.FILE_NAME
        self._decisions = folder / "decisions.json"
        self.checkpoints = folder / "checkpoints"
        self.artifact = folder / "artifact"
        """The deployable folder of a finished run."""
        self.int8_artifact = folder / "artifact-int8"
        """The artifact's int8 version, by `rtrain quantize`."""
        self.summary = folder / "summary.json"
        self.report = folder / "report.html"
        self.baselines = folder / "baselines.json"
        """Scores of simple models on the same rows."""
        self.ray_storage = folder / "ray"
        """Ray Train's own files, a folder for each attempt."""
        self.lock = folder / "lock"
        """Held by the process that trains the run."""
        self.stop_request = folder / "stop_request"
        """Exists while the running attempt is asked to end after the next step."""
        self.placement_group = folder / "placement_group"
        """The id of the placement group of the running attempt."""

        self.trials = folder / "trials.jsonl"
        """The journal of a search: one JSON object a line."""
        self.search_page = folder / "search.html"
        self.best_config = folder / "best.yaml"
        """The complete settings of a search's winner, for `rtrain train`."""
        self.study_table = folder / "study.json"
        """The table of a study of aggregation frequencies."""
        self.study_page = folder / "study.html"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def __str__(self) -> str:
        return str(self.folder)

    def predictions(self, split: str) -> Path:
        """The rows of a split with their predictions."""
        return self.folder / f"predictions-{split}.parquet"

    def scores(self, split: str) -> Path:
        """All scores of a split."""
        return self.folder / f"scores-{split}.json"

    @property
    def token_store(self) -> Path | None:
        """The newest token store named by the log, if it still exists: it lies beside the run, not in it."""
        store_folders = [Path(event["store"]) for event in self.events() if "store" in event]
        return store_folders[-1] if store_folders and (store_folders[-1] / "manifest.json").is_file() else None

    def rung_predictions(self, step: int) -> Path:
        """The predictions for the validation rows at a rung of a search (`rtrain.trainer.evaluate`)."""
        return self.folder / "rungs" / f"step-{step:08d}.safetensors"

    def hang_traceback(self, rank: int | str) -> Path:
        """Traceback of a hung worker of the newest attempt, by rank; empty if it did not hang. `*` for a pattern."""
        return self.folder / f"hang-{rank}.txt"

    def profile(self, rank: int | str) -> Path:
        """Times of the parts of each step on a worker, by rank, of a profiled attempt. `*` for a pattern."""
        return self.folder / f"profile-{rank}.json"

    def hang_tracebacks(self) -> list[Path]:
        """Return the tracebacks of hung workers."""
        return [path for path in sorted(self.folder.glob(self.hang_traceback("*").name)) if path.stat().st_size]

    def new_traceback(self, name: str) -> Path:
        """Return a new file name for a traceback."""
        return self.folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.txt"

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run has its artifact, which is written atomically."""
        return (self.artifact / ARTIFACT_FILE).is_file()

    # -------------------------------------------------------------------------------------------------------- the log

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add an event to the log."""
        events.append_event(self.folder, kind, **fields)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return all events so far, or those with a kind in `kinds`, the oldest first."""
        self._events += self._log.read_new()
        return [event for event in self._events if not kinds or event["kind"] in kinds]

    def first_event(self, *kinds: str) -> dict[str, Any] | None:
        return next(iter(self.events(*kinds)), None)

    def last_event(self, *kinds: str) -> dict[str, Any] | None:
        return next(reversed(self.events(*kinds)), None)

    # ------------------------------------------------------------------------------------------------------ a search

    @property
    def is_search(self) -> bool:
        return self.trials.is_file() or next(self.folder.glob("trial-[0-9]*/config.yaml"), None) is not None

    def trial(self, number: int) -> "Run":
        """A trial of a search: a run in its folder."""
        return Run(self.folder / f"trial-{number:03d}")

    @property
    def winner(self) -> "Run | None":
        """The winning trial of a search. None for a run that is no search, or a search without a winner yet."""
        event = self.last_event("searched")
        return None if event is None else self.trial(event["winner"])

    @property
    def is_student(self) -> bool:
        """Whether the configuration is of a student, or of a search over students."""
        import yaml  # not at the top: `rtrain predict` does not need it

        try:
            document = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            has_teacher: bool = document["distill"]["teacher"] is not None
            return has_teacher
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            return False

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; TEACHER is a placeholder for the teacher's run, since a student records
        only its version."""
        is_search = self.is_search
        arguments = ["tune"] if is_search else ["train"]
        if self.is_student:
            arguments = ["distill", "TEACHER", *(["--search"] if is_search else [])]
        return shlex.join(["rtrain", *arguments, "--resume", "--out", str(self.folder), *plugins.format_options()])

    # -------------------------------------------------------------------------------------------------- the decisions

    @property
    def decisions(self) -> dict[str, Any]:
        """Measured or machine-dependent values, decided once for all ranks and attempts; by name.

        Rank 0 alone reads and writes decisions, and broadcasts them (`collectives.decide_on_rank_zero`): a mounted
        folder may show other ranks an old file.
        """
        return json_files.load_json_object(self._decisions) if self._decisions.is_file() else {}

    def decide_once(self, name: str, value: Any) -> Any:
        """Return the decision of that name: the earlier one, else `value`, which is stored."""
        decisions = self.decisions
        if name in decisions:
            return decisions[name]
        atomic_write.write_text(self._decisions, json.dumps({**decisions, name: value}))
        return value


# ------------------------------------------------------------------------------------ runs and artifacts of folders


def resolve_run(folder: Path) -> Run:
    """Return the run of a folder: itself, or the winner of the search in the folder.

    Raises `UserError` if the folder holds neither, or if the search has no winner yet.
    """
    run = Run(folder)
    if not run.exists:
        parent = Run(folder.parent)
        is_run_artifact = (folder / ARTIFACT_FILE).is_file() and parent.exists
        suggestion = f"did you mean {parent}?" if is_run_artifact else suggest_path(folder)
        hint = suggestion or "name the folder of --out"
        raise UserError(f"{folder} holds no run (no {run.config.name}); {hint}", code="not_a_run")
    if (winner := run.winner) is not None:
        if not winner.exists:
            raise UserError(
                f"{folder} has the winner {winner.name}, which is missing; name the folder of another trial",
                code="not_found",
            )
        return winner
    if run.is_search:
        raise UserError(
            f"{folder} is a search without a winner yet; resume it with: {run.resume_command}", code="not_finished"
        )
    return run


def resolve_artifact(folder: Path) -> Path:
    """Return the artifact of a folder: itself, or that of the run or of the search's winner in it.

    A run's float artifact comes first, since the run's scores are its own; the int8 artifact is taken where it is the
    only one. Any other folder is returned unchanged: reading it as an artifact fails. Raises `UserError` for a run
    without an artifact yet.
    """
    run = Run(folder)
    if (folder / ARTIFACT_FILE).is_file() or not (run.exists or run.is_finished):
        return folder
    resolved_run = resolve_run(folder) if run.exists else run
    for artifact_folder in (resolved_run.artifact, resolved_run.int8_artifact):
        if (artifact_folder / ARTIFACT_FILE).is_file():
            return artifact_folder
    raise UserError(
        f"{resolved_run} has no artifact yet, since its training has not ended; resume it with: {run.resume_command}",
        code="not_finished",
    )


def relative_to_cwd(path: Path) -> Path:
    """Return a path relative to the current folder where it lies in it."""
    cwd = Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


def quote_path(path: Path) -> str:
    """Quote a path for a shell command."""
    return shlex.quote(str(relative_to_cwd(path)))
