"""What a Tune trial runs: an ordinary run in the search's folder, reported to Tune at each evaluation."""

import math
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.training import driver


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
    if config.deploy.cluster.storage:  # trials of several searches have the same names
        config = configuration.with_overrides(
            config, {"cluster.storage": f"{config.deploy.cluster.storage}/{Path(search).name}"}
        )
    prepared = driver.prepare(config, run_folder(Path(search), number), tokens_root=Path(tokens_root))
    until, rungs = stops_at(config, number, prepared.updates)
    driver.fit(prepared, until=until, evaluate_at=rungs, callbacks=[TuneReportCallback()])
