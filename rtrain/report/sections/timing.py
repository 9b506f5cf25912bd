"""Where the time went."""

from rtrain.report import charts
from rtrain.report.blocks import Block, Figure, Note, Section, Table
from rtrain.report.collect import Run
from rtrain.report.sections.overview import duration
from rtrain.report.summary import SECONDS

MEANING = {
    "setup": "workers: imports, model, store",
    "first_batch": "until the first rows arrive",
    "train": "forward, backward, exchange, step",
    "evaluate": "scoring validation and test rows",
    "checkpoint": "copying weights for the writer",
    "input_wait": "waiting for rows while training",
}
REST = "rest"


def section(run: Run) -> Section:
    found = run.summary["seconds"]
    ends = run.of("trained")
    if not ends:
        return Section(
            "time", "Time", "", [Note("No start of the run has come to its end yet: its seconds are not known.")]
        )
    parts = [(name, float(found[name])) for name in SECONDS]
    rest = max(0.0, found["total"] - sum(value for _, value in parts))
    updates = max(1, run.summary["updates"])
    parts.append((REST, rest))
    share = 100 * found["train"] / max(1e-9, found["total"])
    lost = len(run.starts) - len(ends)
    note = (
        "Wall-clock seconds of rank 0. The rest: tokenising, starting Ray and its processes, writing artefact and "
        "report"
    )
    note += f", and {lost} start{'s' if lost > 1 else ''} that did not come to an end." if lost > 0 else "."
    rows = [
        (name, MEANING.get(name, "all else"), f"{value:,.1f}", f"{1000 * value / updates:,.1f}")
        for name, value in parts
    ]
    padding = run.summary["padded_tokens"] / max(1, run.summary["real_tokens"])
    blocks: list[Block] = [
        Figure(f"Training took {share:.0f} % of {duration(found['total'])}", charts.stack(parts, "s"), note),
        Table("Seconds by section", ("section", "what", "seconds", "ms per update"), rows, "Sums over all starts."),
    ]
    intro = (
        f"{run.summary['rows_per_second']:,.0f} rows and {run.summary['real_tokens_per_second']:,.0f} real tokens per "
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
