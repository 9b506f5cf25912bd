"""Curves over steps: loss, scores, speed, with marks for epochs, checkpoints, restarts and crashes."""

from collections.abc import Sequence

from rtrain.parallel import gradient_noise
from rtrain.report import stats
from rtrain.report.collect import Event, RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.charts import LineSeries, VerticalMark
from rtrain.report.drawing.svg import format_rate, format_significant, humanize_score_name, truncate
from rtrain.report.live import event_messages

MAX_MARKS = 12
MAX_METRICS = 6
MAX_TICKS = 60


def build_section(run: RunData) -> Section:
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
        [LineSeries("loss", xs, ys)],
        "step",
        "training loss (mean of the step)",
        list_marks(run),
        checkpoint_steps(run),
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
    valid = score_series(last_event_per_step([event for event in evaluations if event["split"] == "valid"]))
    best, blocks = run.summary["best_step"], list[Block]()
    # A constant score needs no curve; the table below has it.
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
        (
            "test" if event["split"] == "test" else "validation",
            event["step"],
            humanize_score_name(name),
            f"{value:.4f}",
        )
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
            "rows is "
            "mostly noise; of far more rows, half would teach nearly as much."
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
        return f"{cause}: {truncate(event['error'], 160)}; resumed from update {event['resumes_from']}"
    if event["kind"] == "restart_requested":
        return f"{event['reason']}: saved at update {event['step']}, and went on from it"
    if event["kind"] == "failed":
        return truncate(event["error"], 300)
    return f"at update {event['step']}" if "step" in event else _describe_next_attempt(run, event)


def _describe_next_attempt(run: RunData, event: Event) -> str:
    later = [attempt["step"] for attempt in run.events[run.events.index(event) :] if attempt["kind"] == "started"]
    return f"resumed from step {later[0]}" if later else "not started again"
