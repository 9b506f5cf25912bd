"""Successive halving: rungs, their cost, promotions; and the ranking of trials."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tune.history import History, replay_journal
from tune.successive_halving import (
    FINALISTS,
    MAX_TRIALS,
    Objective,
    RungSchedule,
    TrainTo,
    exact_trial_counts,
    next_promotions,
    num_survivors,
)

SCORE = Objective()


def search(ladder: RungSchedule, scores: list[float], aim: Objective = SCORE) -> Iterator[tuple[TrainTo, History]]:
    """A whole halving of trials whose score is the same at each rung; yields each order, with the history before it."""
    history = replay_journal({"kind": "created", "trial": number} for number in range(len(scores)))
    while expected := next_promotions(history, ladder, aim, accepts_trials=False):
        go = expected[0]
        yield go, history
        assert go.rung is not None
        rung_result = {"rung": go.rung, "step": 1, "rows": ladder.rungs[go.rung], "score": scores[go.trial]}
        history = history.with_event({"kind": "rung_result", "trial": go.trial, **rung_result})


@pytest.mark.parametrize(
    ("first", "full", "rungs"),
    [
        (0.2, 1000, (200, 400, 800)),
        (0.125, 1000, (125, 250, 500)),
        (1.0, 1000, (1000,)),
        (0.0001, 10, (1, 2, 4, 8)),
    ],
)
def test_rungs_double_up_to_a_full_run(first: float, full: int, rungs: tuple[int, ...]) -> None:
    assert RungSchedule.from_first_rung(first, full).rungs == rungs


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(10, 100_000))
def test_a_halving_costs_what_the_ladder_says(trials: int, first: float, full: int) -> None:
    ladder, rows = RungSchedule.from_first_rung(first, full), 0
    for go, history in search(ladder, [trial / 64 for trial in range(trials)]):
        before = history.trials[go.trial].rung_results
        rows += ladder.rungs[go.rung or 0] - (before[-1].rows if before else 0)
    assert rows == ladder.total_rows(trials)


@given(st.floats(0.05, 1.0), st.integers(1, 30))
def test_as_many_trials_as_the_budget_pays_for(first: float, full_runs: int) -> None:
    ladder = RungSchedule.from_first_rung(first, 1000)
    trials = ladder.max_trials(full_runs * 1000)
    assert ladder.total_rows(trials) <= full_runs * 1000 or trials == 1
    assert ladder.total_rows(trials + 1) > full_runs * 1000


def test_the_budget_of_eight_full_runs() -> None:
    """20 trials reach a fifth, 10 two fifths, 5 four fifths; eight trials cost much less than ten."""
    ladder = RungSchedule.from_first_rung(0.2, 1000)
    assert (ladder.max_trials(8000), ladder.total_rows(20), exact_trial_counts(18)) == (20, 8000, (8, 16))
    assert (ladder.total_rows(8), ladder.total_rows(10)) == (2400, 4200)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_best_are_left_and_no_trial_goes_on_before_all_have_come_to_its_rung(scores: list[int]) -> None:
    sizes, history = dict[int, int](), History()
    for go, history in search(RungSchedule.from_first_rung(0.1, 1000), [float(score) for score in scores]):
        rung = go.rung or 0
        sizes[rung] = sizes.get(rung, 0) + 1
        if rung:
            assert sum(len(trial.rung_results) >= rung for trial in history.trials) == sizes[rung - 1]
    left = len(scores)
    for rung in sorted(sizes):
        assert sizes[rung] == left
        left = num_survivors(left)
    if len(scores) > FINALISTS:
        ends = [trial.number for trial in history.trials if len(trial.rung_results) >= max(sizes)]
        assert max(scores) in [scores[number] for number in ends]


def test_failed_and_diverged_trials_take_no_part() -> None:
    events = [{"kind": "created", "trial": number} for number in range(5)]
    events.append({"kind": "failed", "trial": 1, "error": "no", "seconds": 1.0})
    events.append({"kind": "diverged", "trial": 3, "reason": "loss", "seconds": 1.0})
    ladder, expected = RungSchedule.from_first_rung(0.5, 100), [TrainTo(number, 0) for number in (0, 2, 4)]
    assert next_promotions(replay_journal(events), ladder, SCORE, accepts_trials=False) == expected


def test_nobody_goes_on_while_trials_are_asked_for() -> None:
    ladder = RungSchedule.from_first_rung(0.2, 100)
    history = replay_journal([{"kind": "created", "trial": 0}])
    for number in range(6):
        history = history.with_event({"kind": "created", "trial": number}) if number else history
        rung_result = {"rung": 0, "step": 1, "rows": 20, "score": 0.5}
        history = history.with_event({"kind": "rung_result", "trial": number, **rung_result})
        assert next_promotions(history, ladder, SCORE, accepts_trials=True) == []
    assert next_promotions(history, ladder, SCORE, accepts_trials=False) == [TrainTo(number, 1) for number in range(3)]


@given(st.integers(1, 300))
def test_further_trials_are_thought_over_where_the_halving_wastes_nothing(planned: int) -> None:
    """At each size every rung has just half of the trials of the one before; the first is about half of the budget."""
    ladder = RungSchedule.from_first_rung(0.01, 100_000)
    for size in exact_trial_counts(planned):
        left = size
        while left > FINALISTS:
            assert left % 2 == 0
            left = num_survivors(left)
        assert size == FINALISTS or ladder.total_rows(size + 1) - ladder.total_rows(size) > 2 * ladder.rungs[0]
    assert all(FINALISTS <= size < planned for size in exact_trial_counts(planned))
    assert planned < 4 or planned / 4 < exact_trial_counts(planned)[0] <= planned / 2


def at_first_rung(*figures: tuple[float, float, float | None]) -> History:
    """Trials by (score, seconds, loss)."""
    history = replay_journal({"kind": "created", "trial": number} for number in range(len(figures)))
    for number, (score, seconds, loss) in enumerate(figures):
        item = {"rung": 0, "step": 1, "rows": 9, "score": score, "seconds": seconds, "loss": loss}
        history = history.with_event({"kind": "rung_result", "trial": number, **item})
    return history


@pytest.mark.parametrize(
    ("aim", "order"),
    [
        (Objective(), [4, 0, 1, 2, 3]),  # the score; of equal scores the lower loss; of equal losses the lower number
        (Objective("time_to_target", 0.8), [2, 1, 4, 0, 3]),
        (Objective("time_to_target", 0.99), [4, 0, 1, 2, 3]),
        (Objective("pareto"), [4, 1, 2, 0, 3]),  # 4, 1 and 2 are dominated by none; inside a front by score
    ],
)
def test_which_trial_is_the_better_one(aim: Objective, order: list[int]) -> None:
    figures = [(0.9, 9.0, 1.0), (0.85, 6.0, None), (0.8, 5.0, None), (0.5, 7.0, 0.1), (0.9, 8.0, 0.5)]
    assert [trial.number for trial in aim.rank(at_first_rung(*figures).trials, 0)] == order


@given(st.permutations([0.5, math.nan, 0.9, math.nan, 0.6]))
def test_a_score_that_is_no_number_is_behind_all_others(scores: list[float]) -> None:
    history = at_first_rung(*((score, 1.0, math.nan) for score in scores))
    ranked = Objective().rank(history.trials, 0)
    assert [scores[trial.number] for trial in ranked[:3]] == [0.9, 0.6, 0.5]
    assert len(Objective("pareto").rank(history.trials, 0)) == 5


def test_the_sampler_is_told_what_is_searched_for() -> None:
    trial = at_first_rung((0.5, 3.0, None)).trials[0]
    [item] = trial.rung_results
    assert Objective().sampler_value(trial, item) == 0.5
    assert Objective("pareto").sampler_value(trial, item) == (0.5, -3.0)
    assert Objective("pareto", cost="bytes").sampler_value(replace(trial, cost=17.5), item) == (0.5, -17.5)


def test_the_front_is_by_what_a_model_costs_where_that_is_asked_for() -> None:
    """Trial 1 trains the longest, and is the smallest; trial 2 is as large as trial 0, and worse."""
    history = at_first_rung((0.9, 1.0, None), (0.8, 9.0, None), (0.85, 1.0, None))
    sizes = {0: 20.0, 1: 5.0, 2: 20.0}
    priced = [replace(trial, cost=sizes[trial.number]) for trial in history.trials]
    assert [trial.number for trial in Objective("pareto", cost="bytes").rank(priced, 0)] == [0, 1, 2]
    assert [trial.number for trial in Objective("pareto").rank(history.trials, 0)] == [0, 2, 1]


def test_a_budget_of_any_size_is_counted_at_once() -> None:
    ladder = RungSchedule.from_first_rung(0.2, 30_000)
    assert ladder.max_trials(10**30) == MAX_TRIALS - 1
    trials = ladder.max_trials(10**9)
    assert ladder.total_rows(trials) <= 10**9 < ladder.total_rows(trials + 1)
