"""The rows: how many, of which labels, how long, which were set aside."""

from pathlib import Path

import numpy as np
import pyarrow.parquet

from rtrain.data.store import Store
from rtrain.report import charts, stats
from rtrain.report.blocks import Block, Figure, Note, Section, Table
from rtrain.report.collect import Run
from rtrain.report.sections import labels, terms
from rtrain.report.svg import number

MOST_BAD = 50
NAMES = {"train": "training", "valid": "validation", "test": "test"}


def section(run: Run) -> Section:
    store = run.store
    if store is None:
        note = Note("The token store is no longer where the run left it; what it says of the rows cannot be shown.")
        return Section("data", "Data", "", [note])
    blocks: list[Block] = [_splits(store), _lengths(run, store), *labels.blocks(run, store)]
    blocks += [*terms.blocks(run, store), _quarantine(store)]
    total = sum(store.manifest.rows.values())
    intro = (
        f"{total:,} rows were read; {store.manifest.quarantined:,} more were set aside as unusable. Rows are split by "
        "a hash of their text, so that the split never changes and equal texts never straddle it."
    )
    return Section("data", "Data", intro, blocks)


def lengths(store: Store, split: str) -> stats.Floats:
    """Tokens of the rows of a split, or of a sample of them."""
    column = store.column(split, "length")
    return column[stats.sample(len(column), labels.MOST_ROWS)].astype(np.float64)


def _splits(store: Store) -> Table:
    rows = []
    for split, count in store.manifest.rows.items():
        found = lengths(store, split)
        middle, high = np.percentile(found, (50, 95)) if len(found) else (0, 0)
        rows.append((NAMES[split], count, store.manifest.tokens[split], f"{middle:.0f}", f"{high:.0f}"))
    cut = store.manifest.truncated
    note = (
        f"{cut:,} rows are longer than data.max_tokens and were cut."
        if cut
        else "No row was cut: all fit data.max_tokens."
    )
    return Table(
        "Rows and tokens of each split", ("split", "rows", "tokens", "median length", "95th percentile"), rows, note
    )


def _lengths(run: Run, store: Store) -> Figure:
    found = {split: lengths(store, split) for split in store.manifest.rows if store.rows(split)}
    edges = stats.edges(np.concatenate(list(found.values())))
    shares = {NAMES[split]: (100 * np.histogram(v, edges)[0] / len(v)).tolist() for split, v in found.items()}
    limit, longest = run.config.recipe.data.max_tokens, max(float(v.max()) for v in found.values())
    chart = charts.histogram(
        edges.tolist(),
        shares,
        "length (tokens)",
        "rows (%)",
        (limit, f"cut at {limit}") if longest >= 0.6 * limit else None,
    )
    train = found["train"]
    title = f"Half of the training rows have {np.median(train):.0f} tokens or fewer; the longest {train.max():.0f}"
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
