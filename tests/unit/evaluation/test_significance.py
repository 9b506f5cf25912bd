"""Tests of differences: against scipy, against counts by hand, and on rows that say nothing."""

import numpy as np
import pytest
from scipy.stats import binomtest

from rtrain.evaluation import significance
from rtrain.evaluation.significance import Difference, compare_slices
from rtrain.metrics.bootstrap import SumMetric, make_mean_metric
from rtrain.metrics.scores import MAX_SLICES
from rtrain.report import stats


def shares(right: list[int]) -> SumMetric:
    return make_mean_metric({"accuracy": np.array(right, dtype=np.float64)})


def made(difference: float, low: float, high: float, p: float = 0.5, rows: int = 100) -> Difference:
    return Difference("accuracy", 0.5, 0.5 + difference, difference, low, high, p, rows)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (5, 5), (3, 12), (12, 3), (0, 9), (400, 480)])
def test_mcnemar_is_the_binomial_test_of_the_rows_that_one_side_alone_has_right(lost: int, won: int) -> None:
    expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert significance.mcnemar_p_value(lost, won) == pytest.approx(expected)


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
    assert stats.holm_correction(values) == pytest.approx(corrected)


def test_a_difference_is_the_other_less_the_first() -> None:
    a, b = shares([1] * 50 + [0] * 50), shares([1] * 70 + [0] * 30)
    (result,) = significance.compare_scores(a, b)
    assert (result.first, result.other, result.rows) == (0.5, 0.7, 100)
    assert result.difference == pytest.approx(0.2)
    assert 0.1 < result.low < 0.2 < result.high < 0.3
    assert result.verdict == 1
    assert significance.compare_scores(b, a)[0].verdict == -1


def test_equal_answers_are_not_told_apart() -> None:
    same = shares([1, 0] * 30)
    (result,) = significance.compare_scores(same, same)
    assert (result.difference, result.low, result.high, result.p, result.verdict) == (0.0, 0.0, 0.0, 1.0, 0)
    assert significance.minimum_detectable_effect(result) == 0


def test_few_rows_tell_nothing_however_far_they_are_apart() -> None:
    (result,) = significance.compare_scores(shares([0] * 6), shares([1] * 6))
    assert result.p < significance.ALPHA
    assert result.verdict == 0


@pytest.mark.parametrize("count", [2, 70])
def test_a_slice_that_has_lost_all_its_rows_is_worse_however_many_slices_there_are(count: int) -> None:
    languages = [f"{row % count:02}" for row in range(40 * count)]
    right = [1] * len(languages)
    lost = [int(language != "00") for language in languages]
    result = compare_slices(shares(right), shares(lost), "accuracy", {"language": languages})
    assert len(result) == min(count, MAX_SLICES + 1)
    assert [(item.value, item.verdict) for item in result if item.verdict] == [("00", -1)]
    assert result[0].difference.p < significance.ALPHA
    assert compare_slices(shares(right), shares(right), "accuracy", {"language": languages})[0].verdict == 0


def test_rows_too_many_for_all_resamples_still_tell_several_sides_apart() -> None:
    rows = 520_000
    first, better = make_mean_metric({"f1": np.arange(rows) % 2}), make_mean_metric({"f1": np.ones(rows)})
    (result,) = significance.compare_scores(first, better)
    assert stats.holm_correction([result.p] * 60)[0] < significance.ALPHA


def test_an_error_is_shown_once_and_a_score_without_end_is_left_out() -> None:
    rows = np.array([[1.0], [2.0]] * 20)

    def score(sums: np.ndarray) -> dict[str, np.ndarray]:
        return {"neg_rmse": -sums[..., 0], "rmse": sums[..., 0], "perplexity": np.full(sums.shape[:-1], np.inf)}

    assert [item.name for item in significance.compare_scores(SumMetric(rows, score), SumMetric(2 * rows, score))] == [
        "neg_rmse"
    ]


def test_rows_needed_grow_with_the_square_of_the_difference() -> None:
    item = made(0.02, -0.03, 0.07)  # a standard error of 0.0255: 100 rows show 7.1 points
    assert significance.minimum_detectable_effect(item) == pytest.approx(2.8016 * 0.1 / (2 * 1.959964), rel=1e-4)
    assert significance.required_sample_size(item, 0.02) == 1300  # 100 x (0.0715 / 0.02)^2 = 1,277
    assert significance.required_sample_size(item, 0.01) == 5200
