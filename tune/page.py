"""report.html of a search: the verdict, the trials, their curves, and the score over what was searched."""

from collections.abc import Callable
from pathlib import Path

from rtrain import config as configuration
from rtrain.comparison import training
from rtrain.comparison.training import Curves
from rtrain.errors import UserError
from rtrain.metrics.by_output import metric_for
from rtrain.report import stats
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Cell, Code, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import Dot, Line
from rtrain.report.drawing.page import render
from rtrain.report.drawing.svg import SERIES, duration, number, score_name, short
from rtrain.report.live.progress import MEANING
from rtrain.run import Run
from rtrain.tasks import base
from tune import search as searching, verdict
from tune.search import Trial

MOST_CURVES = SERIES
MOST_GROUPS = 4
"""Names in the legend of points, which stands beside the axis's label."""
LONGEST = 160


def write(search: Run) -> Path:
    """Make the search's report.html. Raises `UserError` for a search of which no trial has begun."""
    found = verdict.trials(search)
    if not found:
        raise UserError(
            f"{search} is a search of which no trial has begun; rtrain tune --resume --out {search} goes on"
        )
    path = search.report
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(page(search, found).encode("utf-8", "backslashreplace"))
    draft.rename(path)  # a reader never sees half a page
    return path


def page(search: Run, found: list[Trial]) -> str:
    config = configuration.load(str(search.config))
    output = base.get(config.recipe.task).output
    headline = metric_for(output).headline
    shown, sign = score_name(headline.removeprefix("neg_")), -1 if headline.startswith("neg_") else 1
    told, best = verdict.of(search), _best(search, found)
    curves = {trial.number: _curves(Path(trial.run), output) for trial in found}
    sections = [
        _trials(found, best, shown, sign),
        Section("curves", "Curves", _curves_intro(found), _lines(found, curves, shown, sign)),
        Section("space", "What was searched", "", _space(found, shown, sign)),
        _next(search, best),
    ]
    about = f"A search from the recipe {config.recipe.name} by rtrain, {len(found)} trials"
    return render(search.name, about, _tiles(found, best, shown, sign), sections, lead=f"{told[:1].upper()}{told[1:]}.")


def _best(search: Run, found: list[Trial]) -> int | None:
    """The winner's number, once the search has ended with one."""
    scored = any(trial.score is not None and not trial.error for trial in found)
    return searching.best(found).number if scored and search.trials.is_file() else None


def _curves(trial: Path, output: str) -> Curves:
    run = Run(trial)
    rows = configuration.load(str(run.config)).recipe.rows_per_update if run.exists else 1
    return training.curves(run, rows, output)


def _tiles(found: list[Trial], best: int | None, shown: str, sign: int) -> list[Tile]:
    default = next((trial for trial in found if trial.number == 0), None)
    winner, tiles = next((one for one in found if one.number == best), None), []
    for trial, name in ((winner, "winner"), (default if best else None, "trial 0")):
        if trial is not None and trial.score is not None:
            tiles.append(
                Tile(f"{shown}, {name}", f"{sign * trial.score:.4f}", short(f"trial {trial.number}: {trial.named}", 60))
            )
    rows = max((verdict.rows_of(Run(Path(trial.run))) for trial in found), default=0)
    tiles.append(Tile("validation rows", f"{rows:,}", "on which trials are compared"))
    ended = [trial for trial in found if trial.status in ("finished", "paused")]
    tiles.append(Tile("trials", str(len(found)), f"{len(ended)} to their end or the budget"))
    tiles.append(Tile("time", duration(sum(map(_seconds, found))), "of all trials together"))
    return tiles


def _seconds(trial: Trial) -> float:
    """Of its starts, without the time between them."""
    return max((passed for _, passed in training.clock(Run(Path(trial.run)).events())), default=0.0)


def _trials(found: list[Trial], best: int | None, shown: str, sign: int) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (
            _name(trial, best),
            f"{trial.lr:g}",
            trial.aggregation_frequency,
            trial.updates,
            "-" if trial.score is None else f"{sign * trial.score:.4f}",
            trial.status,
        )
        for trial in found
    ]
    head = ("", "lr", "k", "updates", shown, "status")
    blocks: list[Block] = [Table("Trials", head, rows, f"Validation {shown}, the best within the budget.", wide=True)]
    named = [(_name(trial, best), trial.named, f"{_seconds(trial):,.0f}") for trial in found]
    blocks.append(Table("What they differ in", ("", "settings", "seconds"), named, wide=True))
    if failed := [trial for trial in found if trial.error]:
        errors = [(_name(trial, best), short(trial.error or "", LONGEST)) for trial in failed]
        blocks.append(Table("Why trials failed", ("", "error"), errors, wide=True))
    blocks.append(Table("What the words mean", ("word", "meaning"), list(MEANING.items()), wide=True))
    if best:
        note = (
            "The winner was chosen on these rows, as the best of several: its lead is flattered a little. rtrain "
            "compare of two trials that were trained to their end looks at the test rows, which chose nothing."
        )
        blocks.append(Note(note))
    return Section("trials", "Trials", "", blocks)


def _name(trial: Trial, best: int | None) -> str:
    return f"trial {trial.number}{', the winner' if trial.number == best else ''}"


def _drawn(found: list[Trial]) -> list[Trial]:
    """Trial 0 and the best others, as many as there are colours."""
    scored = sorted(found, key=lambda trial: (trial.number != 0, trial.score is None, -(trial.score or 0.0)))
    return sorted(scored[:MOST_CURVES], key=lambda trial: trial.number)


def _curves_intro(found: list[Trial]) -> str:
    text = "Of each trial by its number, over the rows that it was trained on."
    return text if len(found) <= MOST_CURVES else f"{text} Trial 0 and the best {MOST_CURVES - 1} others are drawn."


def _lines(found: list[Trial], curves: dict[int, Curves], shown: str, sign: int) -> list[Block]:
    blocks: list[Block] = []
    for name, label in (("score", f"validation {shown}"), ("loss", "training loss")):
        lines = []
        for trial in _drawn(found):
            points = getattr(curves[trial.number], name)
            value = sign if name == "score" else 1
            xs, ys = stats.thin([float(point.rows) for point in points], [value * point.value for point in points])
            lines.append(Line(str(trial.number), xs, ys, dots=name == "score" and len(xs) <= 60))
        if any(line.xs for line in lines):
            title = f"{label[0].upper()}{label[1:]} of each trial"
            blocks.append(Figure(title, charts.lines(lines, "rows trained on", label), ""))
    return blocks or [Note("No trial has logged an update yet.")]


def _space(found: list[Trial], shown: str, sign: int) -> list[Block]:
    scored = [trial for trial in found if trial.score is not None]
    if not scored:
        return [Note("No trial came to a score.")]
    note = "A point is a trial, with its number. A trial that was stopped early had fewer rows to learn from."

    def figure(x: Callable[[Trial], float], series: Callable[[Trial], float], names: str, label: str) -> Figure:
        groups = sorted({series(trial) for trial in scored})
        items = [
            Dot(
                x(trial),
                sign * (trial.score or 0.0),
                groups.index(series(trial)),
                str(trial.number),
                f"trial {trial.number}, {trial.named}: {shown} {sign * (trial.score or 0.0):.4f}, {trial.status}",
            )
            for trial in scored
        ]
        # More groups than colours cannot be told apart by them: then the numbers alone name the points.
        legend = [f"{names}{number(group)}" for group in groups] if len(groups) <= MOST_GROUPS else []
        return Figure(
            f"Validation {shown} over {label}", charts.dots(items, legend, label, f"validation {shown}"), note
        )

    return [
        figure(lambda trial: trial.lr, lambda trial: trial.aggregation_frequency, "k=", "the learning rate"),
        figure(lambda trial: trial.aggregation_frequency, lambda trial: trial.lr, "", "k"),
    ]


def _next(search: Run, best: int | None) -> Section:
    if best is None:
        command = Code("Go on", f"rtrain tune --resume --out {search}", "Trials that have ended are not run again.")
        return Section("next", "What to do next", "", [command])
    winner = search.trial(best)
    blocks: list[Block] = []
    if best and search.trial(0).finished and winner.finished:
        text = f"rtrain compare {search.trial(0)} {winner}"
        blocks.append(Code("The winner beside the recipe's own settings", text, "On the test rows, row by row."))
    blocks.append(Code("The winner's own report", f"rtrain report {winner}"))
    return Section("next", "What to do next", "", blocks)
