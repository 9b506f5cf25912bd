"""Whether requests still look like the validation rows: seeded simulations of the pure function."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from rtrain import reference
from rtrain.reference import EDGES, Features
from serve.watching.drift import (
    DOUBT,
    LEAST_ROWS,
    ROWS_PER_ALARM,
    WINDOW,
    Drift,
    bets_on,
    most_likely,
    stability_index,
    widest,
)

Numbers = npt.NDArray[np.float64]


class Kind(NamedTuple):
    """How rows are drawn: a sentence of questions, most of them answered surely; and what may come in their place."""

    words: float
    """Median length in tokens."""
    sure: tuple[float, float]
    """The two parameters of a Beta distribution of top scores."""
    unknown: float
    """Chance that a row has unknown pieces."""

    def draw(self, chance: np.random.Generator, rows: int) -> Features:
        tokens = np.ceil(self.words * np.exp(chance.normal(0, 0.4, rows)))
        unknown = np.where(chance.random(rows) < self.unknown, chance.uniform(0.02, 0.3, rows), 0.0)
        return Features(tokens, unknown, chance.beta(*self.sure, rows), [["a"]] * rows)


CLEAN = Kind(14, (8, 0.6), 0.02)
"""A top score below 0.7 has 8 % of the rows, one below 0.5 has 2 %."""
FOREIGN = {
    "unsure": Kind(14, (4, 4), 0.02),
    "another language": Kind(28, (3, 3), 0.5),
    "of unknown pieces, and sure": Kind(14, (8, 0.6), 0.95),
    "long, and sure": Kind(150, (8, 0.6), 0.02),
    "short, and sure": Kind(2.5, (8, 0.6), 0.02),
}


def join(first: Features, second: Features, choose: npt.NDArray[np.bool_]) -> Features:
    """Rows of the second where `choose`, else of the first."""
    here, there = first.numbers(), second.numbers()
    tokens, unknown, score = (np.where(choose, there[name], here[name]) for name in ("tokens", "unknown", "score"))
    return Features(tokens, unknown, score, labels=[["b"] if one else ["a"] for one in choose])


def document(found: Features) -> dict[str, Any]:
    """As `rtrain.reference.measure` makes it."""
    made: dict[str, Any] = {"rows": len(found.tokens), "labels": {"a": len(found.tokens)}}
    for name, values in found.numbers().items():
        counts = np.bincount(reference.place(values, EDGES[name]), minlength=len(EDGES[name]) + 1)
        made[name] = {"edges": list(EDGES[name]), "counts": counts.tolist()}
    return made


def watching(chance: np.random.Generator, rows: int = 1000) -> Drift:
    return Drift(document(CLEAN.draw(chance, rows)))


# ---------------------------------------------------------------------------------------------------------- the alarm


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tenth_of_foreign_rows_is_flagged_within_500_requests(name: str) -> None:
    """In at least 19 of 20 streams, each with 1,000 validation rows of its own, after 2,000 clean rows."""
    late = []
    for seed in range(20):
        chance = np.random.default_rng([seed, 1])
        drift = watching(chance)
        drift.observe(CLEAN.draw(chance, 2000))
        assert drift.alarms == 0
        drift.observe(join(CLEAN.draw(chance, 500), FOREIGN[name].draw(chance, 500), chance.random(500) < 0.1))
        late += [seed] if not drift.alarms else []
    assert len(late) <= 1, late


def test_clean_rows_raise_at_most_one_alarm_in_100_000() -> None:
    """Five streams of 100,000 rows, each beside validation rows of its own."""
    for seed in range(5):
        chance = np.random.default_rng([seed, 2])
        drift = watching(chance)
        drift.observe(CLEAN.draw(chance, 100_000))
        assert drift.alarms <= 1, seed


@pytest.mark.parametrize("rows", [LEAST_ROWS, 300, 1000, 5000])
def test_no_bet_wins_on_average_from_rows_like_the_validation_rows(rows: int) -> None:
    """What the rate of alarms rests on, computed and not drawn: what each bet pays is at most its stake, by the true
    chances of the bins, although the bets were made from the few validation rows."""
    drawn = document(CLEAN.draw(np.random.default_rng(0), 1_000_000))
    truth = {name: np.array(drawn[name]["counts"]) / 1_000_000 for name in EDGES}
    wrong = made = 0
    for seed in range(100):
        for bet in watching(np.random.default_rng([seed, 3]), rows).bets:
            pays = sum(truth[tail.feature][tail.first : tail.after].sum() / tail.chance for tail in bet) / len(bet)
            made += 1
            wrong += pays > 1
    assert made >= 100
    assert wrong <= 3 * DOUBT * made + 1


def test_the_evidence_is_a_supermartingale_less_the_number_of_rows() -> None:
    """Over 150 streams of clean rows the mean evidence stays below their number of rows."""
    found = []
    for seed in range(150):
        chance = np.random.default_rng([seed, 4])
        drift = watching(chance, 300)
        drift.observe(CLEAN.draw(chance, 100))
        found.append(drift.evidence)
    assert 0 < np.mean(found) <= 100


def test_an_alarm_starts_the_evidence_anew_and_is_given_again() -> None:
    chance = np.random.default_rng(5)
    drift = watching(chance)
    foreign = FOREIGN["another language"].draw(chance, 3000)
    drift.observe(foreign)
    assert drift.alarms >= 10
    assert drift.evidence < ROWS_PER_ALARM


def test_rows_one_by_one_are_rows_together() -> None:
    chance = np.random.default_rng(6)
    made, found = (
        document(CLEAN.draw(chance, 500)),
        join(CLEAN.draw(chance, 300), FOREIGN["unsure"].draw(chance, 300), chance.random(300) < 0.2),
    )
    together, apart = Drift(made), Drift(made)
    together.observe(found)
    for row in range(300):
        assert found.labels is not None
        assert found.unknown is not None
        assert found.score is not None
        here = slice(row, row + 1)
        apart.observe(Features(found.tokens[here], found.unknown[here], found.score[here], found.labels[here]))
    assert (apart.evidence, apart.alarms, apart.rows) == (together.evidence, together.alarms, together.rows)
    assert apart.distances() == together.distances()


# ------------------------------------------------------------------------------------------------------------ the bets


@pytest.mark.parametrize(("count", "rows"), [(0, 100), (0, 1000), (10, 1000), (300, 1000), (1000, 1000)])
def test_the_bound_of_a_chance_is_where_what_was_seen_becomes_as_rare_as_the_doubt(count: int, rows: int) -> None:
    bound = most_likely(count, rows)

    def at_most(chance: float) -> float:
        return sum(math.comb(rows, seen) * chance**seen * (1 - chance) ** (rows - seen) for seen in range(count + 1))

    assert at_most(bound) == pytest.approx(DOUBT, rel=1e-3) if count < rows else bound == 1


def test_few_validation_rows_are_betted_on_by_nothing() -> None:
    drift = watching(np.random.default_rng(7), LEAST_ROWS - 1)
    assert drift.bets == []
    drift.observe(FOREIGN["another language"].draw(np.random.default_rng(8), 5000))
    assert (drift.alarms, drift.evidence) == (0, 0.0)
    assert drift.distances()["score"] > 0.25


def test_bets_are_on_the_ends_where_unknown_input_is() -> None:
    counts = np.array([0, 20, 70, 100, 800, 0])
    made = bets_on({"tokens": counts, "unknown": counts[::-1], "score": counts})
    tails = {(tail.feature, tail.first == 0, tail.after == len(counts)) for bet in made for tail in bet}
    assert tails == {
        ("tokens", True, False),
        ("tokens", False, True),
        ("unknown", False, True),
        ("score", True, False),
    }
    assert {len(bet) for bet in made} == {1, 4}
    assert widest("score", counts, "low", 0.03) == ("score", 0, 1, most_likely(0, 990))
    assert widest("score", counts, "low", 0.3) == ("score", 0, 4, most_likely(190, 990))
    assert widest("score", counts, "low", 0.001) is None


# ------------------------------------------------------------------------------------------------------- the distances


def test_a_distance_is_small_by_chance_and_large_for_other_rows_and_forgets() -> None:
    chance = np.random.default_rng(9)
    drift = watching(chance, 5000)
    assert drift.distances() == {}
    drift.observe(CLEAN.draw(chance, WINDOW))
    assert set(drift.distances()) == {"tokens", "unknown", "score", "labels"}
    assert max(drift.distances().values()) < 0.1
    drift.observe(
        join(CLEAN.draw(chance, 500), FOREIGN["another language"].draw(chance, 500), np.ones(500, dtype=bool))
    )
    assert min(drift.distances().values()) > 0.25
    drift.observe(CLEAN.draw(chance, WINDOW))
    assert max(drift.distances().values()) < 0.1


def test_the_index_of_equal_shares_is_nothing() -> None:
    assert stability_index(np.array([10, 20, 70]), np.array([100, 200, 700])) == pytest.approx(0)
    # (0.5 - 0.25) ln 2 + (0.5 - 0.75) ln(2 / 3)
    assert stability_index(np.array([250, 750]), np.array([500, 500])) == pytest.approx(0.25 * math.log(3))


def test_a_model_without_scores_or_unknown_pieces_is_watched_by_what_there_is() -> None:
    tokens = np.arange(1.0, 501.0)
    drift = Drift(document(Features(tokens, None, None, None)))
    drift.observe(Features(np.full(300, 5000.0), None, None, None))
    assert set(drift.distances()) == {"tokens"}
    assert drift.alarms >= 1
