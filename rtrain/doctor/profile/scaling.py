"""How the same updates go with more workers: time, efficiency, exchange, and whether the order of rows is the same."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.training.stages import EXCHANGE

WORKERS = "train.workers"


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each row of a profile that differs from the others in its workers alone, by their number; none where
    there are fewer than two. Speed-up and efficiency are beside the row of the fewest workers."""
    if len(rows) < 2 or any(set(row["settings"]) != {WORKERS} for row in rows):
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
    lines = table(rows)
    if lines and not all(line["same_order"] for line in lines):
        found.append("The digests of the order differ: the rows were not the same in every row of the table.")
    return found
