"""Bootstrap intervals: seeded, the same by sums as by rows, and as wide as theory says."""

import math

import numpy as np
import pytest

from rtrain.metrics import bootstrap, classification, entities, regression, spans, sums


def test_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    right = np.repeat([1.0, 0.0], [300, 100])
    [(name, result)] = bootstrap.compute_intervals(sums.make_mean_metric({"accuracy": right}), replicates=4000).items()
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
def test_an_interval_is_the_percentiles_of_the_scores_of_resampled_rows(scores: sums.SumMetric) -> None:
    by_sums = bootstrap.compute_intervals(scores, seed=1, replicates=50)
    resamples = np.random.Generator(np.random.PCG64(1)).integers(0, 60, size=(50, 60))
    by_rows = [scores.scores_at(rows) for rows in resamples]
    assert by_sums.keys() == by_rows[0].keys()
    for name, interval in by_sums.items():
        low, high = np.quantile([match[name] for match in by_rows], [0.025, 0.975])
        assert interval == pytest.approx((scores.scores()[name], low, high), abs=1e-9)
        assert interval.low <= interval.high


def test_a_system_is_not_better_than_itself() -> None:
    scores = sums.make_mean_metric({"accuracy": [1.0, 0.0] * 50})
    assert bootstrap.compare(scores, scores)["accuracy"] == (0.0, 0.0, 0.0, 1.0)


def test_pairs_show_a_difference_that_the_intervals_hide() -> None:
    """b is right where a is, but for 8 of 200 rows: each interval spans 12 points, the difference is 4 and sure."""
    a = np.repeat([1.0, 0.0], [140, 60])
    b = a.copy()
    b[:8] = 0
    better, worse = sums.make_mean_metric({"accuracy": a}), sums.make_mean_metric({"accuracy": b, "other": b})
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
    values = sums.make_mean_metric({"score": np.random.default_rng(0).random(37)})
    first = bootstrap.compute_intervals(values, seed=5, replicates=101)
    assert bootstrap.compute_intervals(values, seed=5, replicates=101) == first
    assert bootstrap.compute_intervals(values, seed=6, replicates=101) != first
    with pytest.raises(ValueError, match="1 and 2"):
        bootstrap.compare(sums.make_mean_metric({"x": [1.0]}), sums.make_mean_metric({"x": [1.0, 2.0]}))
