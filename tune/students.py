"""A search over the students of one teacher: the default space and its checks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import distill, student
from rtrain.config import Config, Range
from rtrain.config.deploy import DEFAULT_SPACE
from rtrain.core.errors import ConfigError, Problem
from tune import search, space
from tune.space import LAYERS_SETTING

STUDENT_SPACE: Mapping[str, Any] = {
    "distill.lr": {"low": 1.0e-4, "high": 2.0e-3, "log": True},
    "distill.temperature": [1.0, 2.0, 4.0],
    "distill.alpha": [0.5, 0.7, 0.9],
}
"""Default `tune.space` of a search over students."""

WIDTH_SETTING = "distill.width"


def derive_search_config(config: Config, teacher: distill.Teacher, root: Path) -> Config:
    """Return the configuration of the search: that of its first student."""
    if config.deploy.tune.space == DEFAULT_SPACE:
        student_space = default_space(config, student.count_layers(teacher.folder))
        config = configuration.with_overrides(config, {"tune.space": student_space})
    # Each trial resolves it for its own number of layers.
    kept_settings = {"distill.teacher_layers": config.recipe.distill.teacher_layers}
    first_student = distill.derive_student_config(config, teacher, root)
    return replace(
        configuration.with_overrides(first_student, kept_settings), explicit_settings=first_student.explicit_settings
    )


def default_space(config: Config, depth: int | None) -> dict[str, Any]:
    """Return the default space for a teacher with `depth` layers.

    If the cost counts, the space has a third and a half of the teacher's depth, and that of the first student. For the
    score alone the deepest would win. A depth from the user stays.
    """
    distill_settings, space_settings = config.recipe.distill, dict(STUDENT_SPACE)
    searches_depth = (
        config.deploy.tune.objective != "score"
        and distill_settings.student is None
        and LAYERS_SETTING not in config.explicit_settings
    )
    if searches_depth and depth is not None:
        depths = {layers for layers in (depth // 3, depth // 2, distill_settings.layers or 0) if 0 < layers < depth}
        space_settings |= {LAYERS_SETTING: sorted(depths)} if len(depths) > 1 else {}
    return space_settings


def check_students(config: Config, teacher: distill.Teacher, root: Path) -> None:
    """Check a search over students (`derive_search_config`) before anything starts. Raises `ConfigError` with all
    problems."""
    if isinstance(config.deploy.tune.space.get(WIDTH_SETTING), Range):
        reason = "most widths of a range are not multiples of the teacher's attention head size"
        fix = "write a list of widths, such as [128, 192, 256]"
        raise ConfigError([Problem(f"tune.space.{WIDTH_SETTING}", "a range", reason, fix, code="not_a_list")])
    search.check_search(config, students=True)
    if problems := distill.check_text_length(config, [teacher, *distill.load_co_teachers(config, teacher)]):
        raise ConfigError(problems)
    for point in space.list_student_sizes(config):
        try:
            distill.derive_student_config(configuration.with_overrides(config, point), teacher, root)
        except ConfigError as error:
            problems = [
                replace(problem, field=f"tune.space.{problem.field}") if problem.field in point else problem
                for problem in error.problems
            ]
            raise ConfigError(problems) from None
