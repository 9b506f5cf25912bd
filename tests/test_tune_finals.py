"""The end of a search, played through with made-up runs: what is trained next, how it stops, and its verdict."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.errors import UserError
from rtrain.metrics.sums import means
from tests.histories import FULL, Event, asked, finished, reached
from tune.difference_ci import Held
from tune.finals import Run, Verdict, next_runs, overrides
from tune.history import replay
from tune.objective import Aim

SCORE = Aim()
RUNG = 0.8
"""Share of a full run after which `searched` leaves all trials."""
ROWS = 200
"""Held-back rows."""
OF_RUNS = ("seed", "parts")
World = Callable[[Run], Held | None]
"""What a run's answers are worth; None where it fails."""


def searched(*scores: float | None) -> list[Event]:
    """A search before its end: trials that came to these scores at the last rung; None for one that failed."""
    found = [asked(number) for number in range(len(scores))]
    for number, score in enumerate(scores):
        failed = {"kind": "failed", "trial": number, "error": "ValueError: no", "seconds": 0.0}
        found.append(failed if score is None else reached(number, 2, score))
    return found


def answers(share: float, run: Run, rows: int = ROWS) -> Held:
    """About that share of the answers right. Each run has its own luck."""
    draw = np.random.default_rng([run.of, 0 if run.seed is None else run.seed + 1])
    return shares(draw.random(rows) < share)


def shares(right: npt.ArrayLike) -> Held:
    worth = means({"accuracy": right})
    return Held("accuracy", np.arange(len(worth), dtype=np.uint64), worth)


def world(*shares: float, failing: Sequence[Run] = ()) -> World:
    return lambda run: None if run in failing else answers(shares[run.of], run)


@dataclass
class Played:
    """An end that was played through."""

    verdict: Verdict
    events: list[Event]
    judged: dict[Run, Held]
    orders: list[list[Run]]
    """What was asked for at a time."""

    @property
    def rounds(self) -> list[list[Run]]:
        """Orders of further seeds."""
        return [order for order in self.orders if order[0].seed is not None]


def carry_out(events: list[Event], run: Run, came: Held | None, to_target: float | None = None, **named: int) -> None:
    """The events of one run of the end; `named`: seed and parts, as `overrides` has them."""
    number = run.of
    if run.seed is not None:
        number = sum(event["kind"] == "asked" for event in events)
        events.append(asked(number, overrides(run, **named), "seed", of=run.of, seed=run.seed))
    if came is None:
        events.append({"kind": "failed", "trial": number, "error": "ValueError: no", "seconds": 0.0})
    else:
        events.append(finished(number, came.score, to_target=to_target, seconds=100.0 - 10 * run.of))


def play(
    events: Sequence[Event],
    come_to: World,
    budget: float = 4,
    targets: Callable[[Run], float | None] = lambda run: None,
    **options: Any,
) -> Played:
    """All that the end asks for, run after run, until its verdict. `budget`: in full runs."""
    known, judged, orders = list(events), dict[Run, Held](), list[list[Run]]()
    for _ in range(200):
        wanted = next_runs(replay(known), FULL, round(budget * FULL), judged, **options)
        if isinstance(wanted, Verdict):
            return Played(wanted, known, judged, orders)
        assert wanted
        orders.append(wanted)
        for run in wanted:
            came = come_to(run)
            carry_out(known, run, came, targets(run), **{name: options[name] for name in OF_RUNS if name in options})
            if came is not None:
                judged[run] = came
    raise AssertionError("the end does not come to an end")


def numbers(runs: Sequence[Run]) -> list[int]:
    return [run.of for run in runs]


# ---------------------------------------------------------------------------------------------------------- what next


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_the_candidates_are_trained_to_their_ends_whatever_the_budget(budget: float) -> None:
    assert play(searched(0.5, 0.6, 0.9, 0.7), world(0.5, 0.6, 0.9, 0.7), budget).orders[0] == [Run(0), Run(2), Run(3)]


def test_who_fails_on_the_way_to_its_end_makes_room_for_the_next() -> None:
    found = play(searched(0.5, 0.6, 0.9, 0.7), world(0.5, 0.6, 0.9, 0.7, failing=[Run(2)]), budget=0)
    assert found.orders == [[Run(0), Run(2), Run(3)], [Run(1)]]
    assert found.verdict.best in (1, 3)


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
    found = play(searched(0.8, 0.8, 0.8), world(0.8, 0.8, 0.8), budget)
    assert [len(order) for order in found.rounds] == rounds
    assert [{run.seed for run in order} for order in found.rounds] == [{number + 1} for number in range(len(rounds))]


def test_a_round_of_two_is_of_trial_0_and_the_one_before_it() -> None:
    assert numbers(play(searched(0.8, 0.8, 0.8), world(0.8, 0.5, 0.85), 2.6).rounds[0]) == [0, 2]


def test_a_trial_that_is_clearly_behind_gets_no_further_seed() -> None:
    found = play(searched(0.8, 0.8, 0.8), world(0.8, 0.2, 0.8), 20)
    assert sorted(numbers(found.rounds[0])) == [0, 1, 2]
    assert len(found.rounds) > 1
    assert all(sorted(numbers(order)) == [0, 2] for order in found.rounds[1:])


def test_the_end_stops_as_soon_as_it_is_clear() -> None:
    found = play(searched(0.5, 0.9), world(0.5, 0.9), 100)
    assert 1 <= len(found.rounds) < 10  # the budget pays for 49
    assert (found.verdict.kind, found.verdict.best, found.verdict.seeds) == ("better", 1, 1 + len(found.rounds))


@pytest.mark.parametrize("failing", [[Run(0, 1)], [Run(1, 1)], [Run(0, 1), Run(1, 1)], [Run(1, 1), Run(0, 2)]])
def test_a_failed_run_of_a_round_does_not_block(failing: list[Run]) -> None:
    found = play(searched(0.8, 0.8), world(0.8, 0.8, failing=failing), 10)
    assert [sorted(numbers(order)) for order in found.rounds] == [[0, 1]] * 4
    assert found.verdict.seeds == 5 - len({run.seed for run in failing})


@pytest.mark.parametrize(("parts", "rounds"), [(0, 9), (1, 9), (2, 1), (4, 3)])
def test_no_more_seeds_than_there_are_parts_of_the_rows(parts: int, rounds: int) -> None:
    found = play(searched(0.8, 0.8), world(0.8, 0.8), 0.4 + 2 * 9, parts=parts)
    assert len(found.rounds) == rounds
    assert (found.verdict.parts, found.verdict.seeds) == (parts, rounds + 1)


def test_a_repeat_of_a_look_is_no_round_of_an_end_whose_seeds_have_rows_of_their_own() -> None:
    """It was judged on the rows that trial 0 was judged on; taken for round 1, no row would be common to both."""
    look = searched(0.8, 0.8)
    look += [
        asked(2, {"train.seed": 1}, "seed", of=1, seed=1),
        {"kind": "failed", "trial": 2, "error": "ValueError: no", "seconds": 0.0},
    ]
    found = play(look, world(0.8, 0.8), 5, parts=2)
    assert [set(order) for order in found.rounds] == [{Run(0, 1), Run(1, 1)}]
    assert found.verdict.seeds == 2
    assert play(look, world(0.8, 0.8), 5, parts=1).rounds[0] == [Run(0, 1)]  # there the failed one is the end's own


def test_where_time_is_over_a_round_ends_and_none_begins() -> None:
    assert play(searched(0.8, 0.8), world(0.8, 0.8), 9, further=False).rounds == []
    begun = play(searched(0.8, 0.8), world(0.8, 0.8), 9)
    repeated = [place for place, one in enumerate(begun.events) if one.get("of") is not None]
    cut = begun.events[: repeated[1]]  # one run of the first round is there, and the other was not asked for
    judged = {run: answers(0.8, run) for run in (Run(0), Run(1), *begun.rounds[0][:1])}
    waiting = next_runs(replay(cut), FULL, 9 * FULL, judged, further=False)
    assert waiting == begun.rounds[0][1:]


@pytest.mark.parametrize(("parts", "more"), [(0, {}), (1, {}), (4, {"data.valid_part": 2})])
def test_what_a_further_seed_sets(parts: int, more: Mapping[str, int]) -> None:
    assert overrides(Run(3), seed=5, parts=parts) == {}
    assert overrides(Run(3, 7), seed=5, parts=parts) == {"train.seed": 7, **more}


@pytest.mark.parametrize("events", [[], searched(None, None)])
def test_a_search_without_a_score_has_no_end(events: list[Event]) -> None:
    with pytest.raises(UserError) as refused:
        next_runs(replay(events), FULL, FULL, {})
    assert refused.value.code == "no_score"


def test_ends_that_cannot_be_judged_are_an_error() -> None:
    events = searched(0.8)
    carry_out(events, Run(0), answers(0.8, Run(0)))
    with pytest.raises(UserError) as refused:
        next_runs(replay(events), FULL, FULL, {})
    assert refused.value.code == "no_answers"


# ------------------------------------------------------------------------------------------------ whatever comes of it

COUNTS = st.integers(1, 5)
SHARES = st.lists(st.sampled_from([0.3, 0.75, 0.8, 0.85]), min_size=5, max_size=5)
FAILING = st.sets(st.builds(Run, st.integers(0, 4), st.sampled_from([None, 1, 2, 3])), max_size=4)
AIMS = st.sampled_from([SCORE, Aim("front"), Aim("time", 0.8)])


def targets(run: Run) -> float | None:
    return None if run.of == 2 else 50.0 - run.of + (run.seed or 0) / 10


@settings(deadline=None, max_examples=60)
@given(COUNTS, SHARES, FAILING, st.floats(0, 12), st.integers(0, 5), AIMS, st.randoms(use_true_random=False))
def test_every_end_comes_to_a_verdict(
    count: int, shares: list[float], failing: set[Run], budget: float, parts: int, aim: Aim, random: Any
) -> None:
    """Within its budget, without asking twice, and with the same verdict whatever order the events came in."""
    events = searched(*shares[:count])
    options: dict[str, Any] = {"parts": parts, "aim": aim}
    if {Run(number) for number in range(count)} <= failing:
        with pytest.raises(UserError):
            play(events, world(*shares, failing=list(failing)), budget, targets, **options)
        return
    found = play(events, world(*shares, failing=list(failing)), budget, targets, **options)
    runs = [run for order in found.orders for run in order]
    assert len(set(runs)) == len(runs)
    spent = sum(len(order) for order in found.rounds) + sum(
        1 - RUNG for run in runs if run.seed is None and run in found.judged
    )
    assert not found.rounds or spent <= budget + 1e-9
    assert parts < 2 or len(found.rounds) < parts
    for before, after in pairwise(found.rounds):
        assert set(numbers(after)) <= set(numbers(before))

    kinds = {kind: [event for event in found.events if event["kind"] == kind] for kind in ("asked", "reached")}
    ends = [event for event in found.events if event["kind"] not in kinds]
    random.shuffle(kinds["reached"])
    random.shuffle(ends)
    judged = dict(random.sample(list(found.judged.items()), len(found.judged)))
    again = replay([*kinds["asked"], *kinds["reached"], *ends])
    assert next_runs(again, FULL, round(budget * FULL), judged, **options) == found.verdict


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), SHARES, st.floats(0, 12), st.sampled_from([SCORE, Aim("front")]))
def test_the_winner_is_never_below_trial_0(count: int, shares: list[float], budget: float, aim: Aim) -> None:
    """On the held-back rows, in the mean over all of the seeds that both have."""
    found = play(searched(*shares[:count]), world(*shares), budget, aim=aim)
    verdict = found.verdict
    held = {
        trial: {run.seed: one.score for run, one in found.judged.items() if run.of == trial} for trial in range(count)
    }
    # On a front, trial 0 may have had a further seed beside a trial that another one has beaten since.
    both = held[0].keys() & held[verdict.best].keys()
    first, best = (np.mean([held[trial][seed] for seed in both]) for trial in (0, verdict.best))
    assert len(both) == verdict.seeds
    assert verdict.first == pytest.approx(first)
    assert best >= first - 1e-12
    assert (verdict.kind == "default") == (verdict.best == 0)
    if verdict.best:
        assert verdict.against == verdict.best
        assert verdict.other is not None
        assert verdict.other == pytest.approx(best)
        assert verdict.low is not None
        assert (verdict.kind == "better") == (verdict.low > 0 and verdict.seeds > 1)


@settings(deadline=None, max_examples=40)
@given(SHARES, st.floats(0, 8), st.integers(0, 40))
def test_a_killed_search_goes_on_as_it_would_have(shares: list[float], budget: float, killed: int) -> None:
    """Runs one by one, with what the journal and the answers told when it was killed."""
    whole = play(searched(*shares), world(*shares), budget)
    left = whole.events[: len(searched(*shares)) + killed]
    history = replay(left)
    ended = {Run(one.number if one.of is None else one.of, one.seed) for one in history.trials if one.finished}
    known, judged = list(left), {run: held for run, held in whole.judged.items() if run in ended}
    for _ in range(100):
        wanted = next_runs(replay(known), FULL, round(budget * FULL), judged)
        if isinstance(wanted, Verdict):
            break
        run = wanted[0]
        came = judged[run] = answers(shares[run.of], run)
        begun = [one.number for one in replay(known).trials if (one.of, one.seed) == (run.of, run.seed)]
        if run.seed is not None and begun:
            known.append(finished(begun[0], came.score, seconds=100.0 - 10 * run.of))
        else:
            carry_out(known, run, came)
    assert wanted == whole.verdict


# --------------------------------------------------------------------------------------------------------- the verdict


def test_one_seed_is_never_better_however_far_it_is_ahead() -> None:
    found = play(searched(0.2, 0.9), world(0.2, 0.9), 0).verdict
    assert (found.kind, found.best, found.against, found.seeds) == ("unclear", 1, 1, 1)
    assert found.low is not None
    assert found.low > 0.5


def test_a_few_rows_are_never_better() -> None:
    found = play(searched(0.2, 0.9), lambda run: answers(float(run.of), run, rows=19), 4).verdict
    assert (found.kind, found.best, found.rows, found.low) == ("unclear", 1, 19, 1.0)


def test_the_default_at_the_top_is_compared_with_the_next_best() -> None:
    found = play(searched(0.9, 0.5, 0.7), world(0.9, 0.5, 0.7), 4).verdict
    assert (found.kind, found.best, found.against) == ("default", 0, 2)
    assert found.difference is not None
    assert found.difference < 0


def test_equal_scores_leave_the_default() -> None:
    same = answers(0.8, Run(0))
    found = play(searched(0.8, 0.8), lambda run: same, 4).verdict
    assert (found.kind, found.best, found.difference) == ("default", 0, 0.0)


def test_without_trial_0_the_best_other_wins_alone() -> None:
    found = play(searched(None, 0.9, 0.7), world(0.0, 0.9, 0.7), 9)
    assert found.orders == [[Run(1), Run(2)]]
    assert found.verdict == Verdict("alone", 1)


def test_a_verdict_is_a_document_of_figures_that_json_can_hold() -> None:
    found = play(searched(0.8, 0.8), world(0.8, 0.8), 3, steered=True).verdict
    assert found.steered
    assert Verdict(**found.to_document()) == found
    assert all(math.isfinite(value) for value in found.to_document().values() if isinstance(value, float))


def test_a_score_that_is_not_finite_is_none_in_the_verdict() -> None:
    never = play(searched(0.8, 0.8), world(0.8, 0.8), 3, aim=Aim("time", 0.9)).verdict
    assert (never.kind, never.best, never.first, never.other, never.difference) == ("default", 0, None, None, None)


@pytest.mark.parametrize(("budget", "kind"), [(0, "unclear"), (2.4, "unclear"), (20, "better")])
def test_the_faster_one_wins_and_is_better_where_all_of_enough_seeds_are_faster(budget: float, kind: str) -> None:
    found = play(searched(0.8, 0.8), world(0.8, 0.7), budget, targets, aim=Aim("time", 0.7)).verdict
    assert (found.kind, found.best, found.name) == (kind, 1, "neg_seconds")
    assert (found.difference, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    assert found.rows == 0


def test_who_alone_reaches_the_target_wins() -> None:
    found = play(searched(0.8, 0.8), world(0.8, 0.8), 0, lambda run: 9.0 if run.of else None, aim=Aim("time", 0.7))
    assert (found.verdict.best, found.verdict.first, found.verdict.other) == (1, None, -9.0)


def test_who_reaches_the_target_with_one_of_its_seeds_is_before_who_never_does() -> None:
    """The first seed of trial 1 misses the target, after its 90 seconds of training; the next one comes to it."""
    found = play(
        searched(0.8, 0.8),
        world(0.8, 0.8),
        2.4,
        lambda run: 20.0 if run.of and run.seed is not None else None,
        aim=Aim("time", 0.7),
    ).verdict
    assert (found.kind, found.best, found.seeds) == ("unclear", 1, 2)
    assert (found.first, found.other) == (None, -110.0)
    assert (found.first_reached, found.other_reached) == (0, 1)


def test_the_expected_seconds_count_the_trainings_that_missed_the_target() -> None:
    """Trial 1 is faster where it comes to the target, with every second seed; trial 0 always comes to it in 60 s."""
    found = play(
        searched(0.8, 0.8),
        world(0.8, 0.8),
        2.4,
        lambda run: 60.0 if not run.of else 20.0 if run.seed is not None else None,
        aim=Aim("time", 0.7),
    ).verdict
    assert (found.kind, found.best) == ("default", 0)
    assert (found.first, found.other) == (-60.0, -110.0)


def test_of_the_front_the_fastest_of_those_as_good_is_taken() -> None:
    """Trial 2 takes 80 seconds, trial 1 takes 90; 1 has the higher score, by less than the seeds differ."""
    right = {0: (0.5, 0.5), 1: (0.91, 0.81), 2: (0.9, 0.8)}

    def come_to(run: Run) -> Held:
        return shares(np.arange(ROWS) < right[run.of][(run.seed or 0) % 2] * ROWS)

    events = searched(0.8, 0.8, 0.8)
    front, score = (play(events, come_to, 3.6, aim=aim).verdict for aim in (Aim("front"), SCORE))
    assert (front.best, front.faster) == (2, True)
    assert (score.best, score.faster) == (1, False)
    sizes = {0: 9.0, 1: 2.0, 2: 4.0}
    priced = [{**one, "cost": sizes[one["trial"]]} if one["kind"] == "asked" else one for one in events]
    small = play(priced, come_to, 3.6, aim=Aim("front", cost="bytes")).verdict
    assert (small.best, small.faster, small.cost) == (1, False, "bytes")  # the smallest has the highest score too


def test_of_the_front_who_is_as_good_wins_though_the_budget_pays_for_two_further_seeds_alone() -> None:
    """Trial 0 was left at a fifth of a run, the two others at two fifths: their ends take two of four full runs."""
    right = {0: (0.5, 0.5), 1: (0.91, 0.81), 2: (0.9, 0.8)}

    def come_to(worth: Mapping[int, Sequence[float]], run: Run) -> Held:
        return shares(np.arange(ROWS) < worth[run.of][(run.seed or 0) % 2] * ROWS)

    begun = [asked(number) for number in range(3)] + [reached(number, 0, 0.8) for number in range(3)]
    events = begun + [reached(number, 1, 0.8) for number in (1, 2)]
    found = play(events, partial(come_to, right), aim=Aim("front"))
    assert [numbers(order) for order in found.orders] == [[0, 1, 2], [0, 1]]
    assert (found.verdict.best, found.verdict.faster, found.verdict.against, found.verdict.seeds) == (2, True, 2, 1)
    worse = play(events, partial(come_to, {**right, 2: (0.7, 0.7)}), aim=Aim("front")).verdict
    assert (worse.best, worse.faster, worse.seeds) == (1, False, 2)
    assert play(events, partial(come_to, right)).verdict.best == 1  # for the score alone


def test_settings_of_equal_worth_are_rarely_told_better() -> None:
    """Whole ends, with a look after every round and two others that may be lucky: one in twenty, and its own error."""
    ends = 150
    kinds = [play(searched(0.8, 0.8, 0.8), partial(lucky, search), 5).verdict.kind for search in range(ends)]
    assert kinds.count("better") <= ends * 0.05 + 3 * math.sqrt(ends * 0.05 * 0.95)


def lucky(search: int, run: Run) -> Held:
    """Answers to rows that are easier or harder, some of them for one trial; and each seed has its luck."""
    rows = np.random.default_rng([1, search]).normal(1.5, 1.5, ROWS)
    own = np.random.default_rng([2, search, run.of]).normal(0, 0.7, ROWS)
    draw = np.random.default_rng([3, search, run.of, 1 if run.seed is None else 1 + run.seed])
    chance = 1 / (1 + np.exp(-(rows + own + draw.normal(0, 0.2))))
    return shares(draw.random(ROWS) < chance)
