"""Sums over rows: parts joined keep their own scores, dense or sparse, of all rows and of some."""

import numpy as np
import pytest

from rtrain.metrics import classification, regression
from rtrain.metrics.sums import combine_metrics, make_mean_metric


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
        assert together.scores_at(some) == pytest.approx(
            {k: v for part in parts for k, v in part.scores_at(some).items()}, rel=1e-9
        )
