"""Fate of a candidate, as a table of its statistics."""

import random

import numpy as np
import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from serve.rollout.canary import (
    ALPHA,
    WEIGHTED_REQUESTS,
    WEIGHTED_TIMEOUT_S,
    WEIGHTS,
    CanaryPolicy,
    CanaryState,
    CanaryStats,
    advance,
    sum_stats,
)

AIM = CanaryPolicy(traffic_share=0.2, min_rows=500, min_agreement=0.9, max_latency_ratio=1.25, timeout_s=600.0)
GOOD = CanaryStats(rows=500, same_answers=490, slower_rows=200)


def test_a_good_candidate_gets_more_and_more_requests_and_then_all() -> None:
    state, now, weights = CanaryState(started_at=0.0), 10.0, []
    state = advance(state, GOOD._replace(rows=499), AIM, now)
    assert (state.stage, state.weight) == ("shadow", 0.0)
    state = advance(state, GOOD, AIM, now)
    for step in range(len(WEIGHTS)):
        weights.append(state.weight)
        few = GOOD._replace(requests=WEIGHTED_REQUESTS * (step + 1) - 1)
        assert advance(state, few, AIM, now + 1).weight == state.weight
        state = advance(state, few._replace(requests=few.requests + 1), AIM, now + 1)
    assert weights == list(WEIGHTS)
    assert (state.stage, state.weight) == ("promoted", 0.0)
    assert advance(state, GOOD._replace(failed_rows=1), AIM, now) == state


def test_where_few_requests_come_a_step_ends_by_the_clock() -> None:
    state = advance(CanaryState(started_at=0.0), GOOD, AIM, 10.0)
    assert advance(state, GOOD, AIM, 10.0 + WEIGHTED_TIMEOUT_S - 1).step == 0
    assert advance(state, GOOD, AIM, 10.0 + WEIGHTED_TIMEOUT_S).step == 1


@pytest.mark.parametrize(("requests", "errors", "old"), [(1, 1, 7), (2, 2, 10), (3, 2, 9)])
def test_the_clock_promotes_nothing_that_failed_more_often(requests: int, errors: int, old: int) -> None:
    """So few errors may be chance, which is no reason to promote."""
    stats = GOOD._replace(requests=requests, errors=errors, baseline_requests=old)
    state = advance(CanaryState(started_at=0.0), GOOD, AIM, 10.0)
    assert advance(state, stats, AIM, 10.0 + WEIGHTED_TIMEOUT_S).weight == state.weight
    ended = advance(state, stats, AIM, 10.0 + AIM.timeout_s)
    assert ended.stage == "dropped"


@pytest.mark.parametrize(
    "stats",
    [
        CanaryStats(rows=3, same_answers=3, failed_rows=1),
        GOOD._replace(same_answers=465),
        GOOD._replace(slower_rows=300),
        CanaryStats(rows=20, same_answers=20),
    ],
)
def test_a_candidate_is_dropped_for_what_it_lacks(stats: CanaryStats) -> None:
    state = advance(CanaryState(started_at=0.0), stats, AIM, 601.0)
    assert (state.stage, state.weight, state.reason == "") == ("dropped", 0.0, False)


def weighted(stats: CanaryStats) -> CanaryState:
    """A candidate that answers requests, and what then has been seen of it."""
    return advance(advance(CanaryState(started_at=0.0), GOOD, AIM, 1.0), stats, AIM, 2.0)


def test_one_that_fails_more_often_is_dropped() -> None:
    state = weighted(GOOD._replace(requests=10, errors=3, baseline_requests=90))
    assert (state.stage, state.weight) == ("dropped", 0.0)


def test_just_enough_is_enough() -> None:
    assert advance(CanaryState(started_at=0.0), GOOD._replace(same_answers=466), AIM, 1.0).stage == "weighted"
    # As many errors as the other version has are no reason: it is the requests that are at fault.
    same = GOOD._replace(requests=100, errors=1, baseline_requests=100, baseline_errors=1)
    assert weighted(same).stage == "weighted"
    # One error is not enough: with 30 errors of 930 requests the candidate gets a single one in 3 % of all cases.
    one_error = GOOD._replace(requests=30, errors=1, baseline_requests=900)
    assert weighted(one_error).stage == "weighted"
    more = GOOD._replace(requests=40, errors=1, baseline_requests=5000, baseline_errors=120)
    assert weighted(more).stage == "weighted"


def test_more_errors_than_by_chance_are_too_many() -> None:
    def stage(errors: int) -> str:
        stats = GOOD._replace(requests=40, errors=errors, baseline_requests=5000, baseline_errors=120)
        return weighted(stats).stage

    # Where one in 42 fails by chance, of 40 requests 4 or more in 1.5 % of all cases, 5 or more in 0.3 %, of the 0.46 %
    # that the first 12 looks may spend of the 1 % of the whole trial.
    assert [stage(errors) for errors in (3, 4, 5, 40)] == ["weighted", "weighted", "dropped", "dropped"]


def test_an_incident_that_is_over_does_not_hide_what_fails_now() -> None:
    """The other version failed on 150 of 1,000 requests before the candidate answered any, or in its first step."""
    incident = GOOD._replace(baseline_requests=1000, baseline_errors=150)
    state = advance(CanaryState(started_at=0.0), incident, AIM, 1.0)
    assert state.stage == "weighted"
    assert advance(state, incident._replace(requests=50, errors=5, baseline_requests=1500), AIM, 2.0).stage == "dropped"
    both_failing = GOOD._replace(requests=50, errors=8, baseline_requests=1000, baseline_errors=150)
    state = weighted(both_failing)
    assert state.step == 1
    after = both_failing._replace(requests=90, errors=12, baseline_requests=1500)
    assert advance(state, after, AIM, 3.0).stage == "dropped"


def test_after_the_end_of_a_replica_both_versions_are_counted_anew() -> None:
    """The remaining counts are of different periods: 3 errors of 10 requests against 50 of 60."""
    state = weighted(GOOD._replace(requests=20, errors=4, baseline_requests=380, baseline_errors=70))
    state = advance(state, GOOD._replace(requests=10, errors=2, baseline_requests=190, baseline_errors=60), AIM, 3.0)
    assert state.stage == "weighted"
    later = GOOD._replace(requests=20, errors=5, baseline_requests=390, baseline_errors=60)
    assert advance(state, later, AIM, 4.0).stage == "dropped"


def simulate_drops(failing: tuple[float, float], runs: int) -> float:
    """The share of trials that end with the candidate dropped, where it and the other version fail on such shares of
    twenty requests a second, and both are looked at every second."""
    draw = np.random.default_rng(0)
    dropped = 0
    for _ in range(runs):
        counts, now = np.array([0, 0, 600, draw.binomial(600, failing[1])]), 0.0
        state = advance(
            CanaryState(0.0), GOOD._replace(baseline_requests=600, baseline_errors=int(counts[3])), AIM, now
        )
        while not state.is_over:
            now += 1
            requests = draw.poisson(20)
            new = draw.binomial(requests, state.weight)
            errors = draw.binomial([new, requests - new], failing)
            counts += [new, errors[0], requests - new, errors[1]]
            state = advance(state, CanaryStats(500, 490, 200, 0, *map(int, counts)), AIM, now)
        dropped += state.stage == "dropped"
    return dropped / runs


@pytest.mark.parametrize("failing", [pytest.param(0.02, marks=pytest.mark.slow), 0.1])
def test_an_equal_candidate_is_rarely_dropped_however_often_it_is_looked_at(failing: float) -> None:
    assert simulate_drops((failing, failing), 300) <= ALPHA


def test_one_that_fails_far_more_often_nearly_always_is() -> None:
    assert simulate_drops((0.2, 0.02), 100) > 0.9
    assert simulate_drops((1.0, 0.0), 30) == 1.0


def test_a_replica_that_has_gone_takes_what_it_saw_with_it() -> None:
    total = sum_stats([GOOD, CanaryStats(rows=100, same_answers=90, baseline_requests=5)])
    assert total == CanaryStats(rows=600, same_answers=580, slower_rows=200, baseline_requests=5)
    assert sum_stats([]) == CanaryStats()


def test_one_that_is_exactly_as_slow_as_it_may_be_is_rarely_dropped_and_a_slower_one_always() -> None:
    draw = random.Random(0)

    def dropped(likely: float) -> float:
        counts = [sum(draw.random() < likely for _ in range(500)) for _ in range(300)]
        return (
            sum(advance(CanaryState(0.0), GOOD._replace(slower_rows=n), AIM, 1.0).stage == "dropped" for n in counts)
            / 300
        )

    assert dropped(0.5) <= 3 * ALPHA
    assert dropped(0.65) > 0.99


def test_texts_that_could_never_show_the_share_are_refused() -> None:
    for field, value in (
        ("serve.shadow_min_rows", {"serve.shadow_min_agreement": 0.98, "serve.shadow_min_rows": 227}),
        ("serve.shadow_min_agreement", {"serve.shadow_min_agreement": 1.0}),
    ):
        with pytest.raises(ConfigError) as refused:
            config.load_config("intent", value)
        assert [problem.field for problem in refused.value.problems] == [field]
    aim = CanaryPolicy(0.2, 228, 0.98, 1.25, 600.0)
    assert advance(CanaryState(0.0), CanaryStats(rows=228, same_answers=228), aim, 1.0).stage == "weighted"
    assert (
        advance(CanaryState(0.0), CanaryStats(rows=227, same_answers=227), aim._replace(min_rows=227), 1.0).stage
        == "dropped"
    )
