"""The answers of the best weights: scores with intervals, calibration, and what their kind of output calls for."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.svg import score_name
from rtrain.report.outputs import confusion, entities, qa, regression, summaries

SPLITS = {"test": "test", "valid": "validation"}
UNITS = {"labels": "yes or no to a label", "tags": "tags of words", "summary": "sentences, taken by the oracle or not"}
"""What the model is sure of, for outputs where that is no row's answer."""


def intervals(run: Collected) -> Mapping[str, tuple[float, float]]:
    """95 % bootstrap intervals of the scores that are sums over rows, by name."""
    found: Mapping[str, Any] = (run.scores or {}).get("intervals", {}).get("scores", {})
    return {name: (low, high) for name, (low, high) in found.items()}


def section(run: Collected) -> Section:
    answers = run.answers
    if answers is None:
        text = "The run has left no predictions-test.parquet or predictions-valid.parquet: answers cannot be looked at."
        return Section("answers", "Answers", "", [Note(text)])
    intro = f"What the best weights answered on the {len(answers):,} {SPLITS[answers.split]} rows."
    if run.scores is None:
        text = f"The run has left no scores-{answers.split}.json: scores of labels, intervals and slices are not known."
        return Section("answers", "Answers", intro, [Note(text)])
    tables = run.scores["tables"]
    blocks: list[Block] = [_scores(run, run.scores)]
    if "calibration" in tables:
        blocks += _calibration(tables["calibration"], UNITS.get(run.scores["output"], "answers"))
    blocks += _KINDS.get(run.scores["output"], _nothing)(run, tables)
    return Section("answers", "Answers", intro, blocks)


def _scores(run: Collected, found: Mapping[str, Any]) -> Table:
    ends = intervals(run)
    # The negative of an error is there for comparisons only: the error itself is beside it.
    left_out = ("neg_", *(summaries.BESIDE if found["output"] == "summary" else ()))
    rows = [
        (score_name(name), _figure(value), _interval(ends.get(name)))
        for name, value in found["scores"].items()
        if name != "rows" and not name.startswith(left_out)
    ]
    note = (
        "Bootstrap over the rows: made in this way from other rows of the same kind, 95 of 100 such intervals would "
        "hold the true score. Two models whose intervals overlap widely are not told apart by these rows. Areas under "
        "curves and the like have none."
    )
    return Table("Scores and how sure they are", ("score", "value", "95 % interval"), rows, note)


def _interval(ends: tuple[float, float] | None) -> str:
    """The interval, or - where its ends are equal: rows that are all right resample alike, which tells nothing."""
    return "-" if ends is None or ends[0] == ends[1] else " to ".join(map(_figure, ends))


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"  # shares, errors; perplexities


def _calibration(found: Mapping[str, Any], unit: str, head: str = "") -> list[Block]:
    bins = [one for one in found["bins"] if one["rows"]]
    rows = np.array([one["rows"] for one in bins])
    if not rows.sum():
        return []
    confidence, accuracy = (np.array([one[name] for one in bins]) for name in ("confidence", "accuracy"))
    sure, right = float(np.average(confidence, weights=rows)), float(np.average(accuracy, weights=rows))
    mood = (
        "about as sure as it is right"
        if abs(sure - right) < 0.02
        else "too sure of itself"
        if sure > right
        else "less sure than it may be"
    )
    note = (
        f"On the dashed line confidence and accuracy are equal; below it the model is too sure. Dots are bins of {unit}"
        ", their area is how many there are. Mean distance from the line (expected calibration error): "
        f"{found['ece']:.3f}."
    )
    title = f"{head}The model is {mood}: {100 * sure:.0f} % sure, {100 * right:.0f} % right"
    return [Figure(title, charts.reliability(confidence, accuracy, rows.tolist()), note)]


def _classes(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    return confusion.blocks(tables)


def _labels(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    chances = sorted(one["threshold"] for one in tables["per_class"])
    note = f"Each label is given from a chance of its own on, {chances[0]:.2f} to {chances[-1]:.2f}." if chances else ""
    return [confusion.worst(tables), *([Note(note)] if note else [])]


def _heads(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    found: list[Block] = []
    for name, own in tables["heads"].items():
        found += _calibration(own["calibration"], "answers", f"{name}: ")
        found += confusion.blocks(own, f"{name}: ")
    return found


def _nothing(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    return []


_KINDS: Mapping[str, Callable[[Collected, Mapping[str, Any]], list[Block]]] = {
    "classes": _classes,
    "labels": _labels,
    "heads": _heads,
    "number": regression.blocks,
    "tags": entities.blocks,
    "spans": qa.blocks,
    "summary": summaries.blocks,
    "tokens": regression.losses,
}
