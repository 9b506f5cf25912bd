"""A search over the students of one teacher: what is searched where nothing is said, and what of it cannot be."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import distill
from rtrain.config import Config
from rtrain.config.deploy import SPACE
from rtrain.errors import ConfigError
from tune import search
from tune.asking import space

STUDENTS: Mapping[str, Any] = {
    "distill.lr": {"low": 1.0e-4, "high": 2.0e-3, "log": True},
    "distill.temperature": [1.0, 2.0, 4.0],
    "distill.alpha": [0.5, 0.7, 0.9],
}
"""In place of the default of `tune.space`."""
SIZES = ("distill.layers", "distill.width")


def begun(config: Config, teacher: distill.Teacher, root: Path) -> Config:
    """The configuration of the search, which is that of its first student."""
    if config.deploy.tune.space == SPACE:
        config = configuration.with_overrides(config, {"tune.space": dict(STUDENTS)})
    return distill.started(config, teacher, root)


def check(config: Config, teacher: distill.Teacher, root: Path) -> None:
    """Everything about a search whose configuration is `begun` that can be refused before anything starts. Raises
    `ConfigError`."""
    search.check(config, students=True)
    sizes = [one for one in space.dimensions(config) if one.name in SIZES]
    for values in itertools.product(*(one.choices or (one.low, one.high) for one in sizes)):
        point = {one.name: value for one, value in zip(sizes, values, strict=True)}
        try:
            distill.started(configuration.with_overrides(config, point), teacher, root)
        except ConfigError as error:
            problems = [
                replace(one, field=f"tune.space.{one.field}") if one.field in point else one for one in error.problems
            ]
            raise ConfigError(problems) from None
