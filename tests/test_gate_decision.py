"""The gate's decision on made-up measurements: every word has its reason, and worse figures never get a better word."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies

from rtrain.config import Gate
from rtrain.evaluation import decision
from rtrain.evaluation.decision import WORDS, Limits, Measured, Speed, decide
from rtrain.evaluation.differences import Flipped, Slice
from rtrain.evaluation.significance import Difference

LIMITS = decision.limits(Gate(), student=False)


def score(difference: float, spread: float = 0.004, p: float | None = None, rows: int = 3000) -> Difference:
    low, high = difference - spread, difference + spread
    chance = p if p is not None else 0.001 if high < 0 or low > 0 else 0.5
    return Difference("accuracy", 0.9, 0.9 + difference, difference, low, high, chance, rows)


def speed(low: float, high: float) -> Speed:
    ratio = (low + high) / 2
    return Speed("up to 16 tokens", 2.0, 3.0, 2.0 / ratio, 3.0 / ratio, 108, ratio, low, high)


GOOD = Measured(score(0.0), Flipped(3, 3, 1.0), 2700, (), (speed(2.0, 2.2),), megabytes=18.0, memory_mb=200.0)


def word(**changed: Any) -> str:
    return decide(replace(GOOD, **changed), LIMITS).word


def test_as_good_and_faster_is_promoted_with_every_finding() -> None:
    found = decide(GOOD, replace(LIMITS, megabytes=20.0, memory_mb=300.0))
    assert (found.word, len(found.reasons), len(found.findings)) == ("promote", 5, 5)


NOTHING_RIGHT = Difference("accuracy", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3000)
BAD = replace(score(-0.2, spread=0.1, p=0.004), rows=80)


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        ("refuse", {"headline": score(-0.02)}),
        ("hold", {"headline": score(-0.02, spread=0.03)}),  # it may be chance
        ("hold", {"headline": score(-0.005, spread=0.03)}),  # the rows do not rule out three times the limit
        ("hold", {"headline": score(0.0, spread=0.0, rows=19)}),
        ("hold", {"headline": None}),
        ("hold", {"headline": NOTHING_RIGHT, "flipped": Flipped(0, 0, 1.0), "right": 0}),  # nothing could be lost
        ("refuse", {"flipped": Flipped(135, 135, 1.0)}),  # 5 % are lost, whatever is won in their place
        ("hold", {"flipped": Flipped(60, 60, 1.0)}),  # 2.2 %, the interval holds 2 %
        ("promote", {"flipped": Flipped(54, 0, 1.0)}),
        ("hold", {"flipped": Flipped(1, 0, 1.0), "right": 1}),
        ("hold", {"flipped": Flipped(19, 0, 1.0), "right": 19}),
        ("refuse", {"flipped": Flipped(20, 0, 1.0), "right": 20}),
        ("refuse", {"slices": (Slice("language", "de", BAD), Slice("language", "en", score(0.01)))}),
        ("hold", {"slices": (Slice("language", "de", replace(BAD, p=0.3)),)}),  # corrected for the number of slices
        ("promote", {"slices": (Slice("language", "de", score(-0.03, spread=0.01)),)}),
        ("promote", {"speeds": (speed(0.96, 1.1),)}),
        ("promote", {"speeds": (speed(LIMITS.speedup, 1.1),)}),  # the limit itself is allowed
        ("hold", {"speeds": (speed(0.8, 1.1),)}),
        ("refuse", {"speeds": (speed(0.8, 0.94),)}),
        ("hold", {"inherited": ("hold", "its base was not gated")}),
    ],
)
def test_each_measurement_has_its_word(expected: str, changed: dict[str, Any]) -> None:
    assert word(**changed) == expected


def test_of_what_cannot_be_asked_nothing_is_said_of_rows() -> None:
    found = decide(replace(GOOD, headline=None, flipped=None, faults=("no golden answers",)), LIMITS)
    assert (found.word, found.reasons) == ("refuse", ("no golden answers",))


def test_too_large_is_refused() -> None:
    found = decide(GOOD, replace(LIMITS, megabytes=17.5, memory_mb=100.0))
    assert (found.word, len(found.reasons)) == ("refuse", 2)


def test_a_student_has_limits_of_its_own() -> None:
    both = {"speedup": 1.5, "megabytes": 17.0, "memory_mb": 170.0}
    own = {"student_loss": 0.07, "student_slice_loss": 0.17, "student_lost": 0.027}
    settings = Gate(loss=0.02, slice_loss=0.12, lost=0.022, **own, **both)
    assert decision.limits(settings, student=True) == Limits(loss=0.07, slice_loss=0.17, lost=0.027, **both)
    assert decision.limits(settings, student=False) == Limits(loss=0.02, slice_loss=0.12, lost=0.022, **both)


# ------------------------------------------------------------------------------------------------------------ monotone

shares = strategies.floats(0, 0.3, allow_nan=False)
worse_by = strategies.floats(0, 0.5, allow_nan=False)
counts = strategies.integers(0, 200)


def as_bad(one: decision.Verdict, other: decision.Verdict) -> bool:
    """Whether the second word is no better than the first."""
    return WORDS.index(other.word) >= WORDS.index(one.word)


@given(strategies.floats(-0.3, 0.3, allow_nan=False), shares, worse_by, strategies.sampled_from([0.001, 0.04, 0.3]))
def test_a_lower_score_never_has_a_better_word(difference: float, spread: float, worse: float, p: float) -> None:
    """With the same spread and p."""
    one, other = (score(value, spread, p) for value in (difference, difference - worse))
    assert as_bad(decide(replace(GOOD, headline=one), LIMITS), decide(replace(GOOD, headline=other), LIMITS))
    sliced = [decide(replace(GOOD, slices=(Slice("a", "b", value),)), LIMITS) for value in (one, other)]
    assert as_bad(*sliced)


@given(counts, counts, counts)
def test_more_lost_answers_never_have_a_better_word(lost: int, more: int, won: int) -> None:
    one, other = (decide(replace(GOOD, flipped=Flipped(many, won, 0.5)), LIMITS) for many in (lost, lost + more))
    assert as_bad(one, other)


@given(strategies.floats(0.1, 3), shares, worse_by)
def test_a_slower_candidate_never_has_a_better_word(low: float, width: float, worse: float) -> None:
    one, other = (
        decide(replace(GOOD, speeds=(speed(low * part, (low + width) * part),)), LIMITS) for part in (1, 1 - worse)
    )
    assert as_bad(one, other)


@given(shares, shares, strategies.floats(0.5, 2), strategies.floats(0, 1), counts)
def test_stricter_limits_never_have_a_better_word(
    loss: float, stricter: float, speedup: float, faster: float, lost: int
) -> None:
    measured = replace(GOOD, headline=score(-0.02, 0.01), flipped=Flipped(lost, 3, 0.5), speeds=(speed(0.9, 1.2),))
    lax = Limits(loss, loss, loss, speedup, megabytes=20.0)
    less = max(0.0, loss - stricter)
    strict = Limits(less, less, less, speedup + faster, megabytes=20.0 - 10 * stricter)
    assert as_bad(decide(measured, lax), decide(measured, strict))


@given(strategies.lists(strategies.sampled_from(["fault", "slice", "slow", "large"]), unique=True))
def test_one_more_fault_never_has_a_better_word(kinds: list[str]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "fault": {"faults": ("it answers another question",)},
        "slice": {"slices": (Slice("language", "de", score(-0.2, p=0.001)),)},
        "slow": {"speeds": (speed(0.8, 1.1),)},
        "large": {"memory_mb": 1000.0},
    }
    measured, limits = GOOD, replace(LIMITS, memory_mb=300.0)
    before = decide(measured, limits)
    for kind in kinds:
        measured = replace(measured, **changes[kind])
        after = decide(measured, limits)
        assert as_bad(before, after)
        before = after
