"""When a search stops to create trials, and its cost by then. Without Ray: each trial has a score."""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.histories import configured, make_search
from tests.unit.tune.test_budget import started
from tune import search
from tune.history import History, Trial, find_trial
from tune.sampler import SearchPolicy
from tune.successive_halving import RungSchedule, TrainTo

FULL = 1000
LADDER = RungSchedule.from_first_rung(0.2, FULL)
LR, K = "optim.lr", "train.aggregation_frequency"
Scores = Callable[[Trial], float]
BASE: Mapping[str, Any] = {"tune.sampler": "tpe", "train.seed": 0}
"""Its proposals take a tenth of the time of the Gaussian process's."""


def begun(folder: Path, overrides: Mapping[str, Any]) -> search.SearchAttempt:
    """A search with trial 0."""
    config = configured(folder, **overrides)
    item = started(make_search(folder, [], **overrides), config)
    item.schedule, item.policy, item.folds = LADDER, SearchPolicy.from_config(config, LADDER), 1
    item.create_trial({}, "recipe")
    return item


def searched(folder: Path, score: Scores, luck: float | None = 0.0, **overrides: Any) -> History:
    """A search until the two best are left; `luck` is the standard deviation of a score over rows."""
    item = begun(folder, {**BASE, **overrides})
    while result := item.next_halving(set(), True):
        go = result[0]
        trial = find_trial(item.history.trials, go.trial)
        assert go.rung is not None
        rows, original = LADDER.rungs[go.rung], {} if trial.repeat_of is None else {"row_std": luck}
        came = {"step": rows, "rows": rows, "score": score(trial), "loss": 0.1, "seconds": 1.0, **original}
        item.search_log.write("rung_result", trial=go.trial, rung=go.rung, **came)
    return item.history


def full_runs(history: History) -> float:
    return sum(trial.rung_results[-1].rows for trial in history.trials) / FULL


def noisy(deviation: float) -> Scores:
    """Another setting changes nothing, another seed or setting is other luck."""
    return lambda trial: 0.6 + random.Random(f"{trial.settings} {trial.seed}").gauss(0, deviation)


def steep(trial: Trial) -> float:
    """The nearer to 1e-3 the learning rate, the better; a seed changes next to nothing."""
    rate = trial.settings.get(LR, 2e-4)
    return 0.9 - 0.2 * math.log10(1e-3 / rate) + random.Random(str(trial.settings)).gauss(0, 1e-4)


def test_a_search_in_which_settings_make_no_difference_stops_at_eight_trials_and_wastes_no_rung(tmp_path: Path) -> None:
    result = searched(tmp_path, noisy(0.02), luck=0.03)
    assert len(result.original_trials) == 8
    assert result.stop_reason
    # 8 to a fifth, 4 to two fifths; and the best of them once more to a fifth. The budget is 8 full runs.
    assert full_runs(result) == pytest.approx(2.4 + 0.2)


def test_what_is_repeated_is_the_best_with_the_next_seed_of_the_end(tmp_path: Path) -> None:
    result = searched(tmp_path, noisy(0.02), luck=0.03, **{"train.seed": 4})
    [second] = [trial for trial in result.trials if trial.repeat_of is not None]
    assert second.repeat_of == max(result.original_trials, key=lambda trial: trial.rung_results[0].score).number
    assert (second.seed, second.settings["train.seed"], len(second.rung_results)) == (5, 5, 1)
    base = find_trial(result.trials, second.repeat_of).settings
    assert {**base, "train.seed": 5} == second.settings


def test_a_search_that_gains_more_than_chance_makes_goes_on(tmp_path: Path) -> None:
    result = searched(tmp_path, steep, luck=1e-4, **{"tune.trials": 9})
    assert (len(result.original_trials), result.stop_reason) == (9, "tune.trials=9")


def test_without_any_spread_nothing_but_the_budget_ends_a_search(tmp_path: Path) -> None:
    """The repeats have equal scores and predictions: the noise is 0."""
    result = searched(tmp_path, lambda trial: 0.5, luck=None, **{"tune.budget_full_runs": 4.3})
    assert len(result.original_trials) == 9
    assert result.stop_reason == "the budget allows 9 trials"
    assert full_runs(result) <= 4.3


def test_an_error_for_a_score_stops_as_a_share_does(tmp_path: Path) -> None:
    """The score of essays is a negative error, without a binomial standard error."""
    result = searched(tmp_path, lambda trial: 10 * noisy(0.02)(trial) - 15, luck=0.4)
    assert len(result.original_trials) == 8


@pytest.mark.parametrize(
    ("overrides", "planned", "looks"),
    [
        ({}, 18, (8, 16)),  # 20 with the rows that two repetitions take
        ({"tune.budget_full_runs": 16.0}, 38, (16, 32)),
        ({"tune.budget_full_runs": 3.0}, 8, ()),  # at four trials nothing is expected
        ({"tune.trials": 12}, 12, (8,)),
        ({"tune.sampler": "random"}, 20, ()),
        ({"tune.objective": "pareto"}, 20, ()),
        ({"tune.budget_rows": 100}, 1, ()),
    ],
)
def test_when_it_is_asked_whether_another_trial_is_worth_its_cost(
    overrides: dict[str, Any], planned: int, looks: tuple[int, ...], tmp_path: Path
) -> None:
    asker = SearchPolicy.from_config(configured(tmp_path, **overrides), LADDER)
    assert (asker.planned_trials, asker.check_points) == (planned, looks)


def test_the_points_of_the_user_are_tried_before_it_is_asked(tmp_path: Path) -> None:
    """The expected gain in the space does not apply to points of the user, which may be outside of it."""
    points = [{LR: 1e-4 * number} for number in range(1, 12)]
    result = searched(tmp_path, noisy(0.02), luck=0.03, **{"tune.points_to_evaluate": points})
    assert [trial.settings for trial in result.original_trials[1:12]] == points
    assert len(result.original_trials) == 16  # the next look


def test_with_several_slots_a_look_waits_until_all_trials_are_there(tmp_path: Path) -> None:
    item, assigned = begun(tmp_path, BASE), set[TrainTo]()

    def new_work() -> set[TrainTo]:
        return set(item.next_halving(assigned, True) or []) - assigned

    for _ in range(8):
        assigned |= new_work()
    assert len(item.history.original_trials) == 8
    assert new_work() == set()
    assert len(item.history.trials) == 8
