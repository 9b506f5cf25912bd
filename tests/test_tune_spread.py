"""By how much chance makes scores differ: from seed to seed, and by the rows alone."""

import math

import numpy as np
import pytest

from rtrain.core.ragged import Head, Ragged
from rtrain.metrics.registry import metric_for
from rtrain.metrics.sums import Floats, means
from tests.histories import Event, asked, finished, reached
from tune.difference_ci import Held, luck
from tune.history import replay
from tune.objective import spread_at_end, spread_at_first_rung

DRAW = np.random.default_rng(0)
ROWS = 150


def pair(first: float, second: float, by_rows: float | None, of: int = 0) -> list[Event]:
    """A trial that came to the first rung with two seeds."""
    return [
        *(asked(of), reached(of, 0, first)),
        *(asked(of + 10, {}, "seed", of=of, seed=1), reached(of + 10, 0, second, luck=by_rows)),
    ]


def test_without_a_repetition_nothing_is_known() -> None:
    assert spread_at_first_rung(replay([asked(0), reached(0, 0, 0.5), asked(1), reached(1, 0, 0.9)])) is None


def test_two_seeds_tell_the_spread_and_the_rows_its_least() -> None:
    assert spread_at_first_rung(replay(pair(0.5, 0.6, 0.01))) == pytest.approx(0.1 / math.sqrt(2))
    assert spread_at_first_rung(replay(pair(0.5, 0.5, 0.03))) == 0.03  # alike by chance
    assert spread_at_first_rung(replay(pair(-1.5, -1.5, None))) == 0.0  # a score that no row adds to
    two = replay([*pair(0.5, 0.5, 0.03), *pair(0.6, 0.62, 0.01, of=1)])
    assert spread_at_first_rung(two) == pytest.approx(math.sqrt((0.03**2 + 0.01**2) / 2))


def test_the_spread_of_final_scores_is_pooled_over_the_trials_that_have_several_seeds() -> None:
    """Squares about the means 0.82 and 0.72: 2 x 0.02^2, and 2 x 0.02^2 + 0.04^2, with 1 + 2 degrees of freedom."""
    ends = ((0, None, 0.80), (1, None, 0.7), (2, None, 0.1), (0, 1, 0.84), (1, 1, 0.7), (1, 2, 0.76))
    known = list[Event]()
    for number, (of, seed, score) in enumerate(ends):
        known += [asked(number, of=None if seed is None else of, seed=seed), finished(number, 0.0, score=score)]
    assert spread_at_end(replay(known[:6])) is None
    assert spread_at_end(replay(known)) == pytest.approx(math.sqrt((0.0008 + 0.0024) / 3))


def held(name: str, rows: Floats) -> Held:
    return Held(name, np.arange(len(rows), dtype=np.uint64), means({name: rows}))


def test_what_the_rows_make_of_a_share_is_told_by_those_that_two_trainings_answer_differently() -> None:
    """20 of 150 rows are right in the one alone, and 20 in the other alone."""
    one, other = np.zeros(ROWS), np.zeros(ROWS)
    one[:60], other[20:80] = 1, 1
    assert luck(held("accuracy", one), held("accuracy", other)) == pytest.approx(
        math.sqrt(40 / (ROWS - 1) / ROWS / 2), rel=1e-9
    )
    assert luck(held("accuracy", one), held("accuracy", one)) == 0.0


def numbers(errors: Floats) -> Held:
    """Answers to essays that are wrong by so much."""
    grades = Ragged.even(np.linspace(1, 6, ROWS, dtype=np.float32)[:, None])
    answers = Ragged.even((np.linspace(1, 6, ROWS) + errors).astype(np.float32)[:, None])
    additive = metric_for("number").additive
    assert additive is not None
    return Held("neg_rmse", np.arange(ROWS, dtype=np.uint64), additive(answers, grades, Head(("score",), {})))


def test_what_the_rows_make_of_an_error_is_what_other_rows_would() -> None:
    """As the root of a mean of squares is no share: half of the variance of the difference over resampled rows."""
    errors = [DRAW.normal(0, 1, ROWS) for _ in range(2)]
    one, other = map(numbers, errors)
    picked = DRAW.integers(0, ROWS, (4000, ROWS))
    apart = np.diff([-np.sqrt((of[picked] ** 2).mean(axis=1)) for of in errors], axis=0)
    assert luck(one, other) == pytest.approx(apart.std() / math.sqrt(2), rel=0.1)
