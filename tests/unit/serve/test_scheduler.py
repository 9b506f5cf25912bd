"""Rows of an engine call, as a pure function of the queue and the time."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.ragged import EncodedRow, TokenWindow
from serve.batching.scheduler import (
    AGING_LIMIT_S,
    MIN_CALLS,
    BatchLimits,
    CostModel,
    Overloaded,
    QueuedRow,
    Scheduler,
    bucket_length,
    count_padded_tokens,
)

FAR_DEADLINE = 1000.0


def rows(
    owner: object, *lengths: int, client: str = "", deadline: float = FAR_DEADLINE, windows: int = 1
) -> list[QueuedRow]:
    return [
        QueuedRow(
            owner,
            place,
            EncodedRow([1] * tokens * windows, [TokenWindow(tokens, tokens)] * windows, False, []),
            client,
            deadline,
        )
        for place, tokens in enumerate(lengths)
    ]


def scheduler(cost: CostModel | None = None, **limits: float) -> Scheduler:
    return Scheduler(replace(BatchLimits(max_queued_inputs=10_000), **limits), cost or CostModel())  # type: ignore[arg-type]


def test_rows_of_all_lengths_share_a_call_of_an_engine_without_padding() -> None:
    queue = scheduler(max_batch_tokens=1000)
    waiting = [
        QueuedRow(
            "a",
            place,
            EncodedRow([1] * tokens, [TokenWindow(tokens, tokens)], False, []),
            "",
            FAR_DEADLINE,
            is_unpadded=True,
        )
        for place, tokens in enumerate([500, 3, 400, 90, 8])
    ]
    queue.enqueue(waiting, 0.0)
    assert [row.position for row in queue.next_batch(0.0).batch] == [
        0,
        1,
        2,
        3,
    ]  # 993 tokens; the last would make 1,001
    assert [row.position for row in queue.next_batch(0.0).batch] == [4]


def costing(base: float, per_token: float) -> CostModel:
    cost = CostModel()
    for tokens in [16, 4096] * 100:
        cost.observe(tokens, base + per_token * tokens)
    return cost


def owners(batch: Sequence[QueuedRow]) -> list[object]:
    return [row.owner for row in batch]


def buckets(batch: Sequence[QueuedRow]) -> set[int]:
    return {bucket_length(row.window_length) for row in batch}


def drained(queue: Scheduler, now: float = 0.0) -> list[list[object]]:
    calls = []
    while queue.queued_rows:
        calls.append(owners(queue.next_batch(now).batch))
    return calls


# ----------------------------------------------------------------------------------------------------------- the call


def test_a_call_has_one_length_and_the_oldest_row_chooses_it() -> None:
    queue = scheduler(max_batch_size=3)
    for owner, tokens in enumerate([40, 5, 64, 16, 17, 6, 7]):
        queue.enqueue(rows(owner, tokens), 0.0)
    assert drained(queue) == [[0, 2], [1, 3, 5], [4], [6]]


def test_a_call_is_bounded_in_tokens_and_in_their_seconds_and_a_larger_row_goes_alone() -> None:
    for limits, cost in (
        ({"max_batch_tokens": 100}, CostModel()),
        ({"max_batch_latency_s": 1.05}, costing(50.0, 0.01)),
    ):
        queue = scheduler(cost, **limits)
        for owner, tokens in enumerate([32, 32, 32, 32, 128, 64]):
            queue.enqueue(rows(owner, tokens), 0.0)
        assert drained(queue) == [[0, 1, 2], [3], [4], [5]], limits


def test_rows_of_other_lengths_join_where_a_call_of_their_own_costs_more_than_padding() -> None:
    queue = scheduler(costing(base=0.1, per_token=0.001))
    for owner, tokens in enumerate([40, 20, 60, 5, 200]):
        queue.enqueue(rows(owner, tokens), 0.0)
    # 40 tokens of padding for the 20, 55 for the 5; 140 for each of the others beside the 200.
    assert drained(queue) == [[0, 2, 1, 3], [4]]
    queue = scheduler(costing(base=0.03, per_token=0.001))
    for owner, tokens in enumerate([40, 20, 60, 5, 200]):
        queue.enqueue(rows(owner, tokens), 0.0)
    assert drained(queue) == [[0, 2], [1, 3], [4]]  # 15 tokens for the 5 beside the 20


def test_a_full_call_is_joined_by_none_and_limits_hold_for_those_that_join() -> None:
    for limits, expected in (({"max_batch_size": 2}, [[0, 2], [1]]), ({"max_batch_size": 3}, [[0, 2, 1]])):
        queue = scheduler(costing(base=1.0, per_token=0.001), **limits)
        for owner, tokens in enumerate([40, 20, 60]):
            queue.enqueue(rows(owner, tokens), 0.0)
        assert drained(queue) == expected
    queue = scheduler(costing(base=1.0, per_token=0.001), max_batch_tokens=100)
    for owner, tokens in enumerate([40, 20, 60]):
        queue.enqueue(rows(owner, tokens), 0.0)
    assert drained(queue) == [[0, 1], [2]]  # the first beside the 60 would have 120 tokens


def test_no_row_is_late_by_those_that_join() -> None:
    queue = scheduler(costing(base=0.1, per_token=0.001))
    queue.enqueue(rows("soon", 10, deadline=0.12), 0.0)
    queue.enqueue(rows("longer", 60), 0.0)
    batch = queue.next_batch(0.0)
    assert (owners(batch.batch), batch.expired) == (["soon"], [])
    assert owners(queue.next_batch(0.0).batch) == ["longer"]


def test_the_more_urgent_row_goes_first_but_none_waits_longer_than_the_patience() -> None:
    queue = scheduler(max_batch_size=1)
    queue.enqueue(rows("old", 8), 0.0)
    queue.enqueue(rows("urgent", 8, deadline=0.9), 0.5)
    queue.enqueue(rows("newer", 8), 0.6)
    queue.enqueue(rows("late but urgent", 8, deadline=AGING_LIMIT_S + 0.1), 0.7)
    assert drained(queue, 0.7) == [["urgent"], ["old"], ["late but urgent"], ["newer"]]


# -------------------------------------------------------------------------------------------------------- the deadline


def test_rows_that_would_be_answered_too_late_are_not_begun() -> None:
    cost = costing(0.0, 0.01)
    queue = scheduler(cost)
    queue.enqueue(rows("late", 64, deadline=10.5), 10.0)
    queue.enqueue(rows("long", 512, deadline=14.0), 10.0)
    queue.enqueue(rows("in time", 64, deadline=11.0), 10.0)
    queue.enqueue(rows("gone", 64, deadline=9.0), 10.0)
    batch, late = queue.next_batch(10.0)
    assert (owners(batch), sorted(map(str, owners(late)))) == (["in time"], ["gone", "late"])
    assert owners(queue.next_batch(10.0).expired) == ["long"]
    assert (queue.queued_rows, queue.queued_tokens) == (0, 0)


def test_a_wrong_estimate_does_not_keep_the_engine_idle_for_ever() -> None:
    cost = CostModel()
    for _ in range(MIN_CALLS):
        cost.observe(16, 3600.0)  # the machine slept
    queue, refused = scheduler(cost), 0
    for request in range(100):
        queue.enqueue(rows(request, 16, deadline=10.0), 0.0)
        if queue.next_batch(0.0).batch:
            break
        refused += 1
    assert 20 <= refused <= 30


# ------------------------------------------------------------------------------------------------------------- clients


def test_a_client_that_comes_back_has_saved_up_nothing() -> None:
    queue = scheduler(max_batch_size=2)
    for number in range(300):
        queue.enqueue(rows(number, 16, client="busy"), 0.0)
    for _ in range(100):
        queue.next_batch(0.0)
    for number in range(100):
        queue.enqueue(rows(number, 16, client="back"), 0.0)
    had = Counter(row.client for _ in range(20) for row in queue.next_batch(0.0).batch)
    assert abs(had["busy"] - had["back"]) <= 2


def test_a_full_queue_has_room_for_the_share_of_another_client() -> None:
    queue = scheduler(max_queued_inputs=12, max_queued_tokens=12 * 16)
    queue.enqueue(rows("flood", *[16] * 12, client="flood"), 0.0)
    with pytest.raises(Overloaded):
        queue.enqueue(rows("more", 8, client="flood"), 0.0)
    queue.enqueue(rows("second", 16, 16, 16, client="second"), 0.0)
    queue.enqueue(rows("second", 16, 16, 16, client="second"), 0.0)
    with pytest.raises(Overloaded):
        queue.enqueue(rows("second", 16, client="second"), 0.0)
    queue.enqueue(rows("third", *[16] * 50, client="third"), 0.0)  # nothing of its own waits yet
    assert queue.queued_rows == 12 + 6 + 50


def test_the_queue_is_bounded_in_tokens() -> None:
    queue = scheduler(costing(0.0, 0.01), max_queued_tokens=1000)
    queue.enqueue(rows("a", 900), 0.0)
    with pytest.raises(Overloaded) as refused:
        queue.enqueue(rows("b", 101), 0.0)
    assert refused.value.retry_after == 9
    queue.enqueue(rows("b", 100), 0.0)
    assert queue.queued_tokens == 1000


# ---------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), clients=st.integers(1, 4), budget=st.sampled_from([40, 200, 1000, None]))
def test_every_row_leaves_once_and_no_call_is_over_its_limits(seed: int, clients: int, budget: int | None) -> None:
    """Random arrivals, removals and calls on a clock: each queued row leaves once, in a call, late or removed."""
    chance, cost = random.Random(seed), costing(0.001, 0.0005)
    limits = BatchLimits(
        max_batch_size=chance.randint(1, 8), max_batch_tokens=budget, max_queued_inputs=40, max_queued_tokens=2000
    )
    queue, now, number = Scheduler(limits, cost), 0.0, 0
    waiting: dict[int, list[QueuedRow]] = {}
    put = left = 0
    for _ in range(60):
        now += chance.expovariate(20)
        act = chance.random()
        if act < 0.6:
            number += 1
            lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 5))]
            client, deadline = f"client {chance.randrange(clients)}", now + chance.expovariate(2)
            new_rows = rows(number, *lengths, client=client, deadline=deadline, windows=chance.randint(1, 3))
            try:
                queue.enqueue(new_rows, now)
            except Overloaded:
                pass
            else:
                waiting[number] = new_rows
                put += len(new_rows)
        elif act < 0.7 and waiting:
            owner = chance.choice(list(waiting))
            gone = waiting.pop(owner)
            assert queue.remove(owner, gone[0].client) == len(gone)
            left += len(gone)
        else:
            batch, late = queue.next_batch(now)
            assert batch or late or not waiting
            end = now + cost.estimate_seconds(count_padded_tokens(batch))
            assert all(row.deadline > end for row in batch), "begun although its answer would be late"
            by_length = {
                length: [row for row in batch if bucket_length(row.window_length) == length]
                for length in buckets(batch)
            }
            padding = count_padded_tokens(batch) - sum(map(count_padded_tokens, by_length.values()))
            assert len(by_length) <= 1 or cost.is_cheaper_than_call(padding), "a call of their own would have cost less"
            assert len(batch) <= limits.max_batch_size
            assert len(batch) <= 1 or budget is None or count_padded_tokens(batch) <= budget
            for row in (*batch, *late):
                waiting[row.owner].remove(row)  # raises where it has left before
                if not waiting[row.owner]:
                    del waiting[row.owner]
                left += 1
        assert queue.queued_rows == sum(map(len, waiting.values())) == put - left
        assert queue.queued_tokens == sum(row.tokens for queued_rows in waiting.values() for row in queued_rows)
    while queue.queued_rows:
        last = queue.next_batch(now)
        left += len(last.batch) + len(last.expired)
    assert left == put


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), max_batch_size=st.integers(1, 6))
def test_a_row_is_overtaken_for_its_patience_and_its_share_alone(seed: int, max_batch_size: int) -> None:
    """Under a flood of urgent rows by two other clients, and by its own, that never ends: it is answered in time."""
    chance, now = random.Random(seed), 0.0
    queue = scheduler(max_batch_size=max_batch_size)
    step = 0.01
    for call in range(1000):
        for client in ("a", "b", "own"):
            for _ in range(max_batch_size):  # three times the engine's capacity
                queue.enqueue(rows("flood", chance.choice([8, 100]), client=client, deadline=now + 0.5), now)
        if call == 20:
            queue.enqueue(rows("patient", 100, client="own"), now)
            put = now
        if any(row.owner == "patient" for row in queue.next_batch(now).batch):
            break
        now += step
    else:
        pytest.fail("starved")
    # Its own client's rows that are due before it, at a third of the engine's pace, in two lengths.
    assert now - put <= AGING_LIMIT_S * 3 * 2 + 10 * step


def test_fairness_holds_over_any_stretch_of_calls() -> None:
    """Neither of two clients that always wait is ahead by more than a call's tokens and a row's."""
    chance, queue = random.Random(5), scheduler(max_batch_size=6, max_batch_tokens=600)
    for number in range(3000):
        queue.enqueue(rows(number, chance.choice([8, 30, 60]), client="a"), 0.0)
        queue.enqueue(rows(number, chance.choice([30, 200, 500]), client="b"), 0.0)
    ahead, lowest, highest = 0, math.inf, -math.inf
    for _ in range(400):
        for row in queue.next_batch(0.0).batch:
            ahead += row.tokens if row.client == "a" else -row.tokens
        lowest, highest = min(lowest, ahead), max(highest, ahead)
    assert highest - lowest <= 2 * (600 + 500)


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
