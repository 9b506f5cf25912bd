"""Who comes to the end of a search, and what of the end was begun before it."""

import pytest

from tests.histories import FULL, Event, asked, finished, reached
from tests.test_tune_finals import ROWS, SCORE, answers, searched
from tune.finals import Run, candidates, next_runs
from tune.history import replay
from tune.objective import Aim


@pytest.mark.parametrize(
    ("events", "chosen"),
    [
        (searched(0.5, 0.6, 0.9, 0.7), (0, 2, 3)),
        (searched(0.9, 0.6), (0, 1)),
        (searched(0.9), (0,)),
        (searched(None, 0.6, None, 0.7), (3, 1)),
        (searched(0.9, None, None), (0,)),
        (searched(None), ()),
    ],
)
def test_trial_0_and_the_two_best_others_are_trained_to_their_ends(
    events: list[Event], chosen: tuple[int, ...]
) -> None:
    assert candidates(replay(events), SCORE) == chosen


def test_a_later_rung_is_better_than_a_higher_score_at_an_earlier_one() -> None:
    events = [*map(asked, range(4)), reached(1, 1, 0.5), reached(2, 0, 0.9), reached(3, 0, 0.95)]
    assert candidates(replay(events), SCORE) == (0, 1, 3)


def test_of_equal_scores_the_lower_loss_is_better_and_then_the_lower_number() -> None:
    losses = {1: None, 2: 0.3, 3: 0.2, 4: 0.3}
    events = [*map(asked, range(5)), *(reached(number, 0, 0.9, loss=loss) for number, loss in losses.items())]
    assert candidates(replay(events), SCORE) == (0, 3, 2)


def test_a_diverged_trial_is_no_candidate() -> None:
    events = [*searched(0.5, 0.9, 0.8, 0.7), {"kind": "diverged", "trial": 1, "why": "loss", "seconds": 1.0}]
    assert candidates(replay(events), SCORE) == (0, 2, 3)


def test_for_the_least_time_those_that_reached_the_target_first_are_candidates() -> None:
    events = [*map(asked, range(4)), *(reached(trial, 0, 0.7 + trial / 20, seconds=trial) for trial in range(1, 4))]
    assert candidates(replay(events), Aim("time", 0.7)) == (0, 1, 2)
    assert candidates(replay(events), SCORE) == (0, 3, 2)


def test_a_seed_that_was_begun_while_trials_were_asked_for_is_one_of_the_first_round() -> None:
    """Trial 2 is trial 1 with the next seed, frozen at its first rung: the round waits for it."""
    known = [*searched(0.8, 0.9), asked(2, {"train.seed": 1}, "seed", of=1, seed=1), reached(2, 0, 0.88)]
    known += [finished(number, 0.9) for number in (0, 1)]
    judged = {Run(number): answers(0.8, Run(number), ROWS) for number in (0, 1)}
    wanted = next_runs(replay(known), FULL, 9 * FULL, judged)
    assert isinstance(wanted, list)
    assert sorted(run.of for run in wanted if run.seed == 1) == [0, 1]
    known += [asked(3, {"train.seed": 1}, "seed", of=0, seed=1), finished(3, 0.9)]
    assert next_runs(replay(known), FULL, 9 * FULL, {**judged, Run(0, 1): answers(0.8, Run(0, 1))}) == [Run(1, 1)]
