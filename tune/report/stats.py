"""Statistics of a search for its page and table: pure functions of its history. Larger scores are better."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.config import TuneConfig
from tune.history import History, Trial, find_trial

SHORT_NAMES = {"aggregation_frequency": "k"}


def searched_settings(history: History, tune: TuneConfig) -> list[str]:
    """Return the searched settings: those of the space, then those of points, without derived ones such as
    `optim.lr_scaling`."""
    names = dict.fromkeys([*tune.space, *(name for point in tune.points_to_evaluate for name in point)])
    return [name for name in names if any(trial.settings.get(name) is not None for trial in history.original_trials)]


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each setting: its last part if it is unique; `k` for the aggregation frequency."""
    parts = {name: SHORT_NAMES.get(last := name.rpartition(".")[2], last) for name in names}
    short_parts = list(parts.values())
    return {name: short if short_parts.count(short) == 1 else name for name, short in parts.items()}


def trial_label(trial: Trial, short_names: Mapping[str, str]) -> str:
    """Return the trial's searched settings with short names."""
    if trial.repeat_of is not None:
        return f"trial {trial.repeat_of} with seed {trial.seed}"
    parts = [
        f"{text} {format_value(trial.settings[name])}" for name, text in short_names.items() if name in trial.settings
    ]
    return ", ".join(parts) or trial.label


def format_value(value: Any) -> str:
    """Format a setting's value for a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# -------------------------------------------------------------------------------------------------- results


def first_rung_scores(history: History) -> list[tuple[Trial, float]]:
    """Return (trial, its score at the first rung), where all trials have equally many rows."""
    return [
        (trial, result.score) for trial in history.original_trials for result in trial.rung_results if result.rung == 0
    ]


@dataclass(frozen=True)
class HoldoutMean:
    """Mean score of a trial's settings on the holdout rows, over the seeds of its finished runs."""

    score: float
    seeds: int
    rows: int


def holdout_score(history: History, number: int) -> HoldoutMean | None:
    """Return the mean over seeds, or None without a finished run."""
    final_results = [
        trial.final_result
        for trial in history.trials
        if number in (trial.number, trial.repeat_of) and trial.final_result
    ]
    if not final_results:
        return None
    return HoldoutMean(
        sum(result.holdout_score for result in final_results) / len(final_results),
        len(final_results),
        final_results[0].holdout_rows,
    )


def leading_trial(history: History) -> Trial | None:
    """Return the winner, or the best valid trial at the latest rung."""
    if history.winner is not None:
        return find_trial(history.trials, history.winner)
    scored_trials = [
        trial for trial in history.original_trials if trial.is_valid and (trial.rung_results or trial.final_result)
    ]

    def sort_key(trial: Trial) -> tuple[float, ...]:
        holdout = holdout_score(history, trial.number)
        if holdout:
            return (math.inf, holdout.score, -trial.number)
        return (trial.rung_results[-1].rung, trial.rung_results[-1].score, -trial.number)

    return max(scored_trials, key=sort_key, default=None)


# ---------------------------------------------------------------------------------------------------- usage


@dataclass(frozen=True)
class SearchUsage:
    """Trained rows. Rows of failed trials since their last rung are unknown and not counted."""

    first_rung_rows: int
    """Rows until the first rung."""
    later_rung_rows: int
    """Rows from the first to the last rung of each trial."""
    final_rows: int
    """Rows of the finals."""
    full_run_rows: int | None
    """Rows of a full run; None if unknown."""
    budget_rows: int | None
    """Budget of the search without its finals; None if unknown."""
    all_full_runs_rows: int | None
    """Rows of full runs of all trials, after the last trial was created."""
    seconds: float
    """Seconds of training, over all trials."""

    @property
    def search_rows(self) -> int:
        """Rows that count against the budget."""
        return self.first_rung_rows + self.later_rung_rows

    @property
    def saved_rows(self) -> int | None:
        """Saved rows relative to full runs of all trials; negative if the finals took more."""
        return None if self.all_full_runs_rows is None else self.all_full_runs_rows - self.search_rows - self.final_rows


def measure_usage(history: History, tune: TuneConfig) -> SearchUsage:
    first_rows = later_rows = final_rows = 0
    for trial in history.trials:
        rungs = [result.rows for result in trial.rung_results] or [0]
        first_rows, later_rows = first_rows + rungs[0], later_rows + rungs[-1] - rungs[0]
        final_rows += trial.final_result.rows - rungs[-1] if trial.final_result else 0
    rows_per_full_run = full_run_rows(history, tune)
    budget = tune.budget_rows or (
        None if rows_per_full_run is None else round(tune.budget_full_runs * rows_per_full_run)
    )
    all_full_runs = (
        None
        if rows_per_full_run is None or history.stop_reason is None
        else rows_per_full_run * len(history.original_trials)
    )
    return SearchUsage(
        first_rows,
        later_rows,
        final_rows,
        rows_per_full_run,
        budget,
        all_full_runs,
        sum(trial.seconds for trial in history.trials),
    )


def full_run_rows(history: History, tune: TuneConfig) -> int | None:
    """Return the rows of a full run: of a finished run, or derived from the first rung."""
    if final_rows := [trial.final_result.rows for trial in history.trials if trial.final_result]:
        return max(final_rows)
    rungs = [result.rows for trial in history.trials for result in trial.rung_results if result.rung == 0]
    return round(min(rungs) / tune.min_resource_fraction) if rungs else None
