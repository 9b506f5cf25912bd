"""What the training rows are labelled with, by the kind of output."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rtrain.data.store.store import Store
from rtrain.report import label_counts, stats
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure
from rtrain.report.drawing.charts import Bar
from rtrain.report.drawing.svg import short

MOST_ROWS = 200_000
"""Rows whose lengths are drawn; more would not change the picture."""
MOST_LABELS, ENDS = 30, 12


def blocks(run: Collected, store: Store) -> list[Block]:
    draw = _KINDS.get(run.output)
    return draw(store) if draw else []


# ----------------------------------------------------------------------------------------------------- labels of rows


def _classes(store: Store) -> list[Block]:
    return [bars(store.manifest.labels, label_counts.of_classes(store))]


def _labels(store: Store) -> list[Block]:
    counts, each = label_counts.of_labels(store)
    items = [Bar(str(number), float(rows), f"{rows:,} rows") for number, rows in enumerate(each) if rows]
    title = f"{counts.sum() / max(1, sum(each)):.2f} labels per training row; {each[0]:,} rows have none"
    several = Figure(title, charts.bars(items[:MOST_LABELS], "training rows"), "Rows by the number of their labels.")
    return [bars(store.manifest.labels, counts), several]


def _heads(store: Store) -> list[Block]:
    return [bars(own, counts, f"{name}: ") for name, own, counts in label_counts.of_heads(store)]


def bars(names: Sequence[str], counts: stats.Ints, head: str = "", unit: str = "rows") -> Figure:
    order = np.argsort(-counts, kind="stable")
    most, least = int(order[0]), int(order[-1])
    shown = order if len(order) <= MOST_LABELS else np.concatenate([order[:ENDS], order[-ENDS:]])
    items = [Bar(names[code], float(counts[code]), f"{names[code]}: {counts[code]:,} {unit}") for code in shown]
    times = counts[most] / max(1, counts[least])
    ratio = f", {times:{'.1f' if times < 10 else ',.0f'}} times the rarest" if counts[least] else ""
    alike = counts[most] == counts[least]
    note = "Training rows."
    if not alike:
        note = f"Training rows; the rarest label is {short(names[least])} with {counts[least]:,} {unit}."
    if len(order) > len(shown):
        note += f" Of {len(order)} labels, the {ENDS} most frequent and the {ENDS} rarest are drawn."
    title = f"{head}{len(names)} labels: {short(names[most])} has {counts[most]:,} {unit}{ratio}"
    if alike:
        title = f"{head}{len(names)} labels of {counts[most]:,} {unit} each"
    return Figure(title, charts.bars(items, f"training {unit}"), note)


# ------------------------------------------------------------------------------------------- numbers, tags, questions


def _number(store: Store) -> list[Block]:
    chosen = stats.sample(store.labelled("train"), MOST_ROWS)
    target = store.targets("train").values.astype(np.float64)[chosen]
    edges = stats.edges(target)
    counts = np.histogram(target, edges)[0]
    return [
        Figure(
            f"The true scores of the training rows: {target.min():.3g} to {target.max():.3g}",
            charts.histogram(edges.tolist(), {"true score": counts.tolist()}, "true score", "rows"),
            f"Mean {target.mean():.3g}, standard deviation {target.std():.3g}.",
        ),
    ]


def _tags(store: Store) -> list[Block]:
    found = label_counts.of_entities(store)
    names, numbers = found.types, found.counts
    if not numbers.sum():
        return []
    share = 100 * found.marked / max(1, store.labelled("train"))
    chart = bars(names, numbers, unit="entities").chart
    note = f"Training rows by type of entity; {share:.0f} % of the rows have one."
    title = f"{int(numbers.sum()):,} entities of {len(names)} types: {short(names[0])} is the most frequent"
    if len(names) == 1:
        title = f"{int(numbers.sum()):,} entities, all of the type {short(names[0])}"
    return [Figure(title, chart, note)]


def _spans(store: Store) -> list[Block]:
    lengths, without = [], 0
    for row in store.targets("train"):
        found = [last - first + 1 for first, last in row.reshape(-1, 2).tolist() if last > 0]
        lengths += found[:1]
        without += not found
    if not lengths:
        return []
    values = np.array(lengths, dtype=np.float64)
    edges = stats.edges(values)
    counts = np.histogram(values, edges)[0].tolist()
    title = f"Half of the answers have {np.median(values):.0f} tokens or fewer"
    note = f"Training questions; {without:,} more have no answer, or none that a window holds as a whole."
    return [Figure(title, charts.histogram(edges.tolist(), {"answers": counts}, "answer (tokens)", "questions"), note)]


_KINDS: Mapping[str, Callable[[Store], list[Block]]] = {
    "classes": _classes,
    "labels": _labels,
    "heads": _heads,
    "number": _number,
    "tags": _tags,
    "spans": _spans,
}
