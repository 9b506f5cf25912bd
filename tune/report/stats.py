"""Figures of a search that its page and its table show: pure functions of its history.

Scores are as in the history: larger is better.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.config import Tune
from tune.history import History, Trial, numbered

SHORT = {"aggregation_frequency": "k"}


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


# -------------------------------------------------------------------------------------------------- what trials came to


def first_rung(history: History) -> list[tuple[Trial, float]]:
    """(trial, its score at the first rung): there all trials have been trained on equally many rows."""
    return [(trial, one.score) for trial in history.own for one in trial.reached if one.rung == 0]


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
