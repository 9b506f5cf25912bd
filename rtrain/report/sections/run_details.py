"""How a run was computed: curves over steps with restarts marked, time by phase, cost, settings, digests, versions."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, DeployConfig, Recipe
from rtrain.core.errors import redact
from rtrain.parallel import gradient_noise
from rtrain.parallel.profiler import STEP_PARTS
from rtrain.report import charts, event_messages, stats, summary
from rtrain.report.charts import LineSeries, StackedBar, VerticalMark
from rtrain.report.collect import Event, RunData
from rtrain.report.page import Block, Code, Figure, Note, Section, Table
from rtrain.report.summary import STATUSES, TIMED_PHASES, split_commands
from rtrain.report.svg import format_duration, format_rate, format_significant, humanize_score_name, truncate

MAX_MARKS = 12
MAX_METRICS = 6
MAX_TICKS = 60
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
MAX_CHARS = 120


def build_training_section(run: RunData) -> Section:
    progress = last_event_per_step(run.events_of_kind("progress"))
    blocks: list[Block] = [
        *_build_loss_chart(run, progress),
        *_build_score_charts(run),
        *_build_noise_note(run),
        *_build_speed_chart(run),
        *_build_interruption_table(run),
    ]
    if not blocks:
        blocks = [Note("The run has logged no step yet.")]
    intro = "Dashed: the ends of epochs; ticks on the axis: checkpoints."
    return Section("curves", "Training", intro, blocks)


def last_event_per_step(events: Sequence[Event]) -> list[Event]:
    """Keep the last event of each step, in order: a restart repeats the steps since its checkpoint."""
    return [event for _, event in sorted({event["step"]: event for event in events}.items())]


def list_marks(run: RunData) -> list[VerticalMark]:
    """Ends of epochs, restarts, crashes."""
    last_step, per_epoch = run.summary["steps"], run.steps_per_epoch()
    vertical_marks: list[VerticalMark] = []
    if per_epoch and last_step >= per_epoch:
        ends = range(per_epoch, last_step + 1, per_epoch)
        epoch_stride = -(-len(ends) // MAX_MARKS)
        has_names = 1 < len(ends) <= 6
        vertical_marks += [
            VerticalMark(end, f"epoch {epoch}" if has_names else "", "epoch")
            for epoch, end in enumerate(ends, 1)
            if epoch % epoch_stride == 0
        ]
    crashes = run.events_of_kind("crashed")[:MAX_MARKS]
    vertical_marks += [
        VerticalMark(event["resumes_from"], "lost node" if event["cause"] == "node_lost" else "crash", "crash")
        for event in crashes
    ]
    crash_steps = {event["resumes_from"] for event in crashes}
    restart_steps = [start["step"] for start in run.attempts[1:] if start["step"] not in crash_steps]
    return vertical_marks + [VerticalMark(step, "restart", "restart") for step in restart_steps[:MAX_MARKS]]


def checkpoint_steps(run: RunData) -> list[float]:
    """Steps with a checkpoint: every train.save_every steps, and at each evaluation."""
    last_step, save_every = run.summary["steps"], run.config.recipe.train.save_every
    steps = {event["step"] for event in run.events_of_kind("evaluated") if event["split"] == "valid"}
    steps |= set(range(save_every, last_step + 1, save_every)) if save_every else set()
    return sorted(steps)[:: max(1, -(-len(steps) // MAX_TICKS))]


def _build_loss_chart(run: RunData, progress: list[Event]) -> list[Block]:
    if not progress:
        return []
    xs, ys = stats.thin_curve([event["step"] for event in progress], [event["loss"] for event in progress])
    chart = charts.draw_lines(
        [LineSeries("loss", xs, ys)], "step", "training loss (mean of the step)", list_marks(run), checkpoint_steps(run)
    )
    first_event, last_event = progress[0], progress[-1]
    first_loss, last_loss = format_significant(first_event["loss"]), format_significant(last_event["loss"])
    direction = "fell" if last_event["loss"] < first_event["loss"] else "rose"
    title = f"The training loss {direction} from {first_loss} to {last_loss}"
    if first_loss == last_loss:
        title = f"The training loss is {last_loss} at the end, as at the beginning"
    note = f"Mean over the rows of a step, one of every {run.config.recipe.train.log_every} steps."
    if len(run.attempts) > 1:
        note += " Steps that a restart repeated are drawn once: their loss is the same."
    return [Figure(title, chart, note)]


def score_series(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """List (step, value) of each plain score by name, without scores by slice or label."""
    points_by_score: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        for name, value in event["scores"].items():
            is_plain = isinstance(value, int | float) and not isinstance(value, bool)
            if is_plain and name != "rows" and not name.startswith("neg_"):  # the error itself is listed too
                points_by_score.setdefault(name, []).append((event["step"], float(value)))
    return points_by_score


def _build_score_charts(run: RunData) -> list[Block]:
    evaluations = run.events_of_kind("evaluated")
    curve = [event for event in evaluations if event["split"] == "valid" and "calibration" not in event]
    valid = score_series(last_event_per_step(curve))
    best, blocks = run.summary["best_step"], list[Block]()
    # A constant score needs no curve; the table below lists it.
    changing_scores = {name: values for name, values in valid.items() if len({value for _, value in values}) > 1}
    for name, values in list(changing_scores.items())[:MAX_METRICS]:
        display_name = humanize_score_name(name)
        xs, ys = stats.thin_curve([x for x, _ in values], [y for _, y in values])
        best_marks = [VerticalMark(best, "best", "best")] if best is not None else []
        title = (
            f"Validation {display_name}: {format_significant(values[0][1])} at first, "
            f"{format_significant(values[-1][1])} at the end"
        )
        chart = charts.draw_lines(
            [LineSeries(display_name, xs, ys, has_dots=len(xs) <= 60)],
            "step",
            display_name,
            [*list_marks(run), *best_marks],
        )
        best_note = "The run has the weights of the best step." if best is not None else ""
        blocks.append(Figure(title, chart, f"On the validation rows. {best_note}"))
    rows = [
        ("test" if event["split"] == "test" else "validation", event["step"], humanize_score_name(name), f"{value:.4f}")
        for event in [e for e in evaluations if e["split"] == "test" or e["step"] == best][-4:]
        for name, [(_, value)] in score_series([event]).items()
    ]
    if rows:
        choice_note = "".join(
            f" B{event_messages.format_best(event)[1:]}." for event in run.events_of_kind("best")[-1:]
        )
        note = f"Validation chose the best step; the test rows were scored once, afterwards.{choice_note}"
        blocks.append(Table("Scores", ("rows", "step", "score", "value"), rows[:40], note))
    return blocks


def _build_noise_note(run: RunData) -> list[Block]:
    """Compare the gradient noise scale with the global batch size."""
    scale, rows = run.summary["noise_scale"], run.summary["global_batch_size"]
    if scale is None:
        return (
            [Note(f"The gradient's noise scale was not measured: {gradient_noise.MEASURE_HINT}.")]
            if run.events_of_kind("progress")
            else []
        )
    high = "unbounded" if scale["high"] is None else f"{scale['high']:,.0f}"
    return [
        Note(
            f"The gradient's noise scale was {scale['rows']:,.0f} rows at the end ({scale['low']:,.0f} to {high} with "
            f"95 % confidence, from {scale['measurements']} steps); a step has {rows:,}. The gradient of far fewer "
            "rows is mostly noise; of far more rows, half would teach nearly as much."
        )
    ]


def _build_speed_chart(run: RunData) -> list[Block]:
    """Chart rows per second between two progress events of one attempt."""
    xs: list[float] = []
    ys: list[float] = []
    previous: Event | None = None
    for event in run.events_of_kind("started", "progress"):
        if event["kind"] == "started" or "rows" not in event:
            previous = None
            continue
        if previous is not None and event["time"] > previous["time"]:
            xs.append(event["step"])
            ys.append((event["rows"] - previous["rows"]) / (event["time"] - previous["time"]))
        previous = event
    if len(xs) < 2:
        return []
    median_rate = format_rate(sorted(ys)[len(ys) // 2])
    xs, ys = stats.thin_curve(xs, ys)
    chart = charts.draw_lines([LineSeries("rows/s", xs, ys)], "step", "rows per second", list_marks(run))
    note = "Wall-clock speed between two log entries: evaluations and checkpoints show as dips."
    return [Figure(f"Speed: {median_rate} rows/s in the middle of the run", chart, note)]


def _build_interruption_table(run: RunData) -> list[Block]:
    """List crashes, restarts and the end of each attempt, in log order."""
    kinds = ("crashed", "restart_requested", "failed", "interrupted", "stopped", "best_lost")
    start_time = run.events[0]["time"] if run.events else 0.0
    rows = [
        (f"{event['time'] - start_time:,.0f} s", event["kind"], _describe_interruption(run, event))
        for event in run.events_of_kind(*kinds)
    ]
    if not rows:
        return []
    note = "Each attempt resumes from the newest valid checkpoint and repeats the steps after it."
    return [Table("Interruptions", ("after", "event", "what followed"), rows[:50], note, wide=True)]


def _describe_interruption(run: RunData, event: Event) -> str:
    if event["kind"] == "crashed":
        cause = "lost node" if event["cause"] == "node_lost" else event["cause"]
        return f"{cause}: {truncate(event['error'], 160)}; resumed from step {event['resumes_from']}"
    if event["kind"] == "restart_requested":
        return f"{event['reason']}: saved at step {event['step']}, resumed from it"
    if event["kind"] == "failed":
        return truncate(event["error"], 300)
    return f"at step {event['step']}" if "step" in event else _describe_next_attempt(run, event)


def _describe_next_attempt(run: RunData, event: Event) -> str:
    later = [attempt["step"] for attempt in run.events[run.events.index(event) :] if attempt["kind"] == "started"]
    return f"resumed from step {later[0]}" if later else "not started again"


def build_timing_section(run: RunData) -> Section:
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
        f"tokens per second of training; {padding:.2f} tokens computed for each real one (padding included), "
        f"{run.summary['micro_batches_per_step'] or 0:g} micro-batches per step and worker."
    )
    gradient_sync = run.summary["gradient_sync"]
    if (error := gradient_sync["gradient_error"]) is not None:
        intro += f" Gradients were compressed with a relative error of {error:.1e}."
    if sizes := gradient_sync["state_bytes"]:
        intro += f" Each worker stored a shard of the optimizer state, {max(sizes) / 1e6:,.1f} MB at most."
    return Section("time", "Time", intro, blocks)


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
        "The mean step of the newest finished attempt. Gradient synchronization: the worker waits for gradients, also "
        f"of slower workers; {hidden_ms:,.1f} ms more overlap with computation. rtrain profile has single steps."
    )
    chart = charts.draw_stacked_bars(bars, [part.replace("_", " ") for part in parts], "milliseconds of a step")
    return [Figure("Parts of a step by worker", chart, note)]


def _build_cost_table(document: Mapping[str, Any] | None) -> list[Block]:
    if document is None:
        return []
    rows = [(name, summary.format_figure(document[key])) for name, key in HOURS if document[key]]
    total_cost = "unknown" if document["cost"] is None else summary.format_figure(document["cost"])
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


def build_settings_section(run: RunData) -> Section:
    blocks: list[Block] = [_build_rerun_command(run), _build_settings_table(run.config), _build_digest_table(run)]
    if versions := run.created_event.get("versions"):
        rows = [(str(name), str(value)) for name, value in versions.items()]
        blocks.append(Table("Versions", ("package", "version"), rows, "At the creation of the run."))
    return Section("settings", "How it was run", "", blocks)


def _build_rerun_command(run: RunData) -> Code:
    """Build the command that repeats the run. A student needs its teacher's run, which the gate document names."""
    if run.config.recipe.distill.teacher is not None:
        reason = (
            "rtrain distill repeats a student: rtrain inspect prints the command with its settings under “commands”."
        )
        return Code("Run it again", f"rtrain inspect {shlex.quote(str(run.folder))}", reason)
    config = run.folder / "config.yaml"
    return Code(
        "Run it again",
        f"rtrain train {shlex.quote(str(config))} --out NEW_FOLDER",
        "config.yaml holds every setting, with train.global_batch_size resolved and paths absolute. The same rows, "
        "seed "
        "and number of workers give the same weights, bit for bit; another number of workers the same to rounding.",
    )


def _build_settings_table(config: Config) -> Table:
    recipe = config.recipe
    default_settings = configuration.flatten_config(Config(Recipe(name=recipe.name, task=recipe.task), DeployConfig()))
    run_settings = configuration.flatten_config(config)
    rows = [
        (name, truncate(_format_value(value), MAX_CHARS), truncate(_format_value(default_settings[name]), MAX_CHARS))
        for name, value in run_settings.items()
        if default_settings[name] != value
    ]
    note = "All other settings have their defaults; rtrain recipes show RECIPE --all prints them with comments."
    return Table("Settings that differ from the defaults", ("setting", "this run", "default"), rows, note, wide=True)


def _format_value(value: Any) -> str:
    """Format a setting without rounding: a rounded learning rate could look like the default."""
    return "none" if value is None else redact(str(value))


def _build_digest_table(run: RunData) -> Table:
    rows = [
        ("run folder", str(run.folder)),
        ("identity of the recipe", run.created_event.get("recipe_digest") or run.config.recipe.recipe_digest()),
        ("digest of the rows", run.summary["data_digest"] or "unknown"),
        ("digest of the order", run.summary["order_digest"] or "unknown until the end"),
    ]
    if run.artifact:
        rows.append(("version of the artifact", run.artifact["version"]))
    for role, files in (run.created_event.get("origin") or {}).items():
        file_digests = [(truncate(redact(name), MAX_CHARS), sha256) for name, sha256 in list(files.items())[:20]]
        rows += [(f"SHA-256, {role}: {name}", sha256) for name, sha256 in file_digests]
    note = (
        "Two runs with the same digests trained on the same rows in the same order; "
        "rtrain verify --ledger recomputes the order's digest from the token store."
    )
    return Table("Digests", ("of", "digest"), rows, note, wide=True)
