"""Rows of a profile: the recipe unchanged, or one row per combination of swept settings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem

SETTING_ALIASES = {
    "workers": "train.workers",
    "loader": "cluster.data_cpus",
    "precision": "train.precision",
}
"""Settings by their short names in a sweep; any other setting is swept by its full name."""
MAX_ROWS = 32
"""Maximum rows of a profile: each starts its own workers."""
UNCHANGED_ROW = "unchanged"
_BATCH_SIZE_SETTINGS = {"train.global_batch_size", "train.aggregation_frequency"}


@dataclass(frozen=True)
class ProfileLength:
    """Steps of a profile: `warm_up_steps` that are not measured, `steps` that are, and one more that ends with a
    checkpoint."""

    steps: int
    warm_up_steps: int

    @property
    def total_steps(self) -> int:
        return self.warm_up_steps + self.steps + 1


@dataclass(frozen=True)
class ProfileRow:
    name: str
    settings: dict[str, Any]
    """Swept values by setting name."""
    config: Config


def expand_sweeps(config: Config, sweeps: Sequence[str], length: ProfileLength) -> list[ProfileRow]:
    """Expand sweeps into rows: `workers=1,2` and `precision=fp32,bf16` make four.

    All rows keep the recipe's global batch size unless it is swept. Raises `ConfigError` with all problems.
    """
    values_by_setting, problems = dict[str, list[Any]](), list[Problem]()
    for sweep in sweeps:
        name, values = _parse_sweep(sweep, problems)
        if name in values_by_setting:
            problems.append(
                Problem(
                    "--sweep", sweep, f"{name} is swept twice", "write all its values in one --sweep", code="duplicate"
                )
            )
        values_by_setting[name] = values
    fixed_overrides = _fixed_overrides(config, length, set(values_by_setting))
    for name in (name for name in values_by_setting if name in fixed_overrides and name not in _BATCH_SIZE_SETTINGS):
        fix = "leave it out; --steps sets the number of measured steps"
        problems.append(
            Problem("--sweep", name, "the profile sets this setting itself", fix, code="conflicting_settings")
        )
    rows = list[ProfileRow]()
    combinations = list(itertools.product(*values_by_setting.values()))
    if len(combinations) > MAX_ROWS:
        fix = "sweep fewer settings at a time"
        problems.append(
            Problem(
                "--sweep",
                None,
                f"{len(combinations)} rows; the maximum is {MAX_ROWS}",
                fix,
                code="out_of_range",
            )
        )
    if problems:
        raise ConfigError(problems)
    for combination in combinations:
        swept = dict(zip(values_by_setting, combination, strict=True))
        try:
            rows.append(
                ProfileRow(_row_name(swept), swept, configuration.with_overrides(config, {**fixed_overrides, **swept}))
            )
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return rows


def _fixed_overrides(config: Config, length: ProfileLength, swept: set[str]) -> dict[str, Any]:
    """Overrides of all rows: no row evaluates, ends its training within the measured steps, or writes a remote copy,
    whose name rows of other profiles share."""
    train = config.recipe.train
    overrides: dict[str, Any] = {
        "train.epochs": max(train.epochs, length.total_steps + 1),  # an epoch has at least one step
        "train.evaluate_every": length.total_steps + 1,
        "cluster.storage": None,
    }
    if not swept & _BATCH_SIZE_SETTINGS:
        overrides |= {"train.global_batch_size": config.recipe.global_batch_size, "train.aggregation_frequency": None}
    elif "train.global_batch_size" in swept:
        overrides["train.aggregation_frequency"] = None
    else:
        overrides["train.global_batch_size"] = None
    return overrides


def _parse_sweep(text: str, problems: list[Problem]) -> tuple[str, list[Any]]:
    name, separator, values = text.partition("=")
    name = SETTING_ALIASES.get(name.strip(), name.strip())
    fix = f"write e.g. --sweep {next(iter(SETTING_ALIASES))}=1,2, or the full name of a setting"
    if not separator or not values.strip():
        problems.append(Problem("--sweep", text, "has no values", fix, code="missing"))
        return name, []
    try:
        parsed_values = yaml.safe_load(f"[{values}]")
    except (yaml.YAMLError, ValueError):  # ValueError: an invalid date
        problems.append(Problem("--sweep", text, "the values are not a list", fix, code="invalid_value"))
        return name, []
    if len(parsed_values) != len({repr(value) for value in parsed_values}):
        problems.append(Problem("--sweep", text, "has a duplicate value", "leave it out", code="duplicate"))
    return name, parsed_values


def _row_name(swept: dict[str, Any]) -> str:
    aliases = {setting: name for name, setting in SETTING_ALIASES.items()}
    return " ".join(f"{aliases.get(name, name)}={value}" for name, value in swept.items()) or UNCHANGED_ROW
