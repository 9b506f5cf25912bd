"""What a Tune trial runs: an ordinary run in the search's folder, reported to Tune at each evaluation."""

import math
from pathlib import Path
from typing import Any

import ray.train.v2._internal.execution.callback
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.training import driver

PLACEMENT_GROUP = "placement_group"
"""File of a trial's run folder with the id of the placement group of its workers."""


class RememberPlacementGroup(ray.train.v2._internal.execution.callback.WorkerGroupCallback):
    """Writes down which placement group the workers hold, for the search to free when it stops the trial.

    A trial that Tune stops is killed, and its Train controller with it, before it removes the group; Ray's own cleaner
    asks the State API, which needs the dashboard. A leaked group keeps its CPUs, and the next trial waits for ever.
    """

    def __init__(self, run: Path):
        self._path = run / PLACEMENT_GROUP

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        group = worker_group.get_worker_group_state().placement_group_handle.placement_group
        self._path.write_text(group.id.hex())


def run_folder(search: Path, number: int) -> Path:
    return search / f"trial-{number:03d}"


def stops_at(config: Config, number: int, updates: int) -> tuple[int, list[int]]:
    """(updates after which trial `number` ends, updates at which it is compared). Trial 0 uses the full budget."""
    tune = config.deploy.tune
    budget = math.ceil(tune.budget * updates)
    return updates if number == 0 else budget, [math.ceil(tune.first_rung * updates), budget]


def run(
    settings: dict[str, Any], document: dict[str, Any], search: str, overrides: list[dict[str, Any]], tokens_root: str
) -> None:
    """The trainable: trial `settings["number"]` of the search; `document` is the search's configuration."""
    from ray.tune.integration.ray_train import TuneReportCallback

    number = settings["number"]
    config = configuration.parse(document, overrides[number])
    prepared = driver.prepare(config, run_folder(Path(search), number), tokens_root=Path(tokens_root))
    until, rungs = stops_at(config, number, prepared.updates)
    callbacks = [TuneReportCallback(), RememberPlacementGroup(prepared.run)]
    driver.fit(prepared, until=until, evaluate_at=rungs, callbacks=callbacks)
