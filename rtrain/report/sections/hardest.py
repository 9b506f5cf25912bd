"""The rows with the largest loss: mistakes of the model, and of the labels; with what their answers rest on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtrain.report.blocks import Block, Card, Cards, Note, Section
from rtrain.report.collect import Run
from rtrain.report.predictions import Predictions
from rtrain.report.sections import marked
from rtrain.report.svg import number, short

SHOWN = 20
LONGEST = 700
"""Characters of a text that are shown where it is not explained."""


def section(run: Run) -> Section | None:
    answers = run.predictions
    if answers is None:
        return None
    rows = [int(row) for row in answers.hardest(SHOWN)]
    explained = {row["row"]: row for row in run.attributions["rows"]} if run.attributions else {}
    known = run.output != "tokens"
    cards = [
        _card(answers, row, text, explained.get(row), known)
        for row, text in zip(rows, answers.texts(rows), strict=True)
    ]
    right = int(answers.right[rows].sum())
    title = f"The {len(cards)} hardest rows" + (f"; {right} of them are right nevertheless" if right else "")
    note = (
        "The largest loss first. A confident wrong answer is often a wrong label: mend it in the file, at the line "
        "given."
    )
    drawn = any(card.marked for card in cards)
    blocks: list[Block] = [Cards(title, cards, note, legend=drawn)]
    if drawn and run.attributions:
        blocks.append(Note(_method(run.attributions, answers.kind == "numbers")))
    intro = "Reading them is the quickest way to see what the model lacks, or what is wrong with the rows."
    return Section("hardest", "Hardest rows", intro, blocks)


def _method(found: Mapping[str, Any], numbers: bool) -> str:
    unit = "the predicted score" if numbers else "the answer's logit"
    text = (
        f"Marks are integrated gradients ({found['steps']} steps): what each part adds to {unit}, beside a text of "
        "padding. The completeness error is how far the parts' sum is from the whole change, in % of it; above some "
        "10 % do not read much into small shares. rtrain explain gives any text's, with as many steps as it takes."
    )
    if found["asked"] > len(found["rows"]):
        text += f" Only the first {len(found['rows'])} are explained: the texts are long."
    return text


def _card(answers: Predictions, row: int, text: str, explained: Mapping[str, Any] | None, known: bool) -> Card:
    """`known`: there is a true answer beside the model's (of masked text there is only how much was guessed)."""
    facts = [("true", _said(answers.target[row]))] if known else []
    facts.append(("answered", _said(answers.prediction[row])))
    if known and answers.kind != "numbers" and np.isfinite(answers.score[row]):
        facts.append(("confidence", f"{answers.score[row]:.2f}"))
    facts += [("loss", number(float(answers.loss[row]))), ("tokens", str(answers.tokens[row]))]
    facts += [(short(name), short(values[row], 40)) for name, values in answers.slices.items()]
    cut = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    drawn = marked.answers(explained, answers.kind == "numbers") if explained else []
    return Card(cut, facts, f"{answers.source[row]}:{answers.line[row]}", drawn)


def _said(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return (
        short(value, 80) or "nothing"
        if isinstance(value, str)
        else short(", ".join(str(part) or "-" for part in value) or "nothing", 160)
    )
