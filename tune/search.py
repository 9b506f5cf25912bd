"""The search: Ray Tune with ASHA over trials that are ordinary runs, and the winner's way to its full budget."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.report import events, summary
from rtrain.tasks import base
from rtrain.tasks.metrics import metric_for
from rtrain.training import driver, placement, runs
from tune import space, trial as trials

# No CPU of its own, since its workers have theirs; Tune refuses an empty bundle, so a sliver of the head's mark.
TRIAL_RESOURCES = {"CPU": 0, "node:__internal_head__": 0.001}
REDUCTION = 2
"""ASHA keeps the better half of the trials at each rung."""


@dataclass(frozen=True)
class Trial:
    """What became of a trial. `score` is its validation score at the search's budget, or where it was stopped."""

    number: int
    lr: float
    aggregation_frequency: int
    updates: int
    score: float
    status: str
    run: str


@dataclass(frozen=True)
class Found:
    trials: tuple[Trial, ...]
    best: Trial

    def to_document(self) -> dict[str, Any]:
        return {"trials": [asdict(trial) for trial in self.trials], "best": self.best.number}


class _Scheduler(AsyncHyperBandScheduler):
    """ASHA (Li et al. 2018, arXiv:1810.05934), but trial 0, the recipe as it stands, is compared and never stopped."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return self.CONTINUE if trial.config["number"] == 0 else str(decision)


class _FreeWorkers(ray.tune.Callback):
    """Gives back the CPUs of a stopped trial's workers (see `placement.Remember`) and logs the stop."""

    def __init__(self, search: Path):
        self._search = search

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        release(trials_folder(self._search, trial))

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        release(trials_folder(self._search, trial))


def trials_folder(search: Path, trial: Any) -> Path:
    return trials.run_folder(search, trial.config["number"])


def release(run: Path) -> None:
    """Remove the placement group of a trial's workers; nothing is done where the trial has ended by itself."""
    if not (run / placement.NAME).is_file():
        return
    if summary.status(events.read(run)) == "running":
        events.append(run, "stopped")  # before its workers die, so that their end is not logged as a failure
    placement.release(run)


def check(config: Config) -> None:
    """Refuse a search without the rows that choose among its trials: each would be trained, and none have a score."""
    data = config.recipe.data
    if data.valid_share == 0 and not (data.valid or data.split):
        reason = "trials are compared on validation rows, and there are none"
        fix = "give a share, e.g. 0.1; train the winner's settings on all rows afterwards"
        raise ConfigError([Problem("data.valid_share", 0, reason, fix)])


def run(
    config: Config,
    folder: Path,
    reuse: runs.Reuse = "refuse",
    on_event: driver.OnEvent | None = None,
    tokens_root: Path | None = None,
) -> Found:
    """Run all trials under `folder`; every trial keeps its run, `trials.jsonl` lists them.

    The trials share the token store under `tokens_root`, by default the folder that holds the search.
    """
    folder, config = runs.choose(folder, config, reuse)
    config = runs.absolute(config)  # each trial asks for the same commits
    runs.freeze(folder, config)
    overrides = space.trials(config)
    for override in overrides:
        configuration.with_overrides(config, override)  # a trial that cannot work is refused before the first starts
    trainable = partial(
        trials.run,
        document=configuration.to_document(config),
        search=str(folder),
        overrides=overrides,
        tokens_root=str(tokens_root or folder.parent),
    )
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(trainable, TRIAL_RESOURCES),
        param_space={"number": ray.tune.grid_search(list(range(len(overrides))))},
        tune_config=ray.tune.TuneConfig(
            metric="score",
            mode="max",
            max_concurrent_trials=config.deploy.tune.concurrent,
            scheduler=_Scheduler(
                time_attr="percent",
                # The largest share is 100 %; a limit of 100 would kill a trial that is writing its artefact.
                max_t=1000,
                grace_period=max(1, round(100 * config.deploy.tune.first_rung)),
                reduction_factor=REDUCTION,
            ),
        ),
        run_config=ray.tune.RunConfig(
            name="tune", storage_path=str(folder / "ray"), callbacks=[_FreeWorkers(folder)], verbose=0
        ),
    )
    followed = [(trials.run_folder(folder, number), {"trial": number}) for number in range(len(overrides))]
    with events.Follow(followed, on_event):
        results = tuner.fit()
    found = summarise(config, folder, overrides)
    if not found:
        first = next(iter(results.errors), None)
        raise UserError(f"no trial of the search came to a score; the first error was: {first}")
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(trial)) + "\n" for trial in found))
    return Found(tuple(found), best(found))


def summarise(config: Config, folder: Path, overrides: Sequence[dict[str, Any]]) -> list[Trial]:
    """The trials that came to a score, from their own logs."""
    found = []
    headline = metric_for(base.get(config.recipe.task).output).headline
    for number in range(len(overrides)):
        run = trials.run_folder(folder, number)
        log = [event for event in events.read(run) if event["kind"] == "evaluated" and event["split"] == "valid"]
        if not log:
            continue
        recipe = configuration.load(str(run / runs.CONFIG)).recipe
        summary.write(run)  # a stopped trial was killed before it could
        budget = _updates(run, config.deploy.tune.budget)
        compared = [event for event in log if event["update"] <= budget] or log
        found.append(
            Trial(
                number=number,
                lr=recipe.optim.lr,
                aggregation_frequency=recipe.rows_per_update // (recipe.train.workers * recipe.train.micro_batch),
                updates=log[-1]["update"],
                score=max(event["scores"][headline] for event in compared),
                status=summary.status(events.read(run)),
                run=str(run),
            )
        )
    return found


def _updates(run: Path, share: float) -> float:
    """`share` of the updates of a run; a trial stopped early may have said no more than that it started."""
    total = next(event["of"] for event in reversed(events.read(run)) if event["kind"] in ("started", "progress"))
    return float(-(-share * total // 1))


def best(found: Sequence[Trial]) -> Trial:
    """The highest score at the common budget among the trials that reached it; of equals the first."""
    reached = [trial for trial in found if trial.status in ("finished", "paused")] or list(found)
    return max(reached, key=lambda trial: (trial.score, -trial.number))


def continue_best(
    found: Found, on_event: driver.OnEvent | None = None, tokens_root: Path | None = None
) -> dict[str, Any]:
    """Continue the best trial's run from its checkpoint to its last update; returns its summary."""
    run = Path(found.best.run)
    config = configuration.load(str(run / runs.CONFIG))
    prepared = driver.prepare(config, run, "resume", tokens_root or run.parent.parent)
    return driver.fit(prepared, on_event=on_event)
