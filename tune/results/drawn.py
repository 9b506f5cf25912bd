"""The drawn sections of a search's page: what was searched, and the learning curves."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rtrain import config as configuration
from rtrain.comparison import training
from rtrain.comparison.training import Curves
from rtrain.config import Config
from rtrain.report import stats
from rtrain.report.drawing import charts, parallel, surface
from rtrain.report.drawing.blocks import Block, Figure, Note, Section
from rtrain.report.drawing.charts import Bar, Dot, Line, Mark
from rtrain.report.drawing.parallel import Strand, Upright
from rtrain.report.drawing.surface import Grid, Spot
from rtrain.report.drawing.svg import number, score_name, ticks
from rtrain.run import Run
from tune.known.history import History, Trial
from tune.results import figures
from tune.results.figures import Dimension, Importance

MOST_CURVES = 6
"""Trials that are drawn with a name; the legend has room for no more."""
MOST_TICKS = 7
LEAST_APART = 0.07
"""Share of an upright axis: below this, two figures beside it would touch."""
COLUMNS, ROWS = 49, 33
"""Points of a surface's grid."""
MARGIN = 0.06
PAIR = ("optim.lr", "train.aggregation_frequency")


@dataclass(frozen=True)
class Known:
    """All that the page is made from."""

    search: Run
    config: Config
    history: History
    dimensions: tuple[Dimension, ...]
    output: str
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

    def hint(self, trial: Trial, value: float | None, where: str) -> str:
        came = f"{self.score} {self.figure(value)} {where}" if value is not None else trial.status
        return f"trial {trial.number}, {self.named(trial)}: {came}"


# ------------------------------------------------------------------------------------------------------- what was tried


def space(known: Known) -> Section:
    scored = [(trial, score) for trial, score in figures.first_rung(known.history) if known.dimensions]
    found = None
    whole = [(trial, score) for trial, score in scored if _is_placed(trial, known.dimensions)]
    if whole:
        places = np.array([[one.place(trial) for one in known.dimensions] for trial, _ in whole])
        found = figures.importance(places, np.array([score for _, score in whole]))
    blocks = [*_pair(known, scored, found), *_parallel(known, scored), *_importance(known, len(whole), found)]
    intro = "By the scores at the first rung, on the steering rows: there all trials have been trained on equally many."
    if not known.dimensions:
        blocks = [Note("No trial has set anything otherwise than the recipe yet.")]
    return Section("space", "What was searched", intro, blocks)


def _axes(known: Known, found: Importance | None) -> list[Dimension]:
    """The two settings that are drawn against each other: learning rate and k, else the two that matter most."""
    numeric = [one for one in known.dimensions if one.scale != "choice" and len(_values(known, one)) > 1]
    pair = [one for one in numeric if one.name in PAIR]
    if len(pair) == len(PAIR):
        return sorted(pair, key=lambda one: PAIR.index(one.name))
    if found:
        matters = dict(zip(known.dimensions, found.falls, strict=True))
        numeric.sort(key=lambda one: -matters[one])
    return numeric[:2]


def _values(known: Known, one: Dimension) -> set[float]:
    return {one.place(trial) for trial in known.history.own if _is_placed(trial, (one,))}


def _is_placed(trial: Trial, dimensions: Iterable[Dimension]) -> bool:
    """Whether a trial has a number of each of the settings that are numbers."""
    return not any(math.isnan(one.place(trial)) for one in dimensions)


def _pair(known: Known, scored: Sequence[tuple[Trial, float]], found: Importance | None) -> Iterator[Block]:
    axes = _axes(known, found)
    if not axes:
        return
    if len(axes) == 1:
        yield from _alone(known, axes[0], scored)
        return
    one, two = axes
    scored = [(trial, score) for trial, score in scored if _is_placed(trial, axes)]
    x, y = (np.array([axis.place(trial) for trial, _ in scored]) for axis in axes)
    wide, high = (_grid(known, axis, points) for axis, points in ((one, COLUMNS), (two, ROWS)))
    heights = figures.surface(x, y, np.array([score for _, score in scored]), wide, high)
    scores = {trial.number: score for trial, score in scored}
    spots = [
        Spot(
            _unit(one, one.place(trial)),
            _unit(two, two.place(trial)),
            str(trial.number),
            known.hint(trial, scores.get(trial.number), "at the first rung"),
            scored=trial.number in scores,
            best=trial.number == known.history.chosen,
        )
        for trial in known.history.own
        if _is_placed(trial, axes)
    ]
    grid = Grid(_unit(one, wide), _unit(two, high), heights)
    chart = surface.contour(
        *(grid, spots, one.name, two.name, f"estimated {known.score}"),
        log=(one.scale == "log", two.scale == "log"),
        sign=known.sign,
    )
    points = "A point is a trial, with its number"
    points += "; a dashed one came to no score." if len(scores) < len(spots) else "."
    if heights is None:
        few = f"No surface: fewer than {figures.LEAST_SURFACE} trials came to scores that differ."
        yield Figure(f"Trials over {one.short} and {two.short}", chart, f"{points} {few}")
        return
    row, column = np.unravel_index(heights.argmax(), heights.shape)
    at = f"{_near(known, one, wide[column])} and {_near(known, two, high[row])}"
    estimate = (
        f"The surface is an estimate of the {known.score} at the first rung, by a Gaussian process through "
        f"{len(scored)} trials; the stronger the colour, the better, and far from the points it is a guess."
    )
    if len(known.dimensions) > 2:
        estimate += " The other settings are not told apart in it."
    yield Figure(
        f"Estimated {known.score} over {one.short} and {two.short}: best near {at}", chart, f"{points} {estimate}"
    )


def _grid(known: Known, one: Dimension, points: int) -> figures.Floats:
    """Places over an axis, a little beyond its trials."""
    values = _values(known, one)
    margin = MARGIN * (max(values) - min(values))
    return np.linspace(min(values) - margin, max(values) + margin, points)


Place = TypeVar("Place", float, figures.Floats)


def _unit(one: Dimension, place: Place) -> Place:
    """The setting's value at a place."""
    return 10.0**place if one.scale == "log" else place


def _near(known: Known, one: Dimension, place: float) -> str:
    """The setting at a place; where few values were tried, the nearest one of them."""
    tried = _values(known, one)
    near = min(tried, key=lambda value: abs(value - place)) if len(tried) <= MOST_TICKS else place
    return f"{one.short} {_unit(one, near):.2g}"


def _alone(known: Known, one: Dimension, scored: Sequence[tuple[Trial, float]]) -> Iterator[Block]:
    if one.scale != "log":
        return  # the upright axes show it
    items = [
        Dot(
            *(_unit(one, one.place(trial)), known.sign * score, int(trial.number == known.history.chosen)),
            *(str(trial.number), known.hint(trial, score, "at the first rung")),
        )
        for trial, score in scored
        if _is_placed(trial, (one,))
    ]
    chart = charts.dots(items, [], one.name, f"{known.score} at the first rung")
    yield Figure(f"{known.score[:1].upper()}{known.score[1:]} over {one.short}", chart, "A point is a trial.")


def _parallel(known: Known, scored: Sequence[tuple[Trial, float]]) -> Iterator[Block]:
    if not known.dimensions:
        return
    scores = {trial.number: score for trial, score in scored}
    low, high = (min(scores.values()), max(scores.values())) if scores else (0.0, 0.0)
    uprights = [_upright(known, one) for one in known.dimensions]
    if scores:
        marks = [(_share(known.sign * value, low, high), number(value)) for value in _round(known, low, high)]
        uprights.append(Upright(known.score, marks))
    strands = []
    drawn = [trial for trial in known.history.own if _is_placed(trial, known.dimensions)]
    for trial in drawn:
        score = scores.get(trial.number)
        places = [_share(one.place(trial), *_ends(known, one)) for one in known.dimensions]
        shade = None if score is None else _share(score, low, high)
        places += [] if shade is None else [shade]
        hint = known.hint(trial, score, "at the first rung")
        strands.append(Strand(places, shade, hint, trial.number == known.history.chosen))
    label = f"settings and {known.score} of {len(strands)} trials"
    chart = parallel.parallel(uprights, strands, label, (known.figure(low), known.figure(high)) if scores else None)
    note = "A line is a trial: through its settings, to its score at the first rung, by which it is coloured."
    note += " Thick: the winner." if known.history.chosen is not None else ""
    note += " Dashed: came to no score." if any(trial.number not in scores for trial in drawn) else ""
    note += " Not drawn: trials with a setting that is null." if len(drawn) < len(known.history.own) else ""
    yield Figure("Every setting of every trial", chart, note)


def _ends(known: Known, one: Dimension) -> tuple[float, float]:
    values = _values(known, one)
    return min(values), max(values)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _round(known: Known, low: float, high: float) -> list[float]:
    """Figures beside the axis of scores, as they are shown."""
    ends = sorted((known.sign * low, known.sign * high))
    return ticks(ends[0], ends[1])


def _upright(known: Known, one: Dimension) -> Upright:
    low, high = _ends(known, one)
    if one.scale == "choice":
        return Upright(one.short, [(_share(place, low, high), str(name)) for place, name in enumerate(one.choices)])
    places = sorted(_values(known, one))
    shares = [_share(place, low, high) for place in places]
    apart = min((high - low for low, high in itertools.pairwise(shares)), default=1.0)
    if len(places) > MOST_TICKS or apart < LEAST_APART:
        values = _decades(low, high) if one.scale == "log" else ticks(low, high)
        return Upright(one.short, [(_share(place, low, high), number(_unit(one, place))) for place in values])
    marks = [(share, number(_unit(one, place))) for place, share in zip(places, shares, strict=True)]
    return Upright(one.short, marks)


def _decades(low: float, high: float) -> list[float]:
    """Places of 1, 2 and 5 times the powers of ten, or of the powers alone where these are many."""
    for steps in ((1, 2, 5), (1,)):
        powers = range(int(np.floor(low)), int(np.ceil(high)) + 1)
        found = [power + float(np.log10(step)) for power in powers for step in steps]
        inside = [place for place in found if low - 1e-9 <= place <= high + 1e-9]
        if len(inside) <= MOST_TICKS:
            break
    return inside


def _importance(known: Known, trials: int, found: Importance | None) -> Iterator[Block]:
    if not known.dimensions:
        return
    if trials < figures.LEAST_IMPORTANCE:
        few = f"from {trials} trial{'' if trials == 1 else 's'} with a score; it takes {figures.LEAST_IMPORTANCE}"
        yield Note(f"Which setting matters most cannot be told {few}.")
        return
    if found is None:
        yield Note("Which setting matters most cannot be told: all trials came to one score at the first rung.")
        return
    if found.explained <= 0:
        why = f"settings do not predict the scores of trials that were left out (R2 {found.explained:.2f})"
        yield Note(f"Which setting matters most cannot be told from {trials} trials: {why}.")
        return
    ranked = sorted(zip(known.dimensions, found.falls, strict=True), key=lambda pair: -pair[1])
    items = [Bar(one.short, fall, f"{one.name}: {fall:.3f}") for one, fall in ranked]
    note = (
        f"By a random forest, of {trials} trials: it predicts the first-rung scores of trials that it has not seen "
        f"with R2 {found.explained:.2f}. A bar is by how much R2 falls when the values of a setting are shuffled "
        "(permutation importance): an estimate."
    )
    chart = charts.bars(items, "fall of R2")
    yield Figure(f"{ranked[0][0].short} matters most at the first rung", chart, note)


# -------------------------------------------------------------------------------------------------------------- curves


def curves(known: Known) -> Section:
    chosen = _drawn(known)
    logged = {trial.number: _logged(known, trial) for trial in chosen}
    blocks = [
        *_rungs(known, chosen),
        *_logs(known, logged, lambda one: one.score, known.sign, f"validation {known.score}"),
        *_logs(known, logged, lambda one: one.loss, 1, "training loss"),
    ]
    intro = "By the trials' numbers, over the rows that they were trained on; dashed: the rungs."
    if len(chosen) < len(known.history.own):
        intro += f" Named are trial 0 and the {len(chosen) - 1} others that came furthest."
    return Section("curves", "Learning curves", intro, blocks or [Note("No trial has logged an update yet.")])


def _drawn(known: Known) -> list[Trial]:
    """Trial 0, the winner, and the others that came furthest, with the best scores there."""

    def standing(trial: Trial) -> tuple[float, ...]:
        last = trial.reached[-1] if trial.reached else None
        first = (trial.number != 0, trial.number != known.history.chosen, trial.finished is None)
        return (*first, -last.rung if last else 1, -last.score if last else 0.0, trial.number)

    return sorted(sorted(known.history.own, key=standing)[:MOST_CURVES], key=lambda trial: trial.number)


def _logged(known: Known, trial: Trial) -> Curves:
    run = known.search.trial(trial.number)
    rows = configuration.load(str(run.config)).recipe.rows_per_update if run.exists else 1
    return training.curves(run, rows, known.output)


def _marks(known: Known) -> list[Mark]:
    """The rungs, at the rows of the first trial that came there: others may differ by less than an update."""
    rows: dict[int, int] = {}
    for trial in known.history.own:
        for one in trial.reached:
            rows.setdefault(one.rung, one.rows)
    return [Mark(at, f"rung {rung + 1}", "epoch") for rung, at in sorted(rows.items())]


def _rungs(known: Known, chosen: Sequence[Trial]) -> Iterator[Block]:
    def line(trial: Trial, name: str) -> Line:
        rows = [float(one.rows) for one in trial.reached]
        return Line(name, rows, [known.sign * one.score for one in trial.reached], dots=True)

    if not any(trial.reached for trial in known.history.own):
        return
    named = {trial.number for trial in chosen}
    others = [trial for trial in known.history.own if trial.number not in named and trial.reached]
    faint = [line(trial, f"trial {trial.number}, {known.named(trial)}") for trial in others]
    lines = [line(trial, str(trial.number)) for trial in chosen]
    label = f"steering {known.score}"
    chart = charts.lines(lines, "rows trained on", label, _marks(known), faint=faint)
    note = "On the steering rows, at the rungs: what the halving went by."
    yield Figure("The score at the rungs", chart, f"{note} Faint: the other trials." if faint else note)


def _logs(
    known: Known, logged: dict[int, Curves], of: Callable[[Curves], Sequence[training.Point]], sign: int, label: str
) -> Iterator[Block]:
    lines = []
    for trial, one in logged.items():
        points = of(one)
        xs, ys = stats.thin([float(point.rows) for point in points], [sign * point.value for point in points])
        lines.append(Line(str(trial), xs, ys, dots=label.startswith("validation") and len(xs) <= 60))
    if any(line.xs for line in lines):
        note = "The runs' own evaluations, on all validation rows." if label.startswith("validation") else ""
        title = f"{label[0].upper()}{label[1:]} of each trial"
        yield Figure(title, charts.lines(lines, "rows trained on", label, _marks(known)), note)
