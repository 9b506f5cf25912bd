"""Latency of several sides on the same inputs, in interleaved rounds: the machine's moods meet all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rtrain.evaluation.latency import interval

WARM = 3
"""Calls of a side that begin its turn and are not counted: they fetch the weights that the others' have replaced."""


@dataclass
class Times:
    """Milliseconds of a side's calls."""

    medians: list[float] = field(default_factory=list)
    """One for each round."""
    least: float = math.inf
    """The least of all calls: what the others on a busy machine have not taken away."""


def rounds(
    sides: Mapping[str, Callable[[], object]],
    number: int,
    calls: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """The times of each side. Whoever begins changes from round to round."""
    found = {name: Times() for name in sides}
    names = list(sides)
    for turn in range(number):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            own = _timed(sides[name], calls, clock)
            found[name].medians.append(statistics.median(own))
            found[name].least = min(found[name].least, *own)
    return found


def _timed(ask: Callable[[], object], calls: int, clock: Callable[[], float]) -> list[float]:
    times = []
    for call in range(WARM + calls):
        started = clock()
        ask()
        if call >= WARM:
            times.append(1e3 * (clock() - started))
    return times


def figures(times: Mapping[str, Times], of: str, over: str) -> dict[str, Any]:
    """`ratio`: how many times as fast as the side `over` the side `of` is, the median over rounds with its interval,
    and by the least times of both; and the milliseconds of every side, median and least."""
    ratios = [slow / fast for slow, fast in zip(times[over].medians, times[of].medians, strict=True)]
    low, high = interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "ratio_of_least": times[over].least / times[of].least,
        "rounds": len(ratios),
        "ms": {name: statistics.median(own.medians) for name, own in times.items()},
        "least_ms": {name: own.least for name, own in times.items()},
    }
