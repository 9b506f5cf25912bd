"""What a search tries: the settings of `tune.space`, checked, and what a trial makes of a point of them. Pure."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rtrain import config as configuration
from rtrain.config import SPEED, Config, Range, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.models import builder
from rtrain.tasks import base
from rtrain.trainer import losses
from tune.points import (
    Dimension as Dimension,
    grid as grid,
    is_number,
    random_point as random_point,
    same_value,
    spread as spread,
)

FREQUENCY, ROWS = "train.aggregation_frequency", "train.rows_per_update"
"""Two ways to say how many rows an update has; a configuration with both is an error."""
RATE, STUDENT_RATE = "optim.lr", "distill.lr"
LAYERS = "distill.layers"
SIZES = (LAYERS, "distill.teacher_layers", "distill.width")
"""Settings of which a student starts from another model."""
SCALING, RATE_ROWS, BETA2 = "optim.lr_scaling", "optim.lr_rows", "optim.beta2_scaling"
CUT = ("max_tokens", "window", "stride", "max_windows", "pooling")
"""Settings of `data` that say how much of each row is read: they leave the rows as they are."""
STUDENT: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("layers", "teacher_layers", "width", "lr", "temperature", "alpha", "relations", "relation_layer", "hidden")
    ),
    "epochs": "trials are compared after as many rows as each other, of one budget",
    **dict.fromkeys(("unlabelled", "confidence"), "trials are compared on the same rows, and it changes these"),
}
"""Why a search over students does not change a setting of `distill`; None: it may."""
FROM_TEACHER = {RATE: f"a student's is {STUDENT_RATE}", "model.pooling": "a student's is its teacher's"}
"""What a search over students does not change elsewhere, and why."""
COMBINATIONS = 512
"""Most combinations of settings that are checked before a search; each takes a fraction of a millisecond."""


# ------------------------------------------------------------------------------------------------ what may be searched


def dimensions(config: Config) -> tuple[Dimension, ...]:
    """The dimensions of `tune.space`. Raises one `ConfigError` with all that is wrong with them and with `tune.points`:
    a setting that no trial may change, and a value, or a combination of values, that the configuration refuses."""
    found, problems = [], []
    for name, searched in config.deploy.tune.space.items():
        wrong = refusals(config, name) or _flaw(config, name, searched)
        if not wrong:
            given = _range(name, searched) if isinstance(searched, Range) else Dimension(name, choices=searched)
            one, wrong = _resolved(config, given)
            found.append(one)
        problems += [replace(problem, field=f"tune.space.{name}") for problem in wrong]
    if {FREQUENCY, ROWS} <= config.deploy.tune.space.keys():
        problems.append(
            Problem(
                *("tune.space", FREQUENCY, f"{ROWS} says the rows of an update too", "search one of them"),
                code="conflicting_settings",
            )
        )
    for place, point in enumerate(config.deploy.tune.points):
        named = f"tune.points.{place}"
        wrong = [replace(problem, field=f"{named}.{name}") for name in point for problem in refusals(config, name)]
        problems += wrong or [replace(problem, field=named) for problem in _tried(config, point)]
    if not problems:
        problems += _apart(config, found)
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def refusals(config: Config, name: str) -> list[Problem]:
    """Why no trial may change a setting."""
    if unknown := configuration.put({}, name, None):
        return [unknown]
    section, _, leaf = name.rpartition(".")
    reason = None
    if section in configuration.DEPLOY_FIELDS:
        reason = "it says where and how the search runs, not what a trial is"
    elif config.recipe.distill.teacher is not None and (section == "distill" or name in FROM_TEACHER):
        reason = FROM_TEACHER.get(name) or STUDENT.get(leaf, "a search compares students of one teacher")
    elif section in ("distill", "quantize", "gate", ""):
        reason = "it is no setting of a trial's training"
    elif name == "train.seed":
        reason = "a seed is no better than another; the end of the search tries other seeds itself"
    elif name == "train.epochs":
        reason = "trials are compared after as many rows as each other, of one budget"
    elif section == "augment" or (section == "data" and leaf not in CUT):
        reason = "trials are compared on the same rows, and it changes these"
    elif section == "data" and base.get(config.recipe.task).packs:
        reason = f"a row of {config.recipe.task} is a block of so many tokens, and trials are compared on the same rows"
    elif section == "compress":
        reason = "it makes a smaller model of the winner; a search compares settings of one model"
    elif name == RATE_ROWS and not _scales(config):
        reason = "the search itself says for how many rows learning rates are meant (tune.lr_scaling)"
    elif name == "train.evaluate_every":
        reason = "trials are evaluated after as many rows as each other"
    elif name == "model.name":
        reason = "a search compares settings of one model"
    elif section == "train" and leaf in SPEED and name != FREQUENCY:
        reason = f"it changes speed, never the score; the rows of an update are {FREQUENCY} or {ROWS}"
    return [] if reason is None else [Problem(name, None, reason, "leave it out", code="not_searchable")]


def _scales(config: Config) -> bool:
    """Whether learning rate or beta2 follow the rows of an update by the recipe's own settings, or by those of its
    trials."""
    optim, tune = config.recipe.optim, config.deploy.tune
    own = "none" not in (optim.lr_scaling, optim.beta2_scaling) or optim.lr_scaling != optim.beta2_scaling
    return own or SCALING in tune.space or any(SCALING in point for point in tune.points)


def _flaw(config: Config, name: str, searched: Range | tuple[Any, ...]) -> list[Problem]:
    """What is wrong with a range or with choices, whatever the setting."""

    def problem(value: Any, reason: str, fix: str, code: str) -> list[Problem]:
        return [Problem(name, value, reason, fix, code=code)]

    if not isinstance(searched, Range) and name in (FREQUENCY, ROWS) and None in searched:
        return problem(
            None, "it stands for what the recipe comes to, which is another choice too", "write the number", "no_value"
        )
    if not isinstance(searched, Range):
        fix = "write two choices or more; a single one belongs to the recipe: --set " + f"{name}=..."
        return problem(list(searched), "nothing to choose from", fix, "too_few_choices") if len(searched) < 2 else []
    shown = f"{searched.low:g} to {searched.high:g}"
    if not _takes(name, (int, float)):
        return problem(shown, "the setting is no number", "write a list of choices", "not_a_number")
    if config.deploy.tune.sampler == "grid":
        return problem(
            shown, "a grid has no ranges", "write a list of choices, or another tune.sampler", "conflicting_settings"
        )
    if searched.low >= searched.high:
        return problem(shown, "low is not below high", "exchange the two, or leave the setting out", "empty_range")
    if searched.log and searched.low <= 0:
        return problem(shown, "a logarithmic range begins above 0", "raise low, or leave out log", "out_of_range")
    if _takes(name, (int,)) and not (searched.low.is_integer() and searched.high.is_integer()):
        return problem(shown, "the setting is a whole number", "write whole numbers", "not_a_whole_number")
    return []


def _takes(name: str, kinds: tuple[type, ...]) -> bool:
    """Whether the numbers of a setting are of one of these kinds."""
    section, _, leaf = name.rpartition(".")
    field = Recipe.model_fields[section].annotation.model_fields[leaf]  # type: ignore[union-attr]
    return any(kind in kinds for kind in _kinds(field.annotation))


def _kinds(annotation: Any) -> list[Any]:
    """The types of a union, without what they are annotated with."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


def _range(name: str, given: Range) -> Dimension:
    low, high = (int(end) if _takes(name, (int,)) else end for end in (given.low, given.high))
    return Dimension(name, low, high, given.log)


def _resolved(config: Config, given: Dimension) -> tuple[Dimension, list[Problem]]:
    """The dimension with its values as the setting's type makes them, and why some of them cannot be."""
    problems, taken = [], []
    for value in given.choices or (given.low, given.high):
        point = {given.name: value}
        if wrong := _tried(config, point):
            problems += [replace(problem, value=value) for problem in wrong]
            continue
        taken.append(configuration.flat(configuration.with_overrides(config, overrides(config, point)))[given.name])
        if any(same_value(taken[-1], before) for before in taken[:-1]):
            problems.append(
                Problem(given.name, value, "twice among the choices", "leave it out once", code="duplicate")
            )
    if problems or not given.choices:
        return given, problems
    ordered = all(map(is_number, taken))
    return replace(given, choices=tuple(sorted(taken) if ordered else taken)), []


def _tried(config: Config, point: Mapping[str, Any]) -> list[Problem]:
    """Why the settings of a point cannot be, each problem with the name of the setting that it is about."""
    try:
        recipe = configuration.with_overrides(config, overrides(config, point)).recipe
    except ConfigError as error:
        found = error.problems
    else:
        found = (*losses.problems(recipe), *builder.problems(recipe))
    return [
        problem if problem.field in point else replace(problem, reason=f"{problem.field}: {problem.reason}")
        for problem in found
    ]


def _apart(config: Config, dimensions: Sequence[Dimension]) -> list[Problem]:
    """The first combination that cannot be although each of its values can: of the ends of ranges and all choices."""
    ends = [one.choices or (one.low, one.high) for one in dimensions]
    for values in itertools.islice(itertools.product(*ends), COMBINATIONS):
        point = dict(zip((one.name for one in dimensions), values, strict=True))
        if wrong := _tried(config, point):
            shown = ", ".join(f"{name}={value}" for name, value in point.items())
            fix = "search less of one of these settings"
            return [Problem("tune.space", shown, str(wrong[0].reason), fix, code=wrong[0].code)]
    return []


def sizes(config: Config) -> list[dict[str, Any]]:
    """The sizes of students that `tune.space` may have; of a range of widths, which may be hundreds, its ends."""
    searched = [one for one in dimensions(config) if one.name in SIZES]

    def values_of(one: Dimension) -> Sequence[Any]:
        if one.name == LAYERS and not one.choices:
            return range(int(one.low or 0), int(one.high or 0) + 1)
        return one.choices or (one.low, one.high)

    every = itertools.product(*map(values_of, searched))
    return [{one.name: value for one, value in zip(searched, values, strict=True)} for values in every]


def rows_of_one(config: Config) -> dict[str, int]:
    """Rows of an update by each setting that says how many there are, of its value 1."""
    return {FREQUENCY: config.recipe.train.workers * config.recipe.train.micro_batch, ROWS: 1}


def under(config: Config, dimensions: Sequence[Dimension], rows: int) -> tuple[Dimension, ...]:
    """The dimensions without the updates that gain little by their rows, where `rows` is the gradients' noise scale: of
    aggregation frequencies, and of rows per update, those up to the first that has so many."""
    of_one = rows_of_one(config)

    def cut(one: Dimension) -> Dimension:
        if one.name not in of_one or not one.ordered:
            return one
        enough = math.ceil(rows / of_one[one.name])
        if one.choices:
            kept = [value for value, before in zip(one.choices, (0, *one.choices), strict=False) if before < enough]
            return replace(one, choices=tuple(kept))
        return replace(one, high=max(one.low or 0, min(one.high or 0, enough)))

    return tuple(map(cut, dimensions))


def with_rows(
    config: Config, dimensions: Sequence[Dimension], point: Mapping[str, Any], rows: int
) -> dict[str, Any] | None:
    """The point with updates of so many rows, or as near to them as the space has any; None where they are not
    searched."""
    of_one = rows_of_one(config)
    searched = [one for one in dimensions if one.name in of_one and one.ordered]

    def nearest(one: Dimension) -> Any:
        wanted = rows / of_one[one.name]
        if one.choices:
            return min(one.choices, key=lambda value: abs(math.log(value / wanted)))
        return one.clipped(max(1, round(wanted)))

    return {**point, **{one.name: nearest(one) for one in searched}} if searched else None


def evaluated_every(config: Config) -> int | None:
    """Rows between two evaluations of a search's trials: as many for each, since a trial that is read more often has
    more of them to be at its best in, and is seen earlier to have come to a score. None where each is read after an
    epoch.

    They are about those of the recipe, and a number of the largest updates, so that common frequencies divide them.
    """
    every = config.recipe.train.evaluate_every
    if every is None or config.deploy.tune.study:
        return None
    searched = [one for one in dimensions(config) if one.name in (FREQUENCY, ROWS) and one.ordered]
    tried = [*config.deploy.tune.points, *({one.name: max(one.choices or (one.high,))} for one in searched)]
    recipes = [configuration.with_overrides(config, overrides(config, point)).recipe for point in tried]
    largest = max(one.rows_per_update for one in (config.recipe, *recipes))
    return largest * max(1, round(every * config.recipe.rows_per_update / largest))


# ------------------------------------------------------------------------------------------------- what a trial changes


def overrides(config: Config, point: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a trial: those of the point, and what they bring with them.

    The rows of an update are given in one way only. A learning rate is meant for the rows that the recipe's is meant
    for (`optim.lr_rows`, else its rows_per_update), and `tune.lr_scaling` carries it to those of the trial, unless the
    recipe or the point has an `optim.lr_scaling` of its own. Raises `ConfigError` where the point cannot be.
    """
    changed = dict(point)
    if changed.get(FREQUENCY) is not None:
        changed.setdefault(ROWS, None)
    elif changed.get(ROWS) is not None:
        changed.setdefault(FREQUENCY, None)
    if (scaling := _carried_by(config, point)) is not None:
        rows = configuration.with_overrides(config, changed).recipe.rows_per_update
        if rows != _meant_for(config):
            changed |= {SCALING: scaling, RATE_ROWS: _meant_for(config)}
            if scaling == "sqrt":
                changed.setdefault(BETA2, "rows")
    elif changed.get(SCALING, "none") != "none" and config.recipe.optim.lr_rows is None:
        changed.setdefault(RATE_ROWS, _meant_for(config))
    known = configuration.flat(configuration.with_overrides(config, changed))
    # As the settings read them: in YAML 1e-6 is a text.
    return {name: value if value is None else known[name] for name, value in changed.items()}


def _carried_by(config: Config, point: Mapping[str, Any]) -> str | None:
    """How the search scales learning rates; None where it leaves them as they are."""
    own = SCALING in point or config.recipe.optim.lr_scaling != "none"
    return None if own or config.deploy.tune.lr_scaling == "none" else config.deploy.tune.lr_scaling


def _meant_for(config: Config) -> int:
    """The rows of an update for which learning rates are meant."""
    return config.recipe.optim.lr_rows or config.recipe.rows_per_update


def same(config: Config, one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two trials' settings come to the same: a trial that equals another one need not run."""
    return resolved(config, one) == resolved(config, two)


def resolved(config: Config, settings: Mapping[str, Any]) -> str:
    """What a trial's settings come to, to compare them by: all that changes its weights, the learning rate and beta2 as
    they are once scaled."""
    recipe = configuration.with_overrides(config, settings).recipe
    weights = recipe.weights()
    rest = {name: value for name, value in weights["optim"].items() if f"optim.{name}" not in _SCALED}
    weights["optim"] = {**rest, "peak": f"{recipe.peak_lr:.9g}", "beta2": f"{recipe.beta2:.9g}"}
    return json.dumps(weights, sort_keys=True)


_SCALED = (RATE, SCALING, RATE_ROWS, BETA2)


def coordinates(config: Config, dimensions: Sequence[Dimension], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The point of the space at which a trial with these settings stands; None where it is outside, or where it also
    differs from the recipe in what is not searched."""
    changed = configuration.with_overrides(config, settings)
    values = dict(_coordinates(config, dimensions, changed))
    if any(one.place(values[one.name]) is None for one in dimensions):
        return None
    return values if same(config, overrides(config, values), settings) else None


def _coordinates(config: Config, dimensions: Sequence[Dimension], changed: Config) -> Iterator[tuple[str, Any]]:
    flat, recipe = configuration.flat(changed), changed.recipe
    for one in dimensions:
        value = flat[one.name]
        if one.name == ROWS:
            value = recipe.rows_per_update
        elif one.name == FREQUENCY:  # where the rows of an update are given, it is what would give as many
            frequency, rest = divmod(recipe.rows_per_update, recipe.train.workers * recipe.train.micro_batch)
            value = None if rest else frequency
        elif one.name in (RATE, STUDENT_RATE) and recipe.optim.lr_scaling == "none":
            scaling = _carried_by(config, {one.name: None for one in dimensions})
            ratio = recipe.rows_per_update / _meant_for(config)
            value /= {None: 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]
        yield one.name, one.choices[index] if (index := one.index(value)) is not None else value
