"""Where the time went."""

from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.report import cost
from rtrain.report.collect import Collected, Event
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.charts import Stacked
from rtrain.report.drawing.svg import duration, rate
from rtrain.report.summary import SECONDS, STATUSES, commands
from rtrain.trainer.step_timing import PARTS

MEANING = {
    "setup": "workers: imports, model, store",
    "first_batch": "until the first rows arrive",
    "train": "forward, backward, exchange, step",
    "evaluate": "scoring validation and test rows",
    "checkpoint": "copying weights for the writer",
    "cut short": "starts without an end",
    "input_wait": "waiting for rows while training",
}
LOST, REST = "cut short", "rest"
LEAST = 5e-6
"""Seconds of a part of an update that is drawn."""
MOST_WORKERS = 16
HOURS = (("worker-hours", "worker_hours"), ("core-hours", "core_hours"), ("GPU-hours", "gpu_hours"))


def lost(log: Sequence[Event]) -> float:
    """Seconds of the starts that did not come to an end, each counted up to the last event of its command: the hours
    or days before a resume were no training."""
    return sum(map(_lost, commands(log)))


def _lost(command: Sequence[Event]) -> float:
    total, begun, last = 0.0, None, 0.0
    for event in [*command, {"kind": "started", "time": 0.0}]:
        if event["kind"] == "started" and begun is not None:
            total += last - begun
        if event["kind"] in ("started", "trained", *STATUSES, "crashed"):
            if event["kind"] in ("crashed", *STATUSES) and begun is not None:
                total += event["time"] - begun
            begun = event["time"] if event["kind"] == "started" else None
        last = event["time"]
    return total


def measured_updates(log: Sequence[Event]) -> int:
    """Updates of the starts that came to an end, which are those whose seconds are known; at least 1."""
    total, first = 0, 0
    for event in log:
        if event["kind"] == "started":
            first = event["update"]
        elif event["kind"] == "trained":
            total += event["updates"] - first
    return max(1, total)


def _stages(found: Sequence[Mapping[str, float]] | None) -> list[Block]:
    """An update of each worker, by what it did; nothing before a start has come to its end."""
    if not found:
        return []
    parts = [part for part in PARTS if any(worker[part] > LEAST for worker in found)]
    shown = found[:MOST_WORKERS]
    bars = [Stacked(f"worker {rank}", [1000 * worker[part] for part in parts]) for rank, worker in enumerate(shown)]
    hidden = 1000 * sum(worker["hidden"] for worker in found) / len(found)
    note = (
        "The mean update of the newest start that came to an end. Exchange: the worker stands still for gradients, "
        f"also for slower workers; {hidden:,.1f} ms more went while it computed. rtrain profile has them one by one."
    )
    chart = charts.stacked(bars, [part.replace("_", " ") for part in parts], "milliseconds of an update")
    return [Figure("What a worker does in an update", chart, note)]


def _cost(found: Mapping[str, Any] | None) -> list[Block]:
    if found is None:
        return []
    rows = [(name, cost.figure(found[key])) for name, key in HOURS if found[key]]
    money = "unknown" if found["money"] is None else cost.figure(found["money"])
    rows.append(("money", money))
    if found["tokens_per_money"]:
        rows.append(("tokens for 1 of it", f"{found['tokens_per_money']:,}"))
    if found["utilisation"] is not None:
        rows.append(("cores busy while training", f"{100 * found['utilisation']:.0f} %"))
    note = "From the first line of each command's log to its last, with all cores of its workers' machines."
    if found["money"] is None:
        note += " The price of one of them or of the head is unknown: tune.price is that of a worker's hour."
    else:
        note += f" Money: at {found['price']}, the head included."
    return [Table("What it cost", ("what", "how much"), rows, note)]


def section(run: Collected) -> Section:
    found = run.summary["seconds"]
    ends = run.of("trained")
    if not ends:
        return Section(
            "time", "Time", "", [Note("No start of the run has come to its end yet: its seconds are not known.")]
        )
    parts = [(name, float(found[name])) for name in SECONDS]
    cut_short, updates = lost(run.log), measured_updates(run.log)
    if cut_short:
        parts.append((LOST, cut_short))
    parts.append((REST, max(0.0, found["total"] - sum(value for _, value in parts))))
    share = 100 * found["train"] / max(1e-9, found["total"])
    note = (
        "Wall-clock seconds of rank 0. The rest: tokenising, starting Ray and its processes, writing artefact and "
        "report."
    )
    if cut_short:
        note += " Cut short: starts that did not come to an end, whose seconds are not known one by one."
    rows = [
        (
            name,
            MEANING.get(name, "all else"),
            f"{value:,.1f}",
            f"{1000 * value / updates:,.1f}" if name in found else "-",
        )
        for name, value in parts
    ]
    padding = run.summary["padded_tokens"] / max(1, run.summary["real_tokens"])
    blocks: list[Block] = [
        Figure(f"Training took {share:.0f} % of {duration(found['total'])}", charts.stack(parts, "s"), note),
        Table(
            "Seconds by part",
            ("part", "what", "seconds", "ms per update"),
            rows,
            "Sums over the starts that came to an end; per update of these.",
        ),
        *_stages(run.summary["stages"]),
        *_cost(run.summary["cost"]),
    ]
    intro = (
        f"{rate(run.summary['rows_per_second'])} rows and {run.summary['real_tokens_per_second']:,.0f} real tokens per "
        f"second of training; {padding:.2f} tokens computed for each real one (padding included), "
        f"{run.summary['passes_per_update'] or 0:g} passes per update and worker."
    )
    exchanged = run.summary["exchange"]
    if (error := exchanged["gradient_error"]) is not None:
        intro += f" They were sent in fewer bits, with an error of {error:.1e} of their norm."
    if sizes := exchanged["state_bytes"]:
        intro += f" Each worker kept its share of the optimizer's state, {max(sizes) / 1e6:,.1f} MB at most."
    return Section("time", "Time", intro, blocks)
