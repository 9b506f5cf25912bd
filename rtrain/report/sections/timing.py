"""The time of the run by phase, and its cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.report import cost
from rtrain.report.collect import Event, RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.charts import StackedBar
from rtrain.report.drawing.svg import format_duration, format_rate
from rtrain.report.summary import STATUSES, TIMED_PHASES, split_commands
from rtrain.trainer.step_timing import STEP_PARTS

PART_MEANINGS = {
    "setup": "workers: imports, model, store",
    "first_batch": "until the first rows arrive",
    "train": "forward, backward, gradient synchronization, optimizer",
    "evaluate": "scoring validation and test rows",
    "checkpoint": "copying weights for the writer",
    "cut short": "unfinished attempts",
    "input_wait": "waiting for rows while training",
}
CUT_SHORT, REST = "cut short", "rest"
MIN_SECONDS = 5e-6
"""Least seconds of a drawn part of a step."""
MAX_WORKERS = 16
HOURS = (("worker-hours", "worker_hours"), ("core-hours", "core_hours"), ("GPU-hours", "gpu_hours"))


def sum_cut_short_seconds(log: Sequence[Event]) -> float:
    """Sum the seconds of unfinished attempts, each up to the last event of its command (not up to a later resume)."""
    return sum(map(_cut_short_seconds, split_commands(log)))


def _cut_short_seconds(command: Sequence[Event]) -> float:
    total, started_at, last_time = 0.0, None, 0.0
    for event in [*command, {"kind": "started", "time": 0.0}]:
        if event["kind"] == "started" and started_at is not None:
            total += last_time - started_at
        if event["kind"] in ("started", "trained", *STATUSES, "crashed"):
            if event["kind"] in ("crashed", *STATUSES) and started_at is not None:
                total += event["time"] - started_at
            started_at = event["time"] if event["kind"] == "started" else None
        last_time = event["time"]
    return total


def count_measured_steps(log: Sequence[Event]) -> int:
    """Count the steps of finished attempts, whose seconds are known; at least 1."""
    total, first_step = 0, 0
    for event in log:
        if event["kind"] == "started":
            first_step = event["step"]
        elif event["kind"] == "trained":
            total += event["steps"] - first_step
    return max(1, total)


def _build_stage_chart(stages: Sequence[Mapping[str, float]] | None) -> list[Block]:
    """Chart the parts of each worker's mean step; nothing before an attempt has ended."""
    if not stages:
        return []
    parts = [part for part in STEP_PARTS if any(worker[part] > MIN_SECONDS for worker in stages)]
    shown_workers = stages[:MAX_WORKERS]
    bars = [
        StackedBar(f"worker {rank}", [1000 * worker[part] for part in parts])
        for rank, worker in enumerate(shown_workers)
    ]
    hidden_ms = 1000 * sum(worker["hidden"] for worker in stages) / len(stages)
    note = (
        "The mean step of the newest finished attempt. Gradient synchronization: the worker waits for gradients, "
        "also of "
        f"slower workers; {hidden_ms:,.1f} ms more overlap with computation. rtrain profile has single steps."
    )
    chart = charts.draw_stacked_bars(bars, [part.replace("_", " ") for part in parts], "milliseconds of a step")
    return [Figure("Parts of a step by worker", chart, note)]


def _build_cost_table(document: Mapping[str, Any] | None) -> list[Block]:
    if document is None:
        return []
    rows = [(name, cost.format_figure(document[key])) for name, key in HOURS if document[key]]
    total_cost = "unknown" if document["cost"] is None else cost.format_figure(document["cost"])
    rows.append(("cost", total_cost))
    if document["tokens_per_cost"]:
        rows.append(("tokens per unit of cost", f"{document['tokens_per_cost']:,}"))
    if document["utilization"] is not None:
        rows.append(("cores busy while training", f"{100 * document['utilization']:.0f} %"))
    note = "From the first line of each command's log to its last, with all cores of its workers' machines."
    if document["cost"] is None:
        note += " The price of a machine is unknown; set tune.worker_cost_per_hour to the price of a worker's hour."
    else:
        note += f" Cost: at {document['price']}, head included."
    return [Table("Cost", ("measure", "value"), rows, note)]


def build_section(run: RunData) -> Section:
    seconds = run.summary["seconds"]
    ends = run.events_of_kind("trained")
    if not ends:
        return Section("time", "Time", "", [Note("No attempt has finished yet, so seconds are unknown.")])
    phases = [(name, float(seconds[name])) for name in TIMED_PHASES]
    cut_short, steps = sum_cut_short_seconds(run.events), count_measured_steps(run.events)
    if cut_short:
        phases.append((CUT_SHORT, cut_short))
    phases.append((REST, max(0.0, seconds["total"] - sum(value for _, value in phases))))
    share = 100 * seconds["train"] / max(1e-9, seconds["total"])
    note = (
        "Wall-clock seconds of rank 0. The rest: tokenization, start of Ray and its processes, writing of artifact and "
        "report."
    )
    if cut_short:
        note += " Cut short: unfinished attempts, whose seconds by phase are unknown."
    rows = [
        (
            name,
            PART_MEANINGS.get(name, "all else"),
            f"{value:,.1f}",
            f"{1000 * value / steps:,.1f}" if name in seconds else "-",
        )
        for name, value in phases
    ]
    padding = run.summary["padded_tokens"] / max(1, run.summary["real_tokens"])
    blocks: list[Block] = [
        Figure(
            f"Training took {share:.0f} % of {format_duration(seconds['total'])}", charts.draw_stack(phases, "s"), note
        ),
        Table(
            "Seconds by phase",
            ("phase", "description", "seconds", "ms per step"),
            rows,
            "Sums over the finished attempts.",
        ),
        *_build_stage_chart(run.summary["stages"]),
        *_build_cost_table(run.summary["cost"]),
    ]
    intro = (
        f"{format_rate(run.summary['rows_per_second'])} rows and {run.summary['real_tokens_per_second']:,.0f} real "
        "tokens per "
        f"second of training; {padding:.2f} tokens computed for each real one (padding included), "
        f"{run.summary['micro_batches_per_step'] or 0:g} micro-batches per step and worker."
    )
    gradient_sync = run.summary["gradient_sync"]
    if (error := gradient_sync["gradient_error"]) is not None:
        intro += f" Gradients were compressed with a relative error of {error:.1e}."
    if sizes := gradient_sync["state_bytes"]:
        intro += f" Each worker stored a shard of the optimizer state, {max(sizes) / 1e6:,.1f} MB at most."
    return Section("time", "Time", intro, blocks)
