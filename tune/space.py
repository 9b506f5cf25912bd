"""The search space: dimensions of `tune.space`, points, and the settings of a trial at a point. Pure functions, and
deterministic by seed. `rtrain.config.tune.DEFAULT_SPACE` is the default."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rtrain import config as configuration
from rtrain.config import SPEED_SETTINGS, Config, Range, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.models import builder
from rtrain.tasks import base
from rtrain.trainer import imbalance, losses

FREQUENCY_SETTING, BATCH_SIZE_SETTING = "train.aggregation_frequency", "train.global_batch_size"
"""Two ways to set the batch size; a configuration with both is an error."""
LR_SETTING, STUDENT_LR_SETTING = "optim.lr", "distill.lr"
LAYERS_SETTING, WIDTH_SETTING = "distill.layers", "distill.width"
STUDENT_SIZE_SETTINGS = (LAYERS_SETTING, "distill.teacher_layers", WIDTH_SETTING)
"""Settings that change the initial model of a student."""
LR_SCALING_SETTING, LR_REFERENCE_SETTING, BETA2_SCALING_SETTING = (
    "optim.lr_scaling",
    "optim.lr_reference_batch_size",
    "optim.beta2_scaling",
)
TRUNCATION_SETTINGS = ("max_tokens", "window", "stride", "max_windows", "pooling")
"""`data` settings of truncation: they do not change which rows there are."""
DISTILL_REFUSALS: Mapping[str, str | None] = {
    **dict.fromkeys(
        (
            "layers",
            "teacher_layers",
            "width",
            "lr",
            "temperature",
            "alpha",
            "relation_loss_weight",
            "relation_layer",
            "hidden_loss_weight",
        )
    ),
    "epochs": "trials are compared after equally many rows",
    **dict.fromkeys(("unlabeled_rows_path", "confidence"), "trials are compared on the same rows, which it changes"),
}
"""Why a search over students cannot change a `distill` setting; None: it can."""
TEACHER_REFUSALS = {LR_SETTING: f"a student's is {STUDENT_LR_SETTING}", "model.pooling": "a student's is its teacher's"}
"""Why a search over students cannot change these settings."""
SETTING_REFUSALS = {
    "train.seed": "seeds are not searched; the finals repeat trials with other seeds",
    "train.epochs": "trials are compared after equally many rows",
    "train.evaluate_every": "all trials are evaluated after equally many rows",
    "train.patience": "trials are compared after equally many rows",
    "train.average_best": "trials are compared at rungs, by their newest weights",
    "train.best_by": "all trials are compared by the headline of their task",
    "model.name": "a search compares settings of one model",
}
"""Why no search can change these settings."""
MAX_COMBINATIONS = 512
"""Maximum combinations of values that are checked before a search; each takes a fraction of a millisecond."""
SIGNIFICANT_DIGITS = 3
"""Significant digits of a drawn number: smaller differences are below the noise of seeds."""
_LR_SETTINGS = (LR_SETTING, LR_SCALING_SETTING, LR_REFERENCE_SETTING, BETA2_SCALING_SETTING)
"""Settings of the scaled learning rate and beta2."""


@dataclass(frozen=True)
class Dimension:
    """A searched setting: a closed range of numbers, or choices.

    Each value has a position in [0, 1]: linear or logarithmic in a range, evenly spaced for choices.
    """

    name: str
    """Dotted name of the setting."""
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    """Numbers in ascending order; other values in the given order."""

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int)

    @property
    def extreme_values(self) -> tuple[Any, ...]:
        """All choices, or both bounds."""
        return self.choices or (self.low, self.high)

    @property
    def is_ordered(self) -> bool:
        """Whether its values are numbers, so that neighbors are similar."""
        return not self.choices or all(is_number(value) for value in self.choices)

    def from_unit(self, position: float) -> Any:
        """Return the value at a position in [0, 1]."""
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        lower, upper = self._ends
        length = lower + position * (upper - lower)
        return self.round_value(math.exp(length) if self.log else length)

    def to_unit(self, value: Any) -> float | None:
        """Return the position of a value; None if it is outside."""
        if self.choices:
            index = self.index_of(value)
            return None if index is None else (index + 0.5) / len(self.choices)
        low, high = self._range
        if not is_number(value) or (self.is_integer and value != int(value)):
            return None
        if not (low <= value <= high or same_value(value, low) or same_value(value, high)):
            return None
        lower, upper = self._ends
        return min(1.0, max(0.0, ((math.log(value) if self.log else value) - lower) / (upper - lower)))

    def index_of(self, value: Any) -> int | None:
        """Return the index of a value among the choices; None if it is not a choice."""
        return next((number for number, choice in enumerate(self.choices) if same_value(choice, value)), None)

    def round_value(self, number: float) -> float | int:
        """Round a number to `SIGNIFICANT_DIGITS` within the range."""
        if self.is_integer:
            return self.clip(round(number))
        low, high = self._range
        scale = number if self.log else high - low
        return self.clip(round(number, SIGNIFICANT_DIGITS - math.floor(math.log10(scale)) - self.log))

    def clip(self, number: float | int) -> float | int:
        """Return the nearest number of the range."""
        low, high = self._range
        return min(high, max(low, number))

    @property
    def _range(self) -> tuple[float | int, float | int]:
        if self.low is None or self.high is None:
            raise ValueError(f"{self.name} has choices, not a range")
        return self.low, self.high

    @property
    def _ends(self) -> tuple[float, float]:
        """The (logarithmic) bounds. Integer ranges are extended by one half, so that each integer has the same
        share."""
        low, high = self._range
        if self.is_integer:
            low, high = low - 0.5, high + 0.5
        return (math.log(low), math.log(high)) if self.log else (low, high)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal; numbers up to rounding errors."""
    if is_number(first) and is_number(second):
        return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-300)
    return type(first) is type(second) and bool(first == second)


def same_point(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(same_value(value, second[name]) for name, value in first.items())


def halton(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Return points of a Halton sequence over the space, scrambled by the seed (Owen 2017, arXiv:1706.02808). A smaller
    count is a prefix of a larger one."""
    from scipy.stats import qmc

    if not dimensions:
        return []
    unit_points = qmc.Halton(len(dimensions), scramble=True, rng=seed).random(count)
    return [_point_from_unit(dimensions, row) for row in unit_points.tolist()]


def iter_grid(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Iterate over all points; the last setting varies fastest. Raises `ValueError` for an infinite space."""
    names = [dimension.name for dimension in dimensions]
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*map(_list_values, dimensions)))


def is_finite(dimensions: Sequence[Dimension]) -> bool:
    """Return whether the space is finite: no setting has a range of floats."""
    return all(dimension.choices or dimension.is_integer for dimension in dimensions)


def _list_values(dimension: Dimension) -> Sequence[Any]:
    if isinstance(dimension.low, int) and isinstance(dimension.high, int):
        return range(dimension.low, dimension.high + 1)
    if not dimension.choices:
        raise ValueError(f"the range of {dimension.name} is not finite")
    return dimension.choices


def random_points(dimensions: Sequence[Dimension], seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Iterate over uniformly drawn points of trial `number`."""
    generator = random.Random(f"search {seed} {number}")
    while True:
        yield _point_from_unit(dimensions, [generator.random() for _ in dimensions])


def _point_from_unit(dimensions: Sequence[Dimension], positions: Sequence[float]) -> dict[str, Any]:
    return {dimension.name: dimension.from_unit(place) for dimension, place in zip(dimensions, positions, strict=True)}


# ---------------------------------------------------------------------------------------------------- space of a search


def build_dimensions(config: Config) -> tuple[Dimension, ...]:
    """Build the dimensions of `tune.space`.

    Raises one `ConfigError` with all problems of the space and of `tune.points_to_evaluate`: settings that a trial
    cannot change, invalid values, and invalid combinations.
    """
    built, problems, tune = [], [], config.deploy.tune
    for name, values in tune.space.items():
        name_problems = searchable_problems(config, name) or _range_problems(config, name, values)
        if not name_problems:
            dimension, name_problems = _resolve_dimension(config, name, values)
            built.append(dimension)
        problems += [replace(problem, field=f"tune.space.{name}") for problem in name_problems]
    if {FREQUENCY_SETTING, BATCH_SIZE_SETTING} <= tune.space.keys():
        reason = f"{BATCH_SIZE_SETTING} sets the batch size too"
        fix = "search one of them"
        problems.append(Problem("tune.space", FREQUENCY_SETTING, reason, fix, code="conflicting_settings"))
    for index, point in enumerate(tune.points_to_evaluate):
        field = f"tune.points_to_evaluate.{index}"
        name_problems = [
            replace(problem, field=f"{field}.{name}") for name in point for problem in searchable_problems(config, name)
        ]
        problems += name_problems or [replace(problem, field=field) for problem in _validate_point(config, point)]
    problems = problems or _first_conflict(config, built)
    if problems:
        raise ConfigError(problems)
    return tuple(built)


def searchable_problems(config: Config, name: str) -> list[Problem]:
    """Return why a trial cannot change a setting; empty if it can."""
    if unknown_setting := configuration.set_setting({}, name, None):
        return [unknown_setting]
    reason = _refusal_reason(config, name)
    return [] if reason is None else [Problem(name, None, reason, "leave it out", code="not_searchable")]


def _refusal_reason(config: Config, name: str) -> str | None:
    section, _, leaf = name.rpartition(".")
    if section in configuration.DEPLOY_FIELDS:
        return "it sets where and how the search runs, not the trials"
    if config.recipe.distill.teacher is not None and (section == "distill" or name in TEACHER_REFUSALS):
        return TEACHER_REFUSALS.get(name) or DISTILL_REFUSALS.get(leaf, "a search compares students of one teacher")
    if section in ("distill", "quantize", "metrics", "gate", ""):
        return "it is not a setting of a trial's training"
    if name in SETTING_REFUSALS:
        return SETTING_REFUSALS[name]
    if section == "augment" or (section == "data" and leaf not in TRUNCATION_SETTINGS):
        return "trials are compared on the same rows, which it changes"
    if section == "data" and base.get_task(config.recipe.task).packs_text:
        return f"a row of {config.recipe.task} is a block of this many tokens, and trials are compared on the same rows"
    if section == "compress":
        return "it compresses the winner; a search compares settings of one model"
    if name == LR_REFERENCE_SETTING and not _scales_lr(config):
        return "the search sets the reference batch size (tune.lr_scaling)"
    if section == "train" and leaf in SPEED_SETTINGS and name != FREQUENCY_SETTING:
        return f"it changes the speed, not the score; the batch size is {FREQUENCY_SETTING} or {BATCH_SIZE_SETTING}"
    return None


def _scales_lr(config: Config) -> bool:
    """Return whether settings of the recipe or of its trials scale the learning rate or beta2 with the batch size."""
    optim, tune = config.recipe.optim, config.deploy.tune
    return (optim.lr_scaling, optim.beta2_scaling) != ("none", "none") or any(
        LR_SCALING_SETTING in settings for settings in (tune.space, *tune.points_to_evaluate)
    )


def _range_problems(config: Config, name: str, values: Range | tuple[Any, ...]) -> list[Problem]:
    def problem(value: Any, reason: str, fix: str, code: str) -> list[Problem]:
        return [Problem(name, value, reason, fix, code=code)]

    if not isinstance(values, Range):
        if name in (FREQUENCY_SETTING, BATCH_SIZE_SETTING) and None in values:
            reason = "null means the recipe's batch size, which may equal another choice"
            return problem(None, reason, "write the number", "no_value")
        fix = f"write two choices or more; a single one belongs to the recipe: --set {name}=..."
        return problem(list(values), "nothing to choose from", fix, "too_few_choices") if len(values) < 2 else []
    shown_range = f"{values.low:g} to {values.high:g}"
    if not _accepts_type(name, (int, float)):
        return problem(shown_range, "the setting is not a number", "write a list of choices", "not_a_number")
    if config.deploy.tune.sampler == "grid":
        fix = "write a list of choices, or another tune.sampler"
        return problem(shown_range, "a grid has no ranges", fix, "conflicting_settings")
    if values.low >= values.high:
        fix = "swap the two, or leave the setting out"
        return problem(shown_range, "low is not below high", fix, "empty_range")
    if values.log and values.low <= 0:
        fix = "raise low, or leave out log"
        return problem(shown_range, "a logarithmic range begins above 0", fix, "out_of_range")
    if _accepts_type(name, (int,)) and not (values.low.is_integer() and values.high.is_integer()):
        return problem(shown_range, "the setting is a whole number", "write whole numbers", "not_a_whole_number")
    return []


def _accepts_type(name: str, types: tuple[type, ...]) -> bool:
    section, _, leaf = name.rpartition(".")
    field = Recipe.model_fields[section].annotation.model_fields[leaf]  # type: ignore[union-attr]
    return any(kind in types for kind in _union_types(field.annotation))


def _union_types(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _union_types(part)]
    return [annotation]


def _resolve_dimension(
    config: Config, name: str, space_values: Range | tuple[Any, ...]
) -> tuple[Dimension, list[Problem]]:
    """Return the dimension with values converted to the setting's type, and problems of invalid values."""
    if isinstance(space_values, Range):
        low, high = space_values.low, space_values.high
        if _accepts_type(name, (int,)):
            low, high = int(low), int(high)
        dimension = Dimension(name, low, high, space_values.log)
    else:
        dimension = Dimension(name, choices=space_values)
    problems, resolved_values = [], []
    for value in dimension.extreme_values:
        point = {name: value}
        if value_problems := _validate_point(config, point):
            problems += [replace(problem, value=value) for problem in value_problems]
            continue
        trial_config = configuration.with_overrides(config, trial_overrides(config, point))
        resolved_values.append(configuration.flatten_config(trial_config)[name])
        if any(same_value(resolved_values[-1], before) for before in resolved_values[:-1]):
            problems.append(Problem(name, value, "twice among the choices", "leave it out once", code="duplicate"))
    if problems or not dimension.choices:
        return dimension, problems
    are_numbers = all(map(is_number, resolved_values))
    return replace(dimension, choices=tuple(sorted(resolved_values) if are_numbers else resolved_values)), []


def _validate_point(config: Config, point: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a point's settings, each with the name of its setting."""
    try:
        recipe = configuration.with_overrides(config, trial_overrides(config, point)).recipe
    except ConfigError as error:
        recipe_problems = error.problems
    else:
        recipe_problems = (
            *losses.check_label_smoothing(recipe),
            *imbalance.check_weighting(recipe),
            *builder.check_model_settings(recipe),
        )
    return [
        problem if problem.field in point else replace(problem, reason=f"{problem.field}: {problem.reason}")
        for problem in recipe_problems
    ]


def _first_conflict(config: Config, dimensions: Sequence[Dimension]) -> list[Problem]:
    """Return the problem of the first invalid combination of valid values, among bounds of ranges and all choices."""
    combinations = itertools.product(*(dimension.extreme_values for dimension in dimensions))
    for values in itertools.islice(combinations, MAX_COMBINATIONS):
        point = dict(zip((dimension.name for dimension in dimensions), values, strict=True))
        if problems := _validate_point(config, point):
            shown_point = ", ".join(f"{name}={value}" for name, value in point.items())
            fix = "reduce the range or choices of one of these settings"
            return [Problem("tune.space", shown_point, str(problems[0].reason), fix, code=problems[0].code)]
    return []


def list_student_sizes(config: Config) -> list[dict[str, Any]]:
    """Return the sizes of students in `tune.space`; of a range of widths only its bounds."""
    dimensions = [dimension for dimension in build_dimensions(config) if dimension.name in STUDENT_SIZE_SETTINGS]
    values = [
        _list_values(dimension) if dimension.name == LAYERS_SETTING else dimension.extreme_values
        for dimension in dimensions
    ]
    names = [dimension.name for dimension in dimensions]
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def rows_per_unit(config: Config) -> dict[str, int]:
    """Return the batch size at value 1 of each setting that determines it."""
    train = config.recipe.train
    return {FREQUENCY_SETTING: train.workers * train.micro_batch_size, BATCH_SIZE_SETTING: 1}


def prune_by_noise(config: Config, dimensions: Sequence[Dimension], noise_rows: int) -> tuple[Dimension, ...]:
    """Return the dimensions without batch sizes far above the gradient noise scale `noise_rows`: values up to the first
    value that reaches it are kept."""
    unit_rows = rows_per_unit(config)

    def prune(dimension: Dimension) -> Dimension:
        if dimension.name not in unit_rows or not dimension.is_ordered:
            return dimension
        max_useful = math.ceil(noise_rows / unit_rows[dimension.name])
        if not dimension.choices:
            return replace(dimension, high=max(dimension.low or 0, min(dimension.high or 0, max_useful)))
        choices = zip(dimension.choices, (0, *dimension.choices), strict=False)
        return replace(dimension, choices=tuple(value for value, smaller in choices if smaller < max_useful))

    return tuple(map(prune, dimensions))


def with_batch_size(
    config: Config, dimensions: Sequence[Dimension], point: Mapping[str, Any], batch_size: int
) -> dict[str, Any] | None:
    """Return the point with the batch size of the space that is nearest; None if the batch size is not searched."""
    unit_rows = rows_per_unit(config)

    def nearest_value(dimension: Dimension) -> Any:
        target = batch_size / unit_rows[dimension.name]
        if dimension.choices:
            return min(dimension.choices, key=lambda value: abs(math.log(value / target)))
        return dimension.clip(max(1, round(target)))

    nearest_values = {
        dimension.name: nearest_value(dimension)
        for dimension in dimensions
        if dimension.name in unit_rows and dimension.is_ordered
    }
    return {**point, **nearest_values} if nearest_values else None


def evaluation_interval_rows(config: Config) -> int | None:
    """Return the rows between two evaluations of trials; None if trials are evaluated after each epoch.

    All trials have the same: more frequent evaluations would bias the best score upward and the time to a target
    downward. The number is near the recipe's, and a multiple of the largest batch size, so that common frequencies
    divide it.
    """
    interval = config.recipe.train.evaluate_every
    if interval is None or config.deploy.tune.study:
        return None
    tried_points = [
        *config.deploy.tune.points_to_evaluate,
        *(
            {dimension.name: max(dimension.choices or (dimension.high,))}
            for dimension in build_dimensions(config)
            if dimension.name in (FREQUENCY_SETTING, BATCH_SIZE_SETTING) and dimension.is_ordered
        ),
    ]
    recipes = [configuration.with_overrides(config, trial_overrides(config, point)).recipe for point in tried_points]
    largest = max(recipe.global_batch_size for recipe in (config.recipe, *recipes))
    return largest * max(1, round(interval * config.recipe.global_batch_size / largest))


# ------------------------------------------------------------------------------------------------------- trial settings


def trial_overrides(config: Config, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trial: the point's and their consequences.

    The batch size is set in one way only. Learning rates refer to the recipe's reference batch size
    (`optim.lr_reference_batch_size`, else `train.global_batch_size`); `tune.lr_scaling` scales them to the trial's
    batch size, unless the recipe or the point sets `optim.lr_scaling`. Raises `ConfigError` for an invalid point.
    """
    changes = dict(point)
    if changes.get(FREQUENCY_SETTING) is not None:
        changes.setdefault(BATCH_SIZE_SETTING, None)
    elif changes.get(BATCH_SIZE_SETTING) is not None:
        changes.setdefault(FREQUENCY_SETTING, None)
    if (scaling := _search_lr_scaling(config, point)) is not None:
        batch_size = configuration.with_overrides(config, changes).recipe.global_batch_size
        if batch_size != _lr_reference_batch_size(config):
            changes |= {LR_SCALING_SETTING: scaling, LR_REFERENCE_SETTING: _lr_reference_batch_size(config)}
            if scaling == "sqrt":
                changes.setdefault(BETA2_SCALING_SETTING, "rows")
    elif changes.get(LR_SCALING_SETTING, "none") != "none" and config.recipe.optim.lr_reference_batch_size is None:
        changes.setdefault(LR_REFERENCE_SETTING, _lr_reference_batch_size(config))
    settings = configuration.flatten_config(configuration.with_overrides(config, changes))
    # Parsed by the settings: in YAML 1e-6 is a string.
    return {name: value if value is None else settings[name] for name, value in changes.items()}


def _search_lr_scaling(config: Config, point: Mapping[str, Any]) -> str | None:
    has_own_scaling = LR_SCALING_SETTING in point or config.recipe.optim.lr_scaling != "none"
    return None if has_own_scaling or config.deploy.tune.lr_scaling == "none" else config.deploy.tune.lr_scaling


def _lr_reference_batch_size(config: Config) -> int:
    return config.recipe.optim.lr_reference_batch_size or config.recipe.global_batch_size


def same_settings(config: Config, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two trials' settings are equivalent: such a trial need not run."""
    return _fingerprint_settings(config, first) == _fingerprint_settings(config, second)


def _fingerprint_settings(config: Config, settings: Mapping[str, Any]) -> str:
    """Return a key of a trial's settings for comparison: all weight settings, with the scaled learning rate and
    beta2."""
    recipe = configuration.with_overrides(config, settings).recipe
    weights = recipe.weight_settings()
    other_settings = {name: value for name, value in weights["optim"].items() if f"optim.{name}" not in _LR_SETTINGS}
    weights["optim"] = {**other_settings, "peak": f"{recipe.peak_lr:.9g}", "beta2": f"{recipe.beta2:.9g}"}
    return json.dumps(weights, sort_keys=True)


def locate_point(config: Config, dimensions: Sequence[Dimension], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the point of a trial's settings; None if it is outside of the space, or if other settings differ from the
    recipe."""
    trial_config = configuration.with_overrides(config, settings)
    values = dict(_locate_values(config, dimensions, trial_config))
    if any(dimension.to_unit(values[dimension.name]) is None for dimension in dimensions):
        return None
    return values if same_settings(config, trial_overrides(config, values), settings) else None


def _locate_values(config: Config, dimensions: Sequence[Dimension], trial_config: Config) -> Iterator[tuple[str, Any]]:
    flat, recipe = configuration.flatten_config(trial_config), trial_config.recipe
    for dimension in dimensions:
        value = flat[dimension.name]
        if dimension.name == BATCH_SIZE_SETTING:
            value = recipe.global_batch_size
        elif dimension.name == FREQUENCY_SETTING:  # with a set batch size, the equivalent frequency
            frequency, remainder = divmod(
                recipe.global_batch_size, recipe.train.workers * recipe.train.micro_batch_size
            )
            value = None if remainder else frequency
        elif dimension.name in (LR_SETTING, STUDENT_LR_SETTING) and recipe.optim.lr_scaling == "none":
            scaling = _search_lr_scaling(config, {dimension.name: None for dimension in dimensions})
            ratio = recipe.global_batch_size / _lr_reference_batch_size(config)
            value /= {None: 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]
        yield dimension.name, dimension.choices[index] if (index := dimension.index_of(value)) is not None else value
