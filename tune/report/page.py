"""search.html of a search: the verdict, the trials, learning rate and aggregation frequency, the best score over time,
the cost, and what to do next. All else that can be drawn of trials is in Optuna's dashboard (`dashboard`).
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, Tune
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import metric_for
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Cell, Figure, Note, Section, Step, Steps, Table, Tile
from rtrain.report.drawing.charts import Dot, Line
from rtrain.report.drawing.page import render, write as write_page
from rtrain.report.drawing.svg import duration, short
from rtrain.tasks import base
from tune.history import History, read_journal, replay
from tune.report import stats, table, verdict

LONGEST = 300
WORDS = (
    ("rung", "a number of rows after which trials are compared; the better half goes on to twice the rows"),
    ("steering rows", "the validation rows that decide at the rungs"),
    ("held-back rows", "the other validation rows, which decide at the end and steered nothing"),
    ("frozen", "at a rung, with a checkpoint: it can go on from there"),
    ("finished", "trained to its end"),
    ("k", "passes of a worker between two exchanges of gradients (train.aggregation_frequency)"),
)
COSTS: Mapping[str, str] = {"latency": "ms for a text", "bytes": "MB of weights"}
"""By `tune.cost`: the head of the column with what a trial's model costs."""
RATE, FREQUENCY = "optim.lr", "train.aggregation_frequency"


@dataclass(frozen=True)
class Known:
    """All that the page is made from."""

    search: Run
    config: Config
    history: History
    headline: str

    @property
    def tune(self) -> Tune:
        return self.config.deploy.tune

    @property
    def score(self) -> str:
        return table.score_of(self.headline)

    @property
    def sign(self) -> int:
        return -1 if self.headline.startswith("neg_") else 1


def write(search: Run) -> Path:
    """Make the search's search.html. Raises `UserError` for a search of which no trial has begun."""
    events = read_journal(search.trials)
    if not replay(events).trials:
        text = f"{search} is a search of which no trial has begun; {search.resumed_by} goes on"
        raise UserError(text, code="not_begun")
    return write_page(search.search_page, page(search, events, verdict.of(search)))


def page(search: Run, events: Sequence[Mapping[str, Any]], told: str) -> str:
    """The page by the journal's events; `told` is the verdict in one sentence."""
    config, history = configuration.load(str(search.config)), replay(events)
    headline = metric_for(base.get(config.recipe.task).output).headline
    known = Known(search, config, history, headline)
    sections = [_trials(known), _pictures(known, events), _cost(known), _next(known)]
    about = f"A search from the recipe {config.recipe.name} by rtrain, {_count(len(history.own), 'trial')}"
    lead = f"{told[:1].upper()}{told[1:].removesuffix('.')}."
    return render(search.name, about, _tiles(known), sections, lead=lead)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------------------------------------------- tiles


def _tiles(known: Known) -> list[Tile]:
    history, spent, tiles = known.history, stats.spent(known.history, known.tune), list[Tile]()
    states = [trial.status for trial in history.own]
    words = ("finished", "frozen", "asked", "failed", "diverged")
    each = ", ".join(f"{states.count(word)} {word}" for word in words if word in states)
    tiles.append(Tile("trials", f"{len(history.own):,}", each))
    if spent.budget:
        note = f"{spent.searched:,} of {spent.budget:,} rows; {spent.end:,} more for the end"
        tiles.append(Tile("of the budget used", f"{100 * spent.searched / spent.budget:.0f} %", note))
    if spent.saved is not None and spent.every and spent.saved > 0:
        note = f"of the {spent.every:,} that full runs of all trials would take"
        tiles.append(Tile("rows saved", f"{100 * spent.saved / spent.every:.0f} %", note))
    training = f"{duration(spent.seconds)} of training"
    tiles.append(Tile("time", duration(history.seconds or spent.seconds), training))
    return tiles


# -------------------------------------------------------------------------------------------------------------- trials


def _trials(known: Known) -> Section:
    history, cost = known.history, COSTS.get(known.tune.cost)
    head, *rows = table.cells(history, history.own, known.headline, known.tune)
    shown: list[Sequence[Cell]] = [
        (*row, f"{trial.seconds:,.0f}", *([stats.figure(trial.cost)] if cost else []))
        for row, trial in zip(rows, history.own, strict=True)
    ]
    note = (
        f"Under each rung: {known.score} on the steering rows. Held: on the held-back rows, the mean over the seeds "
        "that the settings were trained with to the end."
    )
    columns = (*head, "seconds", *([cost] if cost else []))
    blocks: list[Block] = [Table("Trials", columns, shown, note, wide=True)]
    if failed := [trial for trial in history.trials if not trial.sound]:
        errors = [
            (trial.number, trial.named, short(trial.error or f"diverged: {trial.diverged}", LONGEST))
            for trial in failed
        ]
        blocks.append(Table("Why trials failed", ("trial", "settings", "what happened"), errors, wide=True))
    blocks.append(Table("What the words mean", ("word", "meaning"), WORDS, wide=True))
    stopped = f"No further trial was asked for: {history.stopped}." if history.stopped else ""
    return Section("trials", "Trials", stopped, blocks)


# ------------------------------------------------------------------------------------------------------------ pictures


def _pictures(known: Known, events: Sequence[Mapping[str, Any]]) -> Section:
    blocks = [*_best(known, events), *_pair(known)]
    return Section("space", "What was found", "", blocks or [Note("No trial has come to a score yet.")])


def _best(known: Known, events: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """The best score at each rung by the time at which it was reached."""
    lines = dict[int, tuple[list[float], list[float]]]()
    for event in events:
        if event["kind"] == "reached" and math.isfinite(event["score"]):
            seconds, scores = lines.setdefault(event["rung"], ([], []))
            seconds.append(event["time"] - events[0]["time"])
            scores.append(max([*scores[-1:], event["score"]]))
    drawn = [
        Line(f"rung {rung + 1}", seconds, [known.sign * score for score in scores], dots=True)
        for rung, (seconds, scores) in sorted(lines.items())
    ]
    if drawn:
        note = "On the steering rows. Scores of one rung are of trials that were trained on equally many rows."
        chart = charts.lines(drawn, "seconds since the search began", f"best {known.score}")
        yield Figure(f"The best {known.score} over time", chart, note)


def _pair(known: Known) -> Iterator[Block]:
    """The trials over learning rate and aggregation frequency, where both were searched."""
    if not {RATE, FREQUENCY} <= {*stats.searched(known.history, known.tune)}:
        return
    recipe = known.config.recipe
    default = recipe.rows_per_update / (recipe.train.workers * recipe.train.micro_batch)
    scores = {trial.number: score for trial, score in stats.first_rung(known.history) if math.isfinite(score)}
    middle = sorted(scores.values())[len(scores) // 2] if scores else 0.0
    dots = []
    for trial in known.history.own:
        score = scores.get(trial.number)
        series = 2 if score is None else 3 if trial.number == known.history.chosen else int(score < middle)
        came = trial.status if score is None else f"{known.score} {table.score(known.headline, score)}"
        rate = trial.settings.get(RATE, recipe.optim.lr)
        frequency = trial.settings.get(FREQUENCY, default)
        if frequency is not None:  # else the trial sets the rows of an update
            hint = f"trial {trial.number}, {trial.named}: {came}"
            dots.append(Dot(rate, frequency, series, str(trial.number), hint))
    chart = charts.dots(dots, ("better half", "others", "no score", "winner"), RATE, FREQUENCY)
    note = "A point is a trial, with its number; its color is its place by the score at the first rung."
    yield Figure("Trials over learning rate and aggregation frequency", chart, note)


# ---------------------------------------------------------------------------------------------------------------- cost


def _cost(known: Known) -> Section:
    spent, tune = stats.spent(known.history, known.tune), known.tune
    rows = [
        ("rows until the first rung", f"{spent.first:,}"),
        ("rows of later rungs", f"{spent.later:,}"),
        ("rows of the end: the best trials and trial 0, and again with other seeds", f"{spent.end:,}"),
        ("seconds of training, over all trials", f"{spent.seconds:,.0f}"),
        ("time of the search", duration(known.history.seconds)),
    ]
    if spent.full:
        rows.append(("full runs that the rows would pay for", f"{(spent.searched + spent.end) / spent.full:.1f}"))
    if tune.price is not None:
        money = known.history.money(known.config.recipe.train.workers, tune.price)
        rows.append((f"money, at {tune.price:g} an hour of a worker", f"{money:.2f}"))
    note = "What a failed trial had done since its last rung is not known."
    return Section("cost", "What it has cost", "", [Table("What it has cost", ("", ""), rows, note)])


# ---------------------------------------------------------------------------------------------------------------- next


def _next(known: Known) -> Section:
    search, chosen = known.search, known.history.chosen
    if chosen is None:
        why = "Trials go on from where they are: none is trained twice"
        step = Step("Go on with the search", why, search.resumed_by)
        note = "TEACHER is the run whose model the students learn from." if search.is_of_students else ""
        return Section("next", "What to do next", "", [Steps("What to do next", [step], note)])
    winner, steps, note = search.trial(chosen), list[Step](), ""
    if winner.finished:
        steps.append(Step("Ask the winner", "it is trained to its end", f"rtrain serve {_quoted(winner.artifact)}"))
    if chosen and search.trial(0).finished and winner.finished:
        command = f"rtrain compare {_quoted(search.trial(0).folder)} {_quoted(winner.folder)}"
        why = "row by row, also on the test rows, which have chosen nothing"
        steps.append(Step("Look at the winner beside the recipe's own settings", why, command))
    if not search.is_of_students:  # a student is trained by its teacher's answers, not by a recipe
        best = f"rtrain train {_quoted(search.folder / 'best.yaml')} --out NEW_FOLDER"
        steps.append(Step("Train with the winner's settings", "e.g. on more rows, by --data FILE", best))
        note = "NEW_FOLDER is for you to name."
    report = f"rtrain report {_quoted(winner.folder)}"
    steps.append(Step("Read the winner's own report", "its answers, its slices, what is wrong most", report))
    return Section("next", "What to do next", "", [Steps("What to do next", steps, note)])


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
