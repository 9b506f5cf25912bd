"""Rows with different predictions of two models, the worst first."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.evaluation.pairing import CandidateAnswers
from rtrain.evaluation.row_scores import RowScores
from rtrain.metrics.sums import Floats, Ints
from rtrain.report.drawing.svg import format_number
from rtrain.report.outputs import entities

MAX_ROWS_PER_GROUP = 200
"""Most rows per group."""
OUTPUTS_WITHOUT_CONFIDENCE = ("spans", "summary", "tokens")
"""Kinds of output whose confidence covers only a part of the answer."""
QUALITY_FORMATS = {"summary": "ROUGE {:.3f}", "tokens": "loss {:.3f}"}
"""Suffix with the quality of an answer."""
TOLERANCE = 1e-9
"""Smaller differences of quality are rounding errors."""


@dataclass(frozen=True)
class ChangedPrediction:
    """One row with both predictions."""

    text: str
    target: str
    """Empty for masked text, which has no target in the files."""
    first: str
    other: str
    first_score: float | None
    other_score: float | None
    """Confidence of each model; None if the task has none."""
    location: str
    """File and line."""


@dataclass(frozen=True)
class ChangeGroup:
    """Rows that changed in the same direction."""

    name: str
    sort_order: str
    """Description of the order."""
    rows: int
    """Number of rows; `shown` has at most `MAX_ROWS_PER_GROUP`."""
    shown: tuple[ChangedPrediction, ...]


def group_changes(
    output: str,
    first: RowScores,
    other: RowScores,
    answers: tuple[CandidateAnswers, CandidateAnswers],
    positions: tuple[Ints, Ints],
    letters: tuple[str, str],
) -> list[ChangeGroup]:
    """Group rows by change: lost, won, and wrong in both; for graded answers: worse and better.

    Lost rows are sorted by the loss of the other model, won rows by the loss of the first. Graded answers are sorted by
    the size of the change.

    Args:
        positions: places of the scored rows in each model's answers.
    """
    a, b = letters
    quality_change = other.quality - first.quality
    losses = [candidate_answers.rows.loss[places] for candidate_answers, places in zip(answers, positions, strict=True)]
    if first.is_correct is not None and other.is_correct is not None:
        predictions = [
            candidate_answers.rows.prediction[places]
            for candidate_answers, places in zip(answers, positions, strict=True)
        ]
        differs = np.fromiter(
            (bool(x != y) for x, y in zip(*predictions, strict=True)), dtype=np.bool_, count=len(quality_change)
        )
        order = "the worst first"
        groups = [
            (f"right in {a}, wrong in {b}", first.is_correct & ~other.is_correct, losses[1]),
            (f"wrong in {a}, right in {b}", ~first.is_correct & other.is_correct, losses[0]),
            ("wrong in both, differently", ~first.is_correct & ~other.is_correct & differs, losses[1]),
        ]
    else:
        order = "the largest change first"
        groups = [
            (f"worse in {b} than in {a}", quality_change < -TOLERANCE, -quality_change),
            (f"better in {b} than in {a}", quality_change > TOLERANCE, quality_change),
        ]
    change_groups = []
    for name, selected, severity in groups:
        rows = np.flatnonzero(selected)
        rows = rows[np.argsort(-np.nan_to_num(severity[rows], nan=-np.inf), kind="stable")]
        changes = _list_changes(output, answers, positions, (first.quality, other.quality), rows[:MAX_ROWS_PER_GROUP])
        change_groups.append(ChangeGroup(name, order, len(rows), tuple(changes)))
    return change_groups


def _list_changes(
    output: str,
    answers: tuple[CandidateAnswers, CandidateAnswers],
    positions: tuple[Ints, Ints],
    quality: tuple[Floats, Floats],
    rows: Ints,
) -> list[ChangedPrediction]:
    first, other = (candidate_answers.rows for candidate_answers in answers)
    places, other_places = positions[0][rows].tolist(), positions[1][rows].tolist()
    texts, has_confidence = first.read_texts(places), output not in OUTPUTS_WITHOUT_CONFIDENCE
    return [
        ChangedPrediction(
            text,
            ""
            if output == "tokens"
            else format_answer(output, _known_target(first.target[place], other.target[other_place])),
            format_answer(output, first.prediction[place]) + _format_quality(output, float(quality[0][row])),
            format_answer(output, other.prediction[other_place]) + _format_quality(output, float(quality[1][row])),
            _finite_score(first.score, place) if has_confidence else None,
            _finite_score(other.score, other_place) if has_confidence else None,
            first.format_location(place),
        )
        for text, place, other_place, row in zip(texts, places, other_places, rows.tolist(), strict=True)
    ]


def _known_target(target: Any, other: Any) -> Any:
    """Return the target; a label that the first model lacks is taken from the other model's file."""
    return target if isinstance(target, float) else target or other


def _format_quality(output: str, value: float) -> str:
    return f", {QUALITY_FORMATS[output].format(abs(value))}" if output in QUALITY_FORMATS else ""


def _finite_score(scores: npt.NDArray[np.float64], row: int) -> float | None:
    return float(scores[row]) if np.isfinite(scores[row]) else None


def format_answer(output: str, value: Any) -> str:
    """Format a target or a prediction."""
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, str):
        return value or "nothing"
    if output == "tags":
        return entities.describe_entities(value)
    if output == "summary":
        return f"sentences {', '.join(value)}" if value else "no sentence"
    return ", ".join(str(part) or "-" for part in value) or "nothing"
