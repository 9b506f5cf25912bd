"""The rows: how many, of which labels, how long, which were set aside."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet

from rtrain.data.store import Store
from rtrain.report import charts, stats
from rtrain.report.blocks import Block, Figure, Note, Section, Table
from rtrain.report.charts import Bar
from rtrain.report.collect import Run
from rtrain.report.sections import terms
from rtrain.report.svg import number, short

MOST_ROWS = 200_000
"""Rows whose lengths are drawn; more would not change the picture."""
MOST_LABELS, ENDS = 30, 12
MOST_BOXES = 20
MOST_BAD = 50
NAMES = {"train": "training", "valid": "validation", "test": "test"}


def section(run: Run) -> Section:
    store = run.store
    if store is None:
        note = Note("The token store is no longer where the run left it; what it says of the rows cannot be shown.")
        return Section("data", "Data", "", [note])
    blocks: list[Block] = [_splits(store), *_labels(run, store), _lengths(run, store), *_length_by_label(run, store)]
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
    return column[stats.sample(len(column), MOST_ROWS)].astype(np.float64)


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


def _labels(run: Run, store: Store) -> list[Block]:
    answers = run.predictions
    if answers is not None and answers.kind == "numbers":
        edges = stats.edges(answers.target)
        counts = np.histogram(answers.target, edges)[0]
        chart = charts.histogram(edges.tolist(), {"true score": counts.tolist()}, "true score", "rows")
        note = f"Mean {answers.target.mean():.3g}, standard deviation {answers.target.std():.3g}."
        return [Figure(f"The true scores of the {NAMES[answers.split]} rows", chart, note)]
    if (codes := run.classes()) is None:
        return []
    names = store.manifest.labels
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    most, least = int(order[0]), int(order[-1])
    shown = order if len(order) <= MOST_LABELS else np.concatenate([order[:ENDS], order[-ENDS:]])
    items = [Bar(names[code], float(counts[code]), f"{names[code]}: {counts[code]:,} rows") for code in shown]
    ratio = f", {counts[most] / counts[least]:.1f} times the rarest" if counts[least] else ""
    note = f"Training rows per label; the rarest is {short(names[least])} with {counts[least]:,}."
    if len(order) > len(shown):
        note += f" Of {len(order)} labels, the {ENDS} most frequent and the {ENDS} rarest are drawn."
    title = f"{len(names)} labels: {short(names[most])} has {counts[most]:,} rows{ratio}"
    return [Figure(title, charts.bars(items, "training rows"), note)]


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


def _length_by_label(run: Run, store: Store) -> list[Block]:
    answers = run.predictions
    if answers is not None and answers.kind == "numbers":
        chosen = stats.sample(len(answers), 1500)
        tokens, target = answers.tokens[chosen].astype(np.float64), answers.target[chosen]
        correlation = stats.pearson(answers.tokens.astype(np.float64), answers.target)
        said = "does not vary" if correlation is None else f"{correlation:.2f}"
        note = (
            f"A point per {NAMES[answers.split]} row. A model that merely counts words would do well where it is high."
        )
        chart = charts.scatter(tokens, target, "length (tokens)", "true score")
        return [Figure(f"Length and true score: correlation {said}", chart, note)]
    if (codes := run.classes()) is None:
        return []
    chosen = stats.sample(store.rows("train"), MOST_ROWS)
    codes = codes[chosen]
    tokens = store.column("train", "length")[chosen].astype(np.float64)
    explained = stats.eta_squared(tokens, codes)
    frequent = [code for code, _ in Counter(codes.tolist()).most_common(MOST_BOXES)]
    items = [(store.manifest.labels[code], stats.box(tokens[codes == code])) for code in frequent]
    items.sort(key=lambda item: item[1].median)
    title = f"The label explains {100 * explained:.0f} % of the variance of the length"
    note = (
        "Box: the middle half of the rows of a label; line in it: the median; whiskers: 5th to 95th percentile. "
        f"Correlation ratio η = {explained**0.5:.2f}. Where it is near 1, the length alone would give the label away."
    )
    if len(store.manifest.labels) > len(items):
        note += f" The {len(items)} most frequent labels are drawn."
    return [Figure(title, charts.boxes(items, "length (tokens)"), note)]


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
