"""Figures of a search that its page and its table show: pure functions of its history, nothing is drawn here.

Scores are as in the history: larger is better.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rtrain import config as configuration
from rtrain.config import Config, Tune
from rtrain.config.deploy import Range
from tune.known.history import History, Trial, numbered

Floats = npt.NDArray[np.float64]
SHORT = {"aggregation_frequency": "k"}
WIDE = 8.0
"""Ratio of the largest to the smallest choice from which on the choices are steps of a factor."""
LEAST_SURFACE = 5
"""Fewest trials that a surface is drawn through."""
LEAST_IMPORTANCE = 10
"""Fewest trials from which the importance of settings is estimated."""
FOLDS, TREES, SHUFFLES = 5, 100, 10


# ---------------------------------------------------------------------------------------------------------- dimensions


def searched(history: History, tune: Tune) -> list[str]:
    """The settings that trials set by themselves: those of the space, then those of the points alone. What such a
    setting brings with it (`optim.lr_scaling`, say) is not among them."""
    names = dict.fromkeys([*tune.space, *(name for point in tune.points for name in point)])
    return [name for name in names if any(trial.settings.get(name) is not None for trial in history.own)]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """A short name for each dotted one: its last part (`k` for the aggregation frequency), where no other has it."""
    parts = {name: SHORT.get(last := name.rpartition(".")[2], last) for name in names}
    taken = list(parts.values())
    return {name: short if taken.count(short) == 1 else name for name, short in parts.items()}


def named(trial: Trial, short: Mapping[str, str]) -> str:
    """The trial by what it sets, in the short names of what was searched."""
    if trial.of is not None:
        return f"trial {trial.of} with seed {trial.seed}"
    parts = [f"{told} {figure(trial.settings[name])}" for name, told in short.items() if name in trial.settings]
    return ", ".join(parts) or trial.named


def figure(value: Any) -> str:
    """A setting's value for a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Dimension:
    """A setting that was searched."""

    name: str
    short: str
    scale: Literal["log", "linear", "choice"]
    default: Any
    """The recipe's own value."""
    choices: tuple[Any, ...] = ()
    """What the places of a `choice` stand for."""

    def value(self, trial: Trial) -> Any:
        return trial.settings.get(self.name, self.default)

    def place(self, trial: Trial) -> float:
        """Where a trial lies: equal steps of the search are equally long. NaN where the setting is null in it, which is
        no number of a range."""
        value = self.value(trial)
        if self.scale == "choice":
            return float(self.choices.index(value))
        if value is None:
            return math.nan
        return math.log10(value) if self.scale == "log" else float(value)


def dimensions(history: History, config: Config) -> tuple[Dimension, ...]:
    """Every setting that was searched and that a trial has set."""
    space, names = config.deploy.tune.space, searched(history, config.deploy.tune)
    short, found = short_names(names), []
    for name in names:
        default = _default(config, name)
        values = [trial.settings.get(name, default) for trial in history.own]
        scale = _scale(values, space.get(name))
        choices = tuple(dict.fromkeys(values)) if scale == "choice" else ()
        found.append(Dimension(name, short[name], scale, default, choices))
    return tuple(found)


def _default(config: Config, name: str) -> Any:
    recipe = config.recipe
    # A recipe gives one of these two; the other one follows from it.
    if name == "train.rows_per_update":
        return recipe.rows_per_update
    if name == "train.aggregation_frequency":
        return recipe.rows_per_update / (recipe.train.workers * recipe.train.micro_batch)
    return configuration.flat(config).get(name)


def _scale(tried: Sequence[Any], searched: Any) -> Literal["log", "linear", "choice"]:
    values = [*tried, *(searched if isinstance(searched, tuple) else ())]
    if isinstance(searched, Range):  # what a trial has that does not set it may be null, as dropout is
        values = [value for value in values if value is not None]
    if not values or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return "choice"
    if min(values) <= 0:
        return "linear"
    if isinstance(searched, Range):
        return "log" if searched.log else "linear"
    return "log" if max(values) / min(values) >= WIDE else "linear"


# -------------------------------------------------------------------------------------------------- what trials came to


def first_rung(history: History) -> list[tuple[Trial, float]]:
    """(trial, its score at the first rung): there all trials have been trained on equally many rows."""
    return [(trial, one.score) for trial in history.own for one in trial.reached if one.rung == 0]


def rows_of(trial: Trial) -> int:
    """Rows that a trial is known to have been trained on."""
    return trial.finished.rows if trial.finished else max((one.rows for one in trial.reached), default=0)


@dataclass(frozen=True)
class Held:
    """What the settings of a trial came to on the held-back rows: the mean over the seeds that they were trained with
    to the end."""

    score: float
    seeds: int
    rows: int


def held(history: History, number: int) -> Held | None:
    """None for settings that no run was trained to its end with."""
    ends = [trial.finished for trial in history.trials if number in (trial.number, trial.of) and trial.finished]
    if not ends:
        return None
    return Held(sum(end.held for end in ends) / len(ends), len(ends), ends[0].held_rows)


def leader(history: History) -> Trial | None:
    """The winner; before there is one, the sound trial that has come furthest, of the best score there."""
    if history.chosen is not None:
        return numbered(history.trials, history.chosen)
    scored = [trial for trial in history.own if trial.sound and (trial.reached or trial.finished)]

    def standing(trial: Trial) -> tuple[float, ...]:
        ended = held(history, trial.number)
        if ended:
            return (math.inf, ended.score, -trial.number)
        return (trial.reached[-1].rung, trial.reached[-1].score, -trial.number)

    return max(scored, key=standing, default=None)


def front(history: History) -> list[Trial]:
    """Finished trials that no other finished trial beats in the cost or in the held-back score, without being worse in
    the other one; the cheapest first."""
    found, most = [], -math.inf
    ends = [(one, one.finished) for one in history.own if one.finished]
    ended = [(one.price(end.seconds), -end.held, one.number, one) for one, end in ends]
    for _, negative, _, trial in sorted(ended):
        if -negative > most:
            found.append(trial)
            most = -negative
    return found


# ---------------------------------------------------------------------------------------------------- what it has cost


@dataclass(frozen=True)
class Spent:
    """Rows trained on. What a trial that failed had done since its last rung is not known, and not in it."""

    first: int
    """Until the first rung."""
    later: int
    """From there to the last rung of each trial."""
    end: int
    """From there to the ends, and again with other seeds."""
    full: int | None
    """Rows of a full run; None before that is known."""
    budget: int | None
    """Rows that the search may take before its end; None before that is known."""
    every: int | None
    """Rows of a full run of each trial, once no further one is asked for."""
    seconds: float
    """Seconds of training, over all trials."""

    @property
    def searched(self) -> int:
        """What counts against the budget."""
        return self.first + self.later

    @property
    def saved(self) -> int | None:
        """Against a full run of each trial; below 0 where repetitions took more."""
        return None if self.every is None else self.every - self.searched - self.end


def spent(history: History, tune: Tune) -> Spent:
    first = later = end = 0
    for trial in history.trials:
        rungs = [one.rows for one in trial.reached] or [0]
        first, later = first + rungs[0], later + rungs[-1] - rungs[0]
        end += trial.finished.rows - rungs[-1] if trial.finished else 0
    full = full_rows(history, tune)
    budget = tune.rows or (None if full is None else round(tune.full_runs * full))
    every = None if full is None or history.stopped is None else full * len(history.own)
    return Spent(first, later, end, full, budget, every, sum(trial.seconds for trial in history.trials))


def full_rows(history: History, tune: Tune) -> int | None:
    """Rows of a full run: of one that has ended, else by the share of it that the first rung is."""
    if ended := [trial.finished.rows for trial in history.trials if trial.finished]:
        return max(ended)
    rungs = [one.rows for trial in history.trials for one in trial.reached if one.rung == 0]
    return round(min(rungs) / tune.first_rung) if rungs else None


# ------------------------------------------------------------------------------------------------------ what it teaches


def surface(xs: Floats, ys: Floats, scores: Floats, grid_x: Floats, grid_y: Floats) -> Floats | None:
    """Estimated scores [grid_y, grid_x] from trials at the places (xs, ys): the mean of a Gaussian process with a
    Matern kernel (5/2) and noise, whose lengths are those of the largest likelihood (Rasmussen and Williams 2006,
    chapters 4 and 5). None with too few trials, or where all came to one score or lie on a line along an axis.
    """
    if len(scores) < LEAST_SURFACE or min(np.ptp(scores), np.ptp(xs), np.ptp(ys)) <= 0:
        return None
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(1.0) * Matern([0.5, 0.5], (0.1, 10.0), nu=2.5) + WhiteKernel(0.1, (1e-4, 1.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    low, size = np.array([xs.min(), ys.min()]), np.array([np.ptp(xs), np.ptp(ys)])
    places = np.stack(np.meshgrid(grid_x, grid_y), axis=-1).reshape(-1, 2)
    with warnings.catch_warnings():  # a length at its bound is an answer: the setting makes no difference
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit((np.column_stack([xs, ys]) - low) / size, scores)
    estimated: Floats = process.predict((places - low) / size).reshape(len(grid_y), len(grid_x))
    return estimated


@dataclass(frozen=True)
class Importance:
    explained: float
    """Share of the variance of scores of trials that the forest had not seen (R2); at or below 0 it knows nothing."""
    falls: tuple[float, ...]
    """By setting: by how much R2 falls when the setting's values are shuffled; that may be more than 1."""


def importance(places: Floats, scores: Floats) -> Importance | None:
    """Importance of each setting by permutation (Breiman 2001, "Random forests", section 10), in trials [trials,
    settings] that a forest has not seen: every trial is predicted by the forest of the other folds. None with too few
    trials, or where all came to one score.
    """
    if len(scores) < LEAST_IMPORTANCE or np.ptp(scores) <= 0:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import KFold

    folds = [
        (RandomForestRegressor(TREES, random_state=0).fit(places[seen], scores[seen]), unseen)
        for seen, unseen in KFold(FOLDS, shuffle=True, random_state=0).split(places)
    ]

    def explained(of: Floats) -> float:
        predicted = np.empty_like(scores)
        for forest, unseen in folds:
            predicted[unseen] = forest.predict(of[unseen])
        return float(1 - ((scores - predicted) ** 2).mean() / scores.var())

    whole, random = explained(places), np.random.default_rng(0)

    def fall(setting: int) -> float:
        shuffled = places.copy()
        shuffled[:, setting] = random.permutation(shuffled[:, setting])
        return whole - explained(shuffled)

    means = [np.mean([fall(setting) for _ in range(SHUFFLES)]) for setting in range(places.shape[1])]
    return Importance(whole, tuple(map(float, means)))
