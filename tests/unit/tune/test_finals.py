"""The finals of a search, simulated: the next runs, the stop, and the verdict."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.errors import UserError
from rtrain.metrics.bootstrap import make_mean_metric
from tests.support.histories import FULL, Event, created, finished, rung_result
from tune.difference_ci import HoldoutScores
from tune.finals import (
    FinalRun,
    FinalsSettings,
    HoldoutScoresByRun,
    SearchVerdict,
    choose_finalists,
    next_runs,
    run_overrides,
)
from tune.history import replay_journal
from tune.successive_halving import Objective

SCORE = Objective()
RUNG = 0.8
"""Share of a full run after which `searched` leaves all trials."""
ROWS = 200
"""Held-back rows."""
OF_RUNS = ("seed", "folds")
World = Callable[[FinalRun], HoldoutScores | None]
"""Scores of a run; None if it fails."""


def searched(*scores: float | None) -> list[Event]:
    """A search before its finals: trials with these scores at the last rung; None: the trial failed."""
    result = [created(number) for number in range(len(scores))]
    for number, score in enumerate(scores):
        failed = {"kind": "failed", "trial": number, "error": "ValueError: no", "seconds": 0.0}
        result.append(failed if score is None else rung_result(number, 2, score))
    return result


def answers(share: float, run: FinalRun, rows: int = ROWS) -> HoldoutScores:
    """About that share of the answers right. Each run has its own luck."""
    draw = np.random.default_rng([run.trial, 0 if run.seed is None else run.seed + 1])
    return shares(draw.random(rows) < share)


def shares(right: npt.ArrayLike) -> HoldoutScores:
    worth = make_mean_metric({"accuracy": right})
    return HoldoutScores("accuracy", np.arange(len(worth), dtype=np.uint64), worth)


def world(*shares: float, failing: Sequence[FinalRun] = ()) -> World:
    return lambda run: None if run in failing else answers(shares[run.trial], run)


@dataclass
class Played:
    """An end that was played through."""

    verdict: SearchVerdict
    events: list[Event]
    scores_by_run: dict[FinalRun, HoldoutScores]
    orders: list[list[FinalRun]]
    """Runs of each request."""

    @property
    def rounds(self) -> list[list[FinalRun]]:
        """Orders of further seeds."""
        return [order for order in self.orders if order[0].seed is not None]


def carry_out(
    events: list[Event],
    run: FinalRun,
    came: HoldoutScores | None,
    to_target: float | None = None,
    **named_settings: int,
) -> None:
    """The events of one run of the end; `named`: seed and parts, as `run_overrides` has them."""
    number = run.trial
    if run.seed is not None:
        number = sum(event["kind"] == "created" for event in events)
        events.append(created(number, run_overrides(run, **named_settings), "seed", repeat_of=run.trial, seed=run.seed))
    if came is None:
        events.append({"kind": "failed", "trial": number, "error": "ValueError: no", "seconds": 0.0})
    else:
        events.append(finished(number, came.score, seconds_to_target=to_target, seconds=100.0 - 10 * run.trial))


def ask(
    events: Sequence[Event], scores: HoldoutScoresByRun, budget: float = 4, allow_new_round: bool = True, **options: Any
) -> list[FinalRun] | SearchVerdict:
    """The runs or the verdict after these events. `budget`: in full runs."""
    limits = FinalsSettings(FULL, round(budget * FULL), **options)
    return next_runs(replay_journal(events), scores, limits, allow_new_round)


def play(
    events: Sequence[Event],
    come_to: World,
    budget: float = 4,
    targets: Callable[[FinalRun], float | None] = lambda run: None,
    **options: Any,
) -> Played:
    """All that the end asks for, run after run, until its verdict."""
    state, scores_by_run, orders = list(events), dict[FinalRun, HoldoutScores](), list[list[FinalRun]]()
    for _ in range(200):
        expected = ask(state, scores_by_run, budget, **options)
        if isinstance(expected, SearchVerdict):
            return Played(expected, state, scores_by_run, orders)
        assert expected
        orders.append(expected)
        for run in expected:
            came = come_to(run)
            carry_out(state, run, came, targets(run), **{name: options[name] for name in OF_RUNS if name in options})
            if came is not None:
                scores_by_run[run] = came
    raise AssertionError("the finals do not end")


def numbers(runs: Sequence[FinalRun]) -> list[int]:
    return [run.trial for run in runs]


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_the_candidates_are_trained_to_their_ends_whatever_the_budget(budget: float) -> None:
    result = play(searched(0.5, 0.6, 0.9, 0.7), world(0.5, 0.6, 0.9, 0.7), budget)
    assert result.orders[0] == [FinalRun(0), FinalRun(2), FinalRun(3)]


def test_who_fails_on_the_way_to_its_end_makes_room_for_the_next() -> None:
    result = play(searched(0.5, 0.6, 0.9, 0.7), world(0.5, 0.6, 0.9, 0.7, failing=[FinalRun(2)]), budget=0)
    assert result.orders == [[FinalRun(0), FinalRun(2), FinalRun(3)], [FinalRun(1)]]
    assert result.verdict.winner in (1, 3)


@pytest.mark.parametrize(
    ("budget", "rounds"),
    [
        (0, []),
        (2.5, []),  # 0.6 for the three ends, and 1.9 are left
        (2.6, [2]),  # for two, not three
        (3.5, [2]),
        (3.6, [3]),
        (5.6, [3, 2]),
        (6.6, [3, 3]),
    ],
)
def test_rounds_of_seeds_as_the_budget_pays(budget: float, rounds: list[int]) -> None:
    result = play(searched(0.8, 0.8, 0.8), world(0.8, 0.8, 0.8), budget)
    assert [len(order) for order in result.rounds] == rounds
    assert [{run.seed for run in order} for order in result.rounds] == [{number + 1} for number in range(len(rounds))]


def test_a_round_of_two_is_of_trial_0_and_the_one_before_it() -> None:
    assert numbers(play(searched(0.8, 0.8, 0.8), world(0.8, 0.5, 0.85), 2.6).rounds[0]) == [0, 2]


def test_a_trial_that_is_clearly_behind_gets_no_further_seed() -> None:
    result = play(searched(0.8, 0.8, 0.8), world(0.8, 0.2, 0.8), 20)
    assert sorted(numbers(result.rounds[0])) == [0, 1, 2]
    assert len(result.rounds) > 1
    assert all(sorted(numbers(order)) == [0, 2] for order in result.rounds[1:])


def test_the_end_stops_as_soon_as_it_is_clear() -> None:
    result = play(searched(0.5, 0.9), world(0.5, 0.9), 100)
    assert 1 <= len(result.rounds) < 10  # the budget pays for 49
    assert (result.verdict.kind, result.verdict.winner, result.verdict.seeds) == ("better", 1, 1 + len(result.rounds))


@pytest.mark.parametrize(
    "failing", [[FinalRun(0, 1)], [FinalRun(1, 1)], [FinalRun(0, 1), FinalRun(1, 1)], [FinalRun(1, 1), FinalRun(0, 2)]]
)
def test_a_failed_run_of_a_round_does_not_block(failing: list[FinalRun]) -> None:
    result = play(searched(0.8, 0.8), world(0.8, 0.8, failing=failing), 10)
    assert [sorted(numbers(order)) for order in result.rounds] == [[0, 1]] * 4
    assert result.verdict.seeds == 5 - len({run.seed for run in failing})


@pytest.mark.parametrize(("parts", "rounds"), [(0, 9), (1, 9), (2, 1), (4, 3)])
def test_no_more_seeds_than_there_are_parts_of_the_rows(parts: int, rounds: int) -> None:
    result = play(searched(0.8, 0.8), world(0.8, 0.8), 0.4 + 2 * 9, folds=parts)
    assert len(result.rounds) == rounds
    assert (result.verdict.folds, result.verdict.seeds) == (parts, rounds + 1)


def test_a_repeat_of_a_look_is_no_round_of_an_end_whose_seeds_have_rows_of_their_own() -> None:
    """It was scored on the rows of trial 0; as a run of round 1 it would have no rows in common with it."""
    look = [*searched(0.8, 0.8), created(2, {"train.seed": 1}, "seed", repeat_of=1, seed=1)]
    look.append({"kind": "failed", "trial": 2, "error": "ValueError: no", "seconds": 0.0})
    result = play(look, world(0.8, 0.8), 5, folds=2)
    assert [set(order) for order in result.rounds] == [{FinalRun(0, 1), FinalRun(1, 1)}]
    assert result.verdict.seeds == 2
    # With the same rows for all seeds, the failed one is the end's own.
    assert play(look, world(0.8, 0.8), 5, folds=1).rounds[0] == [FinalRun(0, 1)]


def test_where_time_is_over_a_round_ends_and_none_begins() -> None:
    assert play(searched(0.8, 0.8), world(0.8, 0.8), 9, allow_new_round=False).rounds == []
    initial = play(searched(0.8, 0.8), world(0.8, 0.8), 9)
    repeated = [place for place, event in enumerate(initial.events) if event.get("repeat_of") is not None]
    cut = initial.events[: repeated[1]]  # one run of the first round is there, and the other was not asked for
    scores_by_run = {run: answers(0.8, run) for run in (FinalRun(0), FinalRun(1), *initial.rounds[0][:1])}
    assert ask(cut, scores_by_run, 9, allow_new_round=False) == initial.rounds[0][1:]


@pytest.mark.parametrize(("parts", "more"), [(0, {}), (1, {}), (4, {"data.validation_fold": 2})])
def test_what_a_further_seed_sets(parts: int, more: Mapping[str, int]) -> None:
    assert run_overrides(FinalRun(3), seed=5, folds=parts) == {}
    assert run_overrides(FinalRun(3, 7), seed=5, folds=parts) == {"train.seed": 7, **more}


@pytest.mark.parametrize("events", [[], searched(None, None)])
def test_a_search_without_a_score_has_no_end(events: list[Event]) -> None:
    with pytest.raises(UserError) as refused:
        ask(events, {})
    assert refused.value.code == "no_score"


def test_ends_that_cannot_be_judged_are_an_error() -> None:
    events = searched(0.8)
    carry_out(events, FinalRun(0), answers(0.8, FinalRun(0)))
    with pytest.raises(UserError) as refused:
        ask(events, {})
    assert refused.value.code == "no_answers"


COUNTS = st.integers(1, 5)
SHARES = st.lists(st.sampled_from([0.3, 0.75, 0.8, 0.85]), min_size=5, max_size=5)
FAILING = st.sets(st.builds(FinalRun, st.integers(0, 4), st.sampled_from([None, 1, 2, 3])), max_size=4)
AIMS = st.sampled_from([SCORE, Objective("pareto"), Objective("time_to_target", 0.8)])


def targets(run: FinalRun) -> float | None:
    return None if run.trial == 2 else 50.0 - run.trial + (run.seed or 0) / 10


@settings(deadline=None, max_examples=60)
@given(COUNTS, SHARES, FAILING, st.floats(0, 12), st.integers(0, 5), AIMS, st.randoms(use_true_random=False))
def test_every_end_comes_to_a_verdict(
    count: int, shares: list[float], failing: set[FinalRun], budget: float, parts: int, aim: Objective, random: Any
) -> None:
    """Within its budget, without asking twice, and with the same verdict whatever order the events came in."""
    events = searched(*shares[:count])
    options: dict[str, Any] = {"folds": parts, "objective": aim}
    if {FinalRun(number) for number in range(count)} <= failing:
        with pytest.raises(UserError):
            play(events, world(*shares, failing=list(failing)), budget, targets, **options)
        return
    result = play(events, world(*shares, failing=list(failing)), budget, targets, **options)
    runs = [run for order in result.orders for run in order]
    assert len(set(runs)) == len(runs)
    usage = sum(len(order) for order in result.rounds) + sum(
        1 - RUNG for run in runs if run.seed is None and run in result.scores_by_run
    )
    assert not result.rounds or usage <= budget + 1e-9
    assert parts < 2 or len(result.rounds) < parts
    for before, after in pairwise(result.rounds):
        assert set(numbers(after)) <= set(numbers(before))

    kinds = {kind: [event for event in result.events if event["kind"] == kind] for kind in ("created", "rung_result")}
    ends = [event for event in result.events if event["kind"] not in kinds]
    random.shuffle(kinds["rung_result"])
    random.shuffle(ends)
    scores_by_run = dict(random.sample(list(result.scores_by_run.items()), len(result.scores_by_run)))
    second = [*kinds["created"], *kinds["rung_result"], *ends]
    assert ask(second, scores_by_run, budget, **options) == result.verdict


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), SHARES, st.floats(0, 12), st.sampled_from([SCORE, Objective("pareto")]))
def test_the_winner_is_never_below_trial_0(count: int, shares: list[float], budget: float, aim: Objective) -> None:
    """On the held-back rows, in the mean over all of the seeds that both have."""
    result = play(searched(*shares[:count]), world(*shares), budget, objective=aim)
    verdict = result.verdict
    holdout = {
        trial: {run.seed: item.score for run, item in result.scores_by_run.items() if run.trial == trial}
        for trial in range(count)
    }
    # On a front, trial 0 may have had a further seed beside a trial that another one has beaten since.
    pair = holdout[0].keys() & holdout[verdict.winner].keys()
    first, best = (np.mean([holdout[trial][seed] for seed in pair]) for trial in (0, verdict.winner))
    assert len(pair) == verdict.seeds
    assert verdict.baseline_score == pytest.approx(first)
    assert best >= first - 1e-12
    assert (verdict.kind == "default") == (verdict.winner == 0)
    if verdict.winner:
        assert verdict.compared_trial == verdict.winner
        assert verdict.candidate_score is not None
        assert verdict.candidate_score == pytest.approx(best)
        assert verdict.ci_low is not None
        assert (verdict.kind == "better") == (verdict.ci_low > 0 and verdict.seeds > 1)


@settings(deadline=None, max_examples=40)
@given(SHARES, st.floats(0, 8), st.integers(0, 40))
def test_a_killed_search_goes_on_as_it_would_have(shares: list[float], budget: float, killed: int) -> None:
    """Runs one by one, from the journal and the scores at the kill."""
    full = play(searched(*shares), world(*shares), budget)
    left = full.events[: len(searched(*shares)) + killed]
    history = replay_journal(left)
    ended = {
        FinalRun(trial.number if trial.repeat_of is None else trial.repeat_of, trial.seed)
        for trial in history.trials
        if trial.final_result
    }
    state, scores_by_run = list(left), {run: value for run, value in full.scores_by_run.items() if run in ended}
    for _ in range(100):
        expected = ask(state, scores_by_run, budget)
        if isinstance(expected, SearchVerdict):
            break
        run = expected[0]
        came = scores_by_run[run] = answers(shares[run.trial], run)
        initial = [
            trial.number
            for trial in replay_journal(state).trials
            if (trial.repeat_of, trial.seed) == (run.trial, run.seed)
        ]
        if run.seed is not None and initial:
            state.append(finished(initial[0], came.score, seconds=100.0 - 10 * run.trial))
        else:
            carry_out(state, run, came)
    assert expected == full.verdict


def test_one_seed_is_never_better_however_far_it_is_ahead() -> None:
    result = play(searched(0.2, 0.9), world(0.2, 0.9), 0).verdict
    assert (result.kind, result.winner, result.compared_trial, result.seeds) == ("unclear", 1, 1, 1)
    assert result.ci_low is not None
    assert result.ci_low > 0.5


def test_a_few_rows_are_never_better() -> None:
    result = play(searched(0.2, 0.9), lambda run: answers(float(run.trial), run, rows=19), 4).verdict
    assert (result.kind, result.winner, result.rows, result.ci_low) == ("unclear", 1, 19, 1.0)


def test_the_default_at_the_top_is_compared_with_the_next_best() -> None:
    result = play(searched(0.9, 0.5, 0.7), world(0.9, 0.5, 0.7), 4).verdict
    assert (result.kind, result.winner, result.compared_trial) == ("default", 0, 2)
    assert result.difference is not None
    assert result.difference < 0


def test_equal_scores_leave_the_default() -> None:
    same = answers(0.8, FinalRun(0))
    result = play(searched(0.8, 0.8), lambda run: same, 4).verdict
    assert (result.kind, result.winner, result.difference) == ("default", 0, 0.0)


def test_without_trial_0_the_best_other_wins_alone() -> None:
    result = play(searched(None, 0.9, 0.7), world(0.0, 0.9, 0.7), 9)
    assert result.orders == [[FinalRun(1), FinalRun(2)]]
    assert result.verdict == SearchVerdict("unopposed", 1)


def test_a_verdict_is_a_document_of_figures_that_json_can_hold() -> None:
    result = play(searched(0.8, 0.8), world(0.8, 0.8), 3, used_steering_rows=True).verdict
    assert result.used_steering_rows
    assert SearchVerdict(**json.loads(json.dumps(asdict(result), allow_nan=False))) == result


TO_TARGET = Objective("time_to_target", 0.7)


def test_a_score_that_is_not_finite_is_none_in_the_verdict() -> None:
    never = play(searched(0.8, 0.8), world(0.8, 0.8), 3, objective=TO_TARGET).verdict
    assert (never.kind, never.winner) == ("default", 0)
    assert never.baseline_score is never.candidate_score is never.difference is None


@pytest.mark.parametrize(("budget", "kind"), [(0, "unclear"), (2.4, "unclear"), (20, "better")])
def test_the_faster_one_wins_and_is_better_where_all_of_enough_seeds_are_faster(budget: float, kind: str) -> None:
    result = play(searched(0.8, 0.8), world(0.8, 0.7), budget, targets, objective=TO_TARGET).verdict
    assert (result.kind, result.winner, result.score_name, result.rows) == (kind, 1, "neg_seconds", 0)
    assert (result.difference, result.ci_low, result.ci_high) == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("budget", "seconds", "kind", "winner", "scores", "reached"),
    [
        (0, lambda run: 9.0 if run.trial else None, "unclear", 1, (None, -9.0), (0, 1)),
        # The first seed of trial 1 misses the target, after its 90 seconds of training; the next seed reaches it.
        (2.4, lambda run: 20.0 if run.trial and run.seed is not None else None, "unclear", 1, (None, -110.0), (0, 1)),
        # Trial 1 is faster with every second seed, which reaches the target; trial 0 always reaches it in 60 s.
        (
            *(2.4, lambda run: 60.0 if not run.trial else 20.0 if run.seed is not None else None),
            *("default", 0, (-60.0, -110.0), (2, 1)),
        ),
    ],
    ids=["alone", "with one seed", "missed trainings count"],
)
def test_the_expected_seconds_to_the_target_decide(
    budget: float,
    seconds: Callable[[FinalRun], float | None],
    kind: str,
    winner: int,
    scores: tuple[float | None, float],
    reached: tuple[int, int],
) -> None:
    result = play(searched(0.8, 0.8), world(0.8, 0.8), budget, seconds, objective=TO_TARGET).verdict
    assert (result.kind, result.winner) == (kind, winner)
    assert (result.baseline_score, result.candidate_score) == scores
    assert (result.baseline_reached_seeds, result.candidate_reached_seeds) == reached


RIGHT: Mapping[int, Sequence[float]] = {0: (0.5, 0.5), 1: (0.91, 0.81), 2: (0.9, 0.8)}
"""Share of right answers by trial, for even and odd seeds: 1 is before 2 by less than the seeds differ."""


def by_seed(right: Mapping[int, Sequence[float]], run: FinalRun) -> HoldoutScores:
    return shares(np.arange(ROWS) < right[run.trial][(run.seed or 0) % 2] * ROWS)


def test_of_the_front_the_fastest_of_those_as_good_is_taken() -> None:
    """Trial 2 takes 80 seconds, trial 1 takes 90."""
    sizes, events = {0: 9.0, 1: 2.0, 2: 4.0}, searched(0.8, 0.8, 0.8)
    priced = [{**event, "cost": sizes[event["trial"]]} if event["kind"] == "created" else event for event in events]

    def outcome(history: list[Event], objective: Objective) -> tuple[int, bool, str]:
        result = play(history, partial(by_seed, RIGHT), 3.6, objective=objective).verdict
        return result.winner, result.won_by_cost, result.cost_kind

    assert outcome(events, Objective("pareto")) == (2, True, "training")
    assert outcome(events, SCORE) == (1, False, "training")
    assert outcome(priced, Objective("pareto", cost="bytes")) == (
        1,
        False,
        "bytes",
    )  # the smallest has the highest score


def test_of_the_front_who_is_as_good_wins_though_the_budget_pays_for_two_further_seeds_alone() -> None:
    """Trial 0 was left at a fifth of a run, the two others at two fifths: their ends take two of four full runs."""
    initial = [created(number) for number in range(3)] + [rung_result(number, 0, 0.8) for number in range(3)]
    events = initial + [rung_result(number, 1, 0.8) for number in (1, 2)]
    result = play(events, partial(by_seed, RIGHT), objective=Objective("pareto"))
    assert [numbers(order) for order in result.orders] == [[0, 1, 2], [0, 1]]
    verdict = result.verdict
    assert (verdict.winner, verdict.won_by_cost, verdict.compared_trial, verdict.seeds) == (2, True, 2, 1)
    worse = play(events, partial(by_seed, {**RIGHT, 2: (0.7, 0.7)}), objective=Objective("pareto")).verdict
    assert (worse.winner, worse.won_by_cost, worse.seeds) == (1, False, 2)
    assert play(events, partial(by_seed, RIGHT)).verdict.winner == 1  # for the score alone


def test_settings_of_equal_worth_are_rarely_told_better() -> None:
    """Whole ends, with a look after every round and two others that may be lucky: one in twenty, and its own error."""
    ends = 150
    kinds = [play(searched(0.8, 0.8, 0.8), partial(lucky, search), 5).verdict.kind for search in range(ends)]
    assert kinds.count("better") <= ends * 0.05 + 3 * math.sqrt(ends * 0.05 * 0.95)


def lucky(search: int, run: FinalRun) -> HoldoutScores:
    """Answers to rows that are easier or harder, some of them for one trial; and each seed has its luck."""
    rows = np.random.default_rng([1, search]).normal(1.5, 1.5, ROWS)
    local_values = np.random.default_rng([2, search, run.trial]).normal(0, 0.7, ROWS)
    draw = np.random.default_rng([3, search, run.trial, 1 if run.seed is None else 1 + run.seed])
    chance = 1 / (1 + np.exp(-(rows + local_values + draw.normal(0, 0.2))))
    return shares(draw.random(ROWS) < chance)


@pytest.mark.parametrize(
    ("events", "objective", "expected"),
    [
        (searched(0.5, 0.6, 0.9, 0.7), SCORE, (0, 2, 3)),
        (searched(0.9, 0.6), SCORE, (0, 1)),
        (searched(0.9), SCORE, (0,)),
        (searched(None, 0.6, None, 0.7), SCORE, (3, 1)),
        (searched(0.9, None, None), SCORE, (0,)),
        (searched(None), SCORE, ()),
        # A later rung is better than a higher score at an earlier one.
        (
            [*map(created, range(4)), rung_result(1, 1, 0.5), rung_result(2, 0, 0.9), rung_result(3, 0, 0.95)],
            SCORE,
            (0, 1, 3),
        ),
        # Of equal scores the lower loss is better, and then the lower number.
        (
            [*map(created, range(5)), rung_result(1, 0, 0.9, loss=None)]
            + [rung_result(number, 0, 0.9, loss=loss) for number, loss in ((2, 0.3), (3, 0.2), (4, 0.3))],
            *(SCORE, (0, 3, 2)),
        ),
        # A diverged trial is no finalist.
        (
            [*searched(0.5, 0.9, 0.8, 0.7), {"kind": "diverged", "trial": 1, "reason": "loss", "seconds": 1.0}],
            *(SCORE, (0, 2, 3)),
        ),
        # For the least time those that reached the target first are finalists.
        (
            [*map(created, range(4)), *(rung_result(trial, 0, 0.7 + trial / 20, seconds=trial) for trial in (1, 2, 3))],
            *(TO_TARGET, (0, 1, 2)),
        ),
    ],
)
def test_trial_0_and_the_two_best_others_are_trained_to_their_ends(
    events: list[Event], objective: Objective, expected: tuple[int, ...]
) -> None:
    assert choose_finalists(replay_journal(events), objective) == expected


def test_a_seed_that_was_begun_while_trials_were_asked_for_is_one_of_the_first_round() -> None:
    """Trial 2 is trial 1 with the next seed, frozen at its first rung: the round waits for it."""
    history = [*searched(0.8, 0.9), created(2, {"train.seed": 1}, "seed", repeat_of=1, seed=1), rung_result(2, 0, 0.88)]
    history += [finished(number, 0.9) for number in (0, 1)]
    scores_ = {FinalRun(number): answers(0.8, FinalRun(number), ROWS) for number in (0, 1)}
    expected = ask(history, scores_, 9)
    assert isinstance(expected, list)
    assert sorted(run.trial for run in expected if run.seed == 1) == [0, 1]
    history += [created(3, {"train.seed": 1}, "seed", repeat_of=0, seed=1), finished(3, 0.9)]
    scores_[FinalRun(0, 1)] = answers(0.8, FinalRun(0, 1))
    assert ask(history, scores_, 9) == [FinalRun(1, 1)]
