"""What a Tune trial runs: an ordinary run in the search's folder, reported to Tune at each evaluation."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.metrics.by_output import metric_for
from rtrain.run import Run
from rtrain.runs import driver
from rtrain.tasks import base

Log = list[dict[str, Any]]


def run_folder(search: Path, number: int) -> Path:
    return search / f"trial-{number:03d}"


def stops_at(config: Config, number: int, updates: int) -> tuple[int, list[int]]:
    """(updates after which trial `number` ends, updates at which it is compared). Trial 0 uses the full budget."""
    tune = config.deploy.tune
    budget = math.ceil(tune.budget * updates)
    return updates if number == 0 else budget, [math.ceil(tune.first_rung * updates), budget]


def part(log: Log, config: Config, number: int) -> tuple[Log, bool]:
    """(a trial's log as far as it is the search's, whether that has come to its end): a winner's log goes on."""
    for place, event in enumerate(log):
        ended = event["kind"] in ("paused", "finished")
        if event["kind"] == "stopped" or (ended and event["update"] >= stops_at(config, number, updates_of(log))[0]):
            return log[: place + 1], True
    return log, False


def reported(log: Log, headline: str) -> list[dict[str, Any]]:
    """What a trial has reported to Tune, for one that takes the search up again and knows nothing."""
    found = {event["update"]: event["scores"][headline] for event in log if compared(event)}
    return [{"update": u, "percent": 100 * u / updates_of(log), "score": score} for u, score in sorted(found.items())]


def compared(event: dict[str, Any]) -> bool:
    """An evaluation that Tune is told of; one with what was chosen on the same rows afterwards is not."""
    return event["kind"] == "evaluated" and event["split"] == "valid" and "chosen" not in event


def headline_of(config: Config) -> str:
    return metric_for(base.get(config.recipe.task).output).headline


def updates_of(log: Log) -> int:
    """Updates of the whole run."""
    return int(next(event["of"] for event in reversed(log) if event["kind"] in ("started", "progress")))


def run(
    settings: dict[str, Any],
    document: dict[str, Any],
    search: str,
    overrides: list[dict[str, Any]],
    tokens_root: str,
    named: Iterable[str] = (),
) -> None:
    """The trainable: trial `settings["number"]` of the search; `document` is the search's configuration, of which
    `named` was asked for. One that was begun reports again what it has reported, and goes on from there."""
    import ray.tune
    from ray.tune.integration.ray_train import TuneReportCallback

    number = settings["number"]
    config = configuration.parse(document, overrides[number])
    config = replace(config, named=config.named.union(named))
    if config.deploy.cluster.storage:  # trials of several searches have the same names
        config = configuration.with_overrides(
            config, {"cluster.storage": f"{config.deploy.cluster.storage}/{Path(search).name}"}
        )
    run = Run(run_folder(Path(search), number))
    log, ended = part(run.events(), config, number)
    for result in reported(log, headline_of(config)):
        ray.tune.report(result)
    if ended:
        return
    prepared = driver.prepare(config, run.folder, "resume" if run.exists else "refuse", Path(tokens_root))
    until, rungs = stops_at(config, number, prepared.updates)
    driver.fit(prepared, until=until, evaluate_at=rungs, callbacks=[TuneReportCallback()])
