"""The figures of `benchmarks.search`. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tune.history import History

Event = Mapping[str, Any]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class FinishedSearch:
    """Result of a finished search."""

    seed: int
    settings: Mapping[str, Any]
    """Settings of the winner that differ from the recipe; empty if the recipe won."""
    test: float
    """The winner's score on the test rows."""
    default: float
    """Score of trial 0, the unchanged recipe, with the same seed."""
    trials: int
    rows: int
    """Rows that the search was trained on, without its end."""
    rows_of_the_end: int
    seconds: float
    verdict: Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """A full run: its best validation score, and the test score of the same weights."""

    valid: float
    test: float


def rows_of_search(history: History, rows_by_trial: Mapping[int, int]) -> tuple[int, int]:
    """(rows of the search without its end, rows of the end).

    A trial counts as search up to its last rung; a trial without a rung counts with all rows of its log
    (`rows_by_trial`), unless the end requested it. Rows trained beyond that are the end.
    """
    halving, end = 0, 0
    for trial in history.trials:
        last = trial.rung_results[-1].rows if trial.rung_results else 0
        if trial.repeat_of is not None:
            halving, end = halving + last, end + max(0, rows_by_trial.get(trial.number, 0) - last)
        elif trial.is_valid and trial.final_result is not None:
            halving, end = halving + last, end + max(0, trial.final_result.rows - last)
        else:
            halving += max(last, rows_by_trial.get(trial.number, 0))
    return halving, end


def behind(verdict: Mapping[str, Any]) -> bool:
    """Whether the winner has a lower mean than trial 0 on the held-back rows."""
    first, other = verdict.get("first"), verdict.get("other")
    return verdict.get("kind") != "default" and first is not None and other is not None and other < first


def gain(searches: Sequence[FinishedSearch], defaults: Sequence[float], full_rows: int) -> dict[str, Any]:
    """Gain of the searches over the unchanged recipe, in points (hundredths) of the test score.

    `defaults`: test scores of the recipe by seed. `full_rows`: rows of a full run.
    """
    default = statistics.fmean(defaults)
    points = [100 * (search.test - default) for search in searches]
    deviation = 100 * statistics.stdev(defaults) if len(defaults) > 1 else None
    worst = min(points)
    return {
        "gain_points": statistics.fmean(points),
        "worst_search_points": worst,
        "worst_search_deviations": worst / deviation if deviation else None,
        "default_test": default,
        "default_deviation_points": deviation,
        "winner_test": statistics.fmean(search.test for search in searches),
        "winner_behind_default_on_held_back_rows": sum(behind(search.verdict) for search in searches),
        "full_run_rows": full_rows,
        "search_full_runs": [search.rows / full_rows for search in searches],
        "end_full_runs": [search.rows_of_the_end / full_rows for search in searches],
        "search_seconds": [search.seconds for search in searches],
    }


def best_of(pool: Sequence[Trained]) -> list[float]:
    """Expected test score of the run with the best validation score among n runs of the pool, by n from 1.

    The n runs are drawn without replacement, so the expectation is exact: of R runs in the order of their validation
    scores, run i (from 1, the best first) is the best of n in C(R - i, n - 1) of the C(R, n) draws.
    """
    ordered = [run.test for run in sorted(pool, key=lambda run: run.valid, reverse=True)]
    total = len(ordered)
    return [
        sum(math.comb(total - i, n - 1) * test for i, test in enumerate(ordered, 1)) / math.comb(total, n)
        for n in range(1, total + 1)
    ]


def needed(curve: Sequence[float], score: float) -> int | None:
    """Expected number of random runs to reach a score; None if the pool is too small."""
    return next((n for n, expected in enumerate(curve, 1) if expected >= score), None)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where one more value is expected in 95 of 100 cases, by Student's distribution; None with fewer than two."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values)
    half *= math.sqrt(1 + 1 / len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def against_random(
    pool: Sequence[Trained], searches: Sequence[FinishedSearch], defaults: Sequence[float], full_rows: int
) -> dict[str, Any]:
    """Compare the rows of a search, without its end, with the rows that random search needs for the score of the
    searches minus one standard deviation of the seeds."""
    curve, winner_score = best_of(pool), statistics.fmean(search.test for search in searches)
    deviation = statistics.stdev(defaults) if len(defaults) > 1 else 0.0
    runs, rows = needed(curve, winner_score - deviation), statistics.fmean(search.rows for search in searches)
    bounds = interval(defaults)
    return {
        "pool": len(pool),
        "expected_best_of": curve,
        "searches_reached": winner_score,
        "random_runs_needed": runs,
        "rows_vs_random": None if runs is None else rows / (runs * full_rows),
        # A pool that is too small does not reach the score with all of its runs.
        "rows_vs_random_less_than": rows / (len(pool) * full_rows) if runs is None else None,
        "default_interval": bounds,
        "runs_above_the_default": None if bounds is None else sum(run.test > bounds[1] for run in pool),
    }
