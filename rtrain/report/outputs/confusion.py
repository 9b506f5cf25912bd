"""What was taken for what: the confusion matrix, its pairs, and the labels that are answered worst."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtrain.metrics import per_class
from rtrain.report import stats
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Cell, Figure, Table
from rtrain.report.drawing.svg import short

MOST_CLASSES = 100
"""Labels that the heat map has at most: those with the most mistakes."""
FEW = 14
"""Labels up to which the heat map is no wider than other charts."""
MOST_PAIRS = 15


def blocks(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> list[Block]:
    """Pairs, worst labels and matrix from a `classes` table of `rtrain.metrics.tables`; `head` begins the titles."""
    found: list[Block] = []
    if tables["confused"]:
        found.append(_pairs(tables, head))
    if "per_class" in tables:
        found.append(worst(tables, head))
    if "confusion" in tables:
        found.append(_matrix(tables["confusion"], head, unit))
    return found


def worst(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> Table:
    few, enough = per_class.split_by_support(tables["per_class"])
    rows: list[list[Cell]] = [
        [
            *(short(one["class"], 40), one["support"]),
            *(f"{one[name]:.2f}" for name in per_class.SCORES),
            per_class.TOO_FEW if one in few else "",
        ]
        for one in (*few[:MOST_PAIRS], *enough[:MOST_PAIRS])
    ]
    note = (
        f"Precision: share of the answers with this {unit} that are right; recall: share of the true ones that were "
        f"found; F1: their harmonic mean. Those with fewer than {per_class.LEAST_SUPPORT} true ones come first."
    )
    title = f"{head}The {unit}s with the lowest F1"
    columns = [unit, "true", "precision", "recall", "F1", ""]
    if not few:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(title, tuple(columns), rows, note)


def _pairs(tables: Mapping[str, Any], head: str) -> Table:
    pairs = tables["confused"][:MOST_PAIRS]
    rows = [(short(one["true"], 40), short(one["predicted"], 40), one["rows"]) for one in pairs]
    note = f"The {len(rows)} pairs with the most rows."
    if "confusion" in tables:
        counts = np.array(tables["confusion"]["counts"])
        share = sum(one["rows"] for one in pairs) / (counts.sum() - np.trace(counts))
        these = f"These {len(rows)} pairs hold" if len(rows) > 1 else "This pair holds"
        note = f"{these} {100 * share:.0f} % of all wrong answers."
    title = f"{head}Most confused: {rows[0][0]} taken for {rows[0][1]}"
    return Table(title, ("true", "answered", "rows"), rows, note)


def _matrix(found: Mapping[str, Any], head: str, unit: str) -> Figure:
    names, counts = found["labels"], np.array(found["counts"], dtype=np.int64)
    wrong = counts - np.diag(np.diag(counts))
    if unit == "label":
        mistakes = wrong.sum(axis=0) + wrong.sum(axis=1)
        kept = np.sort(np.argsort(-mistakes, kind="stable")[:MOST_CLASSES])
        order = kept[stats.chain(counts[np.ix_(kept, kept)])]
        near = "both in the same order: labels that are confused are neighbours"
    else:
        order, near = np.arange(len(names))[:MOST_CLASSES], f"both by {unit}"
    chart = charts.heat(counts[np.ix_(order, order)], [names[code] for code in order], unit)
    note = (
        f"A row per true {unit}, a column per predicted one, {near}. Blue, on the diagonal: right; orange: wrong; the "
        "darker, the larger the share of the row. Numbers are rows, where there is room; scroll sideways where it "
        "is cut."
    )
    if len(order) < len(names):
        note += f" Drawn are {len(order)} of {len(names)}, those with the most mistakes."
    title = f"{head}{int(wrong.sum()):,} of {int(counts.sum()):,} answers are wrong; here is what was taken for what"
    return Figure(title, chart, note, wide=len(order) > FEW)
