"""The tables of a profile, for a terminal and for a page alike. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.report.drawing.svg import duration, rate
from rtrain.trainer.step_timing import EXCHANGE, PARTS

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """A table as text: figures are set flush right from the column `figures` on."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figures: int = 1

    @property
    def text(self) -> str:
        every = [self.head, *self.rows]
        wide = [max(len(row[column]) for row in every) for column in range(len(self.head))]
        return "\n".join(
            "  ".join(
                cell.rjust(size) if column >= self.figures else cell.ljust(size)
                for column, (cell, size) in enumerate(zip(row, wide, strict=True))
            ).rstrip()
            for row in every
        )


def ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.1f}" if value >= 9.95 else f"{value:.2f}"


def named(part: str) -> str:
    """A part as a reader writes it."""
    return part.replace("_", " ")


LEAST = 5e-6
"""Seconds of a part that is shown: those that nothing was done in take a microsecond."""


def shown_parts(*documents: Document) -> list[str]:
    """The parts that took any time somewhere."""
    workers = [one for document in documents for row in document["rows"] for one in row["of_workers"]]
    return [part for part in PARTS if any(one["parts"][part] >= LEAST for one in workers)]


def where(document: Document) -> Columns:
    """Milliseconds of an update by part, a line for each worker of each row."""
    parts = shown_parts(document)
    head = ("row", "worker", *map(named, parts), "update", "hidden", "cores busy")
    rows = [
        (
            row["name"] if not place else "",
            str(one["rank"]),
            *(ms(one["parts"][part]) for part in parts),
            *(ms(one["update"]), ms(one["hidden"]), f"{one['cores_busy']:.2f}"),
        )
        for row in document["rows"]
        for place, one in enumerate(row["of_workers"])
    ]
    return Columns(head, rows)


def speed(document: Document) -> Columns:
    """A line for each row: how fast it was, and what a checkpoint costs."""
    head = ("row", "update", "median", "rows/s", "tokens/s", "passes", "checkpoint", "every", "per update")
    return Columns(
        head,
        [
            (
                *(row["name"], ms(row["update"]), ms(row["median"])),
                *(rate(row["rows_per_second"]), f"{row['real_tokens_per_second']:,.0f}"),
                *(f"{row['passes_per_update']:g}", ms(row["checkpoint"]["seconds"])),
                *(f"{row['checkpoint']['every']:,}", ms(row["checkpoint"]["per_update"])),
            )
            for row in document["rows"]
        ],
    )


def scaling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each row of a profile that differs from the others in its workers alone, by their number; none where
    there are fewer than two. Speed-up and efficiency are beside the row of the fewest workers."""
    if len(rows) < 2 or any(set(row["settings"]) != {"train.workers"} for row in rows):
        return []
    ordered = sorted(rows, key=lambda row: int(row["workers"]))
    first = ordered[0]
    return [_line(row, first) for row in ordered]


def _line(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    speedup = first["update"] / row["update"]
    return {
        "workers": row["workers"],
        "update": row["update"],
        "run_seconds": row["update"] * row["run_updates"],
        "speedup": speedup,
        "efficiency": speedup * first["workers"] / row["workers"],
        "exchange": statistics.fmean(one["parts"][EXCHANGE] for one in row["of_workers"]),
        "hidden": statistics.fmean(one["hidden"] for one in row["of_workers"]),
        "rows_per_second": row["rows_per_second"],
        "hosts": len(row["hosts"]),
        "order_digest": row["order_digest"],
        "same_order": row["order_digest"] == first["order_digest"],
    }


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the table must know of the machine, a sentence each."""
    found = []
    crowded = [row for row in rows if row["device"] == "cpu" and row["workers"] > sum(row["hosts"].values())]
    if crowded:
        cores = sum(crowded[0]["hosts"].values())
        most = max(row["workers"] for row in crowded)
        found.append(
            f"Up to {most} workers shared {cores} processor core{'' if cores == 1 else 's'}: Ray's CPUs are logical. "
            f"Beyond {cores} workers the figures show what more workers cost, not what more cores would bring."
        )
    lines = scaling(rows)
    if lines and not all(line["same_order"] for line in lines):
        found.append("The digests of the order differ: the rows were not the same in every row of the table.")
    return found


def scaled(document: Document) -> Columns | None:
    """The scaling table; None where the rows are no scaling."""
    lines = scaling(document["rows"])
    head = ("workers", "update", "a run", "speed-up", "efficiency", "exchange", "hidden", "rows/s", "hosts", "order")
    rows = [
        (
            *(str(one["workers"]), ms(one["update"]), duration(one["run_seconds"]), f"{one['speedup']:.2f}"),
            *(f"{one['efficiency']:.0%}", ms(one["exchange"]), ms(one["hidden"]), rate(one["rows_per_second"])),
            *(str(one["hosts"]), one["order_digest"][:12]),
        )
        for one in lines
    ]
    return Columns(head, rows, figures=0) if rows else None


def beside(documents: Sequence[Document], names: Sequence[str]) -> Columns:
    """Two profiles, row by row in their order: milliseconds of each part in the mean of the workers, and the second
    beside the first."""
    parts = [*shown_parts(*documents), "update"]
    head = ("row", "part", *names, "ratio")
    lines = []
    for one, other in zip(*(document["rows"] for document in documents), strict=False):
        label = one["name"] if one["name"] == other["name"] else f"{one['name']} / {other['name']}"
        for place, part in enumerate(parts):
            values = [mean(row, part) for row in (one, other)]
            ratio = f"{values[1] / values[0]:.2f}" if values[0] else "-"
            lines.append((label if not place else "", named(part), *map(ms, values), ratio))
    return Columns(head, lines, figures=2)


def unpaired(documents: Sequence[Document], names: Sequence[str]) -> list[str]:
    """What is to be said of the rows of two profiles that have none beside them."""
    pairs = min(len(document["rows"]) for document in documents)
    left = {name: document["rows"][pairs:] for name, document in zip(names, documents, strict=True)}
    return [
        f"{name} has {len(rows)} more than the other: nothing is beside {', '.join(row['name'] for row in rows)}"
        for name, rows in left.items()
        if rows
    ]


def mean(row: Mapping[str, Any], part: str) -> float:
    """Seconds of a part of a row, in the mean of its workers; `update` is the whole."""
    workers = row["of_workers"]
    values = [one["update"] if part == "update" else one["parts"][part] for one in workers]
    return float(sum(values)) / len(values)


def told(document: Document) -> str:
    """What was measured, in a sentence."""
    machine, length = document["machine"], document["length"]
    loads = " and ".join(f"{value:.1f}" for value in machine["load"])
    return (
        f"{document['recipe']} ({document['task']}, {document['model']}): {length['updates']} updates of "
        f"{document['rows'][0]['rows_per_update']} rows after {length['warm_up']} that are not counted; on "
        f"{machine['cores']} cores of {machine['processor']}, whose load was {loads} before and after"
    )


LEGEND = (
    "Milliseconds of an update, in the mean. The parts of a worker add up to its update. exchange: it stands still, "
    "also for slower workers; hidden: gradients go while it computes, no time of its own; idle: none of these."
)


def text(document: Document) -> str:
    """The whole profile for a terminal."""
    blocks = [told(document), where(document).text, LEGEND, speed(document).text]
    if (table := scaled(document)) is not None:
        blocks.append(f"Scaling, beside the fewest workers:\n{table.text}")
    return "\n\n".join([*blocks, *warnings(document["rows"])])
