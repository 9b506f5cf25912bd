"""The gate's decision on made-up measurements: every word has its reason, and worse figures never get a better word."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies

from rtrain.config import GateConfig
from rtrain.evaluation import decision
from rtrain.evaluation.decision import DECISIONS, GateLimits, GateMeasurements, LatencyComparison, decide
from rtrain.evaluation.differences import McNemarTest, SliceDifference
from rtrain.evaluation.significance import Difference

LIMITS = decision.make_limits(GateConfig(), is_student=False)


def score(difference: float, spread: float = 0.004, p: float | None = None, rows: int = 3000) -> Difference:
    low, high = difference - spread, difference + spread
    chance = p if p is not None else 0.001 if high < 0 or low > 0 else 0.5
    return Difference("accuracy", 0.9, 0.9 + difference, difference, low, high, chance, rows)


def speed(low: float, high: float) -> LatencyComparison:
    ratio = (low + high) / 2
    return LatencyComparison("up to 16 tokens", 2.0, 3.0, 2.0 / ratio, 3.0 / ratio, 108, ratio, low, high)


GOOD = GateMeasurements(
    score(0.0), McNemarTest(3, 3, 1.0), 2700, (), (speed(2.0, 2.2),), megabytes=18.0, memory_mb=200.0
)


def word(**changed: Any) -> str:
    return decide(replace(GOOD, **changed), LIMITS).decision


def test_as_good_and_faster_is_promoted_with_every_finding() -> None:
    result = decide(GOOD, replace(LIMITS, max_megabytes=20.0, max_memory_mb=300.0))
    assert (result.decision, len(result.reasons), len(result.findings)) == ("promote", 5, 5)


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
        (
            "hold",
            {"headline": NOTHING_RIGHT, "mcnemar": McNemarTest(0, 0, 1.0), "baseline_correct": 0},
        ),  # nothing could be lost
        ("refuse", {"mcnemar": McNemarTest(135, 135, 1.0)}),  # 5 % are lost, whatever is won in their place
        ("hold", {"mcnemar": McNemarTest(60, 60, 1.0)}),  # 2.2 %, the interval holds 2 %
        ("promote", {"mcnemar": McNemarTest(54, 0, 1.0)}),
        ("hold", {"mcnemar": McNemarTest(1, 0, 1.0), "baseline_correct": 1}),
        ("hold", {"mcnemar": McNemarTest(19, 0, 1.0), "baseline_correct": 19}),
        ("refuse", {"mcnemar": McNemarTest(20, 0, 1.0), "baseline_correct": 20}),
        (
            "refuse",
            {"slices": (SliceDifference("language", "de", BAD), SliceDifference("language", "en", score(0.01)))},
        ),
        (
            "hold",
            {"slices": (SliceDifference("language", "de", replace(BAD, p=0.3)),)},
        ),  # corrected for the number of slices
        ("promote", {"slices": (SliceDifference("language", "de", score(-0.03, spread=0.01)),)}),
        ("promote", {"speeds": (speed(0.96, 1.1),)}),
        ("promote", {"speeds": (speed(LIMITS.min_speedup, 1.1),)}),  # the limit itself is allowed
        ("hold", {"speeds": (speed(0.8, 1.1),)}),
        ("refuse", {"speeds": (speed(0.8, 0.94),)}),
        ("hold", {"inherited_verdict": ("hold", "its base was not gated")}),
    ],
)
def test_each_measurement_has_its_word(expected: str, changed: dict[str, Any]) -> None:
    assert word(**changed) == expected


def test_of_what_cannot_be_asked_nothing_is_said_of_rows() -> None:
    result = decide(replace(GOOD, headline=None, mcnemar=None, rejection_reasons=("no golden answers",)), LIMITS)
    assert (result.decision, result.reasons) == ("refuse", ("no golden answers",))


def test_too_large_is_refused() -> None:
    result = decide(GOOD, replace(LIMITS, max_megabytes=17.5, max_memory_mb=100.0))
    assert (result.decision, len(result.reasons)) == ("refuse", 2)


def test_a_student_has_limits_of_its_own() -> None:
    shared: dict[str, Any] = {"min_speedup": 1.5, "max_megabytes": 17.0, "max_memory_mb": 170.0}
    settings = GateConfig(
        max_score_drop=0.02,
        max_slice_drop=0.12,
        max_negative_flips=0.022,
        student_max_score_drop=0.07,
        student_max_slice_drop=0.17,
        student_max_negative_flips=0.027,
        **shared,
    )
    assert decision.make_limits(settings, is_student=True) == GateLimits(
        max_score_drop=0.07, max_slice_drop=0.17, max_negative_flips=0.027, **shared
    )
    assert decision.make_limits(settings, is_student=False) == GateLimits(
        max_score_drop=0.02, max_slice_drop=0.12, max_negative_flips=0.022, **shared
    )


# ------------------------------------------------------------------------------------------------------------ monotone

shares = strategies.floats(0, 0.3, allow_nan=False)
worse_by = strategies.floats(0, 0.5, allow_nan=False)
counts = strategies.integers(0, 200)


def as_bad(one: decision.GateVerdict, other: decision.GateVerdict) -> bool:
    """Whether the second word is no better than the first."""
    return DECISIONS.index(other.decision) >= DECISIONS.index(one.decision)


@given(strategies.floats(-0.3, 0.3, allow_nan=False), shares, worse_by, strategies.sampled_from([0.001, 0.04, 0.3]))
def test_a_lower_score_never_has_a_better_word(difference: float, spread: float, worse: float, p: float) -> None:
    """With the same spread and p."""
    item, other = (score(value, spread, p) for value in (difference, difference - worse))
    assert as_bad(decide(replace(GOOD, headline=item), LIMITS), decide(replace(GOOD, headline=other), LIMITS))
    sliced = [decide(replace(GOOD, slices=(SliceDifference("a", "b", value),)), LIMITS) for value in (item, other)]
    assert as_bad(*sliced)


@given(counts, counts, counts)
def test_more_lost_answers_never_have_a_better_word(lost: int, more: int, won: int) -> None:
    item, other = (decide(replace(GOOD, mcnemar=McNemarTest(many, won, 0.5)), LIMITS) for many in (lost, lost + more))
    assert as_bad(item, other)


@given(strategies.floats(0.1, 3), shares, worse_by)
def test_a_slower_candidate_never_has_a_better_word(low: float, width: float, worse: float) -> None:
    item, other = (
        decide(replace(GOOD, speeds=(speed(low * part, (low + width) * part),)), LIMITS) for part in (1, 1 - worse)
    )
    assert as_bad(item, other)


@given(shares, shares, strategies.floats(0.5, 2), strategies.floats(0, 1), counts)
def test_stricter_limits_never_have_a_better_word(
    loss: float, stricter: float, speedup: float, faster: float, lost: int
) -> None:
    measured = replace(GOOD, headline=score(-0.02, 0.01), mcnemar=McNemarTest(lost, 3, 0.5), speeds=(speed(0.9, 1.2),))
    lax = GateLimits(loss, loss, loss, speedup, max_megabytes=20.0)
    less = max(0.0, loss - stricter)
    strict = GateLimits(less, less, less, speedup + faster, max_megabytes=20.0 - 10 * stricter)
    assert as_bad(decide(measured, lax), decide(measured, strict))


@given(strategies.lists(strategies.sampled_from(["fault", "slice", "slow", "large"]), unique=True))
def test_one_more_fault_never_has_a_better_word(kinds: list[str]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "fault": {"rejection_reasons": ("it answers another question",)},
        "slice": {"slices": (SliceDifference("language", "de", score(-0.2, p=0.001)),)},
        "slow": {"speeds": (speed(0.8, 1.1),)},
        "large": {"memory_mb": 1000.0},
    }
    measured, limits = GOOD, replace(LIMITS, max_memory_mb=300.0)
    before = decide(measured, limits)
    for kind in kinds:
        measured = replace(measured, **changes[kind])
        after = decide(measured, limits)
        assert as_bad(before, after)
        before = after
