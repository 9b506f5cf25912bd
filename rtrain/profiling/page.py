"""profile.html: stacked bars of where the time went, and the tables; of one profile, or of two on the same scale."""

from collections.abc import Sequence

from rtrain.profiling import tables
from rtrain.profiling.tables import Columns, Document
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import Line, Stacked
from rtrain.report.drawing.page import render
from rtrain.report.drawing.svg import rate

MOST_BARS = 40
NOTE = (
    "The parts of a bar add up to the update. Exchange: the worker stands still, also for slower workers. What goes "
    "while it computes is hidden, and no part of the bar."
)


def page(document: Document) -> str:
    rows = document["rows"]
    tiles = [
        Tile(row["name"], f"{tables.ms(row['update'])} ms", f"{rate(row['rows_per_second'])} rows/s")
        for row in rows[:6]
    ]
    scale = _scaling(document)
    sections = [
        Section(
            "where",
            "Where the time goes",
            "",
            [_bars([document], [""]), _block("Each worker", tables.where(document), tables.LEGEND)],
        ),
        *([] if scale is None else [scale]),
        Section(
            "beside",
            "Beside it",
            "",
            [_block("Speed, and what a checkpoint costs", tables.speed(document))],
        ),
    ]
    about = f"A profile of the recipe {document['recipe']} by rtrain"
    return render(document["name"], about, tiles, sections, lead=tables.told(document))


def beside(documents: Sequence[Document], names: Sequence[str]) -> str:
    """Two profiles, of two machines or two settings, on one page."""
    every = [Note(f"{name}: {tables.told(document)}.") for name, document in zip(names, documents, strict=True)]
    compared = _block("Part by part", tables.beside(documents, names), tables.LEGEND)
    left = [Note(one) for one in tables.unpaired(documents, names)]
    bars = _bars(documents, [f"{name}: " for name in names])
    sections = [
        Section("where", "Where the time goes", "", [bars, compared, *left]),
        Section("what", "What was measured", "", every),
    ]
    return render(" and ".join(names), "Two profiles by rtrain", [], sections)


def _bars(documents: Sequence[Document], before: Sequence[str]) -> Block:
    parts = tables.shown_parts(*documents)
    bars = [
        Stacked(f"{lead}{row['name']}, worker {one['rank']}", [1000 * one["parts"][part] for part in parts])
        for lead, document in zip(before, documents, strict=True)
        for row in document["rows"]
        for one in row["of_workers"]
    ]
    note = NOTE if len(bars) <= MOST_BARS else f"{NOTE} The first {MOST_BARS} of {len(bars)} bars; the table has all."
    chart = charts.stacked(bars[:MOST_BARS], [tables.named(part) for part in parts], "milliseconds of an update")
    return Figure("An update of each worker, part by part", chart, note, wide=True)


def _scaling(document: Document) -> Section | None:
    columns, lines = tables.scaled(document), tables.scaling(document["rows"])
    if columns is None:
        return None
    workers = [one["workers"] for one in lines]
    ideal = [one / workers[0] for one in workers]
    series = [Line("measured", workers, [one["speedup"] for one in lines], True), Line("in proportion", workers, ideal)]
    chart = charts.lines(series, "workers", "speed-up")
    figure = Figure("Speed-up with workers", chart, "Beside the fewest workers; in proportion is what no run exceeds.")
    notes = [Note(one) for one in tables.warnings(document["rows"])]
    return Section("scaling", "Scaling", "", [figure, _block("The same updates with more workers", columns), *notes])


def _block(title: str, columns: Columns, note: str = "") -> Table:
    return Table(title, columns.head, columns.rows, note, wide=True)
