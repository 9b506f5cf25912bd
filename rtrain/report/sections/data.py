"""The rows: numbers, labels, lengths, quarantined rows."""

from pathlib import Path

import numpy as np
import pyarrow.parquet

from rtrain.data.store.store import Store
from rtrain.report import stats
from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.svg import format_number
from rtrain.report.live import event_messages
from rtrain.report.sections import labels

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
        *labels.build_blocks(run, store),
    ]
    blocks.append(_build_quarantine_table(store))
    copies, unlabeled_rows = store.manifest.copies, store.manifest.unlabeled.get("rows", 0)
    intro = (
        f"{store.num_source_rows:,} rows were read; {store.manifest.quarantined:,} more were quarantined as unusable. "
    )
    intro += f"{copies:,} copies of training rows were added. " if copies else ""
    intro += f"{unlabeled_rows:,} rows without labels were added. " if unlabeled_rows else ""
    intro += _describe_split(run)
    return Section("data", "Data", intro, blocks)


def _describe_split(run: RunData) -> str:
    """Describe the split."""
    data = run.config.recipe.data
    if data.split_column is not None:
        return f"The column {data.split_column} is the split of each row."
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
    if data.validation_fold:
        text += f" The validation rows are fold {data.validation_fold} of the possible ones, counted from 0."
    if data.folds is not None and data.test is None:
        text += f" The test rows are fold {data.fold} of {data.folds}, counted from 0."
    return text


def sample_lengths(store: Store, split: str) -> stats.Floats:
    """Tokens per row of a split, or of a sample of its rows."""
    column = store.column(split, "length")
    return column[stats.sample_rows(len(column), labels.MAX_ROWS)].astype(np.float64)


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
