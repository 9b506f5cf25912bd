"""`optuna.journal` of a search: its trials as an Optuna study, for Optuna's own tools.

    optuna-dashboard optuna.journal

It is written from the search's own journal and read by nothing of ours: Optuna's cannot be opened again after a line
that a killed process left half written.
"""

import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from tune import sampler, space
from tune.history import History, Trial
from tune.points import Dimension, is_number

NAME = "optuna.journal"
DIRECTIONS = {"score": ("maximize",), "time": ("minimize",), "front": ("maximize", "minimize")}
"""What is wanted of each value of a finished trial, by `tune.objective`: its score, its seconds to the target, or its
score and its cost."""


def export(folder: Path, config: Config, history: History) -> Path:
    """Write the search's trials into its folder; returns the file. Raises `ConfigError` where Optuna is missing.

    Each trial has its searched settings as parameters, its score at each rung as an intermediate value (the step is the
    rows trained on), and the rest as attributes. One that failed or diverged is FAIL, a frozen one PRUNED, and so is a
    finished one that did not reach the target that was asked for.
    """
    optuna = sampler.optuna()
    dimensions = space.dimensions(config)
    settings = [_settings(config, dimensions, trial) for trial in history.trials]
    distributions = {one.name: _distribution(optuna, one, [each[one.name] for each in settings]) for one in dimensions}
    draft = folder / f".{NAME}.{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    try:
        with sampler.quiet(optuna):
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(draft / NAME)))
            directions = DIRECTIONS[config.deploy.tune.objective]
            study = optuna.create_study(storage=storage, study_name=folder.name, directions=directions)
            for trial, values in zip(history.trials, settings, strict=True):
                params = {name: value for name, value in values.items() if _holds(distributions[name], value)}
                state, reached = _state(config, trial)
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState[state],
                        values=reached,
                        params=params,
                        distributions={name: distributions[name] for name in params},
                        intermediate_values={rung.rows: rung.score for rung in trial.reached},
                        user_attrs=_attributes(trial),
                    )
                )
        (draft / NAME).replace(folder / NAME)  # a reader never sees half a study
    finally:
        shutil.rmtree(draft)
    return folder / NAME


def _settings(config: Config, dimensions: Sequence[Dimension], trial: Trial) -> Mapping[str, Any]:
    """The searched settings of a trial: the point of the space at which it stands, or what it has outside of it."""
    flat = configuration.flat(configuration.with_overrides(config, trial.settings))
    point = space.coordinates(config, dimensions, trial.settings)
    return point or {one.name: flat[one.name] for one in dimensions}


def _distribution(optuna: Any, dimension: Dimension, values: Sequence[Any]) -> Any:
    """What a setting may be, and what it is in trials outside of the space."""
    if dimension.choices:
        others = [value for value in dict.fromkeys(values) if dimension.index(value) is None]
        return optuna.distributions.CategoricalDistribution((*dimension.choices, *others))
    numbers = [value for value in values if is_number(value) and (value > 0 or not dimension.log)]
    kind = optuna.distributions.IntDistribution if dimension.whole else optuna.distributions.FloatDistribution
    return kind(min([dimension.low, *numbers]), max([dimension.high, *numbers]), log=dimension.log)


def _holds(distribution: Any, value: Any) -> bool:
    """Whether a value can be shown as a parameter: null is no number, and 0 has no logarithm."""
    if not hasattr(distribution, "low"):
        return True
    return is_number(value) and bool(distribution.low <= value <= distribution.high)


def _state(config: Config, trial: Trial) -> tuple[str, list[float] | None]:
    """The name of Optuna's state of a trial, and its values, which COMPLETE alone has."""
    if not trial.sound:
        return "FAIL", None
    if trial.finished is None:
        return ("PRUNED" if trial.reached else "RUNNING"), None
    end = trial.finished
    if config.deploy.tune.objective == "front":
        return "COMPLETE", [end.score, trial.price(end.seconds)]
    value = end.score if config.deploy.tune.objective == "score" else end.to_target
    return ("PRUNED", None) if value is None else ("COMPLETE", [value])


def _attributes(trial: Trial) -> dict[str, Any]:
    """What Optuna has no field for, as far as there is any of it."""
    told = {
        "number": trial.number,
        "by": trial.by,
        "named": trial.named,
        "settings": dict(trial.settings),
        "of": trial.of,
        "seed": trial.seed,
        "error": trial.error,
        "diverged": trial.diverged,
        "finished": None if trial.finished is None else asdict(trial.finished),
    }
    return {name: value for name, value in told.items() if value is not None}
