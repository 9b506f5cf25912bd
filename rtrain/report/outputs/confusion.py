"""Confusions: the matrix, its most frequent pairs, and the labels with the lowest F1."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtrain.metrics import per_class
from rtrain.report import stats
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Cell, Figure, Table
from rtrain.report.drawing.svg import truncate

MAX_CLASSES = 100
"""Most labels of the heat map: those with the most mistakes."""
MAX_NARROW_LABELS = 14
"""Most labels of a heat map of normal width."""
MAX_PAIRS = 15


def build_blocks(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> list[Block]:
    """Pairs, worst labels and matrix from a `classes` table of `rtrain.metrics.tables`; `head` begins the titles."""
    confusion_blocks: list[Block] = []
    if tables["confused"]:
        confusion_blocks.append(_build_pairs_table(tables, head))
    if "per_class" in tables:
        confusion_blocks.append(build_worst_table(tables, head))
    if "confusion" in tables:
        confusion_blocks.append(_build_matrix(tables["confusion"], head, unit))
    return confusion_blocks


def build_worst_table(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> Table:
    few, enough = per_class.split_by_support(tables["per_class"])
    rows: list[list[Cell]] = [
        [
            *(truncate(label_scores["class"], 40), label_scores["support"]),
            *(f"{label_scores[name]:.2f}" for name in per_class.SCORES),
            per_class.TOO_FEW_ROWS if label_scores in few else "",
        ]
        for label_scores in (*few[:MAX_PAIRS], *enough[:MAX_PAIRS])
    ]
    note = (
        f"Precision: share of correct predictions of this {unit}; recall: share of its true rows that were found; "
        f"F1: their harmonic mean. Entries with fewer than {per_class.MIN_SUPPORT} true rows come first."
    )
    title = f"{head}The {unit}s with the lowest F1"
    columns = [unit, "true", "precision", "recall", "F1", ""]
    if not few:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(title, tuple(columns), rows, note)


def _build_pairs_table(tables: Mapping[str, Any], head: str) -> Table:
    pairs = tables["confused"][:MAX_PAIRS]
    rows = [(truncate(pair["true"], 40), truncate(pair["predicted"], 40), pair["rows"]) for pair in pairs]
    note = f"The {len(rows)} pairs with the most rows."
    if "confusion" in tables:
        counts = np.array(tables["confusion"]["counts"])
        share = sum(pair["rows"] for pair in pairs) / (counts.sum() - np.trace(counts))
        subject = f"These {len(rows)} pairs hold" if len(rows) > 1 else "This pair holds"
        note = f"{subject} {100 * share:.0f} % of all wrong answers."
    title = f"{head}Most confused: {rows[0][0]} predicted as {rows[0][1]}"
    return Table(title, ("true", "predicted", "rows"), rows, note)


def _build_matrix(confusion: Mapping[str, Any], head: str, unit: str) -> Figure:
    names, counts = confusion["labels"], np.array(confusion["counts"], dtype=np.int64)
    wrong = counts - np.diag(np.diag(counts))
    if unit == "label":
        mistakes = wrong.sum(axis=0) + wrong.sum(axis=1)
        codes = np.sort(np.argsort(-mistakes, kind="stable")[:MAX_CLASSES])
        order = codes[stats.confusion_order(counts[np.ix_(codes, codes)])]
        order_note = "both in the same order: confused labels are neighbors"
    else:
        order, order_note = np.arange(len(names))[:MAX_CLASSES], f"both by {unit}"
    chart = charts.draw_heatmap(counts[np.ix_(order, order)], [names[code] for code in order], unit)
    note = (
        f"A row per true {unit}, a column per predicted one, {order_note}. Blue, on the diagonal: right; orange: "
        "wrong; the "
        "darker, the larger the share of the row. Numbers are rows, if there is room; wide charts scroll sideways."
    )
    if len(order) < len(names):
        note += f" Drawn are {len(order)} of {len(names)}, those with the most mistakes."
    title = f"{head}{int(wrong.sum()):,} of {int(counts.sum()):,} predictions are wrong"
    return Figure(title, chart, note, wide=len(order) > MAX_NARROW_LABELS)
