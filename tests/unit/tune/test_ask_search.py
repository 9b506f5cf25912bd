"""The searcher for a user's own Tuner: its space, its proposals, and its state."""

from pathlib import Path
from typing import Any

import pytest
import ray.tune

from rtrain.core.errors import ConfigError
from tune import OptunaAskSearch
from tune.sampler import STARTUP_TRIALS, Observation, propose
from tune.space import Dimension

SPACE = {
    "optim.lr": ray.tune.loguniform(1e-5, 1e-3),
    "optim.warmup": ray.tune.uniform(0.0, 0.2),
    "train.aggregation_frequency": ray.tune.choice([4, 1, 2]),
    "data.max_tokens": ray.tune.randint(16, 33),
    "optim.weight_decay": 0.01,
}
DIMENSIONS = (
    Dimension("optim.lr", 1e-5, 1e-3, log=True),
    Dimension("optim.warmup", 0.0, 0.2),
    Dimension("train.aggregation_frequency", choices=(1, 2, 4)),
    Dimension("data.max_tokens", 16, 32),
)


def make_searcher(space: dict[str, Any] | None = None, mode: str = "max", **options: Any) -> OptunaAskSearch:
    searcher = OptunaAskSearch(seed=3, **options)
    assert searcher.set_search_properties("score", mode, SPACE if space is None else space, num_samples=20)
    return searcher


def finish(searcher: OptunaAskSearch, trial_id: str, *scores: float) -> None:
    """The results of a trial as Tune tells them: the last one ends the trial."""
    results = [{"score": score, "training_iteration": number} for number, score in enumerate(scores, 1)]
    for result in results[:-1]:
        searcher.on_trial_result(trial_id, result)
    searcher.on_trial_complete(trial_id, results[-1])


def ask(searcher: OptunaAskSearch, count: int, sign: float = 1.0) -> list[dict[str, Any] | None]:
    points = []
    for number in range(count):
        points.append(searcher.suggest(f"trial {number}"))
        point = points[-1]
        assert point is not None
        finish(searcher, f"trial {number}", sign * point["optim.lr"])
    return points


def test_proposals_are_those_of_the_search_on_the_same_first_results() -> None:
    observations: list[Observation] = []
    for number, point in enumerate(ask(make_searcher(), STARTUP_TRIALS + 2)):
        proposed = propose(DIMENSIONS, observations, number=number, seed=3, sampler="auto", planned_trials=20)
        assert proposed is not None
        assert proposed[0] == point
        observations.append(Observation(point, proposed[0]["optim.lr"]))


def test_later_results_have_no_influence_and_a_minimum_is_the_maximum_of_the_opposite() -> None:
    searcher, other = make_searcher(), make_searcher(mode="min")
    for number in range(STARTUP_TRIALS + 1):
        first, second = searcher.suggest(f"trial {number}"), other.suggest(f"trial {number}")
        assert first is not None
        assert first == second
        finish(searcher, f"trial {number}", first["optim.lr"], 17.0)
        finish(other, f"trial {number}", -first["optim.lr"], 99.0, 99.0)


def test_a_restored_searcher_proposes_what_the_saved_one_does(tmp_path: Path) -> None:
    searcher = make_searcher()
    ask(searcher, STARTUP_TRIALS)
    searcher.suggest("failed")
    searcher.on_trial_complete("failed", error=True)
    searcher.suggest("at work")
    searcher.save(str(tmp_path / "state"))
    restored = make_searcher()
    restored.restore(str(tmp_path / "state"))
    assert restored.suggest("next") == searcher.suggest("next")


def test_an_own_point_is_completed_by_the_sampler() -> None:
    point = make_searcher(points_to_evaluate=[{"optim.lr": 2e-4}]).suggest("first")
    assert point is not None
    assert (point["optim.lr"], set(point)) == (2e-4, {dimension.name for dimension in DIMENSIONS})


def test_own_points_come_first_and_all_points_of_a_grid_once() -> None:
    points = [{"optim.lr": 5e-2}, {"optim.lr": 1e-4}]  # the first is outside of the space
    space = {"optim.lr": ray.tune.choice([1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])}
    searcher = make_searcher(space, sampler="grid", points_to_evaluate=points)
    assert [searcher.suggest(f"trial {number}") for number in range(2)] == points
    later = [searcher.suggest(f"trial {number}") for number in range(2, 7)]
    assert sorted(point["optim.lr"] for point in later if point) == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    end: Any = searcher.suggest("one more")
    assert end == OptunaAskSearch.FINISHED


def test_all_domains_that_cannot_be_searched_are_refused_together() -> None:
    space = {
        "optim.lr": ray.tune.qloguniform(1e-4, 1e-3, 1e-4),
        "optim.warmup": ray.tune.randn(0.1, 0.01),
        "train": {"aggregation_frequency": ray.tune.choice([1, 2])},
        "model.dropout": ray.tune.grid_search([0.0, 0.1]),
        "optim.beta2": ray.tune.uniform(0.9, 0.99),
    }
    with pytest.raises(ConfigError) as raised:
        make_searcher(space)
    fields = ["optim.lr", "optim.warmup", "train", "model.dropout"]
    assert [problem.field for problem in raised.value.problems] == [f"param_space.{name}" for name in fields]
    assert {problem.code for problem in raised.value.problems} == {"unsupported"}


@pytest.mark.parametrize(
    ("space", "sampler", "code"),
    [
        ({"optim.lr": 1e-4}, "auto", "empty_space"),
        ({"optim.lr": ray.tune.uniform(1e-4, 1e-3)}, "grid", "conflicting_settings"),
        ({"optim.lr": ray.tune.uniform(1e-4, 1e-3)}, "simplex", "unknown_name"),
    ],
)
def test_a_space_or_a_sampler_that_does_not_fit_is_refused(space: dict[str, Any], sampler: str, code: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_searcher(space, sampler=sampler)
    assert [problem.code for problem in raised.value.problems] == [code]
