"""The search space: searchable settings, its points, and the settings of a trial."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from tune import sampler as tune_sampler, space
from tune.space import Dimension

LR = {"low": 5e-5, "high": 1e-3, "log": True}
K = "train.aggregation_frequency"
ROWS = "train.global_batch_size"
REFERENCE = "optim.lr_reference_batch_size"


def instance(recipe: str = "intent", **overrides: Any) -> Config:
    return config.load_config(recipe, {name.replace("__", "."): value for name, value in overrides.items()})


def problems(searched: dict[str, Any], recipe: str = "intent", **overrides: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        space.build_dimensions(instance(recipe, tune__space=searched, **overrides))
    return list(caught.value.problems)


def test_ranges_of_whole_numbers_and_choices_of_all_kinds() -> None:
    searched: dict[str, Any] = {
        ROWS: {"low": 16, "high": 128, "log": True},
        "optim.warmup": {"low": 0, "high": 0.5},
        "optim.name": ["radam", "adamw"],
        "optim.max_grad_norm": [None, 1],
        "optim.weight_decay": ["1e-2", 0],
        "model.attention_dropout": [0.1, 0.0, 0.05],
        "data.max_tokens": [64, 32],
    }
    result = space.build_dimensions(instance(tune__space=searched))
    choices = (("radam", "adamw"), (None, 1.0), (0.0, 0.01), (0.0, 0.05, 0.1), (32, 64))
    ranges = (Dimension(ROWS, 16, 128, log=True), Dimension("optim.warmup", 0.0, 0.5))
    names = [*searched][2:]
    assert result == (*ranges, *(Dimension(name, choices=of) for name, of in zip(names, choices, strict=True)))
    assert [item.is_integer for item in result] == [True, *[False] * 6]
    assert [item.is_ordered for item in result] == [True, True, False, False, True, True, True]
    assert isinstance(result[1].low, float)
    assert isinstance(result[3].choices[1], float)


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("serve.port", "tune.trials", "name", "distill.alpha", "quantize.calibration_rows", "train.seed"),
        *("train.epochs", "data.path", "data.valid_share", "augment.copies", "model.name", "train.workers"),
        *("train.micro_batch_size", "lr", "optim.lrr"),  # the last two are no settings at all
    ],
)
def test_a_setting_that_no_trial_may_change_is_refused_by_name(name: str, points: bool) -> None:
    if points:
        [problem] = problems({"optim.lr": LR}, tune__points_to_evaluate=[{"optim.lr": 1e-4}, {name: 1}])
    else:
        [problem] = problems({name: [1, 2]})
    assert problem.field == (f"tune.points_to_evaluate.1.{name}" if points else f"tune.space.{name}")
    assert (problem.code == "not_searchable") == (name not in ("lr", "optim.lrr"))


def test_every_setting_is_searched_or_refused() -> None:
    base = instance()
    accepted = {name for name in config.iter_setting_names() if not space.searchable_problems(base, name)}
    assert {name for name in accepted if not name.startswith("optim.")} == {
        *("data.max_tokens", "data.window", "data.stride", "data.max_windows", "data.pooling"),
        *("model.attention_dropout", "model.dropout", "model.pooling", "model.freeze"),
        *("model.max_position_embeddings", "model.attention_window"),
        *("train.aggregation_frequency", "train.global_batch_size", "train.label_smoothing"),
        *("train.gradient_compression", "train.precision"),
        *("train.class_weights", "train.loss", "train.focal_gamma", "train.focal_alpha"),
        *("train.asymmetric_gamma_positive", "train.asymmetric_gamma_negative", "train.asymmetric_margin"),
    }
    every = {name for name in config.iter_setting_names() if name.startswith("optim.")}
    assert every - accepted == {REFERENCE}  # the search itself sets that
    for scales in (
        {"optim__lr_scaling": "sqrt", "optim__lr_reference_batch_size": 64},
        {"optim__beta2_scaling": "rows", "optim__lr_reference_batch_size": 64},
        {"tune__space": {"optim.lr_scaling": ["sqrt", "linear"]}},
    ):
        assert not space.searchable_problems(instance(**scales), REFERENCE)


@pytest.mark.parametrize(
    ("searched", "shown", "code"),
    [
        ({"optim.lr": []}, [], "too_few_choices"),
        ({"optim.lr": [1e-4]}, [1e-4], "too_few_choices"),
        ({K: [1, 2, 1]}, 1, "duplicate"),
        ({K: [None, 8]}, None, "no_value"),
        ({ROWS: [None, 128]}, None, "no_value"),
        ({"optim.lr": [1e-4, "1.0e-4"]}, "1.0e-4", "duplicate"),
        ({"optim.lr": [1e-4, 2]}, 2, None),  # refused by the configuration
        ({"optim.lr": {"low": 1e-4, "high": 2}}, 2.0, None),
        ({"optim.lr": {"low": 0, "high": 0.1}}, 0.0, None),
        ({"optim.lr": {"low": 1e-3, "high": 1e-4}}, "0.001 to 0.0001", "empty_range"),
        ({"optim.lr": {"low": 1e-3, "high": 1e-3}}, "0.001 to 0.001", "empty_range"),
        ({"optim.warmup": {"low": 0, "high": 0.5, "log": True}}, "0 to 0.5", "out_of_range"),
        ({K: {"low": 1, "high": 2.5}}, "1 to 2.5", "not_a_whole_number"),
        ({"optim.name": {"low": 1, "high": 2}}, "1 to 2", "not_a_number"),
        ({"optim.name": ["adamw", "sgd"]}, "sgd", None),
        ({"data.stride": [0, 40]}, 40, None),
    ],
)
def test_values_are_refused_before_anything_starts(searched: dict[str, Any], shown: Any, code: str | None) -> None:
    [problem] = problems(searched)
    [name] = searched
    assert (problem.field, problem.value) == (f"tune.space.{name}", shown)
    assert code is None or problem.code == code


def test_all_problems_are_told_at_once() -> None:
    result = problems(
        {"optim.lrr": [1, 2], "optim.lr": {"low": 2, "high": 1}, "optim.name": ["sgd", "adamw"], "train.seed": [1, 2]},
        tune__points_to_evaluate=[{"optim.lr": 3}, {"train.epochs": 2, "optim.warmup": 0.5}],
    )
    fields = ("space.optim.lrr", "space.optim.lr", "space.optim.name", "space.train.seed")
    points = ("points_to_evaluate.0", "points_to_evaluate.1.train.epochs")
    assert [problem.field for problem in result] == [f"tune.{name}" for name in (*fields, *points)]


@pytest.mark.parametrize(
    ("searched", "recipe", "overrides", "expected"),
    [
        (
            {"optim.lr": LR, K: [1, 2]},
            "intent",
            {"tune__sampler": "grid"},
            ("tune.space.optim.lr", "conflicting_settings"),
        ),
        ({K: [1, 2], ROWS: [16, 32]}, "intent", {}, ("tune.space", "conflicting_settings")),
        (
            {"optim.lr": LR},
            "intent",
            {"tune__points_to_evaluate": [{K: 2, ROWS: 16}]},
            ("tune.points_to_evaluate.0", None),
        ),
        ({"train.label_smoothing": [0.0, 0.1]}, "essay", {}, ("tune.space.train.label_smoothing", None)),
        ({"data.max_tokens": [32, 64]}, "domain-adapt", {}, ("tune.space.data.max_tokens", "not_searchable")),
        ({"model.pooling": ["own", "mean"]}, "entities", {}, ("tune.space.model.pooling", None)),
    ],
)
def test_what_goes_with_no_other_setting_or_task_is_refused(
    searched: dict[str, Any], recipe: str, overrides: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    [problem] = problems(searched, recipe, **overrides)
    assert problem.field == expected[0]
    assert expected[1] in (None, problem.code)


def test_combinations_that_cannot_be_are_found_although_each_value_can() -> None:
    """64 rows an update; a learning rate of 0.8 holds there, and at k = 8 it is 0.8 x sqrt(2)."""
    searched = {"optim.lr": {"low": 0.1, "high": 0.8}, K: [1, 8]}
    [problem] = problems(searched)
    assert (problem.field, problem.value) == ("tune.space", f"optim.lr=0.8, {K}=8")
    assert len(space.build_dimensions(instance(tune__space=searched, tune__lr_scaling="none"))) == 2


@pytest.mark.parametrize(("rows", "frequency"), [(1, 1), (64, 1), (100, 2), (128, 2), (9999, 8)])
def test_a_point_gets_the_updates_that_are_asked_for_or_the_nearest(rows: int, frequency: int) -> None:
    config = instance(train__workers=2, train__micro_batch_size=32)
    dimensions = space.build_dimensions(config)
    point = {"optim.lr": 1e-4, K: 4}
    assert space.with_batch_size(config, dimensions, point, rows) == {"optim.lr": 1e-4, K: frequency}
    assert space.with_batch_size(config, dimensions[:1], {"optim.lr": 1e-4}, rows) is None
    ranged = instance(tune__space={"train.global_batch_size": {"low": 16, "high": 256, "log": True}})
    result = space.with_batch_size(ranged, space.build_dimensions(ranged), {"train.global_batch_size": 20}, rows)
    assert result == {"train.global_batch_size": min(256, max(16, rows))}


@pytest.mark.parametrize("sampler", ["random", "gp", "tpe"])
def test_whole_numbers_that_the_noise_cuts_to_one_are_that_one(sampler: str) -> None:
    selection = instance(tune__space={K: {"low": 1, "high": 8}, "optim.lr": LR})
    cut = space.prune_by_noise(selection, space.build_dimensions(selection), noise_rows=8)
    assert cut[0] == Dimension(K, 1, 1)
    points = enumerate(space.halton(cut, 10, seed=0))
    messages = [tune_sampler.Observation(point, 0.1 * number) for number, point in points]
    for number in (1, 10):  # a quasi-random point, and a proposal of the sampler
        result = tune_sampler.propose(cut, messages[:number], number=number, seed=0, sampler=sampler, planned_trials=20)
        assert result is not None
        assert result[0][K] == 1


DIMENSIONS = (
    Dimension("lr", 5e-5, 1e-3, log=True),
    Dimension("warmup", 0.0, 0.5),
    Dimension("rows", 1, 64, log=True),
    Dimension("layers", 2, 5),
    Dimension("k", choices=(1, 2, 4, 8)),
    Dimension("name", choices=("a", None, True)),
)


@given(st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_place_has_a_value_and_a_value_its_place(place: float) -> None:
    for element in DIMENSIONS:
        value = element.from_unit(place)
        restored = element.to_unit(value)
        assert restored is not None
        steps = {"lr": 500, "warmup": 1000, "rows": 6, "layers": 4, "k": 4, "name": 3}[element.name]
        assert abs(restored - place) <= 1 / steps
        assert element.from_unit(restored) == value


def test_what_is_outside_has_no_place() -> None:
    outside = {"lr": 2e-3, "warmup": -0.1, "rows": 65, "layers": 2.5, "k": 3, "name": "b"}
    assert [dimension.to_unit(outside[dimension.name]) for dimension in DIMENSIONS] == [None] * 6
    assert DIMENSIONS[1].to_unit(True) is None
    assert DIMENSIONS[5].to_unit(1) is None  # it is not True
    assert DIMENSIONS[0].to_unit(1e-3 * (1 + 1e-12)) == 1.0  # a rounding is no other value


def test_a_spread_begins_like_a_longer_one_and_is_a_function_of_its_seed() -> None:
    long = space.halton(DIMENSIONS, 40, 7)
    assert space.halton(DIMENSIONS, 11, 7) == long[:11]
    assert space.halton(DIMENSIONS, 40, 8) != long
    assert space.halton((), 3, 0) == []


def test_random_points_follow_the_seed_and_the_trial() -> None:
    result = [next(space.random_points(DIMENSIONS, seed, number)) for seed in range(3) for number in range(30)]
    assert len({str(point) for point in result}) == 90
    assert result[0] == next(space.random_points(DIMENSIONS, 0, 0))
    assert {point["k"] for point in result} == {1, 2, 4, 8}
    halves = [place < 0.5 for point in result if (place := DIMENSIONS[0].to_unit(point["lr"])) is not None]
    assert 30 <= sum(halves) <= 60


def test_a_grid_has_all_points_once() -> None:
    result = list(space.iter_grid(DIMENSIONS[3:]))
    assert len(result) == len({str(point) for point in result}) == 4 * 4 * 3
    assert result[:2] == [{"layers": 2, "k": 1, "name": "a"}, {"layers": 2, "k": 1, "name": None}]
    assert space.is_finite(DIMENSIONS[2:])
    assert not space.is_finite(DIMENSIONS)
    with pytest.raises(ValueError, match="warmup"):
        list(space.iter_grid(DIMENSIONS[1:]))


def test_a_learning_rate_is_carried_to_the_rows_of_the_trial() -> None:
    """The recipe has 64 rows an update: k = 1 has 16, where the square root of a quarter is a half."""
    base = instance()
    recipe = config.with_overrides(base, space.trial_overrides(base, {"optim.lr": 2e-4, K: 1})).recipe
    assert recipe.global_batch_size == 16
    assert recipe.peak_lr == pytest.approx(1e-4, rel=1e-12)
    assert recipe.beta2 == pytest.approx(0.999**0.25, rel=1e-12)


SQRT = {"optim.lr_scaling": "sqrt", "optim.beta2_scaling": "rows"}
LINEAR = {"optim.lr_scaling": "linear", REFERENCE: 64}


@pytest.mark.parametrize(
    ("point", "selection", "expected"),
    [
        ({"optim.lr": 2e-4}, {}, {}),
        ({K: 4}, {}, {ROWS: None}),  # as many rows as the recipe
        ({ROWS: 64}, {}, {K: None}),
        ({ROWS: 32}, {}, {K: None, **SQRT, REFERENCE: 64}),
        ({K: 2}, {"tune__lr_scaling": "linear"}, {ROWS: None, **LINEAR}),
        ({K: 2}, {"tune__lr_scaling": "none"}, {ROWS: None}),
        # The recipe's own scaling stays, and so does the point's.
        ({K: 2}, {"optim__lr_scaling": "linear", "optim__lr_reference_batch_size": 16}, {ROWS: None}),
        ({K: 2}, {"optim__lr_reference_batch_size": 16}, {ROWS: None, **SQRT, REFERENCE: 16}),
        ({K: 2, "optim.lr_scaling": "none"}, {}, {ROWS: None}),
        ({K: 2, "optim.lr_scaling": "linear"}, {}, {ROWS: None, REFERENCE: 64}),
    ],
)
def test_what_a_point_brings_with_it(
    point: dict[str, Any], selection: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert space.trial_overrides(instance(**selection), point) == {**point, **expected}


def test_the_recipe_is_known_by_what_its_settings_come_to() -> None:
    base = instance()
    point: dict[str, Any]
    for point in ({}, {"optim.lr": 3e-4}, {K: 4}, {ROWS: 64}, {"optim.lr": 3e-4, K: 4}):
        assert space.same_settings(base, space.trial_overrides(base, point), {})
        frozen = config.with_overrides(base, {ROWS: 64})
        assert space.same_settings(frozen, space.trial_overrides(frozen, point), {})
    rest: list[dict[str, Any]] = [{"optim.lr": 3.01e-4}, {K: 2}, {"optim.warmup": 0.2}, {"optim.name": "radam"}]
    for point in rest:
        assert not space.same_settings(base, space.trial_overrides(base, point), {})
    # Said otherwise: 32 rows with the learning rate that the square root gives, and with beta2 of twice as long.
    plain = {ROWS: 32, "optim.lr": 3e-4 * 0.5**0.5, "optim.lr_scaling": "none", "optim.beta2_scaling": "rows"}
    text = {**plain, "optim.lr_reference_batch_size": 64}
    assert space.same_settings(base, text, space.trial_overrides(base, {K: 2}))
    assert not space.same_settings(base, {**text, "optim.beta2_scaling": "none"}, space.trial_overrides(base, {K: 2}))


@pytest.mark.parametrize(
    "selection", [{}, {ROWS: 64}, {"optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 16}]
)
def test_a_trial_stands_where_it_was_asked_for(selection: dict[str, Any]) -> None:
    base = config.load_config("intent", selection)
    dimensions = space.build_dimensions(base)
    for point in space.halton(dimensions, 12, 5):
        assert space.locate_point(base, dimensions, space.trial_overrides(base, point)) == point
    assert space.locate_point(base, dimensions, {}) == {"optim.lr": 3e-4, K: 4}


@pytest.mark.parametrize(
    ("settings", "selection"),
    [
        ({"optim.lr": 1e-6}, {}),
        ({"optim.warmup": 0.2}, {}),  # it is not searched
        ({}, {ROWS: 48}),  # 2 workers x 8 rows x k = 48: k = 3 is no choice
        ({}, {ROWS: 50}),  # and no k gives 50
        ({"optim.lr_scaling": "none", K: 2}, {}),  # another learning rate than the scaled one
    ],
)
def test_a_trial_outside_of_the_space_stands_nowhere(settings: dict[str, Any], selection: dict[str, Any]) -> None:
    base = config.load_config("intent", selection)
    assert space.locate_point(base, space.build_dimensions(base), space.trial_overrides(base, settings)) is None


SEARCHED = {
    "optim.lr": LR,
    K: [1, 2, 4, 8],
    "optim.warmup": {"low": 0, "high": 1},
    "optim.schedule": ["linear", "cosine", "constant"],
    "optim.layerwise_lr_decay": {"low": 0.5, "high": 1},
    "model.attention_dropout": [None, 0, 0.1],
    "model.dropout": {"low": 0.0, "high": 0.3},
    "data.max_tokens": {"low": 8, "high": 512, "log": True},
}


@cache
def searched() -> tuple[Config, tuple[Dimension, ...]]:
    base = instance(tune__space=SEARCHED)
    return base, space.build_dimensions(base)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_every_point_is_a_configuration_and_comes_back_from_it(seed: int, number: int) -> None:
    base, dimensions = searched()
    for point in (next(space.random_points(dimensions, seed, number)), *space.halton(dimensions, 2, seed)):
        result = space.locate_point(base, dimensions, space.trial_overrides(base, point))
        assert result is not None
        assert space.same_point(result, point)


@pytest.mark.parametrize(
    "searched",
    [
        *({"tune__space": {K: choices}} for choices in (["1", "16"], ["1.0", 16])),
        {"tune__space": {"optim.lr": LR}, "tune__points_to_evaluate": [{K: "16.0"}]},
    ],
)
def test_trials_are_evaluated_after_equal_rows_however_their_frequencies_are_written(searched: dict[str, Any]) -> None:
    numbers, other = (instance(train__evaluate_every=10, **some) for some in ({"tune__space": {K: [1, 16]}}, searched))
    assert space.evaluation_interval_rows(other) == space.evaluation_interval_rows(numbers)
