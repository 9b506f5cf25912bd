"""Which settings a search tries: the recipe first, then the given points, then draws without repetition."""

from typing import Any

import pytest

from rtrain import config
from tune import space

GRID = {"tune.lr": [1e-4, 2e-4, 3e-4], "tune.aggregation_frequency": [2, 4]}


def trials(count: int, **overrides: Any) -> list[dict[str, Any]]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return space.trials(config.load("intent", {**GRID, "tune.trials": count, **dotted}))


def drawn(lr: float, frequency: int) -> dict[str, Any]:
    return {"optim.lr": lr, "train.aggregation_frequency": frequency, "train.rows_per_update": None}


def test_trial_0_is_the_recipe_as_it_stands() -> None:
    assert trials(1) == [{}]


def test_all_of_the_grid_but_the_recipe_itself_comes_once() -> None:
    found = trials(100)
    # The recipe is lr 3e-4 and k 4, so 5 of the 6 points of the grid are left.
    assert len(found) == 6
    assert sorted((point["optim.lr"], point["train.aggregation_frequency"]) for point in found[1:]) == [
        (1e-4, 2),
        (1e-4, 4),
        (2e-4, 2),
        (2e-4, 4),
        (3e-4, 2),
    ]
    assert all(point["train.rows_per_update"] is None for point in found[1:])


def test_the_recipe_is_known_by_its_rows_however_they_are_given() -> None:
    # 48 rows are no point of the grid (2 workers x 8 rows x k), 32 rows are k = 2.
    assert len(trials(100, train__rows_per_update=48)) == 1 + 6
    found = trials(100, train__rows_per_update=32)
    assert drawn(3e-4, 2) not in found
    assert drawn(3e-4, 4) in found


def test_points_come_right_after_trial_0_and_are_not_drawn_again() -> None:
    points = [{"optim.lr": 1e-6}, {"optim.lr": 3e-4, "train.aggregation_frequency": 2}]
    found = trials(100, tune__points=points)
    assert found[:3] == [{}, {"optim.lr": 1e-6}, drawn(3e-4, 2)]
    assert len(found) == 1 + 2 + 4


def test_the_number_of_trials_is_a_limit() -> None:
    everything = trials(100, tune__points=[{"optim.lr": 1e-6}])
    for count in range(1, 7):
        assert trials(count, tune__points=[{"optim.lr": 1e-6}]) == everything[:count]


def test_the_draw_is_a_function_of_the_seed() -> None:
    orders = {str(trials(100, train__seed=seed)) for seed in range(8)}
    assert len(orders) > 4
    assert trials(100, train__seed=3) == trials(100, train__seed=3)


def test_every_trial_is_a_valid_configuration_also_of_a_frozen_run() -> None:
    frozen = config.load("intent", {**GRID, "tune.trials": 100, "train.rows_per_update": 64})
    made = [config.with_overrides(frozen, overrides).recipe for overrides in space.trials(frozen)]
    assert len(made) == 6
    assert {recipe.rows_per_update for recipe in made} == {32, 64}
    assert len({recipe.identity() for recipe in made}) == 6


def test_a_trial_s_learning_rate_is_scaled_to_the_rows_of_its_own_updates() -> None:
    base = config.load(
        "intent", {**GRID, "tune.trials": 100, "optim.lr_scaling": "sqrt", "optim.lr_rows": 16, "optim.lr": 1e-4}
    )
    made = [config.with_overrides(base, overrides).recipe for overrides in space.trials(base)]
    # k = 2 is 32 rows (root of 2), k = 4 is 64 rows (twice).
    assert len(made) == 6
    assert {(recipe.optim.lr, recipe.rows_per_update): recipe.peak_lr / recipe.optim.lr for recipe in made} == {
        (lr, rows): pytest.approx((rows / 16) ** 0.5, rel=1e-12) for lr in (1e-4, 2e-4, 3e-4) for rows in (32, 64)
    }
