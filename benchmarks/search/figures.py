"""The figures of `benchmarks.search`. Pure."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tune.known.history import History

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


# --------------------------------------------------------------------------------------------------------------- times


def time_vs_k1(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """How much of the time of k = 1 the chosen settings take to a score. `pairs`: seconds of both (chosen, k = 1), by
    seed; None where the score was not reached."""
    ratios = [chosen / first for chosen, first in pairs if chosen is not None and first]
    return {
        "time_vs_k1": statistics.median(ratios) if ratios else None,
        "seeds_that_reached_it": len(ratios),
        "ratios": ratios,
        "seconds": list(pairs),
    }


def first_after(events: Iterable[Event], kind: str, time: float) -> Event | None:
    return next((event for event in events if event["kind"] == kind and event["time"] >= time), None)


def _update_s(events: Sequence[Event], first: Event) -> float:
    """Seconds of an update: the median between the updates that follow the first of a start."""
    times = [event["time"] for event in events if event["kind"] == "progress" and event["time"] >= first["time"]]
    gaps = [two - one for one, two in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def until_training(search: Sequence[Event], trials: Mapping[int, Sequence[Event]]) -> dict[str, list[float]]:
    """Seconds from each order to the trial's training, the first update itself not counted.

    `search` is the search's log, `trials` the logs of its trials by number; every update must be logged
    (train.log_every=1). `start`: the first order of a slot; `thaw`: the order to go on, in a slot that was in use;
    `new`: the order to begin, in such a slot.
    """
    found: dict[str, list[float]] = {"start": [], "thaw": [], "new": []}
    used, begun = set[int](), set[int]()
    for order in (event for event in search if event["kind"] in ("ordered", "slot_up")):
        if order["kind"] == "slot_up":
            continue
        number, slot = order["trial"], order["slot"]
        kind = "start" if slot not in used else "thaw" if number in begun else "new"
        used.add(slot)
        begun.add(number)
        log = trials.get(number, ())
        if (first := first_after(log, "progress", order["time"])) is not None:
            found[kind].append(first["time"] - order["time"] - _update_s(log, first))
    return found


def seconds_of(values: Sequence[float]) -> dict[str, float] | None:
    """Median and extremes; None where there are none."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "of": len(values)}


# ---------------------------------------------------------------------------------------------------------------- kills


def told(journal: Iterable[Event]) -> list[dict[str, Any]]:
    """A journal without what clocks say."""
    return [
        {name: value for name, value in event.items() if name not in ("time", "seconds")}
        for event in journal
        if event["kind"] != "spent"
    ]


def twice(journal: Iterable[Event], logs: Mapping[int, Iterable[Event]]) -> int:
    """Rungs that were told, or trained to, more than once. `logs` are those of the trials."""
    reached = [(event["trial"], event["rung"]) for event in journal if event["kind"] == "reached"]
    paused = [(number, event["update"]) for number, log in logs.items() for event in log if event["kind"] == "paused"]
    return len(reached) - len(set(reached)) + len(paused) - len(set(paused))


def lost(before: Sequence[Event], after: Sequence[Event]) -> int:
    """Events of a journal that are missing, or others, after a resume."""
    kept = sum(one == two for one, two in zip(before, after, strict=False))
    return len(before) - kept
