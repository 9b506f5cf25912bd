"""The data of a run for all sections of the report, read once from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError, suggest_path
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.metrics import scores
from rtrain.report import baselines as report_baselines, row_predictions, summary
from rtrain.tasks import base
from rtrain.tasks.encode import WindowSpec, resolve_window_spec

Event = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """Data of a run. Missing files are None or empty."""

    run: Run
    config: Config
    events: list[Event]
    summary: dict[str, Any]
    store: Store | None
    artifact: dict[str, Any] | None
    """artifact.json of a finished run."""
    answers: row_predictions.AnswerRows | None
    scores: dict[str, Any] | None
    """scores-<split>.json of the rows of `answers` (`rtrain.metrics.scores`)."""
    validation_scores: dict[str, Any] | None
    """scores-valid.json, if present."""
    baselines: dict[str, Any] | None
    """baselines.json (`rtrain.report.baselines`)."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    def events_of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def created_event(self) -> Event:
        return next(iter(self.events_of_kind("created")), {})

    @property
    def attempts(self) -> list[Event]:
        return self.events_of_kind("started")

    @property
    def output(self) -> str:
        """Kind of the task's output."""
        return base.get_task(self.config.recipe.task).output

    @property
    def reading(self) -> WindowSpec:
        """Window settings of the rows."""
        return resolve_window_spec(base.get_task(self.config.recipe.task), self.config.recipe.data)

    def class_codes(self) -> Ints | None:
        """Label number of each training row [rows]; None unless texts have a single label."""
        if self.store is None or self.output != "classes":
            return None
        return self.store.targets("train").values.astype(np.int64)

    def steps_per_epoch(self) -> int | None:
        if self.store is None:
            return None
        return max(1, -(-self.store.num_rows("train") // self.config.recipe.global_batch_size))


def read_run_data(run: Run) -> RunData:
    """Read a run's folder. Raises `UserError` for a folder without a run."""
    if not run.exists:
        fix = suggest_path(run.folder) or "name the folder that --out named"
        raise UserError(f"{run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    config = configuration.load_config(str(run.config))
    answers = row_predictions.read_report_answers(run)
    return RunData(
        run=run,
        config=config,
        events=run.events(),
        summary=summary.summarize(run),
        store=None if run.token_store is None else Store(run.token_store),
        artifact=artifact.read_artifact_json(run.artifact) if run.is_finished else None,
        answers=answers,
        scores=scores.read_scores(run.scores(answers.split)) if answers is not None else None,
        validation_scores=scores.read_scores(run.scores("valid")),
        baselines=report_baselines.read_baselines(run),
    )
