"""A search over the students of one teacher: what is searched where nothing is said, and what of it cannot be."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import distill, student
from rtrain.config import Config, Range
from rtrain.config.deploy import SPACE
from rtrain.core.errors import ConfigError, Problem
from tune import search, space
from tune.space import LAYERS

STUDENTS: Mapping[str, Any] = {
    "distill.lr": {"low": 1.0e-4, "high": 2.0e-3, "log": True},
    "distill.temperature": [1.0, 2.0, 4.0],
    "distill.alpha": [0.5, 0.7, 0.9],
}
"""In place of the default of `tune.space`."""

WIDTH = "distill.width"


def begun(config: Config, teacher: distill.Teacher, root: Path) -> Config:
    """The configuration of the search, which is that of its first student."""
    if config.deploy.tune.space == SPACE:
        space_of = searched(config, student.depth_of(teacher.folder))
        config = configuration.with_overrides(config, {"tune.space": space_of})
    # Trials may have other numbers of layers: each decides it for its own.
    left = {"distill.teacher_layers": config.recipe.distill.teacher_layers}
    started = distill.started(config, teacher, root)
    return replace(configuration.with_overrides(started, left), named=started.named)


def searched(config: Config, depth: int | None) -> dict[str, Any]:
    """The default space for a teacher of so many layers. Where what a student costs counts, so does its depth: a third
    and a half of the teacher's are tried, beside that of the first student. Where the score alone counts, the deepest
    would win; and a depth that the user gave stays."""
    chosen, found = config.recipe.distill, dict(STUDENTS)
    counts = config.deploy.tune.objective != "score" and chosen.student is None and LAYERS not in config.named
    if counts and depth is not None:
        depths = {one for one in (depth // 3, depth // 2, chosen.layers or 0) if 0 < one < depth}
        found |= {LAYERS: sorted(depths)} if len(depths) > 1 else {}
    return found


def check(config: Config, teacher: distill.Teacher, root: Path) -> None:
    """Everything about a search whose configuration is `begun` that can be refused before anything starts. Raises
    `ConfigError`."""
    if isinstance(config.deploy.tune.space.get(WIDTH), Range):
        reason = "most widths of a range are no multiple of the size of the teacher's heads"
        fix = "write a list of widths, such as [128, 192, 256]"
        raise ConfigError([Problem(f"tune.space.{WIDTH}", "a range", reason, fix, code="not_a_list")])
    search.check(config, students=True)
    if problems := distill.too_long(config, [teacher, *distill.co_teachers(config, teacher)]):
        raise ConfigError(problems)
    for point in space.sizes(config):
        try:
            distill.started(configuration.with_overrides(config, point), teacher, root)
        except ConfigError as error:
            problems = [
                replace(one, field=f"tune.space.{one.field}") if one.field in point else one for one in error.problems
            ]
            raise ConfigError(problems) from None
