"""What a search knows: its trials, what each came to, and what was decided; and its journal, `trials.jsonl`, one event
a line, which is only added to and from which all of this is rebuilt.

asked     trial, settings, by, of, seed                        a trial's settings are decided
reached   trial, rung, update, rows, score, loss, seconds, luck it came to a rung
finished  trial, update, rows, score, held, ...                it came to its end
failed    trial, error, seconds                                diverged  trial, why, seconds
noise     rows, chosen                                         by trial 0: most rows of an update, and the best number
stopped   why, budget                                          no further trial is asked for
reopened  budget                                               more may be: by a larger budget, on a resume
ending                                                         the halving is over
spent     seconds, slot_seconds                                how long the search took since the last such line, and
                                                               how long its slots were there, added up
chosen    best, verdict                                        the search has ended
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rtrain.core import events

Status = Literal["asked", "frozen", "finished", "failed", "diverged"]
"""asked: on its way to its first rung. frozen: at a rung, from where it can go on. finished: trained to its end."""
RECIPE = "recipe"
"""What has proposed trial 0: the recipe as it stands."""
SEED = "seed"
"""What has proposed a trial that repeats another one's settings with another seed."""


@dataclass(frozen=True)
class Reached:
    """What a trial came to at a rung, on the validation rows that steer the search."""

    rung: int
    """From 0."""
    update: int
    rows: int
    """Rows trained on until then."""
    score: float
    """The task's headline; larger is better."""
    loss: float | None = None
    """Mean over the rows, where the task has one."""
    seconds: float = 0.0
    """Seconds of training until then."""
    luck: float | None = None
    """Where it repeats another trial: the standard deviation that the rows alone make of one of the two scores
    (`chance.luck`)."""


@dataclass(frozen=True)
class Finished:
    """What a trial came to at its end, by its best weights."""

    update: int
    rows: int
    score: float
    """On all validation rows."""
    held: float
    """On the validation rows that were held back."""
    held_rows: int
    """How many these are."""
    seconds: float = 0.0
    to_target: float | None = None
    """Seconds of training until the first evaluation that reached `tune.target`; None where none did."""


@dataclass(frozen=True)
class Trial:
    """A trial: settings, and what a run with them came to. Its run is `search.trial(number)`."""

    number: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it sets otherwise than the recipe, by dotted name; empty for trial 0."""
    by: str = RECIPE
    """What has proposed it: recipe, points, spread, gp, tpe, random, grid, study, or seed."""
    of: int | None = None
    """The trial whose settings this one repeats with another seed; None for a trial of its own."""
    seed: int | None = None
    """Its `train.seed`, where that is not the recipe's."""
    cost: float | None = None
    """What its model costs to use (`tune.cost`); None where its seconds of training count."""
    reached: tuple[Reached, ...] = ()
    """By rung, the first one first."""
    finished: Finished | None = None
    error: str | None = None
    """First line of the error with which it failed; None if it did not."""
    diverged: str | None = None
    """How it was seen to diverge; None if it did not."""
    lost: float = 0.0
    """Seconds of training until it failed or diverged."""

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        if self.finished is not None:
            return "finished"
        if self.diverged is not None:
            return "diverged"
        return "frozen" if self.reached else "asked"

    @property
    def sound(self) -> bool:
        """Whether it neither failed nor diverged."""
        return self.error is None and self.diverged is None

    @property
    def seconds(self) -> float:
        """Seconds of training, as far as is known."""
        if self.finished is not None:
            return self.finished.seconds
        return max(self.lost, self.reached[-1].seconds if self.reached else 0.0)

    def price(self, seconds: float) -> float:
        """What the front sets against its score, `seconds` being those of its training."""
        return seconds if self.cost is None else self.cost

    @property
    def named(self) -> str:
        """The trial by what it differs in."""
        if self.of is not None:
            return f"trial {self.of} with seed {self.seed}"
        told = {name: value for name, value in self.settings.items() if value is not None}
        return ", ".join(f"{name}={_shown(value)}" for name, value in told.items()) or "the recipe as it stands"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class History:
    """A search until now. It grows by events alone, so that whoever reads the journal again knows the same."""

    trials: tuple[Trial, ...] = ()
    stopped: str | None = None
    """Why no further trial is asked for; None as long as there may be more."""
    budget: Mapping[str, Any] | None = None
    """The settings of time and money by which it was stopped; None where something else did."""
    noise: int | None = None
    """The most rows of an update, by trial 0: the upper end of its gradients' noise scale, or those that take longer
    than they gain; None until it is known."""
    rows: int | None = None
    """The rows of an update with which training is soonest at its end, by trial 0."""
    ending: bool = False
    """Whether the halving is over: who was left for the end stays so, and no further trial is asked for."""
    chosen: int | None = None
    """The winner's number, once the search has ended."""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """What the end has come to: the document of `finals.Verdict`."""
    seconds: float = 0.0
    """Seconds that the search has taken, over all of its starts."""
    slot_seconds: float = 0.0
    """Seconds that its slots were there, over all of them and all starts: at work, starting, or idle."""

    @property
    def own(self) -> tuple[Trial, ...]:
        """Trials with settings of their own, without those that repeat one with another seed."""
        return tuple(trial for trial in self.trials if trial.of is None)

    def money(self, workers: int, price: float) -> float:
        """What a cluster bills for the slots, each of so many workers, at a price of a worker's hour."""
        return self.slot_seconds / 3600 * workers * price

    def after(self, event: Mapping[str, Any]) -> "History":
        """The history with one more event of the journal. An event of another kind changes nothing."""
        fields = {name: value for name, value in event.items() if name not in ("time", "kind", "trial")}
        match event["kind"]:
            case "asked":
                return replace(self, trials=(*self.trials, Trial(event["trial"], **fields)))
            case "reached":
                return self._with(event["trial"], lambda trial: _reached(trial, Reached(**fields)))
            case "finished":
                end = Finished(**fields)
                return self._with(event["trial"], lambda trial: replace(trial, finished=end, error=None))
            case "failed":
                lost = event["seconds"]
                return self._with(event["trial"], lambda trial: replace(trial, error=event["error"], lost=lost))
            case "diverged":
                lost = event["seconds"]
                return self._with(event["trial"], lambda trial: replace(trial, diverged=event["why"], lost=lost))
            case "noise":
                return replace(self, noise=event["rows"], rows=event["chosen"])
            case "stopped":
                return replace(self, stopped=event["why"], budget=event.get("budget"))
            case "reopened":
                return replace(self, stopped=None, budget=None)
            case "ending":
                return replace(self, ending=True)
            case "spent":
                slots = self.slot_seconds + event["slot_seconds"]
                return replace(self, seconds=self.seconds + event["seconds"], slot_seconds=slots)
            case "chosen":
                return replace(self, chosen=event["best"], verdict=event["verdict"])
        return self

    def _with(self, number: int, change: Any) -> "History":
        return replace(self, trials=tuple(change(one) if one.number == number else one for one in self.trials))


def _reached(trial: Trial, new: Reached) -> Trial:
    """A rung that was run again after its result had been written down counts once."""
    if any(known.rung == new.rung for known in trial.reached):
        return trial
    return replace(trial, reached=(*trial.reached, new))


def replay(journal: Iterable[Mapping[str, Any]]) -> History:
    """The history of a journal's events, in their order."""
    found = History()
    for event in journal:
        found = found.after(event)
    return found


def numbered(trials: Sequence[Trial], number: int) -> Trial:
    return next(trial for trial in trials if trial.number == number)


class Journal:
    """The journal of one search. One process writes it: the one that holds the search's lock."""

    def __init__(self, path: Path):
        self.path = path
        self.history = replay(read_journal(path))

    def append(self, kind: str, **fields: Any) -> History:
        """Add an event; returns the history with it. It is on the disk when this returns, also if the machine stops."""
        self.history = self.history.after(events.add(self.path, kind, sync=True, **fields))
        return self.history


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All events of a journal."""
    return events.read_file(path)
