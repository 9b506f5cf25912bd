"""The settings that a search tries. Pure: the configuration and its seed give the same search again."""

import itertools
import random
from typing import Any

from rtrain.config import Config, Tune


def trials(config: Config) -> list[dict[str, Any]]:
    """Overrides of each trial: none for trial 0, then `tune.points`, then points of the grid in random order."""
    tune, recipe = config.deploy.tune, config.recipe
    chosen: list[dict[str, Any]] = [{}, *(_point(dict(point)) for point in tune.points)]
    default = (recipe.optim.lr, recipe.rows_per_update)
    for point in _shuffled(tune, recipe.train.seed):
        rows = recipe.train.workers * recipe.train.micro_batch * point["train.aggregation_frequency"]
        if (point["optim.lr"], rows) != default and _point(point) not in chosen:
            chosen.append(_point(point))
    return chosen[: tune.trials]


def _shuffled(tune: Tune, seed: int) -> list[dict[str, Any]]:
    grid = [
        {"optim.lr": lr, "train.aggregation_frequency": frequency}
        for lr, frequency in itertools.product(tune.lr, tune.aggregation_frequency)
    ]
    random.Random(f"search {seed}").shuffle(grid)
    return grid


def _point(point: dict[str, Any]) -> dict[str, Any]:
    """The overrides of a point. One that sets the aggregation frequency unsets the recipe's rows_per_update, since a
    configuration with both is an error."""
    return {**point, "train.rows_per_update": None} if "train.aggregation_frequency" in point else point
