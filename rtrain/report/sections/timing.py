"""Where the time went."""

from collections.abc import Sequence

from rtrain.report.collect import Collected, Event
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.svg import duration, rate
from rtrain.report.summary import SECONDS, STATUSES

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


def lost(log: Sequence[Event]) -> float:
    """Seconds of the starts that did not come to an end, each counted up to its last event."""
    total, begun, last = 0.0, None, 0.0
    for event in [*log, {"kind": "started", "time": 0.0}]:
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
    ]
    intro = (
        f"{rate(run.summary['rows_per_second'])} rows and {run.summary['real_tokens_per_second']:,.0f} real tokens per "
        f"second of training; {padding:.2f} tokens computed for each real one (padding included), "
        f"{run.summary['passes_per_update'] or 0:g} passes per update and worker."
    )
    if (exchanged := run.summary["exchange"])["transport"] != "stock":
        intro += " Gradients went through memory that the workers shared."
    if (error := exchanged["gradient_error"]) is not None:
        intro += f" They were sent in fewer bits, with an error of {error:.1e} of their norm."
    if sizes := exchanged["state_bytes"]:
        intro += f" Each worker kept its share of the optimizer's state, {max(sizes) / 1e6:,.1f} MB at most."
    return Section("time", "Time", intro, blocks)
