"""The rows: numbers, lengths, labels by kind of output, quarantined rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet

from rtrain.data.store.store import Store
from rtrain.report import charts, data_stats, event_messages, stats
from rtrain.report.charts import Bar
from rtrain.report.collect import RunData
from rtrain.report.page import Block, Figure, Note, Section, Table
from rtrain.report.svg import format_number, truncate

MAX_QUARANTINED_ROWS = 50
SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}


def build_section(run: RunData) -> Section:
    store = run.store
    if store is None:
        note = Note("The token store of the run is missing, so its rows cannot be shown.")
        return Section("data", "Data", "", [note])
    overlaps = {event["split"]: Note(event_messages.format_overlap(event)) for event in run.events_of_kind("overlap")}
    blocks: list[Block] = [
        *overlaps.values(),
        _build_split_table(run, store),
        _build_length_chart(run, store),
        *build_blocks(run, store),
    ]
    blocks.append(_build_quarantine_table(store))
    copies, unlabeled_rows = store.manifest.copies, store.manifest.unlabeled.get("rows", 0)
    left_out, relabeled = (store.manifest.selection.get(name, 0) for name in ("left_out", "relabeled"))
    intro = (
        f"{store.num_source_rows:,} rows were read; {store.manifest.quarantined:,} more were quarantined as unusable. "
    )
    intro += f"data.where left out {left_out:,} more. " if left_out else ""
    intro += f"data.labels renamed {relabeled:,} labels. " if relabeled else ""
    intro += f"{copies:,} copies of training rows were added. " if copies else ""
    intro += f"{unlabeled_rows:,} rows without labels were added. " if unlabeled_rows else ""
    intro += _describe_split(run)
    return Section("data", "Data", intro, blocks)


def _describe_split(run: RunData) -> str:
    data = run.config.recipe.data
    if data.split_column is not None:
        return f"The column {data.split_column} is the split of each row."
    if data.split_time is not None:
        return f"The test rows are the newest by the column {data.split_time.column}, the validation rows those before."
    split_files = [
        SPLIT_NAMES[split] for split, path in (("valid", data.valid), ("test", data.test)) if path is not None
    ]
    text = f"The {' and '.join(split_files)} rows have separate files. " if split_files else ""
    if len(split_files) == 2:
        return text.strip()
    unit = "text" if data.group_column is None else f"column {data.group_column}"
    text += (
        f"{'The others' if split_files else 'Rows'} are split by a hash of their {unit}, so that the split never "
        "changes and "
    )
    text += f"equal {unit if data.group_column is None else 'value'}s never straddle it."
    if data.stratify is not None:
        text += f" Each value of {data.stratify} has its share of each split."
    if data.validation_fold:
        text += f" The validation rows are fold {data.validation_fold} of the possible ones, counted from 0."
    if data.folds is not None and data.test is None:
        text += f" The test rows are fold {data.fold} of {data.folds}, counted from 0."
    return text


def sample_lengths(store: Store, split: str) -> stats.Floats:
    """Tokens per row of a split, or of a sample of its rows."""
    column = store.column(split, "length")
    return column[stats.sample_rows(len(column), MAX_ROWS)].astype(np.float64)


def _build_split_table(run: RunData, store: Store) -> Table:
    rows = []
    for split, count in store.manifest.rows.items():
        row_lengths = sample_lengths(store, split)
        median_length, high_length = np.percentile(row_lengths, (50, 95)) if len(row_lengths) else (0, 0)
        rows.append(
            (SPLIT_NAMES[split], count, store.manifest.tokens[split], f"{median_length:.0f}", f"{high_length:.0f}")
        )
    cut = store.manifest.truncated
    reading = run.reading
    if reading.max_windows > 1:
        note = f"Longer rows are read in windows of {reading.max_tokens} tokens with an overlap of {reading.stride}"
        note += (
            f": {cut:,} rows have more than {reading.max_windows} windows and were truncated."
            if cut
            else "; no row was truncated."
        )
    else:
        note = f"{cut:,} rows are longer than data.max_tokens = {reading.max_tokens} and were truncated."
        note = note if cut else f"No row was truncated: all fit data.max_tokens = {reading.max_tokens}."
    return Table(
        "Rows and tokens of each split", ("split", "rows", "tokens", "median length", "95th percentile"), rows, note
    )


def _build_length_chart(run: RunData, store: Store) -> Figure:
    lengths_by_split = {split: sample_lengths(store, split) for split in store.manifest.rows if store.num_rows(split)}
    edges = stats.bin_edges(np.concatenate(list(lengths_by_split.values())))
    shares = {
        SPLIT_NAMES[split]: (100 * np.histogram(v, edges)[0] / len(v)).tolist() for split, v in lengths_by_split.items()
    }
    reading, longest = run.reading, float(edges[-1])
    limit, limit_label = reading.max_tokens, "limit" if reading.max_windows == 1 else "window of"
    chart = charts.draw_histogram(
        edges.tolist(),
        shares,
        "length (tokens)",
        "rows (%)",
        (limit, f"{limit_label} {limit}") if longest >= 0.6 * limit else None,
    )
    train = lengths_by_split["train"]
    title = f"Half of the training rows have {np.median(train):,.0f} tokens or fewer; the longest {train.max():,.0f}"
    return Figure(title, chart, "Filled: training rows; outlines: the other splits, which should look alike.")


def _build_quarantine_table(store: Store) -> Block:
    path = store.folder / "quarantine.parquet"
    table = pyarrow.parquet.read_table(path) if store.manifest.quarantined and path.is_file() else None
    if table is None or not table.num_rows:
        return Note("No row was quarantined.")
    head = table.slice(0, MAX_QUARANTINED_ROWS).to_pylist()
    rows = [(Path(row["source"]).name, row["line"], row["reason"]) for row in head]
    note = (
        f"{format_number(table.num_rows)} rows are excluded from training and from all scores; fix the lines to "
        "include them."
    )
    if table.num_rows > len(rows):
        note += f" The first {len(rows)} are listed; all are in {path}."
    return Table("Quarantined rows", ("file", "line", "reason"), rows, note, wide=True)


MAX_ROWS = 200_000
"""Most rows in the chart of lengths."""
MAX_LABELS, LABELS_PER_END = 30, 12


def build_blocks(run: RunData, store: Store) -> list[Block]:
    draw = _BUILDERS.get(run.output)
    return draw(store) if draw else []


# ----------------------------------------------------------------------------------------------------- labels of rows


def _build_class_blocks(store: Store) -> list[Block]:
    return [build_bar_chart(store.manifest.labels, data_stats.count_classes(store))]


def _build_label_blocks(store: Store) -> list[Block]:
    counts, rows_by_count = data_stats.count_labels(store)
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
        build_bar_chart(head_labels, counts, f"{name}: ") for name, head_labels, counts in data_stats.count_heads(store)
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
        )
    ]


def _build_tag_blocks(store: Store) -> list[Block]:
    entity_counts = data_stats.count_entities(store)
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
