"""What becomes of a candidate, as a table of what was seen of it."""

import random

import numpy as np
import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from serve.rollout.canary import DOUBT, WEIGHTED_REQUESTS, WEIGHTED_S, WEIGHTS, Aim, State, Tally, follow, total

AIM = Aim(share=0.2, rows=500, agreement=0.9, slower=1.25, seconds=600.0)
GOOD = Tally(rows=500, agreed=490, slower=200)


def test_a_good_candidate_gets_more_and_more_requests_and_then_all() -> None:
    state, now, weights = State(began=0.0), 10.0, []
    state = follow(state, GOOD._replace(rows=499), AIM, now)
    assert (state.stage, state.weight) == ("shadow", 0.0)
    state = follow(state, GOOD, AIM, now)
    for step in range(len(WEIGHTS)):
        weights.append(state.weight)
        few = GOOD._replace(requests=WEIGHTED_REQUESTS * (step + 1) - 1)
        assert follow(state, few, AIM, now + 1).weight == state.weight
        state = follow(state, few._replace(requests=few.requests + 1), AIM, now + 1)
    assert weights == list(WEIGHTS)
    assert (state.stage, state.weight) == ("promoted", 0.0)
    assert follow(state, GOOD._replace(failed=1), AIM, now) == state


def test_where_few_requests_come_a_step_ends_by_the_clock() -> None:
    state = follow(State(began=0.0), GOOD, AIM, 10.0)
    assert follow(state, GOOD, AIM, 10.0 + WEIGHTED_S - 1).step == 0
    assert follow(state, GOOD, AIM, 10.0 + WEIGHTED_S).step == 1


@pytest.mark.parametrize(("requests", "errors", "old"), [(1, 1, 7), (2, 2, 10), (3, 2, 9)])
def test_the_clock_promotes_nothing_that_failed_more_often(requests: int, errors: int, old: int) -> None:
    """So few may fail by chance; that they did is no reason to go on either."""
    seen = GOOD._replace(requests=requests, errors=errors, old_requests=old)
    state = follow(State(began=0.0), GOOD, AIM, 10.0)
    assert follow(state, seen, AIM, 10.0 + WEIGHTED_S).weight == state.weight
    found = follow(state, seen, AIM, 10.0 + AIM.seconds)
    assert found.stage == "dropped"


@pytest.mark.parametrize(
    "seen",
    [
        Tally(rows=3, agreed=3, failed=1),
        GOOD._replace(agreed=465),
        GOOD._replace(slower=300),
        Tally(rows=20, agreed=20),
    ],
)
def test_a_candidate_is_dropped_for_what_it_lacks(seen: Tally) -> None:
    found = follow(State(began=0.0), seen, AIM, 601.0)
    assert (found.stage, found.weight, found.reason == "") == ("dropped", 0.0, False)


def weighted(seen: Tally) -> State:
    """A candidate that answers requests, and what then has been seen of it."""
    return follow(follow(State(began=0.0), GOOD, AIM, 1.0), seen, AIM, 2.0)


def test_one_that_fails_more_often_is_dropped() -> None:
    found = weighted(GOOD._replace(requests=10, errors=3, old_requests=90))
    assert (found.stage, found.weight) == ("dropped", 0.0)


def test_just_enough_is_enough() -> None:
    assert follow(State(began=0.0), GOOD._replace(agreed=466), AIM, 1.0).stage == "weighted"
    # As many errors as the other version has are no reason: it is the requests that are at fault.
    same = GOOD._replace(requests=100, errors=1, old_requests=100, old_errors=1)
    assert weighted(same).stage == "weighted"
    # One is none either: with 30 of 930 requests the candidate gets one of a single error in 3 % of all cases.
    one = GOOD._replace(requests=30, errors=1, old_requests=900)
    assert weighted(one).stage == "weighted"
    more = GOOD._replace(requests=40, errors=1, old_requests=5000, old_errors=120)
    assert weighted(more).stage == "weighted"


def test_more_errors_than_by_chance_are_too_many() -> None:
    def stage(errors: int) -> str:
        seen = GOOD._replace(requests=40, errors=errors, old_requests=5000, old_errors=120)
        return weighted(seen).stage

    # Where one in 42 fails by chance, of 40 requests 4 or more in 1.5 % of all cases, 5 or more in 0.3 %, of the 0.46 %
    # that the first 12 looks may spend of the 1 % of the whole trial.
    assert [stage(errors) for errors in (3, 4, 5, 40)] == ["weighted", "weighted", "dropped", "dropped"]


def test_an_incident_that_is_over_does_not_hide_what_fails_now() -> None:
    """The other version failed on 150 of 1,000 requests before the candidate answered any, or in its first step."""
    incident = GOOD._replace(old_requests=1000, old_errors=150)
    state = follow(State(began=0.0), incident, AIM, 1.0)
    assert state.stage == "weighted"
    assert follow(state, incident._replace(requests=50, errors=5, old_requests=1500), AIM, 2.0).stage == "dropped"
    both = GOOD._replace(requests=50, errors=8, old_requests=1000, old_errors=150)
    state = weighted(both)
    assert state.step == 1
    after = both._replace(requests=90, errors=12, old_requests=1500)
    assert follow(state, after, AIM, 3.0).stage == "dropped"


def test_after_the_end_of_a_replica_both_versions_are_counted_anew() -> None:
    """What is left of the counts is of different times: 3 errors of 10 requests beside 50 of 60."""
    state = weighted(GOOD._replace(requests=20, errors=4, old_requests=380, old_errors=70))
    state = follow(state, GOOD._replace(requests=10, errors=2, old_requests=190, old_errors=60), AIM, 3.0)
    assert state.stage == "weighted"
    later = GOOD._replace(requests=20, errors=5, old_requests=390, old_errors=60)
    assert follow(state, later, AIM, 4.0).stage == "dropped"


def drawn(failing: tuple[float, float], runs: int) -> float:
    """The share of trials that end with the candidate dropped, where it and the other version fail on such shares of
    twenty requests a second, and both are looked at every second."""
    draw = np.random.default_rng(0)
    dropped = 0
    for _ in range(runs):
        counts, now = np.array([0, 0, 600, draw.binomial(600, failing[1])]), 0.0
        state = follow(State(0.0), GOOD._replace(old_requests=600, old_errors=int(counts[3])), AIM, now)
        while not state.over:
            now += 1
            requests = draw.poisson(20)
            new = draw.binomial(requests, state.weight)
            errors = draw.binomial([new, requests - new], failing)
            counts += [new, errors[0], requests - new, errors[1]]
            state = follow(state, Tally(500, 490, 200, 0, *map(int, counts)), AIM, now)
        dropped += state.stage == "dropped"
    return dropped / runs


@pytest.mark.parametrize("failing", [0.02, 0.1])
def test_an_equal_candidate_is_rarely_dropped_however_often_it_is_looked_at(failing: float) -> None:
    assert drawn((failing, failing), 300) <= DOUBT


def test_one_that_fails_far_more_often_nearly_always_is() -> None:
    assert drawn((0.2, 0.02), 100) > 0.9
    assert drawn((1.0, 0.0), 30) == 1.0


def test_a_replica_that_has_gone_takes_what_it_saw_with_it() -> None:
    both = total([GOOD, Tally(rows=100, agreed=90, old_requests=5)])
    assert both == Tally(rows=600, agreed=580, slower=200, old_requests=5)
    assert total([]) == Tally()


def test_one_that_is_exactly_as_slow_as_it_may_be_is_rarely_dropped_and_a_slower_one_always() -> None:
    draw = random.Random(0)

    def dropped(likely: float) -> float:
        counts = [sum(draw.random() < likely for _ in range(500)) for _ in range(300)]
        return sum(follow(State(0.0), GOOD._replace(slower=n), AIM, 1.0).stage == "dropped" for n in counts) / 300

    assert dropped(0.5) <= 3 * DOUBT
    assert dropped(0.65) > 0.99


def test_texts_that_could_never_show_the_share_are_refused() -> None:
    for field, given in (
        ("serve.shadow_rows", {"serve.shadow_agreement": 0.98, "serve.shadow_rows": 227}),
        ("serve.shadow_agreement", {"serve.shadow_agreement": 1.0}),
    ):
        with pytest.raises(ConfigError) as refused:
            config.load("intent", given)
        assert [one.field for one in refused.value.problems] == [field]
    aim = Aim(0.2, 228, 0.98, 1.25, 600.0)
    assert follow(State(0.0), Tally(rows=228, agreed=228), aim, 1.0).stage == "weighted"
    assert follow(State(0.0), Tally(rows=227, agreed=227), aim._replace(rows=227), 1.0).stage == "dropped"
