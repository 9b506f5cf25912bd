"""What a profile measures: a recipe as it stands, or a row for each combination of the settings that are swept."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem

SHORT = {
    "workers": "train.workers",
    "loader": "cluster.data_cpus",
    "precision": "train.precision",
}
"""Setting by the name that a sweep may call it; any other setting has its own name."""
MOST = 32
"""Rows of a profile: each starts its workers anew."""
AS_IT_STANDS = "as it stands"
_SETS_ROWS = {"train.rows_per_update", "train.aggregation_frequency"}


@dataclass(frozen=True)
class Length:
    """How many updates are trained: `warm_up` that are not measured, `updates` that are, and one more, which ends with
    a checkpoint whatever the recipe's cadence."""

    updates: int
    warm_up: int

    @property
    def until(self) -> int:
        return self.warm_up + self.updates + 1


@dataclass(frozen=True)
class Row:
    name: str
    settings: dict[str, Any]
    """What is swept, by dotted name."""
    config: Config


def rows(config: Config, sweeps: Sequence[str], length: Length) -> list[Row]:
    """A row for each combination of the sweeps' values, e.g. of `workers=1,2` and `precision=fp32,bf16` four.

    All rows train on the same rows in each update, those of the recipe as it stands, unless that is what is swept.
    Raises `ConfigError` with all that is wrong.
    """
    named, problems = dict[str, list[Any]](), list[Problem]()
    for text in sweeps:
        name, values = _parsed(text, problems)
        if name in named:
            problems.append(
                Problem("--sweep", text, f"{name} is swept twice", "name all its values in one", code="named_twice")
            )
        named[name] = values
    fixed = _fixed(config, length, set(named))
    for name in (name for name in named if name in fixed and name not in _SETS_ROWS):
        fix = "leave it out; --updates says how many updates are measured"
        problems.append(Problem("--sweep", name, "a profile sets it itself", fix, code="conflicting_settings"))
    found = list[Row]()
    combinations = list(itertools.product(*named.values()))
    if len(combinations) > MOST:
        fix = "sweep fewer settings at a time"
        problems.append(
            Problem(
                "--sweep", None, f"{len(combinations)} rows, and a profile has {MOST} at most", fix, code="out_of_range"
            )
        )
    if problems:
        raise ConfigError(problems)
    for combination in combinations:
        chosen = dict(zip(named, combination, strict=True))
        try:
            found.append(Row(_name(chosen), chosen, configuration.with_overrides(config, {**fixed, **chosen})))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return found


def _fixed(config: Config, length: Length, swept: set[str]) -> dict[str, Any]:
    """What all rows have in common: no row ends an epoch's evaluation inside of what is measured, or its training, or
    leaves copies behind, under the name that the row of another profile has."""
    train = config.recipe.train
    fixed: dict[str, Any] = {
        "train.epochs": max(train.epochs, length.until + 1),  # an epoch has an update at least
        "train.evaluate_every": length.until + 1,
        "cluster.storage": None,
    }
    if not swept & _SETS_ROWS:
        fixed |= {"train.rows_per_update": config.recipe.rows_per_update, "train.aggregation_frequency": None}
    elif "train.rows_per_update" in swept:
        fixed["train.aggregation_frequency"] = None
    else:
        fixed["train.rows_per_update"] = None
    return fixed


def _parsed(text: str, problems: list[Problem]) -> tuple[str, list[Any]]:
    name, sign, values = text.partition("=")
    name = SHORT.get(name.strip(), name.strip())
    fix = f"write e.g. --sweep {next(iter(SHORT))}=1,2, or a setting by its own name"
    if not sign or not values.strip():
        problems.append(Problem("--sweep", text, "names no values", fix, code="missing"))
        return name, []
    try:
        found = yaml.safe_load(f"[{values}]")
    except (yaml.YAMLError, ValueError):  # ValueError: a date that the calendar has not
        problems.append(Problem("--sweep", text, "its values are no list", fix, code="malformed"))
        return name, []
    if len(found) != len({repr(value) for value in found}):
        problems.append(Problem("--sweep", text, "names a value twice", "leave it out", code="named_twice"))
    return name, found


def _name(chosen: dict[str, Any]) -> str:
    short = {setting: name for name, setting in SHORT.items()}
    return " ".join(f"{short.get(name, name)}={value}" for name, value in chosen.items()) or AS_IT_STANDS
