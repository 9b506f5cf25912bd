"""Tables of a profile for the terminal, and its page (profile.html), for one profile or two on one scale. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.parallel.profiler import GRADIENT_SYNC, STEP_PARTS
from rtrain.report import charts
from rtrain.report.charts import LineSeries, StackedBar
from rtrain.report.page import Block, Figure, Note, Section, Table, Tile, render_html
from rtrain.report.svg import format_duration, format_rate

ProfileDocument = Mapping[str, Any]


@dataclass(frozen=True)
class TextTable:
    """A text table; numbers are right-aligned from column `first_number_column` on."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    first_number_column: int = 1

    @property
    def formatted(self) -> str:
        all_rows = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in all_rows) for column in range(len(self.header))]
        return "\n".join(
            "  ".join(
                cell.rjust(size) if column >= self.first_number_column else cell.ljust(size)
                for column, (cell, size) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in all_rows
        )


def format_ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.1f}" if value >= 9.95 else f"{value:.2f}"


def part_label(part: str) -> str:
    """Display name of a part."""
    return part.replace("_", " ")


MIN_SHOWN_S = 5e-6
"""Minimum seconds of a displayed part: an unused part takes about a microsecond."""


def visible_parts(*documents: ProfileDocument) -> list[str]:
    """Parts that took time on any worker."""
    workers = [worker for document in documents for row in document["rows"] for worker in row["worker_summaries"]]
    return [part for part in STEP_PARTS if any(worker["parts"][part] >= MIN_SHOWN_S for worker in workers)]


def time_table(document: ProfileDocument) -> TextTable:
    """Milliseconds of a step by part, one line per worker and row."""
    parts = visible_parts(document)
    header = ("row", "worker", *map(part_label, parts), "step", "hidden", "cores busy")
    rows = [
        (
            row["name"] if not index else "",
            str(worker["rank"]),
            *(format_ms(worker["parts"][part]) for part in parts),
            *(format_ms(worker["step_s"]), format_ms(worker["hidden"]), f"{worker['cores_busy']:.2f}"),
        )
        for row in document["rows"]
        for index, worker in enumerate(row["worker_summaries"])
    ]
    return TextTable(header, rows)


def speed_table(document: ProfileDocument) -> TextTable:
    """Speed and checkpoint cost, one line per row."""
    header = ("row", "step", "median", "rows/s", "tokens/s", "micro-batches", "checkpoint", "every", "per step")
    return TextTable(
        header,
        [
            (
                *(row["name"], format_ms(row["step_s"]), format_ms(row["median_step_s"])),
                *(format_rate(row["rows_per_second"]), f"{row['real_tokens_per_second']:,.0f}"),
                *(f"{row['micro_batches_per_step']:g}", format_ms(row["checkpoint"]["seconds"])),
                *(f"{row['checkpoint']['every']:,}", format_ms(row["checkpoint"]["per_step"])),
            )
            for row in document["rows"]
        ],
    )


def scaling_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Scaling of a profile whose rows differ only in the number of workers, sorted by it; empty for fewer than two
    rows. Speed-up and efficiency are relative to the fewest workers."""
    if len(rows) < 2 or any(set(row["settings"]) != {"train.workers"} for row in rows):
        return []
    ordered_rows = sorted(rows, key=lambda row: int(row["workers"]))
    reference = ordered_rows[0]
    return [_scaling_row(row, reference) for row in ordered_rows]


def _scaling_row(row: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    speedup = reference["step_s"] / row["step_s"]
    return {
        "workers": row["workers"],
        "step_s": row["step_s"],
        "run_seconds": row["step_s"] * row["run_steps"],
        "speedup": speedup,
        "efficiency": speedup * reference["workers"] / row["workers"],
        "gradient_sync": statistics.fmean(worker["parts"][GRADIENT_SYNC] for worker in row["worker_summaries"]),
        "hidden": statistics.fmean(worker["hidden"] for worker in row["worker_summaries"]),
        "rows_per_second": row["rows_per_second"],
        "hosts": len(row["hosts"]),
        "order_digest": row["order_digest"],
        "same_order": row["order_digest"] == reference["order_digest"],
    }


def scaling_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings about the measurement, one sentence each."""
    messages = []
    oversubscribed = [row for row in rows if row["device"] == "cpu" and row["workers"] > sum(row["hosts"].values())]
    if oversubscribed:
        cores = sum(oversubscribed[0]["hosts"].values())
        max_workers = max(row["workers"] for row in oversubscribed)
        messages.append(
            f"Up to {max_workers} workers shared {cores} processor core{'' if cores == 1 else 's'}, since Ray's CPUs "
            f"are logical. Beyond {cores} workers the table shows the overhead of workers, not the gain of cores."
        )
    lines = scaling_rows(rows)
    if lines and not all(line["same_order"] for line in lines):
        messages.append("The order digests differ: the lines of the table did not train on the same rows.")
    return messages


def scaling_table(document: ProfileDocument) -> TextTable | None:
    """The scaling table; None if the rows are no scaling study."""
    lines = scaling_rows(document["rows"])
    times = ("workers", "step", "a run", "speed-up", "efficiency")
    header = (*times, "gradient sync", "hidden", "rows/s", "hosts", "order")
    rows = [
        (
            *(str(line["workers"]), format_ms(line["step_s"]), format_duration(line["run_seconds"])),
            *(f"{line['speedup']:.2f}", f"{line['efficiency']:.0%}", format_ms(line["gradient_sync"])),
            *(format_ms(line["hidden"]), format_rate(line["rows_per_second"]), str(line["hosts"])),
            line["order_digest"][:12],
        )
        for line in lines
    ]
    return TextTable(header, rows, first_number_column=0) if rows else None


def comparison_table(documents: Sequence[ProfileDocument], names: Sequence[str]) -> TextTable:
    """Compare two profiles row by row: mean milliseconds of each part, and the ratio of the second to the first."""
    parts = [*visible_parts(*documents), "step"]
    header = ("row", "part", *names, "ratio")
    lines = []
    for first_row, second_row in zip(*(document["rows"] for document in documents), strict=False):
        names_differ = first_row["name"] != second_row["name"]
        label = f"{first_row['name']} / {second_row['name']}" if names_differ else first_row["name"]
        for index, part in enumerate(parts):
            values = [mean_seconds(row, part) for row in (first_row, second_row)]
            ratio = f"{values[1] / values[0]:.2f}" if values[0] else "-"
            lines.append((label if not index else "", part_label(part), *map(format_ms, values), ratio))
    return TextTable(header, lines, first_number_column=2)


def unpaired_notes(documents: Sequence[ProfileDocument], names: Sequence[str]) -> list[str]:
    """Notes about rows of one profile without a counterpart in the other."""
    pairs = min(len(document["rows"]) for document in documents)
    unpaired_rows = {name: document["rows"][pairs:] for name, document in zip(names, documents, strict=True)}
    return [
        f"{name} has {len(rows)} rows more than the other, unpaired: {', '.join(row['name'] for row in rows)}"
        for name, rows in unpaired_rows.items()
        if rows
    ]


def mean_seconds(row: Mapping[str, Any], part: str) -> float:
    """Seconds of a part of a row, averaged over its workers; `step` is the whole step."""
    workers = row["worker_summaries"]
    values = [worker["step_s"] if part == "step" else worker["parts"][part] for worker in workers]
    return float(sum(values)) / len(values)


def describe_profile(document: ProfileDocument) -> str:
    """Describe the measurement in one sentence."""
    machine, length = document["machine"], document["length"]
    loads = " and ".join(f"{value:.1f}" for value in machine["load"])
    return (
        f"{document['recipe']} ({document['task']}, {document['model']}): {length['steps']} steps of "
        f"{document['rows'][0]['global_batch_size']} rows after {length['warm_up']} warm-up steps; on "
        f"{machine['cores']} cores of {machine['processor']}, whose load was {loads} before and after"
    )


LEGEND = (
    "Mean milliseconds of a step. The parts of a worker add up to its step. gradient sync: the worker waits, also for "
    "slower workers; hidden: communication while the worker computes, not a part; idle: none of these."
)


def format_profile(document: ProfileDocument) -> str:
    """Format the profile for the terminal."""
    blocks = [describe_profile(document), time_table(document).formatted, LEGEND, speed_table(document).formatted]
    if (table := scaling_table(document)) is not None:
        blocks.append(f"Scaling, relative to the fewest workers:\n{table.formatted}")
    return "\n\n".join([*blocks, *scaling_warnings(document["rows"])])


MAX_BARS = 40
BARS_NOTE = (
    "The parts of a bar add up to the step. Gradient sync: the worker waits, also for slower workers. Hidden "
    "communication runs while the worker computes, and is not part of the bar."
)


def render_profile(document: ProfileDocument) -> str:
    rows = document["rows"]
    tiles = [
        Tile(row["name"], f"{format_ms(row['step_s'])} ms", f"{format_rate(row['rows_per_second'])} rows/s")
        for row in rows[:6]
    ]
    scaling = _scaling_section(document)
    bars, table = _stacked_bars([document], [""]), _wide_table("Each worker", time_table(document), LEGEND)
    speed = _wide_table("Speed, and the cost of a checkpoint", speed_table(document))
    sections = [
        Section("where", "Where the time goes", "", [bars, table]),
        *([] if scaling is None else [scaling]),
        Section("speed", "Speed", "", [speed]),
    ]
    subtitle = f"A profile of the recipe {document['recipe']} by rtrain"
    return render_html(document["name"], subtitle, tiles, sections, lead=describe_profile(document))


def render_comparison(documents: Sequence[ProfileDocument], names: Sequence[str]) -> str:
    """Render two profiles on one page."""
    descriptions = [
        Note(f"{name}: {describe_profile(document)}.") for name, document in zip(names, documents, strict=True)
    ]
    comparison = _wide_table("Parts", comparison_table(documents, names), LEGEND)
    bars = _stacked_bars(documents, [f"{name}: " for name in names])
    notes = [Note(note) for note in unpaired_notes(documents, names)]
    sections = [
        Section("where", "Where the time goes", "", [bars, comparison, *notes]),
        Section("measured", "Measured", "", descriptions),
    ]
    return render_html(" and ".join(names), "Two profiles by rtrain", [], sections)


def _stacked_bars(documents: Sequence[ProfileDocument], prefixes: Sequence[str]) -> Block:
    parts = visible_parts(*documents)
    bars = [
        StackedBar(f"{lead}{row['name']}, worker {worker['rank']}", [1000 * worker["parts"][part] for part in parts])
        for lead, document in zip(prefixes, documents, strict=True)
        for row in document["rows"]
        for worker in row["worker_summaries"]
    ]
    hint = f" The first {MAX_BARS} of {len(bars)} bars; the table has all of them." if len(bars) > MAX_BARS else ""
    chart = charts.draw_stacked_bars(bars[:MAX_BARS], [part_label(part) for part in parts], "milliseconds of a step")
    return Figure("A step of each worker, by part", chart, BARS_NOTE + hint, wide=True)


def _scaling_section(document: ProfileDocument) -> Section | None:
    columns, lines = scaling_table(document), scaling_rows(document["rows"])
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
    notes = [Note(warning) for warning in scaling_warnings(document["rows"])]
    return Section("scaling", "Scaling", "", [figure, _wide_table("The same steps with more workers", columns), *notes])


def _wide_table(title: str, columns: TextTable, note: str = "") -> Table:
    return Table(title, columns.header, columns.rows, note, wide=True)
