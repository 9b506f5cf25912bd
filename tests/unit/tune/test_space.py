"""The search space: searchable settings, its points, and the settings of a trial."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from tune import points, sampler as tune_sampler, space
from tune.points import Dimension

LR = {"low": 5e-5, "high": 1e-3, "log": True}
K = "train.aggregation_frequency"
ROWS = "train.global_batch_size"


def instance(recipe: str = "intent", **overrides: Any) -> Config:
    return config.load_config(recipe, {name.replace("__", "."): value for name, value in overrides.items()})


def problems(searched: dict[str, Any], recipe: str = "intent", **overrides: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        space.build_dimensions(instance(recipe, tune__space=searched, **overrides))
    return list(caught.value.problems)


# ------------------------------------------------------------------------------------------------ what may be searched


def test_ranges_of_whole_numbers_and_choices_of_all_kinds() -> None:
    result = space.build_dimensions(
        instance(
            tune__space={
                "train.global_batch_size": {"low": 16, "high": 128, "log": True},
                "optim.warmup": {"low": 0, "high": 0.5},
                "optim.name": ["radam", "adamw"],
                "optim.max_grad_norm": [None, 1],
                "optim.weight_decay": ["1e-2", 0],
                "model.attention_dropout": [0.1, 0.0, 0.05],
                "data.max_tokens": [64, 32],
            }
        )
    )
    assert result == (
        Dimension(ROWS, 16, 128, log=True),
        Dimension("optim.warmup", 0.0, 0.5),
        Dimension("optim.name", choices=("radam", "adamw")),
        Dimension("optim.max_grad_norm", choices=(None, 1.0)),
        Dimension("optim.weight_decay", choices=(0.0, 0.01)),
        Dimension("model.attention_dropout", choices=(0.0, 0.05, 0.1)),
        Dimension("data.max_tokens", choices=(32, 64)),
    )
    assert [item.is_integer for item in result] == [True, *[False] * 6]
    assert [item.is_ordered for item in result] == [True, True, False, False, True, True, True]
    assert isinstance(result[0].low, int)
    assert isinstance(result[1].low, float)
    assert isinstance(result[3].choices[1], float)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, None) for name in ("optim.lrr", "lr")),  # no setting at all
        *((name, "not_searchable") for name in ("serve.port", "tune.trials", "name", "distill.alpha")),
        *((name, "not_searchable") for name in ("quantize.calibration_rows", "train.seed", "train.epochs")),
        *((name, "not_searchable") for name in ("data.path", "data.valid_share", "augment.copies", "model.name")),
        *((name, "not_searchable") for name in ("train.workers", "train.micro_batch_size")),
    ],
)
def test_a_setting_that_no_trial_may_change_is_refused_by_name(name: str, code: str | None) -> None:
    for result, location in (
        (problems({name: [1, 2]}), f"tune.space.{name}"),
        (
            problems({"optim.lr": LR}, tune__points_to_evaluate=[{"optim.lr": 1e-4}, {name: 1}]),
            f"tune.points_to_evaluate.1.{name}",
        ),
    ):
        [problem] = result
        assert problem.field == location
        assert code is None or problem.code == code


def test_every_setting_is_searched_or_refused() -> None:
    base = instance()
    accepted = {name for name in config.iter_setting_names() if not space.searchable_problems(base, name)}
    assert {name for name in accepted if not name.startswith("optim.")} == {
        *("data.max_tokens", "data.window", "data.stride", "data.max_windows", "data.pooling"),
        *("model.attention_dropout", "model.dropout", "model.pooling", "model.freeze"),
        *("model.max_position_embeddings", "model.attention_window"),
        *("train.aggregation_frequency", "train.global_batch_size", "train.label_smoothing"),
        *("train.gradient_compression", "train.precision"),
    }
    every = {name for name in config.iter_setting_names() if name.startswith("optim.")}
    assert every - accepted == {"optim.lr_reference_batch_size"}  # the search itself says that
    for local_values in ({"optim__lr_scaling": "sqrt"}, {"optim__beta2_scaling": "rows"}):
        assert not space.searchable_problems(
            instance(**local_values, optim__lr_reference_batch_size=64), "optim.lr_reference_batch_size"
        )
    by_trial = instance(tune__space={"optim.lr_scaling": ["sqrt", "linear"]})
    assert not space.searchable_problems(by_trial, "optim.lr_reference_batch_size")


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
    assert [problem.field for problem in result] == [
        "tune.space.optim.lrr",
        "tune.space.optim.lr",
        "tune.space.optim.name",
        "tune.space.train.seed",
        "tune.points_to_evaluate.0",
        "tune.points_to_evaluate.1.train.epochs",
    ]


def test_a_grid_has_no_ranges() -> None:
    [problem] = problems({"optim.lr": LR, K: [1, 2]}, tune__sampler="grid")
    assert (problem.field, problem.code) == ("tune.space.optim.lr", "conflicting_settings")


def test_the_rows_of_an_update_are_searched_in_one_way() -> None:
    [problem] = problems({K: [1, 2], ROWS: [16, 32]})
    assert (problem.field, problem.code) == ("tune.space", "conflicting_settings")


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
    messages = [
        tune_sampler.Observation(point, 0.1 * number) for number, point in enumerate(points.halton(cut, 10, seed=0))
    ]
    for number in (1, 10):  # a quasi-random point, and a proposal of the sampler
        result = tune_sampler.propose(cut, messages[:number], number=number, seed=0, sampler=sampler, planned_trials=20)
        assert result is not None
        assert result[0][K] == 1


def test_what_the_recipe_s_task_cannot_use_is_refused() -> None:
    [problem] = problems({"train.label_smoothing": [0.0, 0.1]}, "essay")
    assert problem.value == 0.1
    [problem] = problems({"data.max_tokens": [32, 64]}, "domain-adapt")
    assert problem.code == "not_searchable"
    [problem] = problems({"model.pooling": ["own", "mean"]}, "entities")
    assert problem.value == "mean"


# -------------------------------------------------------------------------------------------------------------- points

DIMENSIONS = (
    Dimension("lr", 5e-5, 1e-3, log=True),
    Dimension("warmup", 0.0, 0.5),
    Dimension("rows", 1, 64, log=True),
    Dimension("layers", 2, 5),
    Dimension("k", choices=(1, 2, 4, 8)),
    Dimension("name", choices=("a", None, True)),
)


@given(st.floats(0, 1))
@settings(max_examples=200, deadline=None)
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
    long = points.halton(DIMENSIONS, 40, 7)
    assert points.halton(DIMENSIONS, 11, 7) == long[:11]
    assert points.halton(DIMENSIONS, 40, 8) != long
    assert points.halton((), 3, 0) == []


def test_random_points_follow_the_seed_and_the_trial() -> None:
    result = [points.random_point(DIMENSIONS, seed, number) for seed in range(3) for number in range(30)]
    assert len({str(point) for point in result}) == 90
    assert result[0] == points.random_point(DIMENSIONS, 0, 0)
    assert {point["k"] for point in result} == {1, 2, 4, 8}
    halves = [place < 0.5 for point in result if (place := DIMENSIONS[0].to_unit(point["lr"])) is not None]
    assert 30 <= sum(halves) <= 60


def test_a_grid_has_all_points_once() -> None:
    result = list(points.list_grid(DIMENSIONS[3:]))
    assert len(result) == len({str(point) for point in result}) == 4 * 4 * 3
    assert result[:2] == [{"layers": 2, "k": 1, "name": "a"}, {"layers": 2, "k": 1, "name": None}]
    assert points.is_finite(DIMENSIONS[2:])
    assert not points.is_finite(DIMENSIONS)
    with pytest.raises(ValueError, match="warmup"):
        list(points.list_grid(DIMENSIONS[1:]))


# ------------------------------------------------------------------------------------------------- trial settings


def overrides(point: dict[str, Any], **selection: Any) -> dict[str, Any]:
    return space.trial_overrides(instance(**selection), point)


def test_a_learning_rate_is_carried_to_the_rows_of_the_trial() -> None:
    """The recipe has 64 rows an update: k = 1 has 16, where the square root of a quarter is a half."""
    base = instance()
    changed = space.trial_overrides(base, {"optim.lr": 2e-4, K: 1})
    assert changed == {
        "optim.lr": 2e-4,
        K: 1,
        ROWS: None,
        "optim.lr_scaling": "sqrt",
        "optim.lr_reference_batch_size": 64,
        "optim.beta2_scaling": "rows",
    }
    recipe = config.with_overrides(base, changed).recipe
    assert recipe.global_batch_size == 16
    assert recipe.peak_lr == pytest.approx(1e-4, rel=1e-12)
    assert recipe.beta2 == pytest.approx(0.999**0.25, rel=1e-12)


@pytest.mark.parametrize(
    ("point", "selection", "expected"),
    [
        ({"optim.lr": 2e-4}, {}, {}),
        ({K: 4}, {}, {ROWS: None}),  # as many rows as the recipe
        ({ROWS: 64}, {}, {K: None}),
        (
            {ROWS: 32},
            {},
            {K: None, "optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 64, "optim.beta2_scaling": "rows"},
        ),
        (
            {K: 2},
            {"tune__lr_scaling": "linear"},
            {ROWS: None, "optim.lr_scaling": "linear", "optim.lr_reference_batch_size": 64},
        ),
        ({K: 2}, {"tune__lr_scaling": "none"}, {ROWS: None}),
        (
            {K: 2},
            {"optim__lr_scaling": "linear", "optim__lr_reference_batch_size": 16},
            {ROWS: None},
        ),  # the recipe's own stays
        (
            {K: 2},
            {"optim__lr_reference_batch_size": 16},
            {
                ROWS: None,
                "optim.lr_scaling": "sqrt",
                "optim.lr_reference_batch_size": 16,
                "optim.beta2_scaling": "rows",
            },
        ),
        ({K: 2, "optim.lr_scaling": "none"}, {}, {ROWS: None}),  # so does the point's own
        ({K: 2, "optim.lr_scaling": "linear"}, {}, {ROWS: None, "optim.lr_reference_batch_size": 64}),
    ],
)
def test_what_a_point_brings_with_it(
    point: dict[str, Any], selection: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert overrides(point, **selection) == {**point, **expected}


def test_a_point_that_sets_the_rows_twice_is_an_error() -> None:
    [problem] = problems({"optim.lr": LR}, tune__points_to_evaluate=[{K: 2, ROWS: 16}])
    assert problem.field == "tune.points_to_evaluate.0"


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
    for point in points.halton(dimensions, 12, 5):
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
@settings(max_examples=60, deadline=None)
def test_every_point_is_a_configuration_and_comes_back_from_it(seed: int, number: int) -> None:
    base, dimensions = searched()
    for point in (points.random_point(dimensions, seed, number), *points.halton(dimensions, 2, seed)):
        result = space.locate_point(base, dimensions, space.trial_overrides(base, point))
        assert result is not None
        assert points.same_point(result, point)


@pytest.mark.parametrize("choices", [[1, 16], ["1", "16"], ["1.0", 16]])
def test_trials_are_evaluated_after_equal_rows_however_their_frequencies_are_written(choices: list[Any]) -> None:
    selection = instance(train__evaluate_every=10, tune__space={K: choices})
    assert space.evaluation_interval_rows(selection) == space.evaluation_interval_rows(
        instance(train__evaluate_every=10, tune__space={K: [1, 16]})
    )
    points = instance(train__evaluate_every=10, tune__space={"optim.lr": LR}, tune__points_to_evaluate=[{K: "16.0"}])
    assert space.evaluation_interval_rows(points) == space.evaluation_interval_rows(selection)
