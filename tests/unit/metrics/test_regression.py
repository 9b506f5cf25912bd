"""Regression scores against arithmetic by hand, scikit-learn and scipy."""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy import stats
from sklearn import metrics as sk

from rtrain.metrics import regression
from rtrain.metrics.bootstrap import Floats

TRUE = np.array([1.0, 2.0, 3.0, 4.0])
PREDICTED = np.array([1.0, 3.0, 2.0, 6.0])


def every(true: Floats, predicted: Floats) -> dict[str, float]:
    return {
        **regression.make_sum_metric(true, predicted).scores(),
        "spearman": regression.compute_spearman(true, predicted),
    }


numbers = st.lists(
    st.tuples(st.floats(-100, 100, allow_nan=False), st.floats(-100, 100, allow_nan=False)), min_size=3, max_size=40
)


@settings(deadline=None, max_examples=40)
@given(numbers)
def test_scores_are_scikit_learns_and_scipys(rows: list[tuple[float, float]]) -> None:
    true, predicted = np.array(rows).round(3).T
    assume(np.ptp(true) > 0.01 and np.ptp(predicted) > 0.01)
    result = every(true, predicted)
    assert result["rmse"] == pytest.approx(sk.root_mean_squared_error(true, predicted))
    assert result["mae"] == pytest.approx(sk.mean_absolute_error(true, predicted))
    assert result["r2"] == pytest.approx(sk.r2_score(true, predicted), rel=1e-7)
    assert result["pearson"] == pytest.approx(stats.pearsonr(true, predicted).statistic, abs=1e-7)
    assert result["spearman"] == pytest.approx(stats.spearmanr(true, predicted).statistic, abs=1e-12)


@pytest.mark.parametrize("constant", [0.0, 0.1, 7.3, 1e9])
def test_a_constant_side_has_no_correlation(constant: float) -> None:
    same = np.full(4, constant)
    for true, predicted in ((TRUE, same), (same, TRUE), (same, same)):
        result = every(true, predicted)
        assert (result["pearson"], result["spearman"]) == (0.0, 0.0)
    assert every(same, TRUE)["r2"] == 0.0


def test_one_row_repeated_is_constant_too() -> None:
    """As a small resample may be: sums of 0.7 about a mean of 20 are equal to rounding only."""
    scores = regression.make_sum_metric(np.array([0.7, 60.0, 0.1]), np.array([0.3, 59.9, 0.2]))
    for row in range(3):
        for times in (1, 3, 7, 1000):
            result = scores.take(np.asarray([row] * times)).scores()
            assert (result["r2"], result["pearson"]) == (0.0, 0.0)


def test_a_far_off_mean_costs_no_digits() -> None:
    distance = every(TRUE + 1e8, PREDICTED + 1e8)
    assert distance["pearson"] == pytest.approx(7 / np.sqrt(5 * 14), abs=1e-12)
    assert distance["r2"] == pytest.approx(1 - 6 / 5, abs=1e-12)


ratings = st.lists(st.tuples(st.integers(2, 12), st.floats(-5, 20, allow_nan=False)), min_size=1, max_size=50)


@settings(deadline=None, max_examples=40)
@given(ratings)
def test_kappa_is_scikit_learns(rows: list[tuple[int, float]]) -> None:
    true, predicted = np.array(rows, dtype=np.float64).T
    rounded = np.clip(np.rint(predicted), 2, 12).astype(int)
    assume(len({*rounded, *true}) > 1)  # else undefined
    expected = sk.cohen_kappa_score(true.astype(int), rounded, weights="quadratic", labels=range(2, 13))
    assert regression.make_kappa_metric(true, predicted, 2, 12).scores()["qwk"] == pytest.approx(expected, abs=1e-12)


def test_kappa_of_half_steps_is_that_of_their_numbers() -> None:
    true, predicted = np.array([1.0, 1.5, 6.5, 9.0]), np.array([1.2, 2.1, 6.0, 8.8])
    numbers = regression.to_ratings(predicted, 1, 9, 0.5)
    assert numbers.tolist() == [0, 2, 10, 16]
    expected = sk.cohen_kappa_score([0, 1, 11, 16], numbers, weights="quadratic", labels=range(17))
    assert regression.make_kappa_metric(true, predicted, 1, 9, 0.5).scores()["qwk"] == pytest.approx(
        expected, abs=1e-12
    )


def test_kappa_of_one_and_the_same_rating_is_undefined_and_zero() -> None:
    assert regression.make_kappa_metric(np.full(5, 3.0), np.full(5, 3.0), 0, 4).scores()["qwk"] == 0.0
