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
from rtrain.config import Config
from rtrain.errors import UserError
from rtrain.metrics.by_output import metric_for
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Cell, Figure, Note, Section, Step, Steps, Table, Tile
from rtrain.report.drawing.charts import Dot, Line
from rtrain.report.drawing.page import render, write as write_page
from rtrain.report.drawing.svg import duration, score_name, short
from rtrain.run import Run
from rtrain.tasks import base
from tune.known import journal
from tune.known.aim import at
from tune.known.history import History, Trial, numbered, replay
from tune.results import figures, verdict
from tune.results.figures import Dimension

LONGEST = 300
WORDS = (
    ("rung", "a number of rows after which trials are compared; the better half goes on to twice the rows"),
    ("steering rows", "the validation rows that decide at the rungs"),
    ("held-back rows", "the other validation rows, which decide at the end and steered nothing"),
    ("frozen", "at a rung, with a checkpoint: it can go on from there"),
    ("finished", "trained to its end"),
)
COSTS: Mapping[str, str] = {"latency": "ms for a text", "bytes": "MB of weights"}
"""By `tune.cost`: the head of the column with what a trial's model costs."""
K = ("k", "passes of a worker between two exchanges of gradients (train.aggregation_frequency)")


PAIR = ("optim.lr", "train.aggregation_frequency")


@dataclass(frozen=True)
class Known:
    """All that the page is made from."""

    search: Run
    config: Config
    history: History
    dimensions: tuple[Dimension, ...]
    headline: str

    @property
    def score(self) -> str:
        """The headline as a reader writes it; of the negative of an error, the error."""
        return score_name(self.headline.removeprefix("neg_"))

    @property
    def sign(self) -> int:
        return -1 if self.headline.startswith("neg_") else 1

    def figure(self, value: float) -> str:
        return f"{self.sign * value:.4f}"

    def named(self, trial: Trial) -> str:
        return figures.named(trial, {one.name: one.short for one in self.dimensions})


def write(search: Run) -> Path:
    """Make the search's search.html. Raises `UserError` for a search of which no trial has begun."""
    events = journal.read(search.trials)
    if not replay(events).trials:
        text = f"{search} is a search of which no trial has begun; {search.resumed_by} goes on"
        raise UserError(text, code="not_begun")
    return write_page(search.search_page, page(search, events, verdict.of(search)))


def page(search: Run, events: Sequence[Mapping[str, Any]], told: str) -> str:
    """The page by the journal's events; `told` is the verdict in one sentence."""
    config, history = configuration.load(str(search.config)), replay(events)
    headline = metric_for(base.get(config.recipe.task).output).headline
    known = Known(search, config, history, figures.dimensions(history, config), headline)
    sections = [_trials(known), _pictures(known, events), _cost(known), _next(known)]
    about = f"A search from the recipe {config.recipe.name} by rtrain, {_count(len(history.own), 'trial')}"
    lead = f"{told[:1].upper()}{told[1:].removesuffix('.')}."
    return render(search.name, about, _tiles(known), sections, lead=lead)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------------------------------------------- tiles


def _tiles(known: Known) -> list[Tile]:
    history, spent = known.history, figures.spent(known.history, known.config.deploy.tune)
    tiles = [*_scores(known)]
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
    if history.seconds:
        tiles.append(Tile("time", duration(history.seconds), f"{duration(spent.seconds)} of training in it"))
    else:
        tiles.append(Tile("time", duration(spent.seconds), "of training, over all trials"))
    return tiles


def _scores(known: Known) -> list[Tile]:
    """Scores of the winner and of trial 0 on the held-back rows; where there is none yet, of the best so far."""
    leading, tiles = figures.leader(known.history), list[Tile]()
    first = "winner" if known.history.chosen is not None else "best so far"
    for number, name in ((leading.number if leading else 0, first), (0, "trial 0")):
        trial, held = numbered(known.history.trials, number), figures.held(known.history, number)
        if number == 0 and tiles and leading and leading.number == 0:
            break
        about = f"trial {number}: {known.named(trial)}"
        if held:
            seeds = f", mean of {held.seeds} seeds" if held.seeds > 1 else ""
            note = f"{short(about, 60)}; {held.rows:,} held-back rows{seeds}"
            tiles.append(Tile(f"{known.score}, {name}", known.figure(held.score), note))
        elif trial.reached:
            note = f"{short(about, 60)}; steering rows, at rung {trial.reached[-1].rung + 1}"
            tiles.append(Tile(f"{known.score}, {name}", known.figure(trial.reached[-1].score), note))
    return tiles


# -------------------------------------------------------------------------------------------------------------- trials


def _trials(known: Known) -> Section:
    history = known.history
    rungs = range(max((one.rung for trial in history.trials for one in trial.reached), default=-1) + 1)
    cost = COSTS.get(known.config.deploy.tune.cost)
    head = (
        *("trial", *(one.short for one in known.dimensions), "by", "reached", *(f"rung {rung + 1}" for rung in rungs)),
        *("held back", "status", "seconds", "seeds", *([cost] if cost else [])),
    )
    note = (
        f"Under each rung: {known.score} on the steering rows. Held back: on the held-back rows, the mean over the "
        "seeds that the settings were trained with to the end."
    )
    rows = [_row(known, trial, rungs) for trial in history.own]
    blocks: list[Block] = [Table("Trials", head, rows, note, wide=True)]
    if again := [trial for trial in history.trials if trial.of is not None]:
        blocks.append(_again(known, again))
    if failed := [trial for trial in history.trials if not trial.sound]:
        errors = [(trial.number, known.named(trial), short(_why(trial), LONGEST)) for trial in failed]
        blocks.append(Table("Why trials failed", ("trial", "settings", "what happened"), errors, wide=True))
    words = [*WORDS, *([K] if any(one.short == K[0] for one in known.dimensions) else [])]
    blocks.append(Table("What the words mean", ("word", "meaning"), words, wide=True))
    stopped = f"No further trial was asked for: {history.stopped}." if history.stopped else ""
    return Section("trials", "Trials", stopped, blocks)


def _why(trial: Trial) -> str:
    return trial.error if trial.error is not None else f"diverged: {trial.diverged}"


def _row(known: Known, trial: Trial, rungs: Sequence[int]) -> tuple[Cell, ...]:
    reached = {one.rung: one.score for one in trial.reached}
    held, seconds = figures.held(known.history, trial.number), trial.seconds
    return (
        f"{trial.number}, the winner" if trial.number == known.history.chosen else str(trial.number),
        *(figures.figure(one.value(trial)) for one in known.dimensions),
        trial.by,
        f"rung {max(reached) + 1}" if reached else "-",
        *(known.figure(reached[rung]) if rung in reached else "-" for rung in rungs),
        known.figure(held.score) if held else "-",
        trial.status,
        f"{seconds:,.0f}" if seconds else "-",
        str(held.seeds) if held else "-",
        *([] if known.config.deploy.tune.cost == "training" else [figures.figure(trial.cost)]),
    )


def _again(known: Known, trials: Sequence[Trial]) -> Table:
    rows = [
        (
            trial.number,
            f"trial {trial.of}",
            str(trial.seed),
            known.figure(first.score) if (first := at(trial, 0)) else "-",
            known.figure(trial.finished.held) if trial.finished else "-",
            known.figure(trial.finished.score) if trial.finished else "-",
            trial.status,
            f"{trial.seconds:,.0f}",
        )
        for trial in trials
    ]
    head = ("trial", "settings of", "seed", "rung 1", "held back", "all validation rows", "status", "seconds")
    return Table("The same settings with other seeds", head, rows, f"Figures are {known.score}.", wide=True)


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
    pair = [one for name in PAIR for one in known.dimensions if one.name == name]
    if len(pair) < len(PAIR):
        return
    scores = {trial.number: score for trial, score in figures.first_rung(known.history) if math.isfinite(score)}
    middle = sorted(scores.values())[len(scores) // 2] if scores else 0.0
    names = ("better half", "others", "no score", "winner")
    dots = []
    for trial in known.history.own:
        score = scores.get(trial.number)
        series = 2 if score is None else 3 if trial.number == known.history.chosen else int(score < middle)
        came = trial.status if score is None else f"{known.score} {known.figure(score)}"
        rate, frequency = (float(one.value(trial)) for one in pair)
        dots.append(
            Dot(rate, frequency, series, str(trial.number), f"trial {trial.number}, {known.named(trial)}: {came}")
        )
    chart = charts.dots(dots, names, pair[0].name, pair[1].name)
    note = "A point is a trial, with its number; its color is its place by the score at the first rung."
    yield Figure("Trials over learning rate and aggregation frequency", chart, note)


# ---------------------------------------------------------------------------------------------------------------- cost


def _cost(known: Known) -> Section:
    tune = known.config.deploy.tune
    spent = figures.spent(known.history, tune)
    parts = [("until the first rung", spent.first), ("later rungs", spent.later), ("the end", spent.end)]
    blocks: list[Block] = []
    if sum(rows for _, rows in parts):
        saved = spent.saved or 0
        title = f"{spent.searched + spent.end:,} rows were trained on"
        if saved > 0:
            title += f", {saved:,} fewer than by full runs of all trials"
            parts.append(("saved against full runs", saved))
        note = (
            "The end: the best trials and trial 0 to their ends, and again with other seeds. What a failed trial had "
            "done since its last rung is not known."
        )
        blocks.append(Figure(title, charts.stack([(name, float(rows)) for name, rows in parts], "rows"), note))
    rows = [("seconds of training, over all trials", f"{spent.seconds:,.0f}")]
    if known.history.seconds:
        rows.insert(0, ("time of the search", duration(known.history.seconds)))
    if spent.full:
        rows.append(("rows of a full run", f"{spent.full:,}"))
        rows.append(("full runs that the rows would pay for", f"{(spent.searched + spent.end) / spent.full:.1f}"))
    if tune.price is not None:
        workers = known.config.recipe.train.workers
        money = known.history.money(workers, tune.price)
        rows.append((f"money, at {tune.price:g} an hour of a worker", f"{money:.2f}"))
    blocks.append(Table("What it has cost", ("", ""), rows))
    return Section("cost", "What it has cost", "", blocks)


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
