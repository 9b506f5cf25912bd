"""The run over its updates: loss, scores, speed; epochs, checkpoints, restarts and crashes marked."""

from collections.abc import Sequence

from rtrain.parallel import gradient_noise
from rtrain.report import stats
from rtrain.report.collect import Collected, Event
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table
from rtrain.report.drawing.charts import Line, Mark
from rtrain.report.drawing.svg import rate, score_name, short, three
from rtrain.report.live import event_messages

MOST_MARKS = 12
MOST_METRICS = 6
MOST_TICKS = 60


def section(run: Collected) -> Section:
    progress = newest(run.of("progress"))
    blocks: list[Block] = [*_loss(run, progress), *_metrics(run), *_noise(run), *_speed(run), *_faults(run)]
    if not blocks:
        blocks = [Note("The run has logged no update yet.")]
    intro = "An update is one step of the optimizer. Dashed: the ends of epochs; ticks on the axis: checkpoints."
    return Section("curves", "Training", intro, blocks)


def newest(events: Sequence[Event]) -> list[Event]:
    """The last event of each update, in order: a restart repeats the updates since its checkpoint."""
    return [event for _, event in sorted({event["update"]: event for event in events}.items())]


def marks(run: Collected) -> list[Mark]:
    """Ends of epochs, restarts, crashes."""
    last, per_epoch = run.summary["updates"], run.updates_per_epoch()
    found: list[Mark] = []
    if per_epoch and last >= per_epoch:
        ends = range(per_epoch, last + 1, per_epoch)
        every = -(-len(ends) // MOST_MARKS)
        few = 1 < len(ends) <= 6
        found += [
            Mark(end, f"epoch {epoch}" if few else "", "epoch")
            for epoch, end in enumerate(ends, 1)
            if epoch % every == 0
        ]
    crashes = run.of("crashed")[:MOST_MARKS]
    found += [
        Mark(event["resumes_from"], "lost node" if event["cause"] == "lost" else "crash", "crash") for event in crashes
    ]
    crashed = {event["resumes_from"] for event in crashes}
    again = [start["update"] for start in run.starts[1:] if start["update"] not in crashed]
    return found + [Mark(update, "restart", "restart") for update in again[:MOST_MARKS]]


def saves(run: Collected) -> list[float]:
    """Updates after which a checkpoint was written: every train.save_every, and with each evaluation."""
    last, every = run.summary["updates"], run.config.recipe.train.save_every
    found = {event["update"] for event in run.of("evaluated") if event["split"] == "valid"}
    found |= set(range(every, last + 1, every)) if every else set()
    return sorted(found)[:: max(1, -(-len(found) // MOST_TICKS))]


def _loss(run: Collected, progress: list[Event]) -> list[Block]:
    if not progress:
        return []
    xs, ys = stats.thin([event["update"] for event in progress], [event["loss"] for event in progress])
    chart = charts.lines([Line("loss", xs, ys)], "update", "training loss (mean of the update)", marks(run), saves(run))
    first, last = progress[0], progress[-1]
    before, after = three(first["loss"]), three(last["loss"])
    moved = "fell" if last["loss"] < first["loss"] else "rose"
    title = f"The training loss {moved} from {before} to {after}"
    if before == after:
        title = f"The training loss is {after} at the end, as at the beginning"
    note = f"Mean over the rows of an update, of every {run.config.recipe.train.log_every} updates one."
    if len(run.starts) > 1:
        note += " Updates that a restart repeated are drawn once: they give the same loss."
    return [Figure(title, chart, note)]


def series(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """(update, value) of each plain score, by name; scores by slice or label are not curves."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        for name, value in event["scores"].items():
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            if plain and name != "rows" and not name.startswith("neg_"):  # the error itself is beside its negative
                found.setdefault(name, []).append((event["update"], float(value)))
    return found


def _metrics(run: Collected) -> list[Block]:
    evaluations = run.of("evaluated")
    valid = series(newest([event for event in evaluations if event["split"] == "valid"]))
    best, blocks = run.summary["best_update"], list[Block]()
    # A score that never changes needs no curve: the table below says all.
    moving = {name: values for name, values in valid.items() if len({value for _, value in values}) > 1}
    for name, values in list(moving.items())[:MOST_METRICS]:
        shown = score_name(name)
        xs, ys = stats.thin([x for x, _ in values], [y for _, y in values])
        at = [Mark(best, "best", "best")] if best is not None else []
        title = f"Validation {shown}: {three(values[0][1])} at first, {three(values[-1][1])} at the end"
        chart = charts.lines([Line(shown, xs, ys, dots=len(xs) <= 60)], "update", shown, [*marks(run), *at])
        kept = "The weights of the best update were kept." if best is not None else ""
        blocks.append(Figure(title, chart, f"On the validation rows, which are not trained on. {kept}"))
    rows = [
        ("test" if event["split"] == "test" else "validation", event["update"], score_name(name), f"{value:.4f}")
        for event in [e for e in evaluations if e["split"] == "test" or e["update"] == best][-4:]
        for name, [(_, value)] in series([event]).items()
    ]
    if rows:
        chosen = "".join(f" B{event_messages.best(event)[1:]}." for event in run.of("best")[-1:])
        note = f"Of the best update, which validation chose; the test rows were looked at once, after that.{chosen}"
        blocks.append(Table("Scores", ("rows", "update", "score", "value"), rows[:40], note))
    return blocks


def _noise(run: Collected) -> list[Block]:
    """The noise scale of the gradient beside the rows of an update."""
    scale, rows = run.summary["noise_scale"], run.summary["rows_per_update"]
    if scale is None:
        return (
            [Note(f"The gradient's noise scale was not measured: {gradient_noise.HOW}.")] if run.of("progress") else []
        )
    high = "no end to be told" if scale["high"] is None else f"{scale['high']:,.0f}"
    return [
        Note(
            f"The gradient's noise scale was {scale['rows']:,.0f} rows at the end ({scale['low']:,.0f} to {high} with "
            f"95 % confidence, by {scale['measurements']} updates); an update has {rows:,}. With far fewer rows an "
            "update is mostly noise; with far more, half of them would teach nearly as much."
        )
    ]


def _speed(run: Collected) -> list[Block]:
    """Rows per second between two progress events of one start."""
    xs: list[float] = []
    ys: list[float] = []
    before: Event | None = None
    for event in run.of("started", "progress"):
        if event["kind"] == "started" or "rows" not in event:
            before = None
            continue
        if before is not None and event["time"] > before["time"]:
            xs.append(event["update"])
            ys.append((event["rows"] - before["rows"]) / (event["time"] - before["time"]))
        before = event
    if len(xs) < 2:
        return []
    typical = rate(sorted(ys)[len(ys) // 2])
    xs, ys = stats.thin(xs, ys)
    chart = charts.lines([Line("rows/s", xs, ys)], "update", "rows per second", marks(run))
    note = "By the wall clock between two log entries: an evaluation or a checkpoint in between shows as a dip."
    return [Figure(f"Speed: {typical} rows/s in the middle of the run", chart, note)]


def _faults(run: Collected) -> list[Block]:
    """Crashes, restarts and how each start ended, in the order of the log."""
    kinds = ("crashed", "yielded", "failed", "interrupted", "stopped", "best_lost")
    first = run.log[0]["time"] if run.log else 0.0
    rows = [(f"{event['time'] - first:,.0f} s", event["kind"], _what(run, event)) for event in run.of(*kinds)]
    if not rows:
        return []
    note = "Each start goes on from the newest checkpoint that verifies; updates after it are computed again."
    return [Table("What interrupted the run", ("after", "what", "how it went on"), rows[:50], note, wide=True)]


def _what(run: Collected, event: Event) -> str:
    if event["kind"] == "crashed":
        cause = "lost node" if event["cause"] == "lost" else event["cause"]
        return f"{cause}: {short(event['error'], 160)}; went on from update {event['resumes_from']}"
    if event["kind"] == "yielded":
        return f"{event['reason']}: saved at update {event['update']}, and went on from it"
    if event["kind"] == "failed":
        return short(event["error"], 300)
    return f"at update {event['update']}" if "update" in event else _next_start(run, event)


def _next_start(run: Collected, event: Event) -> str:
    later = [one["update"] for one in run.log[run.log.index(event) :] if one["kind"] == "started"]
    return f"went on from update {later[0]}" if later else "not started again"
