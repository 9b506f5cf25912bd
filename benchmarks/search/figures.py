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
class Ended:
    """What a search that came to its end has found."""

    seed: int
    settings: Mapping[str, Any]
    """What the winner sets otherwise than the recipe; empty where the recipe has won."""
    test: float
    """The winner's score on the test rows."""
    default: float
    """That of trial 0, the recipe as it stands, with the same seed."""
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


def rows_of_search(history: History, seen: Mapping[int, int]) -> tuple[int, int]:
    """(rows of the search without its end, rows of the end).

    A trial takes part in the search until the last rung that it came to; one that never came to any takes part with
    all of the rows that its log has `seen`, by its number, unless it was asked for by the end. What is trained beyond
    is the end.
    """
    halving, end = 0, 0
    for trial in history.trials:
        last = trial.reached[-1].rows if trial.reached else 0
        if trial.of is not None:
            halving, end = halving + last, end + max(0, seen.get(trial.number, 0) - last)
        elif trial.sound and trial.finished is not None:
            halving, end = halving + last, end + max(0, trial.finished.rows - last)
        else:
            halving += max(last, seen.get(trial.number, 0))
    return halving, end


def behind(verdict: Mapping[str, Any]) -> bool:
    """Whether the winner has a lower mean than trial 0 on the held-back rows."""
    first, other = verdict.get("first"), verdict.get("other")
    return verdict.get("kind") != "default" and first is not None and other is not None and other < first


def gain(found: Sequence[Ended], defaults: Sequence[float], full_rows: int) -> dict[str, Any]:
    """What the searches gain over the recipe as it stands, in points (hundredths) of the test score.

    `defaults`: test scores of the recipe by seed. `full_rows`: rows of a full run.
    """
    default = statistics.fmean(defaults)
    points = [100 * (one.test - default) for one in found]
    deviation = 100 * statistics.stdev(defaults) if len(defaults) > 1 else None
    worst = min(points)
    return {
        "gain_points": statistics.fmean(points),
        "worst_search_points": worst,
        "worst_search_deviations": worst / deviation if deviation else None,
        "default_test": default,
        "default_deviation_points": deviation,
        "winner_test": statistics.fmean(one.test for one in found),
        "winner_behind_default_on_held_back_rows": sum(behind(one.verdict) for one in found),
        "full_run_rows": full_rows,
        "search_full_runs": [one.rows / full_rows for one in found],
        "end_full_runs": [one.rows_of_the_end / full_rows for one in found],
        "search_seconds": [one.seconds for one in found],
    }


def best_of(pool: Sequence[Trained]) -> list[float]:
    """By n from 1: the expected test score of the run with the best validation score among n runs of the pool.

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
    """How many random runs are expected to come to a score; None if the pool is too small for it."""
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
    pool: Sequence[Trained], found: Sequence[Ended], defaults: Sequence[float], full_rows: int
) -> dict[str, Any]:
    """The rows of a search, without its end, beside those that random search takes to what the searches came to, less
    one deviation of the seeds."""
    curve, reached = best_of(pool), statistics.fmean(one.test for one in found)
    deviation = statistics.stdev(defaults) if len(defaults) > 1 else 0.0
    runs, rows = needed(curve, reached - deviation), statistics.fmean(one.rows for one in found)
    bounds = interval(defaults)
    return {
        "pool": len(pool),
        "expected_best_of": curve,
        "searches_reached": reached,
        "random_runs_needed": runs,
        "rows_vs_random": None if runs is None else rows / (runs * full_rows),
        # A pool that is too small has not come there with all of its runs.
        "rows_vs_random_less_than": rows / (len(pool) * full_rows) if runs is None else None,
        "default_interval": bounds,
        "runs_above_the_default": None if bounds is None else sum(run.test > bounds[1] for run in pool),
    }
