"""Latency of two sides, beside each other: the machine's moods meet both alike.

In each round both sides answer the same texts, one after the other, and whoever begins changes from round to round; it
gives one ratio of medians. What is said of the ratio is an interval over rounds, never one figure. The sides do not
alternate text by text: each would find its weights thrown out of the caches by the other one's, which no endpoint does.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rtrain.evaluation.decision import Speed

LEAST_ROUNDS, MOST_ROUNDS = 9, 51
"""With nine, the interval leaves out the fastest and the slowest round: a hiccup of the machine spoils one."""
FEWEST, MOST = 3, 12
"""Texts of a bucket that are asked in each round."""
BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Most tokens of a text of each bucket; longer texts share one more."""

Ask = Callable[[int], object]
"""Answers the row at a position."""


def bucket(tokens: int) -> str:
    """Name of the bucket that a text of so many tokens is in."""
    upper = next((most for most in BUCKETS if tokens <= most), None)
    return f"more than {BUCKETS[-1]} tokens" if upper is None else f"up to {upper} tokens"


def chosen(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Positions of at most `MOST` rows of each bucket, spread evenly over it; the short ones first."""
    found: dict[str, list[int]] = {}
    for position in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        found.setdefault(bucket(lengths[position]), []).append(position)
    return {name: _spread(rows, MOST) for name, rows in found.items()}


def _spread(rows: Sequence[int], most: int) -> list[int]:
    return [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))]


def measure(
    base: Ask,
    candidate: Ask,
    rows: Mapping[str, Sequence[int]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Speed]:
    """The speed of both sides on the rows of each bucket, in about so many seconds, or what the least rounds of the
    fewest texts take."""
    found = []
    for name, positions in rows.items():
        # Answers of the first texts warm both sides up, and say how many there is time for.
        cost = [_timed(base, row, clock) + _timed(candidate, row, clock) for row in [*positions[:FEWEST]] * 2]
        calls = int(seconds / len(rows) / max(statistics.median(cost), 1e-9))
        asked = _spread(positions, max(FEWEST, min(calls // LEAST_ROUNDS - 1, MOST)))
        rounds = max(LEAST_ROUNDS, min(calls // (len(asked) + 1), MOST_ROUNDS))
        found.append(_bucket(name, base, candidate, asked, rounds, clock))
    return found


def _bucket(
    name: str, base: Ask, candidate: Ask, positions: Sequence[int], rounds: int, clock: Callable[[], float]
) -> Speed:
    times: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for number in range(rounds):
        own: tuple[list[float], list[float]] = ([], [])
        for side, ask in ((0, base), (1, candidate))[:: 1 if number % 2 else -1]:
            ask(positions[0])  # it fetches the weights that the other side's have replaced
            own[side].extend(_timed(ask, row, clock) for row in positions)
        ratios.append(statistics.median(own[0]) / max(statistics.median(own[1]), 1e-9))
        times[0].extend(own[0])
        times[1].extend(own[1])
    low, high = interval(ratios)
    (base_p50, base_p99), (p50, p99) = (np.percentile(np.array(side) * 1000, (50, 99)).tolist() for side in times)
    return Speed(
        bucket=name,
        base_p50=base_p50,
        base_p99=base_p99,
        p50=p50,
        p99=p99,
        calls=len(times[0]),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of the median that holds it with 95 % or more, whatever the values' distribution: order statistics, by
    the sign test (Conover, Practical Nonparametric Statistics). Five values or fewer give less: their range."""
    ordered, count = sorted(values), len(values)
    inside, tail = 0, 0.0
    while inside < (count - 1) // 2:
        tail += math.comb(count, inside) / 2**count
        if 2 * tail > 0.05:
            break
        inside += 1
    place = max(0, inside - 1)
    return ordered[place], ordered[count - 1 - place]


def _timed(ask: Ask, row: int, clock: Callable[[], float]) -> float:
    started = clock()
    ask(row)
    return clock() - started
