"""The search: Ray Tune with ASHA over trials that are ordinary runs, and the winner's way to its full budget."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from rtrain import config as configuration, events
from rtrain.config import Config
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.ray_internals import HEAD_RESOURCE
from rtrain.report import summary
from rtrain.run import Run
from rtrain.runs import driver, opening, placement, preparing
from tune import space, trial as trials
from tune.trial import part

# A trial takes no CPU itself, since its workers take theirs. Tune refuses an empty bundle, so the trial takes a sliver
# of the resource that marks the head node.
TRIAL_RESOURCES = {"CPU": 0, HEAD_RESOURCE: 0.001}
SPACE = ("points", "lr", "aggregation_frequency", "budget", "first_rung")
"""Settings of `tune` that define the trials."""
REDUCTION = 2
"""ASHA keeps the better half of the trials at each rung."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    `score` is its best validation score within the search's budget, or before it was stopped; None if it has none.
    """

    number: int
    lr: float
    aggregation_frequency: int
    updates: int
    score: float | None
    status: str
    run: str
    error: str | None = None
    """First line of the error with which the trial failed; None if it did not fail."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it sets otherwise than the recipe, by dotted name; empty for trial 0."""

    @property
    def named(self) -> str:
        """The trial by what it differs in."""
        if self.number == 0:
            return "the recipe as it stands"
        # Searches of an earlier version did not write the settings of a trial down.
        known = self.settings or {"optim.lr": self.lr, "train.aggregation_frequency": self.aggregation_frequency}
        return ", ".join(f"{name}={value}" for name, value in known.items())


@dataclass(frozen=True)
class Found:
    """The result of a search: all trials, and the best of them."""

    trials: tuple[Trial, ...]
    best: Trial

    @property
    def failures(self) -> str:
        """The failed trials in one line; empty if none failed."""
        return _failures(self.trials)

    def to_document(self) -> dict[str, Any]:
        return {"trials": [asdict(trial) for trial in self.trials], "best": self.best.number}


class _Scheduler(AsyncHyperBandScheduler):
    """ASHA (Li et al. 2018, arXiv:1810.05934), except that trial 0, the recipe as it stands, is never stopped."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return self.CONTINUE if trial.config["number"] == 0 else str(decision)


class _FreeWorkers(ray.tune.Callback):
    """A Tune callback that frees the CPUs of an ended trial's workers (see `placement.remember`), and logs stops."""

    def __init__(self, search: Path, config: Config):
        self._search, self._config = search, config

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        run, number = self._run(trial), trial.config["number"]
        log, ended = part(run.events(), self._config, number)
        if log and not ended and summary.status(log) == "running":
            run.append("stopped")  # before its workers die, so that their end is not logged as a failure
        placement.release(run)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        placement.release(self._run(trial))

    def _run(self, trial: Any) -> Run:
        return Run(self._search).trial(trial.config["number"])


def check(config: Config) -> None:
    """Raise `ConfigError` if there will be no validation rows: the trials would be trained, and none would get a
    score."""
    data = config.recipe.data
    if data.valid_share == 0 and not (data.valid or data.split):
        reason = "trials are compared on validation rows, and there are none"
        fix = "give a share, e.g. 0.1; train the winner's settings on all rows afterwards"
        raise ConfigError([Problem("data.valid_share", 0, reason, fix)])


def run(
    config: Config,
    folder: Path,
    reuse: opening.Reuse = "refuse",
    on_event: driver.OnEvent | None = None,
    tokens_root: Path | None = None,
) -> Found:
    """Run all trials under `folder`. Every trial keeps its run folder; `trials.jsonl` lists the trials.

    The trials share the token store under `tokens_root`, by default the folder that holds the search. A resumed search
    continues the trials that were cut short; ended trials are not run again. Raises `ConfigError` if a resumed search
    has other trials, and `UserError` if no trial has a score.
    """
    folder, config = opening.choose(folder, config, reuse)
    config = opening.absolute(
        config, folder if reuse == "resume" else None
    )  # all trials use the same commits of hub names
    if reuse == "resume":
        _refuse_another(opening.stored(folder), config)
    search = Run(folder)
    opening.freeze(search, config)
    with opening.hold(search):
        return _run(config, search, on_event, tokens_root or folder.parent)


def _refuse_another(old: Config, new: Config) -> None:
    """Raise `ConfigError` if a resumed search would have other trials. Their number alone may change.

    The number of workers counts too, since it sets a trial's rows per update.
    """
    fixed = ("train.workers", "train.micro_batch", *(f"tune.{name}" for name in SPACE))
    before, after = configuration.flat(old), configuration.flat(new)
    fix = "leave it out, or start another search with --new"
    if changed := [name for name in fixed if before[name] != after[name]]:
        reason = "the search was started with {!r}"
        raise ConfigError([Problem(name, after[name], reason.format(before[name]), fix) for name in changed])


def _run(config: Config, search: Run, on_event: driver.OnEvent | None, tokens_root: Path) -> Found:
    folder, overrides = search.folder, space.trials(config)
    for override in overrides:
        configuration.with_overrides(config, override)  # a trial that cannot work is refused before the first starts
    trainable = partial(
        trials.run,
        document=configuration.to_document(config),
        search=str(folder),
        overrides=overrides,
        tokens_root=str(tokens_root),
        named=sorted(config.named),
    )
    started = len(list(search.ray.iterdir())) if search.ray.is_dir() else 0
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(trainable, TRIAL_RESOURCES),
        param_space={"number": ray.tune.grid_search(list(range(len(overrides))))},
        tune_config=ray.tune.TuneConfig(
            metric="score",
            mode="max",
            max_concurrent_trials=config.deploy.tune.concurrent,
            scheduler=_Scheduler(
                time_attr="percent",
                # Time goes to 100 %. A limit of 100 would kill a trial while it writes its artefact.
                max_t=1000,
                grace_period=max(1, round(100 * config.deploy.tune.first_rung)),
                reduction_factor=REDUCTION,
            ),
        ),
        run_config=ray.tune.RunConfig(
            # Each start has a new name. Under an old name Ray would unpickle its state of the last start.
            name=f"tune-{started:03d}",
            storage_path=str(search.ray),
            callbacks=[_FreeWorkers(folder, config)],
            verbose=0,
        ),
    )
    followed = [(search.trial(number).folder, {"trial": number}) for number in range(len(overrides))]
    with events.Follow(followed, on_event):
        results: Any = tuner.fit()
    errors = {number: first_line(result.error) for number, result in enumerate(results) if result.error}
    found = [
        summarise(config, search.trial(number).folder, number, override, errors.get(number))
        for number, override in enumerate(overrides)
    ]
    for trial in found:
        if trial.score is not None:
            summary.write(Run(Path(trial.run)))  # a stopped trial was killed before it could write it
    search.trials.write_text("".join(json.dumps(asdict(trial)) + "\n" for trial in found))
    chosen = best(found)
    search.append("searched", best=chosen.number, trials=len(found))
    return Found(tuple(found), chosen)


def first_line(error: Any) -> str:
    """The first line of the error that ended a trial. For an error from a Ray process, it is that of the error raised
    there."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).splitlines() if line.strip()]
    return lines[0 if cause else -1].strip() if lines else type(cause or error).__name__


def summarise(config: Config, run: Path, number: int, override: dict[str, Any], error: str | None) -> Trial:
    """A trial's result, from the part of its log that belongs to the search."""
    log, _ = part(Run(run).events(), config, number)
    scored = [event for event in log if event["kind"] == "evaluated" and event["split"] == "valid"]
    recipe = configuration.with_overrides(config, override).recipe
    budget = trials.stops_at(config, 1, trials.updates_of(log))[0] if scored else 0
    compared = [event for event in scored if event["update"] <= budget] or scored
    headline = trials.headline_of(config)
    return Trial(
        number=number,
        lr=recipe.optim.lr,
        aggregation_frequency=recipe.rows_per_update // (recipe.train.workers * recipe.train.micro_batch),
        updates=scored[-1]["update"] if scored else 0,
        score=max((event["scores"][headline] for event in compared), default=None),
        status="failed" if error else summary.status(log),
        run=str(run),
        error=error,
        settings={name: value for name, value in override.items() if value is not None},
    )


def best(found: Sequence[Trial]) -> Trial:
    """The trial with the highest score among those that reached the common budget; the first of equal ones.

    If no trial reached it, all scored trials count. Raises `UserError` if no trial has a score without a failure.
    """
    scored = [(trial.score, -trial.number, trial) for trial in found if trial.score is not None and not trial.error]
    reached = [entry for entry in scored if entry[2].status in ("finished", "paused")] or scored
    if not reached:
        raise UserError(f"no trial of the search came to a score; {_failures(found)}")
    return max(reached)[2]


def _failures(found: Sequence[Trial]) -> str:
    failed = [f"trial {trial.number}: {trial.error}" for trial in found if trial.error]
    return f"{len(failed)} of {len(found)} trials failed: {'; '.join(failed)}" if failed else ""


def continue_best(
    found: Found, on_event: driver.OnEvent | None = None, tokens_root: Path | None = None
) -> dict[str, Any]:
    """Continue the best trial's run from its checkpoint to its last update; returns its summary."""
    run = Run(Path(found.best.run))
    config = configuration.load(str(run.config))
    prepared = preparing.prepare(config, run.folder, "resume", tokens_root or run.folder.parent.parent)
    return driver.fit(prepared, on_event=on_event)
