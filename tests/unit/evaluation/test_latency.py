"""Latency of two sides by a clock of the test's own: ratios, intervals, and what a noisy machine does to them."""

import random
from collections.abc import Callable

import pytest

from rtrain.evaluation import latency
from rtrain.evaluation.latency import LatencyComparison

ROWS = {"up to 16 tokens": list(range(12))}


class Machine:
    """A clock, and two sides that move it."""

    def __init__(self, noise: Callable[[], float] = lambda: 1.0):
        self.now = 0.0
        self.calls: list[str] = []
        self.noise = noise

    def side(self, name: str, seconds: float) -> Callable[[int], None]:
        def ask(row: int) -> None:
            self.calls.append(name)
            self.now += seconds * self.noise()

        return ask

    def measure(self, base: float, candidate: float, seconds: float = 5.0) -> list[LatencyComparison]:
        sides = self.side("base", base), self.side("candidate", candidate)
        return latency.measure_latency(*sides, ROWS, seconds, clock=lambda: self.now)


def test_the_ratio_is_that_of_the_medians() -> None:
    (result,) = Machine().measure(0.004, 0.002)
    assert (result.ratio, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (result.baseline_p50, result.baseline_p99, result.p50, result.p99) == pytest.approx((4.0, 4.0, 2.0, 2.0))
    assert result.calls == latency.MAX_ROUNDS * latency.MAX_TEXTS


def test_little_time_means_fewer_rounds_then_fewer_texts() -> None:
    rounds, limit, minimum = latency.MIN_ROUNDS, latency.MAX_TEXTS, latency.MIN_TEXTS
    calls = [Machine().measure(0.005, 0.005, seconds)[0].calls for seconds in (100.0, 2.0, 0.55, 0.0)]
    assert calls == [latency.MAX_ROUNDS * limit, 15 * limit, rounds * 5, rounds * minimum]


def test_noise_widens_the_interval_and_both_sides_meet_it() -> None:
    generator = random.Random(1)
    (result,) = Machine(lambda: generator.choice((1.0, 1.5, 2.5, 4.0))).measure(0.002, 0.002)
    assert result.low <= 1.0 <= result.high
    assert result.high - result.low > 0.05


def test_a_moment_s_hiccup_decides_nothing() -> None:
    """One round is four times as slow, for one of the sides."""
    machine = Machine()
    warm_up = 2 * 2 * latency.MIN_TEXTS
    one_round = latency.MAX_TEXTS + 1
    machine.noise = lambda: 4.0 if warm_up < len(machine.calls) <= warm_up + one_round else 1.0
    (result,) = machine.measure(0.002, 0.002)
    assert (result.low, result.high) == pytest.approx((1.0, 1.0))


def test_sides_take_turns_at_being_the_first() -> None:
    machine = Machine()
    machine.measure(0.001, 0.001)
    calls = machine.calls[2 * 2 * latency.MIN_TEXTS :]
    blocks = [calls[start] for start in range(0, len(calls), latency.MAX_TEXTS + 1)]
    assert blocks == [*["candidate", "base", "base", "candidate"] * 25, "candidate", "base"]


@pytest.mark.parametrize(("cost", "seconds"), [(0.001, 5.0), (0.05, 5.0), (0.02, 1.0)])
def test_it_takes_about_the_seconds_that_it_may(cost: float, seconds: float) -> None:
    machine = Machine()
    machine.measure(cost, cost, seconds)
    least = cost * 2 * (2 * latency.MIN_TEXTS + latency.MIN_ROUNDS * (latency.MIN_TEXTS + 1))
    assert machine.now <= max(seconds, least) + 12 * cost + 1e-9


def test_rows_are_spread_over_buckets_of_lengths() -> None:
    lengths = [5] * 40 + [16, 17, 600]
    result = latency.choose_rows(lengths)
    assert list(result) == ["up to 16 tokens", "up to 32 tokens", "up to 1024 tokens"]
    assert len(result["up to 16 tokens"]) == latency.MAX_TEXTS
    assert result["up to 32 tokens"] == [41]
    assert latency.bucket_name(512) == "up to 512 tokens"
    assert latency.bucket_name(8192) == "more than 4096 tokens"


def test_the_interval_of_nine_leaves_out_the_outermost_two() -> None:
    assert latency.median_interval([9, 1, 2, 3, 4, 5, 6, 7, 100]) == (2, 9)
    assert latency.median_interval([1, 2, 3]) == (1, 3)
    assert latency.median_interval(list(range(20))) == (5, 14)  # Conover's table: the 6th and the 15th of 20
