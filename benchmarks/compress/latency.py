"""Latency of several sides on the same inputs, in interleaved rounds: the machine's moods meet all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rtrain.evaluation.latency import median_interval

WARM = 3
"""Calls of a side that begin its turn and are not counted: they fetch the weights that the others' have replaced."""


@dataclass
class Times:
    """Milliseconds of a side's calls."""

    medians: list[float] = field(default_factory=list)
    """One for each round."""
    minimum: float = math.inf
    """Minimum over all calls: the call with the least disturbance on a busy machine."""


def rounds(
    sides: Mapping[str, Callable[[], object]], number: int, calls: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Times]:
    """The times of each side. Whoever begins changes from round to round."""
    times = {name: Times() for name in sides}
    names = list(sides)
    for turn in range(number):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            timings = _timed(sides[name], calls, clock)
            times[name].medians.append(statistics.median(timings))
            times[name].minimum = min(times[name].minimum, *timings)
    return times


def _timed(ask: Callable[[], object], calls: int, clock: Callable[[], float]) -> list[float]:
    times = []
    for call in range(WARM + calls):
        started = clock()
        ask()
        if call >= WARM:
            times.append(1e3 * (clock() - started))
    return times


def figures(times: Mapping[str, Times], side: str, over: str) -> dict[str, Any]:
    """`ratio`: how many times as fast as the side `over` the side `of` is, the median over rounds with its interval,
    and by the least times of both; and the milliseconds of every side, median and least."""
    ratios = [slow / fast for slow, fast in zip(times[over].medians, times[side].medians, strict=True)]
    low, high = median_interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "ratio_of_least": times[over].minimum / times[side].minimum,
        "rounds": len(ratios),
        "ms": {name: statistics.median(side_times.medians) for name, side_times in times.items()},
        "least_ms": {name: side_times.minimum for name, side_times in times.items()},
    }
