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
from tune.space import Dimension, is_number

FILE_NAME = "optuna.journal"
DIRECTIONS = {"score": ("maximize",), "time_to_target": ("minimize",), "pareto": ("maximize", "minimize")}
"""Directions of a trial's values by objective: its score, its seconds to the target, or its score and cost."""


def export_study(folder: Path, config: Config, history: History) -> Path:
    """Write the search's trials to `optuna.journal` and return its path. Raises `ConfigError` if Optuna is missing.

    Each trial has its searched settings as parameters, its score at each rung as an intermediate value (the step is the
    number of trained rows), and the rest as attributes. Failed and diverged trials are FAIL; frozen trials, and
    finished trials below the target, are PRUNED.
    """
    optuna = sampler.import_optuna()
    dimensions = space.build_dimensions(config)
    settings = [_searched_settings(config, dimensions, trial) for trial in history.trials]
    distributions = {
        dimension.name: _make_distribution(optuna, dimension, [setting[dimension.name] for setting in settings])
        for dimension in dimensions
    }
    draft = folder / f".{FILE_NAME}.{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    try:
        with sampler.quiet_logging(optuna):
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(draft / FILE_NAME)))
            directions = DIRECTIONS[config.deploy.tune.objective]
            study = optuna.create_study(storage=storage, study_name=folder.name, directions=directions)
            for trial, values in zip(history.trials, settings, strict=True):
                params = {name: value for name, value in values.items() if _contains(distributions[name], value)}
                study.add_trial(_make_trial(optuna, config, trial, params, distributions))
        (draft / FILE_NAME).replace(folder / FILE_NAME)  # atomic
    finally:
        shutil.rmtree(draft)
    return folder / FILE_NAME


def _make_trial(
    optuna: Any, config: Config, trial: Trial, params: Mapping[str, Any], distributions: Mapping[str, Any]
) -> Any:
    state, values = _trial_state(config, trial)
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        values=values,
        params=params,
        distributions={name: distributions[name] for name in params},
        intermediate_values={rung.rows: rung.score for rung in trial.rung_results},
        user_attrs=_user_attributes(trial),
    )


def _searched_settings(config: Config, dimensions: Sequence[Dimension], trial: Trial) -> Mapping[str, Any]:
    flat = configuration.flatten_config(configuration.with_overrides(config, trial.settings))
    point = space.locate_point(config, dimensions, trial.settings)
    return point or {dimension.name: flat[dimension.name] for dimension in dimensions}


def _make_distribution(optuna: Any, dimension: Dimension, values: Sequence[Any]) -> Any:
    """Return a distribution of the setting's space, extended by values outside of it."""
    if dimension.choices:
        other_values = [value for value in dict.fromkeys(values) if dimension.index_of(value) is None]
        return optuna.distributions.CategoricalDistribution((*dimension.choices, *other_values))
    numbers = [value for value in values if is_number(value) and (value > 0 or not dimension.log)]
    distribution_class = (
        optuna.distributions.IntDistribution if dimension.is_integer else optuna.distributions.FloatDistribution
    )
    return distribution_class(min([dimension.low, *numbers]), max([dimension.high, *numbers]), log=dimension.log)


def _contains(distribution: Any, value: Any) -> bool:
    """Return whether a value is valid as a parameter: not null in a range, not 0 in a logarithmic one."""
    if not hasattr(distribution, "low"):
        return True
    return is_number(value) and bool(distribution.low <= value <= distribution.high)


def _trial_state(config: Config, trial: Trial) -> tuple[str, list[float] | None]:
    """Return Optuna's state of a trial, and its values if it is COMPLETE."""
    if not trial.is_valid:
        return "FAIL", None
    if trial.final_result is None:
        return ("PRUNED" if trial.rung_results else "RUNNING"), None
    final_result = trial.final_result
    if config.deploy.tune.objective == "pareto":
        return "COMPLETE", [final_result.score, trial.pareto_cost(final_result.seconds)]
    value = final_result.score if config.deploy.tune.objective == "score" else final_result.seconds_to_target
    return ("PRUNED", None) if value is None else ("COMPLETE", [value])


def _user_attributes(trial: Trial) -> dict[str, Any]:
    """Return attributes without a field in Optuna, without empty ones."""
    attributes = {
        "number": trial.number,
        "proposed_by": trial.proposed_by,
        "label": trial.label,
        "settings": dict(trial.settings),
        "repeat_of": trial.repeat_of,
        "seed": trial.seed,
        "error": trial.error,
        "divergence": trial.divergence,
        "final_result": None if trial.final_result is None else asdict(trial.final_result),
    }
    return {name: value for name, value in attributes.items() if value is not None}
