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

from rtrain import config as configuration, events
from rtrain.config import Config
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.ray_internals import HEAD_RESOURCE
from rtrain.report import summary
from rtrain.run import Run
from rtrain.runs import driver, opening, placement
from tune import space, trial as trials
from tune.trial import part, run_folder

# No CPU of its own, since its workers have theirs; Tune refuses an empty bundle, so a sliver of the head's mark.
TRIAL_RESOURCES = {"CPU": 0, HEAD_RESOURCE: 0.001}
SPACE = ("points", "lr", "aggregation_frequency", "budget", "first_rung")
"""Settings of `tune` that say what its trials are."""
REDUCTION = 2
"""ASHA keeps the better half of the trials at each rung."""


@dataclass(frozen=True)
class Trial:
    """What became of a trial. `score` is its validation score at the search's budget, or where it was stopped; a trial
    that failed may have none."""

    number: int
    lr: float
    aggregation_frequency: int
    updates: int
    score: float | None
    status: str
    run: str
    error: str | None = None
    """First line of what a failed trial failed with."""


@dataclass(frozen=True)
class Found:
    trials: tuple[Trial, ...]
    best: Trial

    @property
    def failures(self) -> str:
        """The failed trials in one line; empty where there are none."""
        return _failures(self.trials)

    def to_document(self) -> dict[str, Any]:
        return {"trials": [asdict(trial) for trial in self.trials], "best": self.best.number}


class _Scheduler(AsyncHyperBandScheduler):
    """ASHA (Li et al. 2018, arXiv:1810.05934), but trial 0, the recipe as it stands, is compared and never stopped."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return self.CONTINUE if trial.config["number"] == 0 else str(decision)


class _FreeWorkers(ray.tune.Callback):
    """Gives back the CPUs of a stopped trial's workers (see `placement.remember`) and logs the stop."""

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
        return Run(run_folder(self._search, trial.config["number"]))


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
    reuse: opening.Reuse = "refuse",
    on_event: driver.OnEvent | None = None,
    tokens_root: Path | None = None,
) -> Found:
    """Run all trials under `folder`; every trial keeps its run, `trials.jsonl` lists them.

    The trials share the token store under `tokens_root`, by default the folder that holds the search. A search that is
    resumed goes on with the trial that was cut short; those that have come to their end are not run again.
    """
    folder, config = opening.choose(folder, config, reuse)
    config = opening.absolute(config, folder if reuse == "resume" else None)  # each trial asks for the same commits
    if reuse == "resume":
        _refuse_another(opening.stored(folder), config)
    search = Run(folder)
    opening.freeze(search, config)
    with opening.hold(search):
        return _run(config, search, on_event, tokens_root or folder.parent)


def _refuse_another(old: Config, new: Config) -> None:
    """A search goes on over the same trials, of which there may be more; its workers count in a trial's rows."""
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
                # The largest share is 100 %; a limit of 100 would kill a trial that is writing its artefact.
                max_t=1000,
                grace_period=max(1, round(100 * config.deploy.tune.first_rung)),
                reduction_factor=REDUCTION,
            ),
        ),
        run_config=ray.tune.RunConfig(
            # A new name per start: Ray's own state of the last one, which it would unpickle, is left alone.
            name=f"tune-{started:03d}",
            storage_path=str(search.ray),
            callbacks=[_FreeWorkers(folder, config)],
            verbose=0,
        ),
    )
    followed = [(run_folder(folder, number), {"trial": number}) for number in range(len(overrides))]
    with events.Follow(followed, on_event):
        results: Any = tuner.fit()
    errors = {number: first_line(result.error) for number, result in enumerate(results) if result.error}
    found = [
        summarise(config, run_folder(folder, number), number, override, errors.get(number))
        for number, override in enumerate(overrides)
    ]
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(trial)) + "\n" for trial in found))
    return Found(tuple(found), best(found))


def first_line(error: Any) -> str:
    """Of what ended a trial, as a person would want it: of an error from a process of Ray's, what was raised there."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).splitlines() if line.strip()]
    return lines[0 if cause else -1].strip() if lines else type(cause or error).__name__


def summarise(config: Config, run: Path, number: int, override: dict[str, Any], error: str | None) -> Trial:
    """A trial's row, from its own log as far as it is the search's."""
    log, _ = part(Run(run).events(), config, number)
    scored = [event for event in log if event["kind"] == "evaluated" and event["split"] == "valid"]
    recipe = configuration.with_overrides(config, override).recipe
    if scored:
        summary.write(run)  # a stopped trial was killed before it could
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
    )


def best(found: Sequence[Trial]) -> Trial:
    """The highest score at the common budget among the trials that reached it; of equals the first.

    A search of which no trial came to a score without failing has none: `UserError`.
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
    prepared = driver.prepare(config, run.folder, "resume", tokens_root or run.folder.parent.parent)
    return driver.fit(prepared, on_event=on_event)
