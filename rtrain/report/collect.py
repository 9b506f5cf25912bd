"""What is known of a run: its folder, read once, for all sections of the report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError, meant
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.metrics import scores
from rtrain.report import baselines as report_baselines, row_predictions, summary
from rtrain.tasks import base
from rtrain.tasks.encode import Reading, reading_of

Event = dict[str, Any]


@dataclass(frozen=True)
class Collected:
    """Everything that is known of a run. What its folder does not hold is None or empty."""

    run: Run
    config: Config
    log: list[Event]
    summary: dict[str, Any]
    store: Store | None
    artifact: dict[str, Any] | None
    """artifact.json of a finished run."""
    answers: row_predictions.AnswerRows | None
    scores: dict[str, Any] | None
    """scores-<split>.json of the rows that `answers` is about (`rtrain.metrics.scores`)."""
    validation: dict[str, Any] | None
    """scores-valid.json, where the run has one."""
    baselines: dict[str, Any] | None
    """baselines.json (`rtrain.report.baselines`)."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.log if event["kind"] in kinds]

    @property
    def created(self) -> Event:
        return next(iter(self.of("created")), {})

    @property
    def starts(self) -> list[Event]:
        return self.of("started")

    @property
    def output(self) -> str:
        """Kind of output; it decides what can be drawn of the rows and of the answers."""
        return base.get(self.config.recipe.task).output

    @property
    def reading(self) -> Reading:
        """How the rows were read: whole, or in windows."""
        return reading_of(base.get(self.config.recipe.task), self.config.recipe.data)

    def classes(self) -> Ints | None:
        """Number of each training row's label [rows], where the task gives a text one label; else None."""
        if self.store is None or self.output != "classes":
            return None
        return self.store.targets("train").values.astype(np.int64)

    def updates_per_epoch(self) -> int | None:
        if self.store is None:
            return None
        return max(1, -(-self.store.rows("train") // self.config.recipe.rows_per_update))


def read(run: Run) -> Collected:
    """Raises `UserError` for a folder that holds no run."""
    if not run.exists:
        fix = meant(run.folder) or "name the folder that --out named"
        raise UserError(f"{run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    config = configuration.load(str(run.config))
    answers = row_predictions.newest(run)
    return Collected(
        run=run,
        config=config,
        log=run.events(),
        summary=summary.summarise(run),
        store=None if run.store is None else Store(run.store),
        artifact=artifact.document_of(run.artifact) if run.finished else None,
        answers=answers,
        scores=scores.read(run.scores(answers.split)) if answers is not None else None,
        validation=scores.read(run.scores("valid")),
        baselines=report_baselines.read(run),
    )
