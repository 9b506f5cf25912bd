"""Noise of scores over seeds, and over rows."""

import math

import numpy as np
import pytest

from rtrain.core.ragged import Head, RaggedArray
from rtrain.metrics.bootstrap import Floats, make_mean_metric
from rtrain.metrics.registry import get_metric
from tests.support.histories import Event, created, finished, rung_result
from tune.difference_ci import HoldoutScores, row_std
from tune.history import replay_journal
from tune.successive_halving import final_seed_std, first_rung_seed_std

DRAW = np.random.default_rng(0)
ROWS = 150


def pair(first: float, second: float, by_rows: float | None, original: int = 0) -> list[Event]:
    """A trial with two seeds at the first rung."""
    return [
        *(created(original), rung_result(original, 0, first)),
        *(
            created(original + 10, {}, "seed", repeat_of=original, seed=1),
            rung_result(original + 10, 0, second, row_std=by_rows),
        ),
    ]


def test_without_a_repetition_nothing_is_known() -> None:
    assert (
        first_rung_seed_std(replay_journal([created(0), rung_result(0, 0, 0.5), created(1), rung_result(1, 0, 0.9)]))
        is None
    )


def test_two_seeds_tell_the_spread_and_the_rows_its_least() -> None:
    assert first_rung_seed_std(replay_journal(pair(0.5, 0.6, 0.01))) == pytest.approx(0.1 / math.sqrt(2))
    assert first_rung_seed_std(replay_journal(pair(0.5, 0.5, 0.03))) == 0.03  # alike by chance
    assert first_rung_seed_std(replay_journal(pair(-1.5, -1.5, None))) == 0.0  # a score that no row adds to
    two = replay_journal([*pair(0.5, 0.5, 0.03), *pair(0.6, 0.62, 0.01, original=1)])
    assert first_rung_seed_std(two) == pytest.approx(math.sqrt((0.03**2 + 0.01**2) / 2))


def test_the_spread_of_final_scores_is_pooled_over_the_trials_that_have_several_seeds() -> None:
    """Squares about the means 0.82 and 0.72: 2 x 0.02^2, and 2 x 0.02^2 + 0.04^2, with 1 + 2 degrees of freedom."""
    ends = ((0, None, 0.80), (1, None, 0.7), (2, None, 0.1), (0, 1, 0.84), (1, 1, 0.7), (1, 2, 0.76))
    history = list[Event]()
    for number, (original, seed, score) in enumerate(ends):
        history += [
            created(number, repeat_of=None if seed is None else original, seed=seed),
            finished(number, 0.0, score=score),
        ]
    assert final_seed_std(replay_journal(history[:6])) is None
    assert final_seed_std(replay_journal(history)) == pytest.approx(math.sqrt((0.0008 + 0.0024) / 3))


def holdout(name: str, rows: Floats) -> HoldoutScores:
    return HoldoutScores(name, np.arange(len(rows), dtype=np.uint64), make_mean_metric({name: rows}))


def test_what_the_rows_make_of_a_share_is_told_by_those_that_two_trainings_answer_differently() -> None:
    """20 of 150 rows are right in the one alone, and 20 in the other alone."""
    item, other = np.zeros(ROWS), np.zeros(ROWS)
    item[:60], other[20:80] = 1, 1
    assert row_std(holdout("accuracy", item), holdout("accuracy", other)) == pytest.approx(
        math.sqrt(40 / (ROWS - 1) / ROWS / 2), rel=1e-9
    )
    assert row_std(holdout("accuracy", item), holdout("accuracy", item)) == 0.0


def numbers(errors: Floats) -> HoldoutScores:
    """Answers to essays that are wrong by so much."""
    grades = RaggedArray.from_matrix(np.linspace(1, 6, ROWS, dtype=np.float32)[:, None])
    answers = RaggedArray.from_matrix((np.linspace(1, 6, ROWS) + errors).astype(np.float32)[:, None])
    additive = get_metric("number").make_sum_metric
    assert additive is not None
    return HoldoutScores("neg_rmse", np.arange(ROWS, dtype=np.uint64), additive(answers, grades, Head(("score",), {})))


def test_what_the_rows_make_of_an_error_is_what_other_rows_would() -> None:
    """As the root of a mean of squares is no share: half of the variance of the difference over resampled rows."""
    errors = [DRAW.normal(0, 1, ROWS) for _ in range(2)]
    item, other = map(numbers, errors)
    picked = DRAW.integers(0, ROWS, (4000, ROWS))
    separate = np.diff([-np.sqrt((error[picked] ** 2).mean(axis=1)) for error in errors], axis=0)
    assert row_std(item, other) == pytest.approx(separate.std() / math.sqrt(2), rel=0.1)
