"""A trial of Ray Tune: an ordinary run in the search's folder, which reports each evaluation to Tune."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.metrics.by_output import metric_for
from rtrain.run import Run
from rtrain.runs import driver, preparing
from rtrain.tasks import base

Log = list[dict[str, Any]]


def stops_at(config: Config, number: int, updates: int) -> tuple[int, list[int]]:
    """(the update after which trial `number` ends, the updates at which it is compared), for a run of `updates`
    updates.

    Trial 0 is not limited to the search's budget: it trains the whole run.
    """
    tune = config.deploy.tune
    budget = math.ceil(tune.budget * updates)
    return updates if number == 0 else budget, [math.ceil(tune.first_rung * updates), budget]


def part(log: Log, config: Config, number: int) -> tuple[Log, bool]:
    """(the part of a trial's log that belongs to the search, whether that part is complete).

    The log of a winner goes on after the search.
    """
    for place, event in enumerate(log):
        ended = event["kind"] in ("paused", "finished")
        if event["kind"] == "stopped" or (ended and event["update"] >= stops_at(config, number, updates_of(log))[0]):
            return log[: place + 1], True
    return log, False


def reported(log: Log, headline: str) -> list[dict[str, Any]]:
    """The results that a trial has reported to Tune. A resumed search reports them again, since the new Tune lacks
    them."""
    found = {event["update"]: event["scores"][headline] for event in log if compared(event)}
    return [{"update": u, "percent": 100 * u / updates_of(log), "score": score} for u, score in sorted(found.items())]


def compared(event: dict[str, Any]) -> bool:
    """Whether Tune is told of an event: of evaluations on validation rows, but not of those after a choice was made on
    the same rows (field `chosen`)."""
    return event["kind"] == "evaluated" and event["split"] == "valid" and "chosen" not in event


def headline_of(config: Config) -> str:
    return metric_for(base.get(config.recipe.task).output).headline


def updates_of(log: Log) -> int:
    """The number of updates of the whole run, as its log says."""
    return int(next(event["of"] for event in reversed(log) if event["kind"] in ("started", "progress")))


def run(
    settings: dict[str, Any],
    document: dict[str, Any],
    search: str,
    overrides: list[dict[str, Any]],
    tokens_root: str,
    named: Iterable[str] = (),
) -> None:
    """The trainable of Ray Tune: run trial `settings["number"]` of the search.

    `document` is the search's configuration, and `named` lists the settings that the user gave. A trial that was begun
    before reports again what it has reported, and continues from its checkpoint.
    """
    import ray.tune
    from ray.tune.integration.ray_train import TuneReportCallback

    number = settings["number"]
    config = configuration.parse(document, overrides[number])
    config = replace(config, named=config.named.union(named))
    if config.deploy.cluster.storage:  # trials of several searches have the same names
        config = configuration.with_overrides(
            config, {"cluster.storage": f"{config.deploy.cluster.storage}/{Path(search).name}"}
        )
    run = Run(Path(search)).trial(number)
    log, ended = part(run.events(), config, number)
    for result in reported(log, headline_of(config)):
        ray.tune.report(result)
    if ended:
        return
    prepared = preparing.prepare(config, run.folder, "resume" if run.exists else "refuse", Path(tokens_root))
    until, rungs = stops_at(config, number, prepared.updates)
    driver.fit(prepared, until=until, evaluate_at=rungs, callbacks=[TuneReportCallback()])
