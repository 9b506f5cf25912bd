"""State of a search: its trials, their results and decisions. It is rebuilt from the journal, `trials.jsonl`: an
append-only file with one event a line.

| kind | fields |
|---|---|
| `created` | trial, settings, proposed_by, repeat_of, seed, cost |
| `rung_result` | trial, rung, step, rows, score, loss, seconds, row_std |
| `finished` | trial, step, rows, score, holdout_score, holdout_rows, seconds, seconds_to_target |
| `failed` | trial, error, seconds |
| `diverged` | trial, reason, seconds |
| `noise` | max_useful_batch_size, fastest_batch_size, from the log of trial 0 |
| `stopped` | reason, budget: no further trials are created |
| `reopened` | budget: trials are created again, after a resume with a larger budget |
| `finals_started` | the halving is over |
| `usage` | seconds, slot_seconds since the last `usage` event |
| `winner` | winner, verdict: the search has ended |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rtrain.core import events

Status = Literal["created", "frozen", "finished", "failed", "diverged"]
"""created: has no result yet. frozen: paused at a rung, can be resumed. finished: trained to its end."""
RECIPE = "recipe"
"""Proposer of trial 0, the recipe without overrides."""
SEED_REPEAT = "seed"
"""Proposer of a trial that repeats another trial with another seed."""


@dataclass(frozen=True)
class RungResult:
    """Result of a trial at a rung, on the steering rows."""

    rung: int
    """Index from 0."""
    step: int
    rows: int
    """Trained rows."""
    score: float
    """The task's headline score; larger is better."""
    loss: float | None = None
    """Mean loss, if the task has one."""
    seconds: float = 0.0
    """Seconds of training."""
    row_std: float | None = None
    """For a repeated trial: standard deviation of a score over rows (`difference_ci.row_std`)."""


@dataclass(frozen=True)
class FinalResult:
    """Result of a finished trial, by its best weights."""

    step: int
    rows: int
    score: float
    """On all validation rows."""
    holdout_score: float
    """On the holdout rows."""
    holdout_rows: int
    """Number of holdout rows."""
    seconds: float = 0.0
    seconds_to_target: float | None = None
    """Seconds of training until `tune.target` was reached, or None."""


@dataclass(frozen=True)
class Trial:
    """Settings and results of a trial. Its run is `search.trial(number)`."""

    number: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the recipe by dotted name; empty for trial 0."""
    proposed_by: str = RECIPE
    """recipe, points, spread, prior, gp, tpe, random, grid, study, or seed."""
    repeat_of: int | None = None
    """The trial that this one repeats with another seed, or None."""
    seed: int | None = None
    """`train.seed`, if it differs from the recipe's."""
    cost: float | None = None
    """Inference cost of its model (`tune.cost`); None if the cost is the training time."""
    rung_results: tuple[RungResult, ...] = ()
    """In the order of rungs."""
    final_result: FinalResult | None = None
    error: str | None = None
    """First line of its error, or None."""
    divergence: str | None = None
    """Reason of its divergence, or None."""
    lost_seconds: float = 0.0
    """Seconds of training until it failed or diverged."""

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        if self.final_result is not None:
            return "finished"
        if self.divergence is not None:
            return "diverged"
        return "frozen" if self.rung_results else "created"

    @property
    def is_valid(self) -> bool:
        return self.error is None and self.divergence is None

    @property
    def seconds(self) -> float:
        """Known seconds of training."""
        if self.final_result is not None:
            return self.final_result.seconds
        return max(self.lost_seconds, self.rung_results[-1].seconds if self.rung_results else 0.0)

    def pareto_cost(self, seconds: float) -> float:
        """Return the cost for the Pareto front: `cost`, else the seconds of training."""
        return seconds if self.cost is None else self.cost

    @property
    def label(self) -> str:
        if self.repeat_of is not None:
            return f"trial {self.repeat_of} with seed {self.seed}"
        values = {name: value for name, value in self.settings.items() if value is not None}
        return (
            ", ".join(f"{name}={format_value(value)}" for name, value in values.items()) or "the recipe's own settings"
        )


def format_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class History:
    """State of a search. It changes by journal events alone, so a replay gives the same state."""

    trials: tuple[Trial, ...] = ()
    stop_reason: str | None = None
    """Why no further trials are created, or None."""
    stop_budget: Mapping[str, Any] | None = None
    """The exhausted budget of time and money, or None."""
    max_useful_batch_size: int | None = None
    """From trial 0: the upper bound of the gradient noise scale, or the batch size above which steps take longer than
    they gain; None if unknown."""
    fastest_batch_size: int | None = None
    """The batch size with the shortest predicted training, from trial 0."""
    is_in_finals: bool = False
    """Whether the halving is over: the finalists are fixed, and no further trials are created."""
    winner: int | None = None
    """The winner's number, once the search has ended."""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """The document of `finals.SearchVerdict`."""
    seconds: float = 0.0
    """Seconds of the search over all attempts."""
    slot_seconds: float = 0.0
    """Seconds of all slots over all attempts: busy, starting, or idle."""

    @property
    def original_trials(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.repeat_of is None)

    def billed_cost(self, workers: int, price: float) -> float:
        """Return the cost of the slots, each with so many workers, at a price per worker hour."""
        return self.slot_seconds / 3600 * workers * price

    def with_event(self, event: Mapping[str, Any]) -> "History":
        """Return the history with one more event. Unknown kinds are ignored."""
        fields = {name: value for name, value in event.items() if name not in ("time", "kind", "trial")}
        match event["kind"]:
            case "created":
                return replace(self, trials=(*self.trials, Trial(event["trial"], **fields)))
            case "rung_result":
                # After a kill a rung may be run again: its first result counts.
                trials = [trial for trial in self.trials if trial.number == event["trial"]]
                results = {result.rung: result for trial in trials for result in trial.rung_results}
                results.setdefault(event["rung"], RungResult(**fields))
                return self._with_trial(event, rung_results=tuple(results.values()))
            case "finished":
                return self._with_trial(event, final_result=FinalResult(**fields), error=None)
            case "failed":
                return self._with_trial(event, error=event["error"], lost_seconds=event["seconds"])
            case "diverged":
                return self._with_trial(event, divergence=event["reason"], lost_seconds=event["seconds"])
            case "noise":
                return replace(self, **fields)
            case "stopped":
                return replace(self, stop_reason=event["reason"], stop_budget=event.get("budget"))
            case "reopened":
                return replace(self, stop_reason=None, stop_budget=None)
            case "finals_started":
                return replace(self, is_in_finals=True)
            case "usage":
                slot_seconds = self.slot_seconds + event["slot_seconds"]
                return replace(self, seconds=self.seconds + event["seconds"], slot_seconds=slot_seconds)
            case "winner":
                return replace(self, winner=event["winner"], verdict=event["verdict"])
        return self

    def _with_trial(self, event: Mapping[str, Any], **changes: Any) -> "History":
        return replace(
            self,
            trials=tuple(
                replace(trial, **changes) if trial.number == event["trial"] else trial for trial in self.trials
            ),
        )


def replay_journal(journal: Iterable[Mapping[str, Any]]) -> History:
    history = History()
    for event in journal:
        history = history.with_event(event)
    return history


def find_trial(trials: Sequence[Trial], number: int) -> Trial:
    return next(trial for trial in trials if trial.number == number)


def trials_table(history: History, recipe_values: Mapping[str, Any] | None = None) -> dict[str, list[Any]]:
    """Return the trials as columns, as Ray Tune's `ResultGrid.get_dataframe()` names them. `score` is the last one, at
    a rung or at the end. `recipe_values` has the values, by dotted name, of settings that a trial lacks."""
    trials, values = history.trials, recipe_values or {}
    results = [trial.final_result or next(reversed(trial.rung_results), None) for trial in trials]
    names = dict.fromkeys(name for trial in trials for name in trial.settings)
    return {
        "trial_id": [f"trial-{trial.number:03d}" for trial in trials],
        **{f"config/{name}": [trial.settings.get(name, values.get(name)) for trial in trials] for name in names},
        "score": [result.score if result else None for result in results],
        "holdout_score": [trial.final_result.holdout_score if trial.final_result else None for trial in trials],
        "rows": [result.rows if result else 0 for result in results],
        "training_iteration": [len(trial.rung_results) + (trial.final_result is not None) for trial in trials],
        "time_total_s": [trial.seconds for trial in trials],
        **{name: [getattr(trial, name) for trial in trials] for name in ("status", "proposed_by", "repeat_of")},
        "error": [trial.error or trial.divergence for trial in trials],
        "winner": [trial.number == history.winner for trial in trials],
    }


class Journal:
    """The journal of a search. Its writer holds the search's lock."""

    def __init__(self, path: Path):
        self.path = path
        self.history = replay_journal(read_journal(path))

    def append(self, kind: str, **fields: Any) -> History:
        """Append an event and sync it to the disk; return the new history."""
        self.history = self.history.with_event(events.append_event_to_file(self.path, kind, sync=True, **fields))
        return self.history


def read_journal(path: Path) -> list[dict[str, Any]]:
    return events.read_events_file(path)
