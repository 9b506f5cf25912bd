"""Whether requests still look like the validation rows: seeded simulations of the pure function."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from rtrain.inference import drift_baseline
from rtrain.inference.drift_baseline import BIN_EDGES, DriftFeatures
from serve.observability.drift import MIN_ROWS, WINDOW_ROWS, DriftDetector, stability_index


class Kind(NamedTuple):
    """How rows are drawn: a sentence of questions, most of them answered surely; and what may come in their place."""

    words: float
    """Median length in tokens."""
    sure: tuple[float, float]
    """The two parameters of a Beta distribution of top scores."""
    unknown: float
    """Chance that a row has unknown pieces."""

    def draw(self, chance: np.random.Generator, rows: int) -> DriftFeatures:
        tokens = np.ceil(self.words * np.exp(chance.normal(0, 0.4, rows)))
        unknown = np.where(chance.random(rows) < self.unknown, chance.uniform(0.02, 0.3, rows), 0.0)
        return DriftFeatures(tokens, unknown, chance.beta(*self.sure, rows), [["a"]] * rows)


CLEAN = Kind(14, (8, 0.6), 0.02)
"""A top score below 0.7 has 8 % of the rows, one below 0.5 has 2 %."""
FOREIGN = {
    "unsure": Kind(14, (4, 4), 0.02),
    "another language": Kind(28, (3, 3), 0.5),
    "of unknown pieces, and sure": Kind(14, (8, 0.6), 0.95),
    "long, and sure": Kind(150, (8, 0.6), 0.02),
    "short, and sure": Kind(2.5, (8, 0.6), 0.02),
}


def join(first: DriftFeatures, second: DriftFeatures, choose: npt.NDArray[np.bool_]) -> DriftFeatures:
    """Rows of the second where `choose`, else of the first."""
    first_features, second_features = first.numeric_features(), second.numeric_features()
    tokens, unknown, score = (
        np.where(choose, second_features[name], first_features[name]) for name in ("tokens", "unknown", "score")
    )
    return DriftFeatures(tokens, unknown, score, labels=[["b"] if is_b else ["a"] for is_b in choose])


def document(features: DriftFeatures) -> dict[str, Any]:
    """As `rtrain.inference.drift_baseline.build_split_baseline` makes it."""
    baseline: dict[str, Any] = {"rows": len(features.tokens), "labels": {"a": len(features.tokens)}}
    for name, values in features.numeric_features().items():
        counts = np.bincount(drift_baseline.assign_bins(values, BIN_EDGES[name]), minlength=len(BIN_EDGES[name]) + 1)
        baseline[name] = {"edges": list(BIN_EDGES[name]), "counts": counts.tolist()}
    return baseline


def watching(chance: np.random.Generator, rows: int = 1000) -> DriftDetector:
    return DriftDetector(document(CLEAN.draw(chance, rows)))


@pytest.mark.parametrize("rows", [300, 1000])
def test_rows_like_the_validation_rows_raise_no_alarm(rows: int) -> None:
    for seed in range(10):
        chance = np.random.default_rng([seed, rows])
        drift = watching(chance, rows)
        for _ in range(20):
            drift.observe(CLEAN.draw(chance, MIN_ROWS))
            assert not drift.has_alarm(drift.distances()), seed


@pytest.mark.parametrize("name", FOREIGN)
def test_a_window_half_of_foreign_rows_alarms_until_they_have_left_it(name: str) -> None:
    chance = np.random.default_rng(1)
    drift = watching(chance)
    assert drift.distances() == {}
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS))
    assert set(drift.distances()) == {"tokens", "unknown", "score", "labels"}
    assert max(drift.distances().values()) < 0.1
    drift.observe(FOREIGN[name].draw(chance, WINDOW_ROWS // 2))
    assert drift.has_alarm(drift.distances())
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS))
    assert not drift.has_alarm(drift.distances())
    assert drift.rows == 2 * WINDOW_ROWS + WINDOW_ROWS // 2


@pytest.mark.parametrize(("validation", "requests"), [(MIN_ROWS - 1, WINDOW_ROWS), (WINDOW_ROWS, MIN_ROWS - 1)])
def test_too_few_rows_raise_no_alarm(validation: int, requests: int) -> None:
    chance = np.random.default_rng(2)
    drift = watching(chance, validation)
    drift.observe(FOREIGN["another language"].draw(chance, requests))
    assert drift.distances()["score"] > 0.25
    assert not drift.has_alarm(drift.distances())


def test_other_labels_raise_no_alarm() -> None:
    chance = np.random.default_rng(3)
    drift = watching(chance)
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS)._replace(labels=[["b"]] * WINDOW_ROWS))
    assert drift.distances()["labels"] > 0.25
    assert not drift.has_alarm(drift.distances())


def test_the_index_of_equal_shares_is_nothing() -> None:
    assert stability_index(np.array([10, 20, 70]), np.array([100, 200, 700])) == pytest.approx(0)
    # (0.5 - 0.25) ln 2 + (0.5 - 0.75) ln(2 / 3)
    assert stability_index(np.array([250, 750]), np.array([500, 500])) == pytest.approx(0.25 * math.log(3))


def test_a_model_without_scores_or_unknown_pieces_is_watched_by_what_there_is() -> None:
    tokens = np.arange(1.0, 501.0)
    drift = DriftDetector(document(DriftFeatures(tokens, None, None, None)))
    drift.observe(DriftFeatures(np.full(300, 5000.0), None, None, None))
    assert set(drift.distances()) == {"tokens"}
    assert drift.has_alarm(drift.distances())
