"""What the training rows are labelled with, and whether their length gives it away; by the kind of output."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rtrain.data.stores.store import Store
from rtrain.report import label_counts, stats
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure
from rtrain.report.drawing.charts import Bar
from rtrain.report.drawing.svg import short

MOST_ROWS = 200_000
"""Rows whose lengths are drawn; more would not change the picture."""
MOST_POINTS = 1500
MOST_LABELS, ENDS = 30, 12
MOST_BOXES = 20


def blocks(run: Collected, store: Store) -> list[Block]:
    return _KINDS.get(run.output, _nothing)(store)


def _nothing(store: Store) -> list[Block]:
    return []


# ----------------------------------------------------------------------------------------------------- labels of rows


def _classes(store: Store) -> list[Block]:
    codes = store.targets("train").values.astype(np.int64)
    known = codes >= 0
    counts = np.bincount(codes[known], minlength=len(store.manifest.labels))
    return [_bars(store.manifest.labels, counts), _by_label(store, store.manifest.labels, codes)]


def _labels(store: Store) -> list[Block]:
    names = store.manifest.labels
    given = store.targets("train").matrix(len(names)) > 0
    each = given.sum(axis=1)
    counted = np.bincount(each)
    items = [Bar(str(number), float(rows), f"{rows:,} rows") for number, rows in enumerate(counted) if rows]
    title = f"{each.mean():.2f} labels per training row; {int(counted[0]):,} rows have none"
    several = Figure(title, charts.bars(items[:MOST_LABELS], "training rows"), "Rows by the number of their labels.")
    tokens = store.column("train", "length")[: len(given)].astype(np.float64)  # rows without labels come after them
    boxed = [(name, tokens[given[:, place]]) for place, name in enumerate(names)]
    note = "A row counts for each of its labels."
    return [_bars(names, given.sum(axis=0)), several, *_boxes(boxed, "Length by label", note)]


def _heads(store: Store) -> list[Block]:
    found: list[Block] = []
    for name, own, codes in of_heads(store):
        counts = np.bincount(codes[codes >= 0], minlength=len(own))
        found += [_bars(own, counts, f"{name}: "), _by_label(store, own, codes, f"{name}: ")]
    return found


def of_heads(store: Store) -> Iterator[tuple[str, Sequence[str], stats.Ints]]:
    """(name, own labels, place of each training row's label among them; negative where it has none)."""
    head = store.manifest.head
    true, start = store.targets("train").matrix(len(head.facts["heads"])).astype(np.int64), 0
    for place, (name, size) in enumerate(head.facts["heads"]):
        own = [label.removeprefix(f"{name}=") for label in head.labels[start : start + size]]
        yield name, own, true[:, place]
        start += size


def _bars(names: Sequence[str], counts: stats.Ints, head: str = "", unit: str = "rows") -> Figure:
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


def _by_label(store: Store, names: Sequence[str], codes: stats.Ints, head: str = "") -> Figure:
    chosen = np.flatnonzero(codes >= 0)
    chosen = chosen[stats.sample(len(chosen), MOST_ROWS)]
    codes, tokens = codes[chosen], store.column("train", "length")[chosen].astype(np.float64)
    explained = stats.eta_squared(tokens, codes)
    frequent = [code for code, _ in Counter(codes.tolist()).most_common(MOST_BOXES)]
    items = sorted(((names[code], stats.box(tokens[codes == code])) for code in frequent), key=_median)
    title = f"{head}The label explains {100 * explained:.0f} % of the variance of the length"
    note = (
        "Box: the middle half of the rows of a label; line in it: the median; whiskers: 5th to 95th percentile. "
        f"Correlation ratio η = {explained**0.5:.2f}. Where it is near 1, the length alone would give the label away."
    )
    if len(names) > len(items):
        note += f" The {len(items)} most frequent labels are drawn."
    return Figure(title, charts.boxes(items, "length (tokens)"), note)


def _median(item: tuple[str, stats.Box]) -> float:
    return item[1].median


def _boxes(groups: Sequence[tuple[str, stats.Floats]], name: str, note: str) -> list[Block]:
    frequent = sorted((group for group in groups if len(group[1])), key=lambda group: -len(group[1]))[:MOST_BOXES]
    items = sorted(((label, stats.box(values)) for label, values in frequent), key=_median)
    if not items:
        return []
    title = f"{name}: {short(items[-1][0], 30)} has the longest rows, {short(items[0][0], 30)} the shortest"
    note += " Box: the middle half; line in it: the median; whiskers: 5th to 95th percentile."
    return [Figure(title, charts.boxes(items, "length (tokens)"), note)]


# ------------------------------------------------------------------------------------------- numbers, tags, questions


def _number(store: Store) -> list[Block]:
    chosen = stats.sample(store.labelled("train"), MOST_ROWS)
    target = store.targets("train").values.astype(np.float64)[chosen]
    tokens = store.column("train", "length")[chosen].astype(np.float64)
    edges = stats.edges(target)
    counts = np.histogram(target, edges)[0]
    correlation = stats.pearson(tokens, target)
    said = "does not vary" if correlation is None else f"{correlation:.2f}"
    few = stats.sample(len(chosen), MOST_POINTS)
    return [
        Figure(
            f"The true scores of the training rows: {target.min():.3g} to {target.max():.3g}",
            charts.histogram(edges.tolist(), {"true score": counts.tolist()}, "true score", "rows"),
            f"Mean {target.mean():.3g}, standard deviation {target.std():.3g}.",
        ),
        Figure(
            f"Length and true score: correlation {said}",
            charts.scatter(tokens[few], target[few], "length (tokens)", "true score"),
            "A point per training row. A model that merely counts words would do well where it is high.",
        ),
    ]


def _tags(store: Store) -> list[Block]:
    found = label_counts.of_entities(store)
    names, numbers = found.types, found.counts
    if not numbers.sum():
        return []
    share = 100 * found.marked / max(1, store.labelled("train"))
    bars = _bars(names, numbers, unit="entities")
    note = f"Training rows by type of entity; {share:.0f} % of the rows have one."
    title = f"{int(numbers.sum()):,} entities of {len(names)} types: {short(names[0])} is the most frequent"
    if len(names) == 1:
        title = f"{int(numbers.sum()):,} entities, all of the type {short(names[0])}"
    return [Figure(title, bars.chart, note)]


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
