"""Successive halving by freezing: rungs, what they cost, who goes on; and which trial is the better one."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tune.history import History, replay
from tune.objective import Aim
from tune.successive_halving import KEPT, MOST, Go, Ladder, due, goes_on, sizes

SCORE = Aim()


def search(ladder: Ladder, scores: list[float], aim: Aim = SCORE) -> Iterator[tuple[Go, History]]:
    """A whole halving of trials whose score is the same at each rung; yields each order, with the history before it."""
    history = replay({"kind": "asked", "trial": number} for number in range(len(scores)))
    while wanted := due(history, ladder, aim, asking=False):
        go = wanted[0]
        yield go, history
        assert go.rung is not None
        reached = {"rung": go.rung, "update": 1, "rows": ladder.rungs[go.rung], "score": scores[go.trial]}
        history = history.after({"kind": "reached", "trial": go.trial, **reached})


def test_rungs_double_up_to_a_full_run() -> None:
    assert Ladder.of(0.2, 1000).rungs == (200, 400, 800)
    assert Ladder.of(0.125, 1000).rungs == (125, 250, 500)
    assert Ladder.of(1.0, 1000).rungs == (1000,)
    assert Ladder.of(0.0001, 10).rungs == (1, 2, 4, 8)


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(10, 100_000))
def test_a_halving_costs_what_the_ladder_says(trials: int, first: float, full: int) -> None:
    ladder, rows = Ladder.of(first, full), 0
    for go, history in search(ladder, [trial / 64 for trial in range(trials)]):
        before = history.trials[go.trial].reached
        rows += ladder.rungs[go.rung or 0] - (before[-1].rows if before else 0)
    assert rows == ladder.cost(trials)


@given(st.floats(0.05, 1.0), st.integers(1, 30))
def test_as_many_trials_as_the_budget_pays_for(first: float, full_runs: int) -> None:
    ladder = Ladder.of(first, 1000)
    trials = ladder.affordable(full_runs * 1000)
    assert ladder.cost(trials) <= full_runs * 1000 or trials == 1
    assert ladder.cost(trials + 1) > full_runs * 1000


def test_the_budget_of_eight_full_runs() -> None:
    """20 trials come to a fifth, 10 to two fifths, 5 to four fifths."""
    ladder = Ladder.of(0.2, 1000)
    assert (ladder.affordable(8000), ladder.cost(20)) == (20, 8000)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_best_are_left_and_no_trial_goes_on_before_all_have_come_to_its_rung(scores: list[int]) -> None:
    ladder = Ladder.of(0.1, 1000)
    left, sizes = len(scores), dict[int, int]()
    history = History()
    for go, history in search(ladder, [float(score) for score in scores]):
        assert go.rung is not None
        sizes[go.rung] = sizes.get(go.rung, 0) + 1
        if go.rung and go.rung - 1 in sizes:
            there = [trial for trial in history.trials if len(trial.reached) >= go.rung]
            assert len(there) == sizes[go.rung - 1]
    for rung in sorted(sizes):
        assert sizes[rung] == left
        left = goes_on(left)
    if len(scores) > KEPT:
        deepest = max(sizes)
        ends = [trial for trial in history.trials if len(trial.reached) >= deepest]
        assert max(scores) in [scores[trial.number] for trial in ends]


def test_failed_and_diverged_trials_take_no_part() -> None:
    ladder = Ladder.of(0.5, 100)
    history = replay([{"kind": "asked", "trial": number} for number in range(5)])
    history = history.after({"kind": "failed", "trial": 1, "error": "no", "seconds": 1.0})
    history = history.after({"kind": "diverged", "trial": 3, "why": "loss", "seconds": 1.0})
    assert due(history, ladder, SCORE, asking=False) == [Go(0, 0), Go(2, 0), Go(4, 0)]


def test_nobody_goes_on_while_trials_are_asked_for() -> None:
    ladder = Ladder.of(0.2, 100)
    history = replay([{"kind": "asked", "trial": 0}])
    for number in range(6):
        history = history.after({"kind": "asked", "trial": number}) if number else history
        reached = {"rung": 0, "update": 1, "rows": 20, "score": 0.5}
        history = history.after({"kind": "reached", "trial": number, **reached})
        assert due(history, ladder, SCORE, asking=True) == []
    assert due(history, ladder, SCORE, asking=False) == [Go(number, 1) for number in range(3)]


@given(st.integers(1, 300))
def test_further_trials_are_thought_over_where_the_halving_wastes_nothing(planned: int) -> None:
    """At each size every rung has just half of the trials of the one before; the first is about half of the budget."""
    ladder = Ladder.of(0.01, 100_000)
    for size in sizes(planned):
        left = size
        while left > KEPT:
            assert left % 2 == 0
            left = goes_on(left)
        assert size == KEPT or ladder.cost(size + 1) - ladder.cost(size) > 2 * ladder.rungs[0]
    assert all(KEPT <= size < planned for size in sizes(planned))
    assert planned < 4 or planned / 4 < sizes(planned)[0] <= planned / 2


def test_eight_trials_cost_much_less_than_ten() -> None:
    ladder = Ladder.of(0.2, 1000)
    assert (ladder.cost(8), ladder.cost(10), sizes(18)) == (2400, 4200, (8, 16))


# -------------------------------------------------------------------------------------------------------------- aims


def at_first_rung(*figures: tuple[float, float, float | None]) -> History:
    """Trials by (score, seconds, loss)."""
    history = replay({"kind": "asked", "trial": number} for number in range(len(figures)))
    for number, (score, seconds, loss) in enumerate(figures):
        one = {"rung": 0, "update": 1, "rows": 9, "score": score, "seconds": seconds, "loss": loss}
        history = history.after({"kind": "reached", "trial": number, **one})
    return history


@pytest.mark.parametrize(
    ("aim", "order"),
    [
        (Aim(), [4, 0, 1, 2, 3]),  # the score; of equal scores the lower loss; of equal losses the lower number
        (Aim("time", 0.8), [2, 1, 4, 0, 3]),
        (Aim("time", 0.99), [4, 0, 1, 2, 3]),
        (Aim("front"), [4, 1, 2, 0, 3]),  # 4, 1 and 2 are dominated by none; inside a front by score
    ],
)
def test_which_trial_is_the_better_one(aim: Aim, order: list[int]) -> None:
    figures = [(0.9, 9.0, 1.0), (0.85, 6.0, None), (0.8, 5.0, None), (0.5, 7.0, 0.1), (0.9, 8.0, 0.5)]
    assert [trial.number for trial in aim.ranked(at_first_rung(*figures).trials, 0)] == order


def test_figures_that_are_no_numbers_end_the_ranking_too() -> None:
    history = at_first_rung((float("nan"), 1.0, None), (float("nan"), 2.0, None), (0.5, 1.0, None))
    assert sorted(trial.number for trial in Aim("front").ranked(history.trials, 0)) == [0, 1, 2]


@pytest.mark.parametrize("scores", list(itertools.permutations([0.5, math.nan, 0.9, math.nan, 0.6])))
def test_a_score_that_is_no_number_is_behind_all_others(scores: tuple[float, ...]) -> None:
    ranked = Aim().ranked(at_first_rung(*((score, 1.0, math.nan) for score in scores)).trials, 0)
    assert [scores[trial.number] for trial in ranked[:3]] == [0.9, 0.6, 0.5]


def test_the_sampler_is_told_what_is_searched_for() -> None:
    trial = at_first_rung((0.5, 3.0, None)).trials[0]
    [one] = trial.reached
    assert (Aim().value(trial, one), Aim("front").value(trial, one)) == (0.5, (0.5, -3.0))
    priced = replace(trial, cost=17.5)
    assert Aim("front", cost="bytes").value(priced, one) == (0.5, -17.5)


def test_the_front_is_by_what_a_model_costs_where_that_is_asked_for() -> None:
    """Trial 1 trains the longest, and is the smallest; trial 2 is as large as trial 0, and worse."""
    history = at_first_rung((0.9, 1.0, None), (0.8, 9.0, None), (0.85, 1.0, None))
    sizes = {0: 20.0, 1: 5.0, 2: 20.0}
    priced = [replace(trial, cost=sizes[trial.number]) for trial in history.trials]
    assert [trial.number for trial in Aim("front", cost="bytes").ranked(priced, 0)] == [0, 1, 2]
    assert [trial.number for trial in Aim("front").ranked(history.trials, 0)] == [0, 2, 1]


def test_a_budget_of_any_size_is_counted_at_once() -> None:
    ladder = Ladder.of(0.2, 30_000)
    assert ladder.affordable(10**30) == MOST - 1
    trials = ladder.affordable(10**9)
    assert ladder.cost(trials) <= 10**9 < ladder.cost(trials + 1)
