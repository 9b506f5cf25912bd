"""Labels of the training rows, by kind of output."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rtrain.data.store.store import Store
from rtrain.report import label_counts, stats
from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure
from rtrain.report.drawing.charts import Bar
from rtrain.report.drawing.svg import truncate

MAX_ROWS = 200_000
"""Most rows in the chart of lengths."""
MAX_LABELS, LABELS_PER_END = 30, 12


def build_blocks(run: RunData, store: Store) -> list[Block]:
    draw = _BUILDERS.get(run.output)
    return draw(store) if draw else []


# ----------------------------------------------------------------------------------------------------- labels of rows


def _build_class_blocks(store: Store) -> list[Block]:
    return [build_bar_chart(store.manifest.labels, label_counts.count_classes(store))]


def _build_label_blocks(store: Store) -> list[Block]:
    counts, rows_by_count = label_counts.count_labels(store)
    items = [Bar(str(number), float(rows), f"{rows:,} rows") for number, rows in enumerate(rows_by_count) if rows]
    title = (
        f"{counts.sum() / max(1, sum(rows_by_count)):.2f} labels per training row; {rows_by_count[0]:,} rows have none"
    )
    label_count_figure = Figure(
        title, charts.draw_bars(items[:MAX_LABELS], "training rows"), "Rows by the number of their labels."
    )
    return [build_bar_chart(store.manifest.labels, counts), label_count_figure]


def _build_head_blocks(store: Store) -> list[Block]:
    return [
        build_bar_chart(head_labels, counts, f"{name}: ")
        for name, head_labels, counts in label_counts.count_heads(store)
    ]


def build_bar_chart(names: Sequence[str], counts: stats.Ints, head: str = "", unit: str = "rows") -> Figure:
    order = np.argsort(-counts, kind="stable")
    most_frequent, rarest = int(order[0]), int(order[-1])
    shown_codes = (
        order if len(order) <= MAX_LABELS else np.concatenate([order[:LABELS_PER_END], order[-LABELS_PER_END:]])
    )
    items = [Bar(names[code], float(counts[code]), f"{names[code]}: {counts[code]:,} {unit}") for code in shown_codes]
    ratio_to_rarest = counts[most_frequent] / max(1, counts[rarest])
    ratio = (
        f", {ratio_to_rarest:{'.1f' if ratio_to_rarest < 10 else ',.0f'}} times the rarest" if counts[rarest] else ""
    )
    is_uniform = counts[most_frequent] == counts[rarest]
    note = "Training rows."
    if not is_uniform:
        note = f"Training rows; the rarest label is {truncate(names[rarest])} with {counts[rarest]:,} {unit}."
    if len(order) > len(shown_codes):
        note += (
            f" Of {len(order)} labels, the {LABELS_PER_END} most frequent and the {LABELS_PER_END} rarest are drawn."
        )
    title = f"{head}{len(names)} labels: {truncate(names[most_frequent])} has {counts[most_frequent]:,} {unit}{ratio}"
    if is_uniform:
        title = f"{head}{len(names)} labels of {counts[most_frequent]:,} {unit} each"
    return Figure(title, charts.draw_bars(items, f"training {unit}"), note)


# ------------------------------------------------------------------------------------------- numbers, tags, questions


def _build_number_blocks(store: Store) -> list[Block]:
    positions = stats.sample_rows(store.num_labeled("train"), MAX_ROWS)
    target = store.targets("train").values.astype(np.float64)[positions]
    edges = stats.bin_edges(target)
    counts = np.histogram(target, edges)[0]
    return [
        Figure(
            f"The true scores of the training rows: {target.min():.3g} to {target.max():.3g}",
            charts.draw_histogram(edges.tolist(), {"true score": counts.tolist()}, "true score", "rows"),
            f"Mean {target.mean():.3g}, standard deviation {target.std():.3g}.",
        ),
    ]


def _build_tag_blocks(store: Store) -> list[Block]:
    entity_counts = label_counts.count_entities(store)
    names, numbers = entity_counts.types, entity_counts.counts
    if not numbers.sum():
        return []
    share = 100 * entity_counts.rows_with_entities / max(1, store.num_labeled("train"))
    chart = build_bar_chart(names, numbers, unit="entities").chart
    note = f"Training rows by type of entity; {share:.0f} % of the rows have one."
    title = f"{int(numbers.sum()):,} entities of {len(names)} types: {truncate(names[0])} is the most frequent"
    if len(names) == 1:
        title = f"{int(numbers.sum()):,} entities, all of the type {truncate(names[0])}"
    return [Figure(title, chart, note)]


def _build_span_blocks(store: Store) -> list[Block]:
    lengths, unanswered = [], 0
    for row in store.targets("train"):
        span_lengths = [last - first + 1 for first, last in row.reshape(-1, 2).tolist() if last > 0]
        lengths += span_lengths[:1]
        unanswered += not span_lengths
    if not lengths:
        return []
    values = np.array(lengths, dtype=np.float64)
    edges = stats.bin_edges(values)
    counts = np.histogram(values, edges)[0].tolist()
    title = f"Half of the answers have {np.median(values):.0f} tokens or fewer"
    note = f"Training questions; {unanswered:,} more have no answer, or none that a window holds as a whole."
    return [
        Figure(title, charts.draw_histogram(edges.tolist(), {"answers": counts}, "answer (tokens)", "questions"), note)
    ]


_BUILDERS: Mapping[str, Callable[[Store], list[Block]]] = {
    "classes": _build_class_blocks,
    "labels": _build_label_blocks,
    "heads": _build_head_blocks,
    "number": _build_number_blocks,
    "tags": _build_tag_blocks,
    "spans": _build_span_blocks,
}
