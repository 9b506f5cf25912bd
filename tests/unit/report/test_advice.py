"""What to do next: each rule on facts that call for it, and on facts that do not."""

from dataclasses import replace
from typing import Any

import pytest

from rtrain.report import advice
from rtrain.report.advice import BaselineComparison, RunFacts, WeakSlice, WorstLabel

FINE = RunFacts(folder="/runs/a b", score=0.95, rows=1000, labeled_rows=800, steps=100, epochs=3)
AGAIN = "rtrain train '/runs/a b/config.yaml' --set {} --out NEW_FOLDER"


def test_a_good_run_is_led_on_to_the_endpoint_and_to_nothing_else() -> None:
    commands = [step.command for step in advice.list_recommendations(FINE)]
    assert commands == [
        "rtrain distill '/runs/a b'",
        "rtrain quantize '/runs/a b'",
        "rtrain serve '/runs/a b/artifact'",
    ]


def test_what_is_made_already_is_not_asked_for_again() -> None:
    done = replace(FINE, has_student=True, has_int8=True)
    assert [step.command for step in advice.list_recommendations(done)] == ["rtrain serve '/runs/a b/artifact-int8'"]


def test_an_encoder_of_a_domain_goes_on_to_a_task() -> None:
    (step,) = advice.list_recommendations(replace(FINE, output="tokens"))
    assert step.command == "rtrain train RECIPE --model '/runs/a b/artifact' --data FILE"


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({"has_int8": True}, "rtrain quantize '/runs/a b' --set quantize.calibration_rows=1024"),
        ({"is_student": True}, ""),
        ({}, "rtrain inspect '/runs/a b/artifact'"),
    ],
)
def test_what_the_gate_has_refused_is_not_led_to_the_endpoint(facts: dict[str, Any], command: str) -> None:
    result = advice.list_recommendations(
        replace(FINE, has_student=True, rejection_reason="accuracy 0.7 against 0.9", **facts)
    )
    assert result[-1].command == command
    assert "accuracy 0.7 against 0.9" in result[-1].reason
    assert [step for step in result if "rtrain serve" in (step.command or "")] == []


def test_a_student_is_distilled_again_not_trained_or_searched_like_its_teacher() -> None:
    facts = replace(
        FINE,
        is_student=True,
        has_student=True,
        score=0.7,
        baseline_comparison=BaselineComparison(0.7, (0.6, 0.8), "TF-IDF", 0.9),
        truncated_rows=500,
        validation_scores=((1, 0.1), (2, 0.5)),
    )
    assert [step.command for step in advice.list_recommendations(facts)] == [
        "rtrain distill TEACHER --search --out '/runs/a b-search'",
        "rtrain distill TEACHER --set data.max_tokens=128 --out NEW_FOLDER",
        "rtrain distill TEACHER --set distill.epochs=6 --out NEW_FOLDER",
    ]


@pytest.mark.parametrize("status", ["running", "paused", "stopped", "interrupted", "failed"])
def test_a_run_that_has_not_ended_goes_on(status: str) -> None:
    (step,) = advice.list_recommendations(replace(FINE, status=status, has_artifact=False))
    assert step.command == "rtrain train --resume --out '/runs/a b'"


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_student_that_has_not_ended_goes_on_beside_its_teacher(status: str) -> None:
    """As a training it would be refused where it learns inside the teacher, and else end without its gate."""
    (step,) = advice.list_recommendations(
        replace(FINE, status=status, has_artifact=False, is_student=True, has_student=True)
    )
    assert step.command == "rtrain distill TEACHER --resume --out '/runs/a b'"


RISING = ((10, 0.5), (20, 0.7), (30, 0.8))
FLAT = ((10, 0.5), (20, 0.8), (30, 0.801))
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # rule: facts that call for it; facts that just do not; its command
    "fix_rows": ({"quarantined_rows": 50, "quarantine_reason": "empty"}, {"quarantined_rows": 4}, ""),
    "check_labels": ({"suspect_rows": ("a.csv:2", "a.csv:9")}, {"suspect_rows": ("a.csv:2",)}, ""),
    "increase_max_tokens": (
        {"truncated_rows": 20, "max_tokens": 64},
        {"truncated_rows": 19},
        AGAIN.format("data.max_tokens=128"),
    ),
    "separate_answers": (
        {"collapsed_answer": "usual", "has_class_weights": False},
        {"has_class_weights": False},
        AGAIN.format("train.class_weights=balanced"),
    ),
    "beat_baseline": (
        {"baseline_comparison": BaselineComparison(0.95, (0.93, 0.97), "TF-IDF", 0.94)},
        {"baseline_comparison": BaselineComparison(0.95, (0.93, 0.97), "TF-IDF", 0.92)},
        "rtrain tune '/runs/a b/config.yaml' --out '/runs/a b-search'",
    ),
    "train_longer": ({"validation_scores": RISING}, {"validation_scores": FLAT}, AGAIN.format("train.epochs=6")),
    "train_shorter": (
        {"train_loss": 0.1, "held_out_loss": 0.5},
        {"train_loss": 0.1, "held_out_loss": 0.19},
        AGAIN.format("train.epochs=1"),
    ),
    "strengthen_slice": ({"weak_slice": WeakSlice("topic", "law", 40, 0.5)}, {}, ""),
    "strengthen_label": (
        {"worst_label": WorstLabel("refund", 0.2, 12)},
        {"worst_label": WorstLabel("refund", 0.2, 500)},
        "",
    ),
    "merge_or_split_labels": ({"confused_pair": ("login", "parcel", 9)}, {}, ""),
}


def test_every_rule_is_tried() -> None:
    assert {rule.__name__ for rule in advice.RULES} == {"resume_run", *CALLS}


@pytest.mark.parametrize("rule", CALLS)
def test_a_rule_speaks_where_its_facts_are_there_and_only_there(rule: str) -> None:
    calls, calm, command = CALLS[rule]
    result = getattr(advice, rule)(replace(FINE, **calls))
    assert result.command == command
    assert getattr(advice, rule)(replace(FINE, **calm)) is None
    assert result in advice.list_recommendations(replace(FINE, **calls))


@pytest.mark.parametrize(
    ("facts", "setting"),
    [
        ({"max_tokens": 512}, "data.window=512"),
        ({"max_tokens": 128, "uses_windows": True, "max_windows": 8}, "data.max_windows=16"),
    ],
)
def test_long_texts_are_read_in_windows_where_no_encoder_is_longer(facts: dict[str, Any], setting: str) -> None:
    step = advice.increase_max_tokens(replace(FINE, truncated_rows=500, **facts))
    assert step is not None
    assert step.command == AGAIN.format(setting)


@pytest.mark.parametrize("has_class_weights", [True, None])
def test_a_collapsed_model_of_weighted_or_no_labels_learns_slower(has_class_weights: bool | None) -> None:
    facts = replace(FINE, collapsed_answer="usual", has_class_weights=has_class_weights, peak_lr=4e-4)
    step = advice.separate_answers(facts)
    assert step is not None
    assert step.command == AGAIN.format("optim.lr=0.000100")


def test_validation_that_was_best_early_calls_for_less_training() -> None:
    early = replace(FINE, validation_scores=((30, 0.8), (60, 0.7), (100, 0.7)), best_step=30)
    step = advice.train_shorter(early)
    assert step is not None
    assert step.command == AGAIN.format("train.epochs=1")
    assert advice.train_shorter(replace(early, best_step=60)) is None
    pair = replace(FINE, validation_scores=RISING, train_loss=0.1, held_out_loss=0.5)
    for facts in (pair, replace(early, epochs=1)):  # beside a step that says to train longer; nothing to halve
        step = advice.train_shorter(facts)
        assert step is not None
        assert not step.command


def test_a_model_that_loses_to_a_baseline_is_not_led_to_the_endpoint() -> None:
    lost = replace(FINE, score=-1.5, baseline_comparison=BaselineComparison(-1.5, (-1.7, -1.3), "TF-IDF", -0.7))
    (step,) = advice.list_recommendations(lost)
    assert step.command.startswith("rtrain tune")
    assert lost.baseline_comparison is not None
    assert lost.baseline_comparison.is_ahead is False
    assert BaselineComparison(0.939, (0.92, 0.956), "TF-IDF", 0.949).is_ahead is None  # within the interval


def test_a_list_of_everything_is_cut_but_for_the_path() -> None:
    every = {name: value for calls, _, _ in CALLS.values() for name, value in calls.items()}
    result = advice.list_recommendations(replace(FINE, **every))
    assert len(result) == advice.MAX_RECOMMENDATIONS + 3
    assert result[-1].command == "rtrain serve '/runs/a b/artifact'"
