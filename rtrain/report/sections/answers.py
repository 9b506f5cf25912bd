"""Predictions of the best weights: scores with intervals, calibration, and blocks by kind of output."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.svg import humanize_score_name
from rtrain.report.outputs import confusion, entities, qa, regression, summaries

SPLIT_NAMES = {"test": "test", "valid": "validation"}
UNITS = {"labels": "yes or no to a label", "tags": "tags of words", "summary": "sentences, taken by the oracle or not"}
"""Unit of the confidence, if it is not a row's answer."""


def score_intervals(run: RunData) -> Mapping[str, tuple[float, float]]:
    """95 % bootstrap intervals by score, for scores that are sums over rows."""
    bootstrap: Mapping[str, Any] = (run.scores or {}).get("intervals", {}).get("scores", {})
    return {name: (low, high) for name, (low, high) in bootstrap.items()}


def build_section(run: RunData) -> Section:
    answers = run.answers
    if answers is None:
        text = "The run has neither predictions-test.parquet nor predictions-valid.parquet."
        return Section("answers", "Answers", "", [Note(text)])
    intro = f"Predictions of the best weights on the {len(answers):,} {SPLIT_NAMES[answers.split]} rows."
    if run.scores is None:
        text = f"The run has no scores-{answers.split}.json, so scores of labels, intervals and slices are unknown."
        return Section("answers", "Answers", intro, [Note(text)])
    tables = run.scores["tables"]
    blocks: list[Block] = [_build_score_table(run, run.scores)]
    if "calibration" in tables:
        blocks += _build_calibration(tables["calibration"], UNITS.get(run.scores["output"], "answers"))
    blocks += _BUILDERS.get(run.scores["output"], _build_nothing)(run, tables)
    return Section("answers", "Answers", intro, blocks)


def _build_score_table(run: RunData, scores: Mapping[str, Any]) -> Table:
    ends = score_intervals(run)
    # A negated error is for comparisons; the table has the error itself.
    left_out = ("neg_", *(summaries.REFERENCE_PREFIXES if scores["output"] == "summary" else ()))
    rows = [
        (humanize_score_name(name), _format_score(value), _format_interval(ends.get(name)))
        for name, value in scores["scores"].items()
        if name != "rows" and not name.startswith(left_out)
    ]
    note = (
        "Bootstrap over the rows: 95 of 100 such intervals contain the true score. Models with widely overlapping "
        "intervals do not differ significantly. Areas under curves have no interval."
    )
    return Table("Scores with intervals", ("score", "value", "95 % interval"), rows, note)


def _format_interval(ends: tuple[float, float] | None) -> str:
    """Format the interval, or `-` if its ends are equal: resamples of equal rows are equal."""
    return "-" if ends is None or ends[0] == ends[1] else " to ".join(map(_format_score, ends))


def _format_score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"  # shares, errors; perplexities


def _build_calibration(calibration: Mapping[str, Any], unit: str, head: str = "") -> list[Block]:
    bins = [calibration_bin for calibration_bin in calibration["bins"] if calibration_bin["rows"]]
    rows = np.array([calibration_bin["rows"] for calibration_bin in bins])
    if not rows.sum():
        return []
    confidence, accuracy = (
        np.array([calibration_bin[name] for calibration_bin in bins]) for name in ("confidence", "accuracy")
    )
    mean_confidence, mean_accuracy = (
        float(np.average(confidence, weights=rows)),
        float(np.average(accuracy, weights=rows)),
    )
    description = (
        "well calibrated"
        if abs(mean_confidence - mean_accuracy) < 0.02
        else "overconfident"
        if mean_confidence > mean_accuracy
        else "underconfident"
    )
    note = (
        "On the dashed line confidence and accuracy are equal; below it the model is overconfident. Dots are bins "
        f"of {unit}"
        "; their area is the number of entries. Expected calibration error (mean distance from the line): "
        f"{calibration['ece']:.3f}."
    )
    title = (
        f"{head}The model is {description}: confidence {100 * mean_confidence:.0f} %, accuracy "
        f"{100 * mean_accuracy:.0f} %"
    )
    return [Figure(title, charts.draw_reliability(confidence, accuracy, rows.tolist()), note)]


def _build_class_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    return confusion.build_blocks(tables)


def _build_label_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    chances = sorted(label_scores["threshold"] for label_scores in tables["per_class"])
    note = f"Thresholds of the labels: {chances[0]:.2f} to {chances[-1]:.2f}." if chances else ""
    return [confusion.build_worst_table(tables), *([Note(note)] if note else [])]


def _build_head_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for name, tables_of_head in tables["heads"].items():
        blocks += _build_calibration(tables_of_head["calibration"], "answers", f"{name}: ")
        blocks += confusion.build_blocks(tables_of_head, f"{name}: ")
    return blocks


def _build_nothing(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    return []


_BUILDERS: Mapping[str, Callable[[RunData, Mapping[str, Any]], list[Block]]] = {
    "classes": _build_class_blocks,
    "labels": _build_label_blocks,
    "heads": _build_head_blocks,
    "number": regression.build_blocks,
    "tags": entities.build_blocks,
    "spans": qa.build_blocks,
    "summary": summaries.build_blocks,
    "tokens": regression.build_loss_blocks,
}
