"""The gate's decision on made-up measurements: every word has its reason, and worse figures never get a better word."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies

from rtrain.comparison.chance import Difference
from rtrain.comparison.measure import Flipped, Slice
from rtrain.config import Gate
from rtrain.gate import decision
from rtrain.gate.decision import WORDS, Limits, Measured, Speed, decide

LIMITS = decision.limits(Gate(), student=False)


def score(difference: float, spread: float = 0.004, p: float | None = None, rows: int = 3000) -> Difference:
    low, high = difference - spread, difference + spread
    chance = p if p is not None else 0.001 if high < 0 or low > 0 else 0.5
    return Difference("accuracy", 0.9, 0.9 + difference, difference, low, high, chance, rows)


def speed(low: float, high: float) -> Speed:
    ratio = (low + high) / 2
    return Speed("up to 16 tokens", 2.0, 3.0, 2.0 / ratio, 3.0 / ratio, 108, ratio, low, high)


GOOD = Measured(score(0.0), Flipped(3, 3, 1.0), 2700, (), (speed(2.0, 2.2),), megabytes=18.0, memory_mb=200.0)


def word(**changed: Any) -> tuple[str, tuple[str, ...]]:
    found = decide(replace(GOOD, **changed), LIMITS)
    return found.word, found.reasons


def test_as_good_and_faster_is_promoted_with_every_finding() -> None:
    found = decide(GOOD, replace(LIMITS, megabytes=20.0, memory_mb=300.0))
    assert found.word == "promote"
    assert found.reasons == (
        "accuracy 0.900 against 0.900, +0.0 points (-0.4 to 0.4), p 0.500, on 3,000 rows; 0.9 points may be lost",
        "3 of the base's 2,700 right answers are lost (0.1%, and 3 won); 2.0% may be lost",
        "up to 16 tokens: 2.10 times as fast as its base (2.00 to 2.20; 0.95 ms against 2.00); 0.95 is the least",
        "its files take 18.0 MB; 20 may be taken",
        "loaded, it takes 200.0 MB; 300 may be taken",
    )
    assert found.sentence == f"promote: {'; '.join(found.reasons)}"


def test_a_loss_beyond_chance_is_refused_and_one_within_it_is_held() -> None:
    assert word(headline=score(-0.02)) == (
        "refuse",
        ("accuracy 0.880 against 0.900, -2.0 points (-2.4 to -1.6), p 0.001, on 3,000 rows; 0.9 points may be lost",),
    )
    held, (reason,) = word(headline=score(-0.02, spread=0.03))
    assert (held, reason.endswith("0.9 points may be lost, and this may be chance: more rows tell")) == ("hold", True)


def test_two_models_without_a_right_answer_are_held() -> None:
    """Their rows are other rows than they were made for; no loss could be seen on them."""
    nothing = Difference("accuracy", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3000)
    held, (reason,) = word(headline=nothing, flipped=Flipped(0, 0, 1.0), right=0)
    assert (held, reason.endswith("on 3,000 rows: nothing that could be lost")) == ("hold", True)


def test_rows_too_few_to_rule_out_a_loss_hold_it() -> None:
    held, (reason,) = word(headline=score(-0.005, spread=0.03))
    assert (held, reason.endswith("and so few rows do not rule out 2.7 points")) == ("hold", True)
    assert word(headline=score(0.0, spread=0.0, rows=19)) == ("hold", ("19 rows tell nothing; 20 are the least",))
    assert word(headline=None, unscored="") == ("hold", ("there were no rows to score",))


def test_answers_lost_and_won_elsewhere_are_seen() -> None:
    refused, (reason,) = word(flipped=Flipped(135, 135, 1.0))
    assert refused == "refuse"
    assert reason == "135 of the base's 2,700 right answers are lost (5.0%, and 135 won); 2.0% may be lost"
    assert word(flipped=Flipped(60, 60, 1.0))[0] == "hold"  # 2.2 %, the interval holds 2 %
    assert word(flipped=Flipped(54, 0, 1.0))[0] == "promote"


def test_a_few_right_answers_refuse_nothing() -> None:
    held, (reason,) = word(flipped=Flipped(1, 0, 1.0), right=1)
    assert held == "hold"
    assert reason.endswith("2.0% may be lost, and this may be chance: more rows tell")
    assert word(flipped=Flipped(19, 0, 1.0), right=19)[0] == "hold"
    assert word(flipped=Flipped(20, 0, 1.0), right=20)[0] == "refuse"


def test_one_bad_slice_is_enough() -> None:
    bad = Slice("language", "de", replace(score(-0.2, spread=0.1, p=0.004), rows=80))
    refused, (reason,) = word(slices=(bad, Slice("language", "en", score(0.01))))
    assert refused == "refuse"
    assert reason.startswith(
        "where language is de: accuracy 0.700 against 0.900, -20.0 points (-30.0 to -10.0), p 0.004"
    )
    by_chance = Slice("language", "de", replace(bad.difference, p=0.3))  # corrected for the number of slices
    assert word(slices=(by_chance,))[0] == "hold"
    small = Slice("language", "de", score(-0.03, spread=0.01))
    assert word(slices=(small,)) == ("promote", decide(replace(GOOD, slices=(small,)), LIMITS).reasons)


@pytest.mark.parametrize(
    ("low", "high", "expected", "end"),
    [
        (0.96, 1.1, "promote", "0.95 is the least"),
        (0.8, 1.1, "hold", "0.95 is the least, and this machine is too noisy to tell"),
        (0.8, 0.94, "refuse", "0.95 is the least"),
    ],
)
def test_slower_is_said_only_of_what_is_sure(low: float, high: float, expected: str, end: str) -> None:
    found, reasons = word(speeds=(speed(low, high),))
    assert found == expected
    assert any(reason.endswith(end) for reason in reasons)


def test_faults_and_a_base_s_own_verdict_count() -> None:
    fault = "artefact tiny 1 does not reproduce its golden answers"
    # Where it cannot be asked at all, nothing is said of rows.
    assert word(headline=None, flipped=None, faults=(fault,)) == ("refuse", (fault,))
    assert word(inherited=("hold", "its base was not gated")) == ("hold", ("its base was not gated",))


def test_too_large_is_refused() -> None:
    found = decide(GOOD, replace(LIMITS, megabytes=17.5, memory_mb=100.0))
    assert found.word == "refuse"
    assert found.reasons == ("its files take 18.0 MB; 17.5 may be taken", "loaded, it takes 200.0 MB; 100 may be taken")


def test_a_student_has_limits_of_its_own() -> None:
    settings = Gate(student_loss=0.07, loss=0.02)
    assert decision.limits(settings, student=True).loss == 0.07
    assert decision.limits(settings, student=False).loss == 0.02
    assert {field.name for field in dataclasses.fields(Limits)} <= set(Gate.model_fields)


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
