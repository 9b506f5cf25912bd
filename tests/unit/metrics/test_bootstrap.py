"""Scores as sums over rows, their intervals, and paired comparisons of two systems."""

import math

import numpy as np
import pytest

from rtrain.metrics import bootstrap, classification, entities, regression, spans
from rtrain.metrics.bootstrap import combine_metrics, make_mean_metric


def test_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    right = np.repeat([1.0, 0.0], [300, 100])
    [(name, result)] = bootstrap.compute_intervals(
        bootstrap.make_mean_metric({"accuracy": right}), replicates=4000
    ).items()
    half = 1.96 * math.sqrt(0.75 * 0.25 / 400)  # of the binomial distribution: .0424
    assert name == "accuracy"
    assert result.value == 0.75
    assert result.low == pytest.approx(0.75 - half, abs=0.006)
    assert result.high == pytest.approx(0.75 + half, abs=0.006)


generator = np.random.default_rng(3)
LABELS, GUESSES = generator.integers(-1, 4, 60), generator.integers(0, 4, 60)
NUMBERS, PREDICTIONS = generator.integers(0, 5, 60).astype(float), generator.normal(2, 1, 60)
TAGS = [["B-X", "I-X", "O"], ["O", "B-Y"], ["O", "O"]] * 20
PREDICTED = [["B-X", "O", "O"], ["O", "B-Y"], ["B-X", "I-X"]] * 20


@pytest.mark.parametrize(
    "scores",
    [
        classification.make_sum_metric(LABELS, GUESSES, 4),
        classification.make_multilabel_metric(generator.random((60, 3)) < 0.4, generator.random((60, 3)) < 0.4),
        regression.make_sum_metric(NUMBERS, PREDICTIONS),
        regression.make_kappa_metric(NUMBERS, PREDICTIONS, 0, 4),
        entities.make_sum_metric(TAGS, PREDICTED),
        spans.make_sum_metric(["cat", "", "dog"] * 20, [["cat"], [], ["red dog"]] * 20),
    ],
    ids=["classes", "labels", "numbers", "ratings", "entities", "spans"],
)
def test_an_interval_is_the_percentiles_of_the_scores_of_resampled_rows(scores: bootstrap.SumMetric) -> None:
    by_sums = bootstrap.compute_intervals(scores, seed=1, replicates=50)
    resamples = np.random.Generator(np.random.PCG64(1)).integers(0, 60, size=(50, 60))
    by_rows = [scores.take(np.asarray(rows)).scores() for rows in resamples]
    assert by_sums.keys() == by_rows[0].keys()
    for name, interval in by_sums.items():
        low, high = np.quantile([match[name] for match in by_rows], [0.025, 0.975])
        assert interval == pytest.approx((scores.scores()[name], low, high), abs=1e-9)
        assert interval.low <= interval.high


def test_a_system_is_not_better_than_itself() -> None:
    scores = bootstrap.make_mean_metric({"accuracy": [1.0, 0.0] * 50})
    assert bootstrap.compare(scores, scores)["accuracy"] == (0.0, 0.0, 0.0, 1.0)


def test_pairs_show_a_difference_that_the_intervals_hide() -> None:
    """b is right where a is, but for 8 of 200 rows: each interval spans 12 points, the difference is 4 and sure."""
    a = np.repeat([1.0, 0.0], [140, 60])
    b = a.copy()
    b[:8] = 0
    better, worse = bootstrap.make_mean_metric({"accuracy": a}), bootstrap.make_mean_metric({"accuracy": b, "other": b})
    compared = bootstrap.compare(better, worse)
    assert set(compared) == {"accuracy"}
    result = compared["accuracy"]
    assert result.difference == pytest.approx(0.04)
    assert 0 < result.low < result.high < 0.08
    assert result.p == pytest.approx(2 / 1001)  # no resample had the other sign
    interval_a, interval_b = (bootstrap.compute_intervals(side)["accuracy"] for side in (better, worse))
    assert interval_b.high > interval_a.low
    restored = bootstrap.compare(worse, better)["accuracy"]
    assert (restored.difference, restored.low, restored.high) == pytest.approx(
        (-result.difference, -result.high, -result.low)
    )


def test_the_same_seed_draws_the_same_rows_and_other_rows_are_no_pairs() -> None:
    values = bootstrap.make_mean_metric({"score": np.random.default_rng(0).random(37)})
    first = bootstrap.compute_intervals(values, seed=5, replicates=101)
    assert bootstrap.compute_intervals(values, seed=5, replicates=101) == first
    assert bootstrap.compute_intervals(values, seed=6, replicates=101) != first
    with pytest.raises(ValueError, match="1 and 2"):
        bootstrap.compare(bootstrap.make_mean_metric({"x": [1.0]}), bootstrap.make_mean_metric({"x": [1.0, 2.0]}))


def test_joined_parts_score_as_they_do_alone() -> None:
    random = np.random.default_rng(0)
    true, result = random.integers(0, 3, 40), random.integers(0, 3, 40)
    sparse = classification.make_sum_metric(true, result, 3)
    dense, plain = (
        regression.make_sum_metric(true.astype(np.float64), result.astype(np.float64)),
        make_mean_metric({"one": random.random(40)}),
    )
    some = [3, 3, 17, 39]
    for parts in ((dense, plain), (sparse, dense), (plain, sparse, dense)):
        together = combine_metrics(*parts)
        assert len(together) == 40
        expected = {name: value for part in parts for name, value in part.scores().items()}
        assert together.scores() == pytest.approx(expected, rel=1e-12)
        assert list(together.scores()) == list(expected)
        assert together.take(np.asarray(some)).scores() == pytest.approx(
            {k: v for part in parts for k, v in part.take(np.asarray(some)).scores().items()}, rel=1e-9
        )
