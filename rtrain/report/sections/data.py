"""The rows: how many, of which labels, how long, which were set aside."""

from pathlib import Path

import numpy as np
import pyarrow.parquet

from rtrain.data.store.store import Store
from rtrain.report import stats
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.svg import number
from rtrain.report.live import event_messages
from rtrain.report.sections import labels

MOST_BAD = 50
NAMES = {"train": "training", "valid": "validation", "test": "test"}


def section(run: Collected) -> Section:
    store = run.store
    if store is None:
        note = Note("The token store is no longer where the run left it; what it says of the rows cannot be shown.")
        return Section("data", "Data", "", [note])
    overlaps = {event["split"]: Note(event_messages.overlap(event)) for event in run.of("overlap")}
    blocks: list[Block] = [*overlaps.values(), _splits(run, store), _lengths(run, store), *labels.blocks(run, store)]
    blocks.append(_quarantine(store))
    made, without = store.manifest.copies, store.manifest.unlabelled.get("rows", 0)
    intro = f"{store.given:,} rows were read; {store.manifest.quarantined:,} more were set aside as unusable. "
    intro += f"{made:,} copies of training rows were made. " if made else ""
    intro += f"{without:,} rows without labels come after them. " if without else ""
    intro += _split(run)
    return Section("data", "Data", intro, blocks)


def _split(run: Collected) -> str:
    """How the rows came to their splits."""
    data = run.config.recipe.data
    if data.split is not None:
        return f"The column {data.split} says which split a row is in."
    own = [NAMES[split] for split, path in (("valid", data.valid), ("test", data.test)) if path is not None]
    text = f"The {' and '.join(own)} rows have files of their own. " if own else ""
    if len(own) == 2:
        return text.strip()
    by = "text" if data.split_by is None else f"column {data.split_by}"
    text += f"{'The others' if own else 'Rows'} are split by a hash of their {by}, so that the split never changes and "
    text += f"equal {by if data.split_by is None else 'value'}s never straddle it."
    if data.valid_part:
        text += f" The validation rows are part {data.valid_part} of those that could be, counted from 0."
    if data.folds is not None and data.test is None:
        text += f" The test rows are fold {data.fold} of {data.folds}, counted from 0."
    return text


def lengths(store: Store, split: str) -> stats.Floats:
    """Tokens of the rows of a split, or of a sample of them."""
    column = store.column(split, "length")
    return column[stats.sample(len(column), labels.MOST_ROWS)].astype(np.float64)


def _splits(run: Collected, store: Store) -> Table:
    rows = []
    for split, count in store.manifest.rows.items():
        found = lengths(store, split)
        middle, high = np.percentile(found, (50, 95)) if len(found) else (0, 0)
        rows.append((NAMES[split], count, store.manifest.tokens[split], f"{middle:.0f}", f"{high:.0f}"))
    cut = store.manifest.truncated
    read = run.reading
    if read.max_windows > 1:
        note = f"Longer rows are read in windows of {read.max_tokens} tokens, of which neighbours share {read.stride}"
        note += f": {cut:,} rows have more than {read.max_windows} and were cut." if cut else "; none was cut."
    else:
        note = f"{cut:,} rows are longer than data.max_tokens = {read.max_tokens} and were cut."
        note = note if cut else f"No row was cut: all fit data.max_tokens = {read.max_tokens}."
    return Table(
        "Rows and tokens of each split", ("split", "rows", "tokens", "median length", "95th percentile"), rows, note
    )


def _lengths(run: Collected, store: Store) -> Figure:
    found = {split: lengths(store, split) for split in store.manifest.rows if store.rows(split)}
    edges = stats.edges(np.concatenate(list(found.values())))
    shares = {NAMES[split]: (100 * np.histogram(v, edges)[0] / len(v)).tolist() for split, v in found.items()}
    read, longest = run.reading, float(edges[-1])
    limit, what = read.max_tokens, "cut at" if read.max_windows == 1 else "window of"
    chart = charts.histogram(
        edges.tolist(),
        shares,
        "length (tokens)",
        "rows (%)",
        (limit, f"{what} {limit}") if longest >= 0.6 * limit else None,
    )
    train = found["train"]
    title = f"Half of the training rows have {np.median(train):,.0f} tokens or fewer; the longest {train.max():,.0f}"
    return Figure(title, chart, "Filled: training rows; outlines: the other splits, which should look alike.")


def _quarantine(store: Store) -> Block:
    path = store.folder / "quarantine.parquet"
    table = pyarrow.parquet.read_table(path) if store.manifest.quarantined and path.is_file() else None
    if table is None or not table.num_rows:
        return Note("No row was set aside: every row of the files could be used.")
    head = table.slice(0, MOST_BAD).to_pylist()
    rows = [(Path(row["source"]).name, row["line"], row["reason"]) for row in head]
    note = f"{number(table.num_rows)} rows were left out of training and of every score; mend the lines to get them in."
    if table.num_rows > len(rows):
        note += f" The first {len(rows)} are listed; all are in {path}."
    return Table("Rows that were set aside, with the reason", ("file", "line", "reason"), rows, note, wide=True)
