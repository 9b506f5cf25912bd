"""When a search asks for no further trial, and what it has cost by then. Without Ray: each trial comes to a score."""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.histories import configured, make_search
from tests.test_tune_budget import started
from tune.history import History, Trial, numbered
from tune.search_policy import Asker
from tune.successive_halving import Go, Ladder

FULL = 1000
LADDER = Ladder.of(0.2, FULL)
LR, K = "optim.lr", "train.aggregation_frequency"
Scores = Callable[[Trial], float]
BASE: Mapping[str, Any] = {"tune.sampler": "tpe", "train.seed": 0}
"""Its proposals take a tenth of the time of the Gaussian process's."""


def searched(folder: Path, score: Scores, luck: float | None = 0.0, **overrides: Any) -> History:
    """A search until the two best are left; `luck` is what the rows make of a score by two trainings of one setting."""
    chosen = configured(folder, **{**BASE, **overrides})
    one = started(make_search(folder, [], **{**BASE, **overrides}), chosen)
    one.ladder, one.asker, one.parts = LADDER, Asker.of(chosen, LADDER), 1
    one.ask({}, "recipe")
    while found := one.halving(set(), True):
        go = found[0]
        trial = numbered(one.history.trials, go.trial)
        assert go.rung is not None
        rows, of = LADDER.rungs[go.rung], {} if trial.of is None else {"luck": luck}
        came = {"update": rows, "rows": rows, "score": score(trial), "loss": 0.1, "seconds": 1.0, **of}
        one.record.write("reached", trial=go.trial, rung=go.rung, **came)
    return one.history


def full_runs(history: History) -> float:
    return sum(trial.reached[-1].rows for trial in history.trials) / FULL


def noisy(deviation: float) -> Scores:
    """Another setting changes nothing, another seed or setting is other luck."""
    return lambda trial: 0.6 + random.Random(f"{trial.settings} {trial.seed}").gauss(0, deviation)


def steep(trial: Trial) -> float:
    """The nearer to 1e-3 the learning rate, the better; a seed changes next to nothing."""
    rate = trial.settings.get(LR, 2e-4)
    return 0.9 - 0.2 * math.log10(1e-3 / rate) + random.Random(str(trial.settings)).gauss(0, 1e-4)


def test_a_search_in_which_settings_make_no_difference_stops_at_eight_trials_and_wastes_no_rung(tmp_path: Path) -> None:
    found = searched(tmp_path, noisy(0.02), luck=0.03)
    assert len(found.own) == 8
    assert found.stopped
    # 8 to a fifth, 4 to two fifths; and the best of them once more to a fifth. The budget is 8 full runs.
    assert full_runs(found) == pytest.approx(2.4 + 0.2)


def test_what_is_repeated_is_the_best_with_the_next_seed_of_the_end(tmp_path: Path) -> None:
    found = searched(tmp_path, noisy(0.02), luck=0.03, **{"train.seed": 4})
    [again] = [trial for trial in found.trials if trial.of is not None]
    assert again.of == max(found.own, key=lambda trial: trial.reached[0].score).number
    assert (again.seed, again.settings["train.seed"], len(again.reached)) == (5, 5, 1)
    base = numbered(found.trials, again.of).settings
    assert {**base, "train.seed": 5} == again.settings


def test_a_search_that_gains_more_than_chance_makes_goes_on(tmp_path: Path) -> None:
    found = searched(tmp_path, steep, luck=1e-4, **{"tune.trials": 9})
    assert (len(found.own), found.stopped) == (9, "tune.trials=9")


def test_without_any_spread_nothing_but_the_budget_ends_a_search(tmp_path: Path) -> None:
    """The repetitions come to the very score, and no row tells more: chance makes nothing."""
    found = searched(tmp_path, lambda trial: 0.5, luck=None, **{"tune.full_runs": 4.3})
    assert len(found.own) == 9
    assert found.stopped == "the budget pays for 9 trials"
    assert full_runs(found) <= 4.3


def test_an_error_for_a_score_stops_as_a_share_does(tmp_path: Path) -> None:
    """The score of essays is the negative of an error, of which no standard error of a share is known."""
    found = searched(tmp_path, lambda trial: 10 * noisy(0.02)(trial) - 15, luck=0.4)
    assert len(found.own) == 8


@pytest.mark.parametrize(
    ("overrides", "planned", "looks"),
    [
        ({}, 18, (8, 16)),  # 20 with the rows that two repetitions take
        ({"tune.full_runs": 16.0}, 38, (16, 32)),
        ({"tune.full_runs": 3.0}, 8, ()),  # at four trials nothing is expected
        ({"tune.trials": 12}, 12, (8,)),
        ({"tune.sampler": "random"}, 20, ()),
        ({"tune.objective": "front"}, 20, ()),
        ({"tune.rows": 100}, 1, ()),
    ],
)
def test_when_it_is_asked_whether_another_trial_is_worth_its_cost(
    overrides: dict[str, Any], planned: int, looks: tuple[int, ...], tmp_path: Path
) -> None:
    asker = Asker.of(configured(tmp_path, **overrides), LADDER)
    assert (asker.planned, asker.looks) == (planned, looks)


def test_the_points_of_the_user_are_tried_before_it_is_asked(tmp_path: Path) -> None:
    """What the best point of the space is expected to gain says nothing of theirs, which may lie outside of it."""
    points = [{LR: 1e-4 * number} for number in range(1, 12)]
    found = searched(tmp_path, noisy(0.02), luck=0.03, **{"tune.points": points})
    assert [trial.settings for trial in found.own[1:12]] == points
    assert len(found.own) == 16  # the next look


def test_with_several_slots_a_look_waits_until_all_trials_are_there(tmp_path: Path) -> None:
    chosen = configured(tmp_path, **BASE)
    one = started(make_search(tmp_path, [], **BASE), chosen)
    one.ladder, one.asker, one.parts = LADDER, Asker.of(chosen, LADDER), 1
    one.ask({}, "recipe")
    given = set[Go]()
    for _ in range(7):
        [go] = [go for go in one.halving(given, True) or [] if go not in given]
        given.add(go)
    [go] = [go for go in one.halving(given, True) or [] if go not in given]
    given.add(go)
    assert len(one.history.own) == 8
    assert [go for go in one.halving(given, True) or [] if go not in given] == []
    assert len(one.history.trials) == 8
