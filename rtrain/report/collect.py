"""What is known of a run: its folder, read once, for all sections of the report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration, events, run
from rtrain.batch import Ints
from rtrain.config import Config
from rtrain.data.store import Store
from rtrain.errors import UserError
from rtrain.metrics import scores
from rtrain.report import answer_rows, attributions, baseline, summary
from rtrain.tasks import base
from rtrain.tasks.encode import Reading, reading_of

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Everything that is known of a run. What its folder does not hold is None or empty."""

    folder: Path
    config: Config
    log: list[Event]
    summary: dict[str, Any]
    store: Store | None
    tokenizer: Path | None
    """tokenizer.json that the rows were made with."""
    artifact: dict[str, Any] | None
    """artifact.json of a finished run."""
    answers: answer_rows.AnswerRows | None
    scores: dict[str, Any] | None
    """scores-<split>.json of the rows that `answers` is about (`rtrain.metrics.scores`)."""
    validation: dict[str, Any] | None
    """scores-valid.json, where the run has one."""
    baselines: dict[str, Any] | None
    """baselines.json (`rtrain.report.baseline`)."""
    attributions: dict[str, Any] | None
    """attributions-<split>.json of the rows that `answers` is about."""

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


def read(folder: Path) -> Run:
    """Raises `UserError` for a folder that holds no run."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run (no config.yaml); name the folder that --out named")
    config, log = configuration.load(str(path)), events.read(folder)
    made, answers = _artifact(folder), answer_rows.newest(folder)
    explained = attributions.read(folder, answers.split, made["version"]) if made and answers is not None else None
    return Run(
        folder=folder,
        config=config,
        log=log,
        summary=summary.summarise(folder),
        store=_store(log),
        tokenizer=_tokenizer(folder, config),
        artifact=made,
        answers=answers,
        scores=scores.read(run.Run(folder).scores(answers.split)) if answers is not None else None,
        validation=scores.read(run.Run(folder).scores("valid")),
        baselines=baseline.read(folder),
        attributions=explained,
    )


def _store(log: list[Event]) -> Store | None:
    """The token store, where it is still there: it lies beside the run, not in it."""
    places = [event["store"] for event in log if "store" in event]
    return Store(Path(places[-1])) if places and (Path(places[-1]) / "manifest.json").is_file() else None


def _tokenizer(folder: Path, config: Config) -> Path | None:
    places = (folder / "artifact" / "tokenizer.json", Path(config.recipe.model.name) / "tokenizer.json")
    return next((place for place in places if place.is_file()), None)


def _artifact(folder: Path) -> dict[str, Any] | None:
    path = folder / "artifact" / "artifact.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
