"""profile.html: stacked bars of step times, and tables; for one profile, or for two on the same scale."""

from collections.abc import Sequence

from rtrain.profiling import tables
from rtrain.profiling.tables import ProfileDocument, TextTable
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import LineSeries, StackedBar
from rtrain.report.drawing.page import render_html
from rtrain.report.drawing.svg import format_rate

MAX_BARS = 40
BARS_NOTE = (
    "The parts of a bar add up to the step. Gradient sync: the worker waits, also for slower workers. Hidden "
    "communication runs while the worker computes, and is not part of the bar."
)


def render_profile(document: ProfileDocument) -> str:
    rows = document["rows"]
    tiles = [
        Tile(row["name"], f"{tables.format_ms(row['step_s'])} ms", f"{format_rate(row['rows_per_second'])} rows/s")
        for row in rows[:6]
    ]
    scaling = _scaling_section(document)
    sections = [
        Section(
            "where",
            "Where the time goes",
            "",
            [_stacked_bars([document], [""]), _wide_table("Each worker", tables.time_table(document), tables.LEGEND)],
        ),
        *([] if scaling is None else [scaling]),
        Section(
            "speed",
            "Speed",
            "",
            [_wide_table("Speed, and the cost of a checkpoint", tables.speed_table(document))],
        ),
    ]
    subtitle = f"A profile of the recipe {document['recipe']} by rtrain"
    return render_html(document["name"], subtitle, tiles, sections, lead=tables.describe_profile(document))


def render_comparison(documents: Sequence[ProfileDocument], names: Sequence[str]) -> str:
    """Render two profiles on one page."""
    descriptions = [
        Note(f"{name}: {tables.describe_profile(document)}.") for name, document in zip(names, documents, strict=True)
    ]
    comparison = _wide_table("Parts", tables.comparison_table(documents, names), tables.LEGEND)
    unpaired_notes = [Note(note) for note in tables.unpaired_notes(documents, names)]
    bars = _stacked_bars(documents, [f"{name}: " for name in names])
    sections = [
        Section("where", "Where the time goes", "", [bars, comparison, *unpaired_notes]),
        Section("measured", "Measured", "", descriptions),
    ]
    return render_html(" and ".join(names), "Two profiles by rtrain", [], sections)


def _stacked_bars(documents: Sequence[ProfileDocument], prefixes: Sequence[str]) -> Block:
    parts = tables.visible_parts(*documents)
    bars = [
        StackedBar(f"{lead}{row['name']}, worker {worker['rank']}", [1000 * worker["parts"][part] for part in parts])
        for lead, document in zip(prefixes, documents, strict=True)
        for row in document["rows"]
        for worker in row["worker_summaries"]
    ]
    note = (
        BARS_NOTE
        if len(bars) <= MAX_BARS
        else f"{BARS_NOTE} The first {MAX_BARS} of {len(bars)} bars; the table has all of them."
    )
    chart = charts.draw_stacked_bars(
        bars[:MAX_BARS], [tables.part_label(part) for part in parts], "milliseconds of a step"
    )
    return Figure("A step of each worker, by part", chart, note, wide=True)


def _scaling_section(document: ProfileDocument) -> Section | None:
    columns, lines = tables.scaling_table(document), tables.scaling_rows(document["rows"])
    if columns is None:
        return None
    workers = [line["workers"] for line in lines]
    ideal = [count / workers[0] for count in workers]
    series = [
        LineSeries("measured", workers, [line["speedup"] for line in lines], True),
        LineSeries("in proportion", workers, ideal),
    ]
    chart = charts.draw_lines(series, "workers", "speed-up")
    figure = Figure("Speed-up with workers", chart, "Relative to the fewest workers; in proportion is the upper bound.")
    notes = [Note(warning) for warning in tables.scaling_warnings(document["rows"])]
    return Section("scaling", "Scaling", "", [figure, _wide_table("The same steps with more workers", columns), *notes])


def _wide_table(title: str, columns: TextTable, note: str = "") -> Table:
    return Table(title, columns.header, columns.rows, note, wide=True)
