"""Where the model is worse than on the whole: scores by length and by every further column of the predictions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rtrain.report import charts, stats
from rtrain.report.blocks import Block, Figure, Note, Section, Table
from rtrain.report.charts import Bar
from rtrain.report.collect import Run
from rtrain.report.predictions import Predictions
from rtrain.report.svg import short

FEWEST = 10
"""Rows below which a slice's score is noise."""
MOST_VALUES = 40
"""Values of a column that makes slices; a column of more is an identifier."""
SHOWN = 15
MOST_COLUMNS, MOST_BOXES = 6, 12


@dataclass(frozen=True)
class Slice:
    name: str
    rows: int
    value: float
    interval: tuple[float, float]


def section(run: Run) -> Section | None:
    answers = run.predictions
    if answers is None or len(answers) < 2 * FEWEST:
        return None
    columns = {"length": quartiles(answers.tokens), **answers.slices}
    kept = {name: values for name, values in columns.items() if 1 < len(set(values)) <= MOST_VALUES}
    blocks: list[Block] = [*_worst(answers, kept), *_boxes(answers, kept)]
    if left := [name for name in answers.slices if name not in kept]:
        listed = ", ".join(short(name) for name in left)
        blocks.append(Note(f"No slices by {listed}: one value only, or more than {MOST_VALUES}."))
    intro = (
        "A score over all rows can hide a group of rows that the model fails on. Slices are quarters by length and "
        "every further column of the rows."
    )
    return Section("slices", "Slices", intro, blocks)


def quartiles(tokens: stats.Ints) -> list[str]:
    """The quarter, by length, that each row is in; named by its range of tokens."""
    cuts = np.unique(np.percentile(tokens, (25, 50, 75)).astype(np.int64))
    place = np.searchsorted(cuts, tokens, side="left")
    limits = {
        int(code): (int(tokens[place == code].min()), int(tokens[place == code].max())) for code in np.unique(place)
    }
    return [f"{limits[code][0]} to {limits[code][1]} tokens" for code in place.tolist()]


def measure(answers: Predictions) -> tuple[str, stats.Floats, bool]:
    """(name, a value per row whose mean is a slice's score, whether larger is better)."""
    if answers.kind == "classes":
        return "accuracy", answers.right.astype(np.float64), True
    if answers.kind == "numbers":
        return "mean absolute error", np.abs(answers.prediction - answers.target), False
    return "mean loss", answers.loss, False


def slices(columns: dict[str, list[str]], values: stats.Floats, shares: bool) -> list[Slice]:
    """The mean of each slice of enough rows, with its 95 % interval."""
    found = []
    for column, of_row in columns.items():
        keys = np.array(of_row, dtype=object)
        for key in sorted(set(of_row)):
            inside = values[keys == key]
            inside = inside[np.isfinite(inside)]
            if len(inside) < FEWEST:
                continue
            mean, half = float(inside.mean()), 1.96 * float(inside.std()) / len(inside) ** 0.5
            interval = stats.wilson(int(inside.sum()), len(inside)) if shares else (max(0.0, mean - half), mean + half)
            found.append(Slice(f"{column}: {key or '(empty)'}", len(inside), mean, interval))
    return found


def _worst(answers: Predictions, columns: dict[str, list[str]]) -> list[Block]:
    name, values, better = measure(answers)
    values_known = values[np.isfinite(values)]
    if not len(values_known):
        return []
    overall = float(values_known.mean())
    found = sorted(slices(columns, values, shares=better), key=lambda one: one.value if better else -one.value)
    if not found:
        return []
    worst = found[:SHOWN]
    items = [Bar(one.name, one.value, f"{one.name}: {one.value:.3f}, {one.rows:,} rows", one.interval) for one in worst]
    chart = charts.bars(items, name, (overall, f"all rows {overall:.3f}"), high=1.0 if better else None)
    note = (
        "Whiskers: 95 % intervals. A slice whose whisker does not reach the line differs, or is the one in twenty "
        f"that does so by chance. Slices of {FEWEST} rows or more."
    )
    title = f"Worst slice: {short(worst[0].name, 40)}, {name} {worst[0].value:.2f} against {overall:.2f}"
    rows = [
        (
            short(one.name, 60),
            one.rows,
            f"{one.value:.3f}",
            f"{one.interval[0]:.3f} to {one.interval[1]:.3f}",
            _verdict(one, overall, better),
        )
        for one in worst
    ]
    table = Table("The same in figures", ("slice", "rows", name, "95 % interval", "against all"), rows)
    return [Figure(title, chart, note), table]


def _verdict(one: Slice, overall: float, better: bool) -> str:
    low, high = one.interval
    if low <= overall <= high:
        return "alike"
    return "worse" if (high < overall) == better else "better"


def _boxes(answers: Predictions, columns: dict[str, list[str]]) -> list[Block]:
    """Box plots by each column: of the true score for numbers, of the loss for other answers, and of the length."""
    values, label = (answers.target, "true score") if answers.kind == "numbers" else (answers.loss, "loss of the row")
    found: list[Block] = []
    for column, of_row in list(columns.items())[:MOST_COLUMNS]:
        items = _grouped(of_row, values)
        if len(items) > 1:
            low, high = items[0][1].median, items[-1][1].median
            spread = f"{short(items[-1][0], 30)} has the highest median" if high > low else "the medians are equal"
            note = "Box: the middle half of the rows; line in it: the median; whiskers: 5th to 95th percentile."
            title = f"{label[0].upper()}{label[1:]} by {short(column)}: {spread}"
            found.append(Figure(title, charts.boxes(items, label), note))
    return found


def _grouped(of_row: Sequence[str], values: stats.Floats) -> list[tuple[str, stats.Box]]:
    """A box per value of the column, for the most frequent ones, by their median."""
    keys, known = np.array(of_row, dtype=object), np.isfinite(values)
    frequent = [key for key, count in Counter(of_row).most_common(MOST_BOXES) if count >= FEWEST]
    parts = [(key or "(empty)", values[(keys == key) & known]) for key in frequent]
    return sorted(((key, stats.box(part)) for key, part in parts if len(part)), key=lambda item: item[1].median)
