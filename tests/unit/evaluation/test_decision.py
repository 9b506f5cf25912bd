"""The gate's decision on made-up measurements: every word has its reason, and worse figures never get a better word."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies

from rtrain.config import GateConfig
from rtrain.evaluation import decision
from rtrain.evaluation.decision import DECISIONS, GateLimits, GateMeasurements, decide
from rtrain.evaluation.latency import LatencyComparison
from rtrain.evaluation.significance import Difference, McNemarTest, PairedScores, SliceDifference

LIMITS = decision.make_limits(GateConfig(), is_student=False)


def score(difference: float, spread: float = 0.004, p: float | None = None, rows: int = 3000) -> Difference:
    low, high = difference - spread, difference + spread
    chance = p if p is not None else 0.001 if high < 0 or low > 0 else 0.5
    return Difference("accuracy", 0.9, 0.9 + difference, difference, low, high, chance, rows)


def speed(low: float, high: float) -> LatencyComparison:
    ratio = (low + high) / 2
    return LatencyComparison("up to 16 tokens", 2.0, 3.0, 2.0 / ratio, 3.0 / ratio, 108, ratio, low, high)


AS_GOOD = PairedScores(score(0.0), mcnemar=McNemarTest(3, 3, 1.0), first_correct=2700)
GOOD = GateMeasurements(AS_GOOD, (speed(2.0, 2.2),), megabytes=18.0, memory_mb=200.0)


def changed(measured: GateMeasurements = GOOD, **figures: Any) -> GateMeasurements:
    """The measurements with other scores (fields of `PairedScores`) or other figures."""
    scores = {name: value for name, value in figures.items() if hasattr(AS_GOOD, name)}
    others = {name: value for name, value in figures.items() if name not in scores}
    return replace(measured, scores=replace(measured.scores, **scores), **others)


def test_as_good_and_faster_is_promoted_with_every_finding() -> None:
    result = decide(GOOD, replace(LIMITS, max_megabytes=20.0, max_memory_mb=300.0))
    assert (result.decision, len(result.reasons), len(result.findings)) == ("promote", 5, 5)


NOTHING_RIGHT = Difference("accuracy", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3000)
BAD = replace(score(-0.2, spread=0.1, p=0.004), rows=80)


def in_slice(difference: Difference) -> SliceDifference:
    return SliceDifference("language", "de", difference)


@pytest.mark.parametrize(
    ("expected", "figures"),
    [
        ("refuse", {"headline": score(-0.02)}),
        ("hold", {"headline": score(-0.02, spread=0.03)}),  # it may be chance
        ("hold", {"headline": score(-0.005, spread=0.03)}),  # the rows do not rule out three times the limit
        ("hold", {"headline": score(0.0, spread=0.0, rows=19)}),
        ("hold", {"headline": None}),
        ("hold", {"headline": NOTHING_RIGHT, "first_correct": 0}),  # nothing could be lost
        ("refuse", {"mcnemar": McNemarTest(135, 135, 1.0)}),  # 5 % are lost, whatever is won in their place
        ("hold", {"mcnemar": McNemarTest(60, 60, 1.0)}),  # 2.2 %, the interval holds 2 %
        ("promote", {"mcnemar": McNemarTest(54, 0, 1.0)}),
        ("hold", {"mcnemar": McNemarTest(1, 0, 1.0), "first_correct": 1}),
        ("hold", {"mcnemar": McNemarTest(19, 0, 1.0), "first_correct": 19}),
        ("refuse", {"mcnemar": McNemarTest(20, 0, 1.0), "first_correct": 20}),
        ("refuse", {"slices": (in_slice(BAD), in_slice(score(0.01)))}),
        ("hold", {"slices": (in_slice(replace(BAD, p=0.3)),)}),  # corrected for the number of slices
        ("promote", {"slices": (in_slice(score(-0.03, spread=0.01)),)}),
        ("promote", {"speeds": (speed(0.96, 1.1),)}),
        ("promote", {"speeds": (speed(LIMITS.min_speedup, 1.1),)}),  # the limit itself is allowed
        ("hold", {"speeds": (speed(0.8, 1.1),)}),
        ("refuse", {"speeds": (speed(0.8, 0.94),)}),
        ("hold", {"inherited_verdict": ("hold", "its base was not gated")}),
    ],
)
def test_each_measurement_has_its_word(expected: str, figures: dict[str, Any]) -> None:
    assert decide(changed(**figures), LIMITS).decision == expected


def test_of_what_cannot_be_asked_nothing_is_said_of_rows() -> None:
    result = decide(changed(headline=None, mcnemar=None, rejection_reason="no golden answers"), LIMITS)
    assert (result.decision, result.reasons) == ("refuse", ("no golden answers",))


def test_too_large_is_refused() -> None:
    result = decide(GOOD, replace(LIMITS, max_megabytes=17.5, max_memory_mb=100.0))
    assert (result.decision, len(result.reasons)) == ("refuse", 2)


def test_a_student_has_limits_of_its_own() -> None:
    shared: dict[str, Any] = {"min_speedup": 1.5, "max_megabytes": 17.0, "max_memory_mb": 170.0}
    drops: dict[str, Any] = {"max_score_drop": 0.02, "max_slice_drop": 0.12, "max_negative_flips": 0.022}
    student_drops: dict[str, Any] = {"max_score_drop": 0.07, "max_slice_drop": 0.17, "max_negative_flips": 0.027}
    settings = GateConfig(**drops, **{f"student_{name}": value for name, value in student_drops.items()}, **shared)
    assert decision.make_limits(settings, is_student=True) == GateLimits(**student_drops, **shared)
    assert decision.make_limits(settings, is_student=False) == GateLimits(**drops, **shared)


shares = strategies.floats(0, 0.3, allow_nan=False)
worse_by = strategies.floats(0, 0.5, allow_nan=False)
counts = strategies.integers(0, 200)


def never_better(
    first: GateMeasurements, other: GateMeasurements, limits: GateLimits = LIMITS, other_limits: GateLimits = LIMITS
) -> bool:
    """Whether the second word is no better than the first."""
    words = [decide(first, limits).decision, decide(other, other_limits).decision]
    return DECISIONS.index(words[1]) >= DECISIONS.index(words[0])


@given(strategies.floats(-0.3, 0.3, allow_nan=False), shares, worse_by, strategies.sampled_from([0.001, 0.04, 0.3]))
def test_a_lower_score_never_has_a_better_word(difference: float, spread: float, worse: float, p: float) -> None:
    """With the same spread and p."""
    item, other = (score(value, spread, p) for value in (difference, difference - worse))
    assert never_better(changed(headline=item), changed(headline=other))
    assert never_better(changed(slices=(in_slice(item),)), changed(slices=(in_slice(other),)))


@given(counts, counts, counts)
def test_more_lost_answers_never_have_a_better_word(lost: int, more: int, won: int) -> None:
    item, other = (changed(mcnemar=McNemarTest(many, won, 0.5)) for many in (lost, lost + more))
    assert never_better(item, other)


@given(strategies.floats(0.1, 3), shares, worse_by)
def test_a_slower_candidate_never_has_a_better_word(low: float, width: float, worse: float) -> None:
    item, other = (changed(speeds=(speed(low * part, (low + width) * part),)) for part in (1, 1 - worse))
    assert never_better(item, other)


@given(shares, shares, strategies.floats(0.5, 2), strategies.floats(0, 1), counts)
def test_stricter_limits_never_have_a_better_word(
    loss: float, stricter: float, speedup: float, faster: float, lost: int
) -> None:
    measured = changed(headline=score(-0.02, 0.01), mcnemar=McNemarTest(lost, 3, 0.5), speeds=(speed(0.9, 1.2),))
    less = max(0.0, loss - stricter)
    lax = GateLimits(loss, loss, loss, speedup, max_megabytes=20.0)
    strict = GateLimits(less, less, less, speedup + faster, max_megabytes=20.0 - 10 * stricter)
    assert never_better(measured, measured, lax, strict)


@given(strategies.lists(strategies.sampled_from(["fault", "slice", "slow", "large"]), unique=True))
def test_one_more_fault_never_has_a_better_word(kinds: list[str]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "fault": {"rejection_reason": "it answers another question"},
        "slice": {"slices": (in_slice(score(-0.2, p=0.001)),)},
        "slow": {"speeds": (speed(0.8, 1.1),)},
        "large": {"memory_mb": 1000.0},
    }
    measured, limits = GOOD, replace(LIMITS, max_memory_mb=300.0)
    for kind in kinds:
        before, measured = measured, changed(measured, **changes[kind])
        assert never_better(before, measured, limits, limits)


def of_class(name: str, recall: float, support: int, predicted: int = 50, precision: float = 0.9) -> dict[str, Any]:
    figures = {"precision": precision, "recall": recall, "f1": 0.8, "predicted": predicted}
    return {"class": name, "support": support, "first": {**figures, "recall": 0.1}, "other": figures}


@pytest.mark.parametrize(
    ("expected", "result", "floors"),
    [
        ("promote", of_class("P1", 0.8, 40), {"min_recall": {"P1": 0.8}}),
        ("refuse", of_class("P1", 0.5, 40), {"min_recall": {"P1": 0.8}}),
        ("hold", of_class("P1", 0.75, 12), {"min_recall": {"P1": 0.8}}),  # it may be chance
        ("hold", of_class("P1", 0.0, 0), {"min_recall": {"P1": 0.8}}),
        ("hold", of_class("P2", 1.0, 90), {"min_recall": {"P1": 0.8}}),
        ("refuse", of_class("P1", 1.0, 40, precision=0.3), {"min_precision": {"P1": 0.9}}),
        ("hold", of_class("P1", 1.0, 40, predicted=0, precision=0.0), {"min_precision": {"P1": 0.9}}),
        ("refuse", of_class("intent: P1", 0.5, 40), {"min_recall": {"intent/P1": 0.8}}),
    ],
)
def test_a_label_below_its_floor_is_not_promoted_whatever_its_baseline_has(
    expected: str, result: dict[str, Any], floors: dict[str, Any]
) -> None:
    verdict = decide(changed(classes=[result]), replace(LIMITS, **floors))
    assert verdict.decision == expected
    [finding] = [one for one in verdict.findings if "P1" in one.text]
    assert finding.decision == expected
    assert decide(changed(classes=[result]), LIMITS).decision == "promote"
