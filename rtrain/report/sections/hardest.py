"""The rows with the largest loss: mistakes of the model, and of the labels."""

from typing import Any

import numpy as np

from rtrain.report.blocks import Card, Cards, Section
from rtrain.report.collect import Run
from rtrain.report.predictions import Predictions
from rtrain.report.svg import number, short

SHOWN = 20
LONGEST = 700
"""Characters of a text that are shown."""


def section(run: Run) -> Section | None:
    answers = run.predictions
    if answers is None:
        return None
    loss = np.where(np.isfinite(answers.loss), answers.loss, -np.inf)
    rows = [int(row) for row in np.argsort(-loss, kind="stable")[:SHOWN]]
    cards = [_card(answers, row, text) for row, text in zip(rows, answers.texts(rows), strict=True)]
    right = int(answers.right[rows].sum())
    title = f"The {len(cards)} hardest rows" + (f"; {right} of them are right nevertheless" if right else "")
    note = (
        "The largest loss first. A confident wrong answer is often a wrong label: mend it in the file, at the line "
        "given."
    )
    intro = "Reading them is the quickest way to see what the model lacks, or what is wrong with the rows."
    return Section("hardest", "Hardest rows", intro, [Cards(title, cards, note)])


def _card(answers: Predictions, row: int, text: str) -> Card:
    facts = [("true", _said(answers.target[row])), ("answered", _said(answers.prediction[row]))]
    if answers.kind != "numbers" and np.isfinite(answers.score[row]):
        facts.append(("confidence", f"{answers.score[row]:.2f}"))
    facts += [("loss", number(float(answers.loss[row]))), ("tokens", str(answers.tokens[row]))]
    facts += [(short(name), short(values[row], 40)) for name, values in answers.slices.items()]
    cut = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    return Card(cut, facts, f"{answers.source[row]}:{answers.line[row]}")


def _said(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return (
        short(value, 80) if isinstance(value, str) else short(", ".join(str(part) for part in value) or "nothing", 160)
    )
