"""Whether a difference of two trials is more than chance: on made-up searches whose true difference is known."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import t, ttest_rel

from rtrain.metrics import classification
from rtrain.metrics.bootstrap import SumMetric, make_mean_metric
from tune.difference_ci import DifferenceCI, HoldoutScores, ScoreTable, align_rows, difference_ci, pseudo_values

Draw = np.random.Generator


def shares(values: npt.ArrayLike, ids: npt.ArrayLike | None = None) -> HoldoutScores:
    worth = make_mean_metric({"accuracy": values})
    return HoldoutScores("accuracy", np.asarray(np.arange(len(worth)) if ids is None else ids, dtype=np.uint64), worth)


def instance(
    draw: Draw,
    difference: float,
    noise: tuple[float, float, float],
    *,
    rows: int = 200,
    seeds: int = 2,
    trials: int = 2,
    nested: bool = False,
) -> ScoreTable:
    """Trials of equal worth but for the second one, which is better by `difference`. `noise`: the standard deviations
    of the parts of row, seed and rest in the difference of two trials."""
    row, seed, rest = (part / math.sqrt(2) for part in noise)
    hard = draw.normal(0.8, 0.4, (seeds if nested else 1, rows))
    local_values = draw.normal(0, row, (trials, seeds if nested else 1, rows))
    luck = draw.normal(0, seed, (trials, seeds, 1)) + draw.normal(0, rest, (trials, seeds, rows))
    values = np.broadcast_to(hard + local_values + luck, (trials, seeds, rows)).copy()
    values[1] += difference
    return {trial: [shares(value) for value in values[trial]] for trial in range(trials)}


def answered(draw: Draw, share: float, *, rows: int = 300, seeds: int = 2, trials: int = 2) -> ScoreTable:
    """Trials of equal worth whose rows are right or wrong: some are easier than others, some easier for one trial, and
    each seed has its luck with the rows and over all."""
    easy = (
        draw.normal(1.5, 1.5, rows) + draw.normal(0, share, (trials, 1, rows)) + draw.normal(0, 0.2, (trials, seeds, 1))
    )
    right = draw.random((trials, seeds, rows)) < 1 / (1 + np.exp(-easy))
    return {trial: [shares(item) for item in right[trial]] for trial in range(trials)}


MANY = 300


def at_most(share: float) -> float:
    """So many of `MANY` at the most, if each has this chance: three standard errors above the mean."""
    return MANY * share + 3 * math.sqrt(MANY * share * (1 - share))


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("trials", [2, 3])
@pytest.mark.parametrize("noise", [(0.3, 0.02, 0.3), (0.3, 0.05, 0.2), (0.1, 0.1, 0.5)], ids=["rows", "both", "seeds"])
def test_trials_of_equal_worth_are_rarely_told_apart(
    noise: tuple[float, float, float], trials: int, seeds: int
) -> None:
    draw = np.random.default_rng([seeds, trials])
    result = [difference_ci(instance(draw, 0.0, noise, seeds=seeds, trials=trials), 0, 1) for _ in range(MANY)]
    maximum = at_most(0.07 if seeds == trials == 2 else 0.05)
    assert max(sum(item.ci_low > 0 for item in result), sum(item.ci_high < 0 for item in result)) <= maximum


@pytest.mark.parametrize("nested", [False, True], ids=["answers", "other rows"])
@pytest.mark.parametrize("seeds", [2, 3])
def test_nor_are_they_by_answers_that_are_right_or_wrong_or_with_rows_of_their_own(seeds: int, nested: bool) -> None:
    draw, noise = np.random.default_rng(seeds), (0.3, 0.02, 0.3)
    tables = [
        instance(draw, 0.0, noise, rows=80, seeds=seeds, trials=3, nested=True)
        if nested
        else answered(draw, 1.0, seeds=seeds)
        for _ in range(MANY)
    ]
    assert sum(difference_ci(table, 0, 1, is_nested=nested).ci_low > 0 for table in tables) <= at_most(0.05)


@pytest.mark.parametrize(("trials", "seeds", "result"), [(2, 2, 0.7), (3, 2, 0.9), (2, 3, 0.95), (3, 3, 0.99)])
def test_large_differences_are_found(trials: int, seeds: int, result: float) -> None:
    """A difference of six standard errors; half the variance is the seeds'."""
    draw, noise = np.random.default_rng(0), (0.3, 0.02, 0.2)
    error = math.sqrt(0.3**2 / 200 + (0.02**2 + 0.2**2 / 200) / seeds)
    gaps = [difference_ci(instance(draw, 6 * error, noise, trials=trials, seeds=seeds), 0, 1) for _ in range(100)]
    assert sum(gap.ci_low > 0 for gap in gaps) >= 100 * result


def test_the_interval_holds_the_difference_as_often_as_it_says() -> None:
    draw, inside = np.random.default_rng(0), 0
    for _ in range(MANY):
        element = difference_ci(instance(draw, 0.05, (0.3, 0.02, 0.1), trials=3, seeds=3), 0, 1, alpha=0.2)
        inside += element.ci_low <= 0.05 <= element.ci_high
    assert abs(inside / MANY - 0.8) < 0.08


def test_a_difference_by_hand() -> None:
    """Rows of the difference: seed 0 (1, 0, 1, 0), seed 1 (0, 0, 1, 0). Scores: 1/4 and 1/2, and 3/4 and 3/4."""
    table = {0: [shares([0, 1, 0, 0]), shares([1, 1, 0, 0])], 1: [shares([1, 1, 1, 0]), shares([1, 1, 1, 0])]}
    result = difference_ci(table, 0, 1)
    assert (result.score_name, result.baseline_score, result.candidate_score, result.difference) == (
        "accuracy",
        0.375,
        0.75,
        0.375,
    )
    assert (result.rows, result.seeds) == (4, 2)
    # Variances of the mean over the rows: of each seed (1/3) / 4 and (1/4) / 4; of the rows' own means over the seeds,
    # (0.5, 0, 1, 0), (11/48) / 4. The scores less the means of trial and seed are 1/16, four times, so that a seed's
    # difference has the variance 2 x 4 / 256; by the rows alone it has `rest`, which is less.
    each, together, scores = (1 / 12 + 1 / 16) / 2, 11 / 192, 2 * 4 / 256
    rest = 2 * (each - together)
    assert rest < scores
    few, many = (scores - rest) / 2, together
    half = (few * t.ppf(0.975, 1) + many * t.ppf(0.975, 3)) / math.sqrt(few + many)
    assert (result.ci_high - result.ci_low) / 2 == pytest.approx(half)


def test_of_one_seed_the_interval_is_students_over_the_rows() -> None:
    draw = np.random.default_rng(0)
    first, other = draw.normal(0, 1, (2, 50))
    result = difference_ci({0: [shares(first)], 1: [shares(other)]}, 0, 1)
    expected = ttest_rel(other, first).confidence_interval(0.95)
    assert (result.ci_low, result.ci_high) == pytest.approx((expected.low, expected.high))


def test_of_other_rows_for_each_seed_the_interval_is_students_over_the_seeds() -> None:
    """Where the seeds differ by more than their rows tell."""
    first, other = [0.1, 0.5, 0.3], [0.9, 0.6, 0.7]
    table = {trial: [shares([item] * 30) for item in match] for trial, match in ((0, first), (1, other))}
    result = difference_ci(table, 0, 1, is_nested=True)
    expected = ttest_rel(other, first).confidence_interval(0.95)
    assert (result.ci_low, result.ci_high) == pytest.approx((expected.low, expected.high))
    assert (result.rows, result.seeds) == (90, 3)


def test_turned_around_the_difference_is_negative_and_a_smaller_alpha_is_a_wider_interval() -> None:
    table = instance(np.random.default_rng(1), 0.02, (0.3, 0.005, 0.1), seeds=4, trials=3)
    wide, narrow, turned = (
        difference_ci(table, *pair, alpha=alpha) for pair, alpha in (((0, 1), 0.01), ((0, 1), 0.1), ((1, 0), 0.1))
    )
    assert wide.ci_low < narrow.ci_low < narrow.ci_high < wide.ci_high
    figures = (-narrow.difference, -narrow.ci_high, -narrow.ci_low)
    assert (turned.difference, turned.ci_low, turned.ci_high) == pytest.approx(figures)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_equal_answers_differ_by_nothing(seeds: int, nested: bool) -> None:
    same = [shares([1, 0] * 20)] * seeds
    result = difference_ci({0: same, 1: same}, 0, 1, is_nested=nested)
    rows = 40 * (seeds if nested else 1)
    assert result == DifferenceCI("accuracy", 0.5, 0.5, 0.0, 0.0, 0.0, rows, seeds)


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_the_pseudo_values_of_a_mean_are_the_rows_values(rows: int) -> None:
    values = np.random.default_rng(0).normal(0, 1, rows)
    assert pseudo_values(shares(values)) == pytest.approx(values)


def test_the_pseudo_values_of_macro_f1_are_the_jackknifes() -> None:
    draw, rows = np.random.default_rng(0), 60
    true = draw.integers(0, 3, rows)
    arguments = np.where(draw.random(rows) < 0.7, true, draw.integers(0, 3, rows))

    def macro_f1(remaining: npt.NDArray[np.int64]) -> float:
        result = []
        for label in range(3):
            is_true, is_given = (true == label) * remaining, (arguments == label) * remaining
            result.append(2 * np.sum(is_true * is_given) / (np.sum(is_true) + np.sum(is_given)))
        return float(np.mean(result))

    every = np.ones(rows, dtype=np.int64)
    without = np.array([macro_f1(every - (np.arange(rows) == row)) for row in range(rows)])
    expected = rows * macro_f1(every) - (rows - 1) * without
    worth = classification.make_sum_metric(true, arguments, 3)
    result = pseudo_values(HoldoutScores("macro_f1", np.arange(rows, dtype=np.uint64), worth))
    assert result == pytest.approx(expected)
    assert not isinstance(worth.rows, np.ndarray)  # sparse sums are left out row by row too


def test_trials_are_compared_on_the_rows_that_all_have() -> None:
    a, b = shares([1.0, 0.0, 1.0, 0.0], [7, 8, 9, 5]), shares([0.0, 1.0, 0.5], [9, 7, 6])
    table = align_rows({0: [a, a], 1: [a, b]}, is_nested=False)
    assert [item.row_ids.tolist() for match in table.values() for item in match] == [[7, 9]] * 4
    assert [item.score for match in table.values() for item in match] == [1.0, 1.0, 1.0, 0.5]


def test_with_rows_of_its_own_a_seed_is_aligned_by_itself() -> None:
    first, second = shares([1.0, 0.0], [1, 2]), shares([0.0, 1.0, 1.0], [3, 4, 5])
    table = align_rows({0: [first, second], 1: [first, shares([0.5, 0.0], [5, 3])]}, is_nested=True)
    assert [[item.row_ids.tolist() for item in match] for match in table.values()] == [[[1, 2], [3, 5]]] * 2
    assert table[1][1].row_metric.rows[:, 0].tolist() == [0.0, 0.5]


def test_a_score_that_is_no_mean_has_an_interval() -> None:
    """Macro F1 of answers with 60 and 90 % accuracy."""
    draw, rows = np.random.default_rng(0), 400
    true = draw.integers(0, 4, rows)

    def seen(right: float) -> list[HoldoutScores]:
        other = (true + draw.integers(1, 4, (3, rows))) % 4
        arguments = np.where(draw.random((3, rows)) < right, true, other)
        worths: list[SumMetric] = [classification.make_sum_metric(true, item, 4) for item in arguments]
        return [HoldoutScores("macro_f1", np.arange(rows, dtype=np.uint64), worth) for worth in worths]

    result = difference_ci({0: seen(0.6), 1: seen(0.9)}, 0, 1)
    assert 0.2 < result.ci_low < result.difference < result.ci_high < 0.4
