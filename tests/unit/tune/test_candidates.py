"""The finalists of a search, and repeats from before the finals."""

import pytest

from tests.support.histories import FULL, Event, created, finished, rung_result
from tests.unit.tune.test_finals import ROWS, SCORE, answers, searched
from tune.finals import FinalRun, choose_finalists, next_runs
from tune.history import replay_journal
from tune.objective import Objective


@pytest.mark.parametrize(
    ("events", "config"),
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
    events: list[Event], config: tuple[int, ...]
) -> None:
    assert choose_finalists(replay_journal(events), SCORE) == config


def test_a_later_rung_is_better_than_a_higher_score_at_an_earlier_one() -> None:
    events = [*map(created, range(4)), rung_result(1, 1, 0.5), rung_result(2, 0, 0.9), rung_result(3, 0, 0.95)]
    assert choose_finalists(replay_journal(events), SCORE) == (0, 1, 3)


def test_of_equal_scores_the_lower_loss_is_better_and_then_the_lower_number() -> None:
    losses = {1: None, 2: 0.3, 3: 0.2, 4: 0.3}
    events = [*map(created, range(5)), *(rung_result(number, 0, 0.9, loss=loss) for number, loss in losses.items())]
    assert choose_finalists(replay_journal(events), SCORE) == (0, 3, 2)


def test_a_diverged_trial_is_no_candidate() -> None:
    events = [*searched(0.5, 0.9, 0.8, 0.7), {"kind": "diverged", "trial": 1, "reason": "loss", "seconds": 1.0}]
    assert choose_finalists(replay_journal(events), SCORE) == (0, 2, 3)


def test_for_the_least_time_those_that_reached_the_target_first_are_candidates() -> None:
    events = [
        *map(created, range(4)),
        *(rung_result(trial, 0, 0.7 + trial / 20, seconds=trial) for trial in range(1, 4)),
    ]
    assert choose_finalists(replay_journal(events), Objective("time_to_target", 0.7)) == (0, 1, 2)
    assert choose_finalists(replay_journal(events), SCORE) == (0, 3, 2)


def test_a_seed_that_was_begun_while_trials_were_asked_for_is_one_of_the_first_round() -> None:
    """Trial 2 is trial 1 with the next seed, frozen at its first rung: the round waits for it."""
    history = [*searched(0.8, 0.9), created(2, {"train.seed": 1}, "seed", repeat_of=1, seed=1), rung_result(2, 0, 0.88)]
    history += [finished(number, 0.9) for number in (0, 1)]
    scores_ = {FinalRun(number): answers(0.8, FinalRun(number), ROWS) for number in (0, 1)}
    expected = next_runs(replay_journal(history), FULL, 9 * FULL, scores_)
    assert isinstance(expected, list)
    assert sorted(run.trial for run in expected if run.seed == 1) == [0, 1]
    history += [created(3, {"train.seed": 1}, "seed", repeat_of=0, seed=1), finished(3, 0.9)]
    assert next_runs(
        replay_journal(history), FULL, 9 * FULL, {**scores_, FinalRun(0, 1): answers(0.8, FinalRun(0, 1))}
    ) == [FinalRun(1, 1)]
