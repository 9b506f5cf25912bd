"""The rows with the largest loss, where the model or the label is wrong, and the words that the answers rest on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rtrain.report.answer_rows import AnswerRows
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Card, Cards, Note, Piece, Section
from rtrain.report.drawing.svg import number, short
from rtrain.report.kinds import entities, marked, summaries

SHOWN = 20
UNSURE = ("spans", "summary")
"""Kinds of output whose score says how sure a part of the answer is, not the whole, and so is not shown."""
LONGEST = 700
"""Characters of a text that are shown where it is not explained."""


def section(run: Collected) -> Section | None:
    answers = run.answers
    if answers is None:
        return None
    rows = [int(row) for row in answers.hardest(SHOWN)]
    cards = [_card(run, answers, row, text) for row, text in zip(rows, answers.texts(rows), strict=True)]
    legend: Sequence[Piece] = marked.legend(answers.kind == "numbers")
    if run.output == "tags":
        cards = _with_entities(run, answers, rows, cards)
    elif run.output == "summary":
        cards, legend = _with_sentences(run, rows, cards), summaries.LEGEND
    right = int(answers.right[rows].sum())
    title = f"The {len(cards)} hardest rows" + (f"; {right} of them are right nevertheless" if right else "")
    note = (
        "The largest loss first. A confident wrong answer is often a wrong label: mend it in the file, at the line "
        "given."
    )
    if run.output == "spans":
        note += (
            " The loss is about the place: the words may be right and stand elsewhere, or be one of several answers."
        )
    drawn = any(card.marked for card in cards)
    blocks: list[Block] = [Cards(title, cards, note, legend=legend if drawn else ())]
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
        text += f" Only the first {len(found['rows'])} are explained: the others would take too long."
    return text


def _with_entities(run: Collected, answers: AnswerRows, rows: Sequence[int], cards: Sequence[Card]) -> list[Card]:
    """The cards with entities in words, instead of one tag for each word."""
    words = entities.words(run, rows)
    found = []
    for row, card in zip(rows, cards, strict=True):
        named = {
            "true": entities.named(answers.target[row], words.get(row)),
            "answered": entities.named(answers.prediction[row], words.get(row)),
        }
        found.append(replace(card, facts=[(name, named.get(name, value)) for name, value in card.facts]))
    return found


def _with_sentences(run: Collected, rows: Sequence[int], cards: Sequence[Card]) -> list[Card]:
    drawn = summaries.marked(run, summaries.shown(run, rows))
    found = []
    for row, card in zip(rows, cards, strict=True):
        names = {"true": "the oracle's sentences", "answered": "the summary's sentences"}
        facts = [(names.get(name, name), value) for name, value in card.facts]
        if row in drawn:  # they are named below the text
            facts = [fact for fact in facts if fact[0] not in names.values()]
        found.append(replace(card, facts=facts, marked=[drawn[row]] if row in drawn else ()))
    return found


def _card(run: Collected, answers: AnswerRows, row: int, text: str) -> Card:
    explained = next((one for one in (run.attributions or {"rows": []})["rows"] if one["row"] == row), None)
    known = run.output != "tokens"  # of masked text there is only how much was guessed
    facts = [("true", _said(answers.target[row]))] if known else []
    facts.append(("answered", _said(answers.prediction[row])))
    if known and answers.kind != "numbers" and np.isfinite(answers.score[row]) and run.output not in UNSURE:
        facts.append(("confidence", f"{answers.score[row]:.2f}"))
    facts += [("loss", number(float(answers.loss[row]))), ("tokens", str(answers.tokens[row]))]
    facts += [(short(name), short(values[row], 40)) for name, values in answers.slices.items()]
    cut = _around(text, answers.target[row]) if run.output == "spans" else _around(text, "")
    drawn = marked.answers(explained, answers.kind == "numbers") if explained else []
    return Card(cut, facts, answers.place(row), drawn)


def _around(text: str, answer: str) -> str:
    """The beginning of a text, and the true answer with its surroundings where it stands further on."""
    place = text.find(answer) if answer else -1
    if len(text) <= LONGEST or place + len(answer) <= LONGEST:
        return text if len(text) <= LONGEST else text[:LONGEST] + " …"
    first = max(LONGEST // 2, place - LONGEST // 4)
    found = f"{text[: LONGEST // 2]} … {text[first : first + LONGEST // 2]}"
    return found if first + LONGEST // 2 >= len(text) else found + " …"


def _said(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return (
        short(value, 80) or "nothing"
        if isinstance(value, str)
        else short(", ".join(str(part) or "-" for part in value) or "nothing", 160)
    )
