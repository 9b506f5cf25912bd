"""Tests of differences: against scipy, against counts by hand, and on rows that say nothing."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from rtrain.evaluation import significance
from rtrain.evaluation.differences import slices
from rtrain.evaluation.significance import Difference
from rtrain.metrics.scores import MOST_SLICES
from rtrain.metrics.sums import Additive, means
from rtrain.report import stats


def shares(right: list[int]) -> Additive:
    return means({"accuracy": np.array(right, dtype=np.float64)})


def made(difference: float, low: float, high: float, p: float = 0.5, rows: int = 100) -> Difference:
    return Difference("accuracy", 0.5, 0.5 + difference, difference, low, high, p, rows)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (5, 5), (3, 12), (12, 3), (0, 9), (400, 480)])
def test_mcnemar_is_the_binomial_test_of_the_rows_that_one_side_alone_has_right(lost: int, won: int) -> None:
    expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert significance.mcnemar(lost, won) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "corrected"),
    [
        ([], []),
        ([0.03], [0.03]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 x 0.01, 2 x 0.03, and 1 x 0.04, which may not fall below it
        ([0.6, 0.7], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm(values: list[float], corrected: list[float]) -> None:
    assert stats.holm(values) == pytest.approx(corrected)


def test_a_difference_is_the_other_less_the_first() -> None:
    a, b = shares([1] * 50 + [0] * 50), shares([1] * 70 + [0] * 30)
    (found,) = significance.differences(a, b)
    assert (found.first, found.other, found.rows) == (0.5, 0.7, 100)
    assert found.difference == pytest.approx(0.2)
    assert 0.1 < found.low < 0.2 < found.high < 0.3
    assert found.verdict == 1
    assert significance.differences(b, a)[0].verdict == -1


def test_equal_answers_are_not_told_apart() -> None:
    same = shares([1, 0] * 30)
    (found,) = significance.differences(same, same)
    assert (found.difference, found.low, found.high, found.p, found.verdict) == (0.0, 0.0, 0.0, 1.0, 0)
    assert significance.seen(found) == 0


def test_few_rows_tell_nothing_however_far_they_are_apart() -> None:
    (found,) = significance.differences(shares([0] * 6), shares([1] * 6))
    assert found.p < significance.ALPHA
    assert found.verdict == 0


@pytest.mark.parametrize("count", [2, 30, 51, 70])
def test_a_slice_that_has_lost_all_its_rows_is_worse_however_many_slices_there_are(count: int) -> None:
    languages = [f"{row % count:02}" for row in range(40 * count)]
    right = [1] * len(languages)
    lost = [int(language != "00") for language in languages]
    found = slices(shares(right), shares(lost), "accuracy", {"language": languages})
    assert len(found) == min(count, MOST_SLICES + 1)
    assert [(one.value, one.verdict) for one in found if one.verdict] == [("00", -1)]
    assert found[0].difference.p < significance.ALPHA
    assert slices(shares(right), shares(right), "accuracy", {"language": languages})[0].verdict == 0


def test_rows_too_many_for_all_resamples_still_tell_several_sides_apart() -> None:
    rows = 520_000
    first, better = means({"f1": np.arange(rows) % 2}), means({"f1": np.ones(rows)})
    (found,) = significance.differences(first, better)
    assert stats.holm([found.p] * 60)[0] < significance.ALPHA
    (same,) = significance.differences(first, first)
    assert same.p == 1.0


def test_an_error_is_shown_once_and_a_score_without_end_is_left_out() -> None:
    rows = np.array([[1.0], [2.0]] * 20)

    def score(sums: np.ndarray) -> dict[str, np.ndarray]:
        return {"neg_rmse": -sums[..., 0], "rmse": sums[..., 0], "perplexity": np.full(sums.shape[:-1], np.inf)}

    assert [one.name for one in significance.differences(Additive(rows, score), Additive(2 * rows, score))] == [
        "neg_rmse"
    ]


def test_rows_needed_grow_with_the_square_of_the_difference() -> None:
    one = made(0.02, -0.03, 0.07)  # a standard error of 0.0255: 100 rows show 7.1 points
    assert significance.seen(one) == pytest.approx(2.8016 * 0.1 / (2 * 1.959964), rel=1e-4)
    assert significance.needed(one, 0.02) == 1300  # 100 x (0.0715 / 0.02)^2 = 1,277
    assert significance.needed(one, 0.01) == 5200


def test_shares_of_unknown_rows() -> None:
    """Newcombe (1998), table II, example (a) by method 10: 56/70 less 48/80 is 0.0524 to 0.3339. Here both sides have
    as many rows; with 70 each, by hand."""
    one = significance.unpaired("accuracy", 48 / 70, 56 / 70, 70)
    (low_a, high_a), (low_b, high_b) = (0.5700, 0.7824), (0.6918, 0.8770)  # Wilson's
    assert one.difference == pytest.approx(8 / 70)
    assert one.low == pytest.approx(8 / 70 - math.hypot(0.8 - low_b, high_a - 48 / 70), abs=2e-3)
    assert one.high == pytest.approx(8 / 70 + math.hypot(high_b - 0.8, 48 / 70 - low_a), abs=2e-3)
    assert one.verdict == 0
    assert significance.unpaired("accuracy", 0.5, 0.5, 60).p == 1.0
    assert significance.unpaired("accuracy", 1.0, 1.0, 60).p == 1.0
    assert significance.unpaired("accuracy", 0.5, 0.9, 60).verdict == 1
