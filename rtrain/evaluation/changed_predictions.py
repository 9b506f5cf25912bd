"""The rows that two sides answer differently, the worst first."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.evaluation.pairing import Answers
from rtrain.evaluation.row_scores import Judged
from rtrain.metrics.sums import Floats, Ints
from rtrain.report.drawing.svg import number
from rtrain.report.outputs import entities

MOST = 200
"""Rows of a kind that are kept."""
UNSURE = ("spans", "summary", "tokens")
"""Kinds of output whose score says how sure a part of the answer is, not the whole."""
WORTH = {"summary": "ROUGE {:.3f}", "tokens": "loss {:.3f}"}
"""What is said of an answer that is more or less good, where the answer does not say it."""
SAME = 1e-9
"""A difference of two rows' worth up to this is one of rounding."""


@dataclass(frozen=True)
class Flip:
    """One row with both answers."""

    text: str
    target: str
    """Empty where the files have none: of masked text."""
    first: str
    other: str
    first_score: float | None
    other_score: float | None
    """How sure each side is; None where the task has no such thing."""
    where: str
    """File and line."""


@dataclass(frozen=True)
class Kind:
    """Rows that went one way."""

    name: str
    order: str
    """Which come first."""
    rows: int
    """All of them; `shown` has at most `MOST`."""
    shown: tuple[Flip, ...]


def kinds(
    output: str,
    first: Judged,
    other: Judged,
    sides: tuple[Answers, Answers],
    at: tuple[Ints, Ints],
    letters: tuple[str, str],
) -> list[Kind]:
    """Where answers are right or wrong: lost, won, and wrong both times in two ways. Else: worse and better.

    `at` has the places of the judged rows in the answers of each side. Lost rows are sorted by the loss of the other
    side, won ones by that of the first; where answers are more or less good, the largest change comes first.
    """
    a, b = letters
    gained = other.worth - first.worth
    losses = [side.rows.loss[own] for side, own in zip(sides, at, strict=True)]
    if first.right is not None and other.right is not None:
        said = [side.rows.prediction[own] for side, own in zip(sides, at, strict=True)]
        apart = np.fromiter((bool(x != y) for x, y in zip(*said, strict=True)), dtype=np.bool_, count=len(gained))
        order = "the worst first"
        chosen = [
            (f"right in {a}, wrong in {b}", first.right & ~other.right, losses[1]),
            (f"wrong in {a}, right in {b}", ~first.right & other.right, losses[0]),
            ("wrong in both, differently", ~first.right & ~other.right & apart, losses[1]),
        ]
    else:
        order = "the largest change first"
        chosen = [
            (f"worse in {b} than in {a}", gained < -SAME, -gained),
            (f"better in {b} than in {a}", gained > SAME, gained),
        ]
    found = []
    for name, inside, bad in chosen:
        rows = np.flatnonzero(inside)
        rows = rows[np.argsort(-np.nan_to_num(bad[rows], nan=-np.inf), kind="stable")]
        flipped = _flips(output, sides, at, (first.worth, other.worth), rows[:MOST])
        found.append(Kind(name, order, len(rows), tuple(flipped)))
    return found


def _flips(
    output: str, sides: tuple[Answers, Answers], at: tuple[Ints, Ints], worth: tuple[Floats, Floats], rows: Ints
) -> list[Flip]:
    first, other = (side.rows for side in sides)
    places, others = at[0][rows].tolist(), at[1][rows].tolist()
    texts, sure = first.texts(places), output not in UNSURE
    return [
        Flip(
            text,
            "" if output == "tokens" else said(output, _true(first.target[one], other.target[two])),
            said(output, first.prediction[one]) + _worth(output, float(worth[0][row])),
            said(output, other.prediction[two]) + _worth(output, float(worth[1][row])),
            _score(first.score, one) if sure else None,
            _score(other.score, two) if sure else None,
            first.place(one),
        )
        for text, one, two, row in zip(texts, places, others, rows.tolist(), strict=True)
    ]


def _true(target: Any, other: Any) -> Any:
    """The target; of a label that the training rows of the first side lack, as the other side has it."""
    return target if isinstance(target, float) else target or other


def _worth(output: str, value: float) -> str:
    return f", {WORTH[output].format(abs(value))}" if output in WORTH else ""


def _score(scores: npt.NDArray[np.float64], row: int) -> float | None:
    return float(scores[row]) if np.isfinite(scores[row]) else None


def said(output: str, value: Any) -> str:
    """A target or an answer in words."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return value or "nothing"
    if output == "tags":
        return entities.named(value)
    if output == "summary":
        return f"sentences {', '.join(value)}" if value else "no sentence"
    return ", ".join(str(part) or "-" for part in value) or "nothing"
