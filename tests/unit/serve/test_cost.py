"""The cost model of engine calls, learned from calls with a known law."""

import random

import pytest

from serve.batching.scheduler import MIN_CALLS, CostModel


def learned(calls: list[int], base: float, per_token: float, noise: float = 0.0) -> CostModel:
    chance, cost = random.Random(7), CostModel()
    for tokens in calls:
        cost.observe(tokens, (base + per_token * tokens) * (1 + noise * chance.uniform(-1, 1)))
    return cost


def test_nothing_is_expected_before_some_calls() -> None:
    assert learned([64] * (MIN_CALLS - 1), 0.002, 20e-6).estimate_seconds(1000) == 0.0
    assert learned([64] * MIN_CALLS, 0.002, 20e-6).estimate_seconds(1000) > 0.0


def test_a_call_that_was_held_up_changes_little() -> None:
    cost = learned([64, 256] * 50, 0.001, 10e-6)
    before = cost.estimate_seconds(256)
    cost.observe(64, 30.0)
    assert before < cost.estimate_seconds(256) < 1.3 * before


def test_calls_of_several_sizes_tell_the_base_from_the_tokens() -> None:
    chance = random.Random(3)
    cost = learned([chance.choice([16, 64, 256, 1024, 4096]) for _ in range(200)], 0.002, 20e-6, noise=0.2)
    for tokens in (16, 500, 4096, 16_384):
        assert cost.estimate_seconds(tokens) == pytest.approx(0.002 + 20e-6 * tokens, rel=0.25), tokens
    assert cost.estimate_seconds(1000, calls=10) - cost.estimate_seconds(1000) == pytest.approx(9 * 0.002, rel=0.25)


def test_a_machine_that_becomes_slower_is_learned_anew() -> None:
    cost = learned([64, 256] * 100, 0.001, 10e-6)
    for tokens in [64, 256] * 100:
        cost.observe(tokens, 3 * (0.001 + 10e-6 * tokens))
    assert cost.estimate_seconds(1000) == pytest.approx(3 * (0.001 + 10e-6 * 1000), rel=0.1)


def test_a_longer_call_never_costs_less_and_none_costs_nothing() -> None:
    """Whatever the noise says: short calls that were held up make the slope of plain least squares negative."""
    cost = CostModel()
    for tokens, seconds in [(16, 0.5), (1024, 0.01), (16, 0.4), (1024, 0.012)] * 10:
        cost.observe(tokens, seconds)
    assert 0 < cost.estimate_seconds(16) <= cost.estimate_seconds(1024) <= cost.estimate_seconds(16_384)
