"""Slots whose processes die: whose order is lost, who is to blame, and when it is no use to start them again."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs import stop_request, worker_pool
from tests.ray.test_search import searched, slot_processes
from tune import search, trial_pool
from tune.trainable import Assignment
from tune.trial_pool import MAX_LOSSES, SlotPool, SlotReport

pytestmark = pytest.mark.ray
ORDERS = [Assignment(number, {}, 0, 100) for number in range(4)]


@pytest.fixture(scope="module")
def office(ray_session: Path) -> Iterator[Any]:
    instance = worker_pool.start_mailbox_server()
    yield instance
    ray.kill(instance)


@pytest.fixture
def two(
    office: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[SlotPool]:
    """Two slots that are up. Their processes are this test, and so is Ray Tune's thread."""
    monkeypatch.setattr(trial_pool, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(trial_pool, "REPORTS_MAILBOX", f"answers of {request.node.name}")
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    result = SlotPool(Run(tmp_path), office, thread)
    for slot in range(2):
        upper(result, slot)
        assert result.wait() == (None, ())
    yield result
    over.set()


def tell(result: SlotPool, answer: SlotReport) -> None:
    ray.get(result.mailbox_server.put.remote(trial_pool.REPORTS_MAILBOX, answer))


def upper(result: SlotPool, slot: int) -> None:
    tell(result, SlotReport(slot, f"box {slot}"))


def dead(result: SlotPool, slot: int, second: bool = True) -> None:
    """Ray Tune's word on it."""
    trial: Any = SimpleNamespace(config={"slot": slot})
    (result.deaths.on_trial_recover if second else result.deaths.on_trial_error)(1, [], trial)


def test_a_slot_that_is_not_started_again_gives_its_order_back(two: SlotPool) -> None:
    two.assign(0, ORDERS[0])
    two.assign(1, ORDERS[1])
    dead(two, 1, second=False)
    assert two.wait() == (ORDERS[1], None)
    assert (two.idle_slots, list(two.assignments)) == ([], [0])  # no order is given to it any more
    tell(two, SlotReport(0, "box 0", ORDERS[0], ({"kind": "failed"},)))
    assert two.wait() == (ORDERS[0], ({"kind": "failed"},))
    assert two.idle_slots == [0]


def test_what_a_slot_has_answered_before_its_end_is_not_lost(two: SlotPool) -> None:
    two.assign(1, ORDERS[1])
    tell(two, SlotReport(1, "box 1", ORDERS[1], ({"kind": "failed"},)))
    dead(two, 1, second=False)
    assert two.wait() == (ORDERS[1], ({"kind": "failed"},))


def test_a_slot_that_dies_again_and_again_without_an_order_ends_the_search(two: SlotPool) -> None:
    for _ in range(MAX_LOSSES):
        dead(two, 0)
    upper(two, 0)
    assert two.wait() == (None, ())
    dead(two, 0)
    with pytest.raises(UserError) as raised:
        two.wait()
    assert raised.value.code == "workers_lost"


def test_deaths_with_orders_are_no_fault_of_the_slot_however_many_there_are(two: SlotPool) -> None:
    for order in ORDERS * 2:
        two.assign(0, order)
        dead(two, 0)
        upper(two, 0)
        assert two.wait() == (order, None)


def test_deaths_do_not_add_up_while_orders_are_done(two: SlotPool) -> None:
    for order in ORDERS * 2:
        dead(two, 0)
        upper(two, 0)
        two.wait()
        two.assign(0, order)
        tell(two, SlotReport(0, "box 0", order))
        assert two.wait() == (order, ())


def test_a_dead_slot_gets_no_order_before_it_is_up_again(two: SlotPool) -> None:
    dead(two, 0)
    tell(two, SlotReport(1, "box 1"))
    two.wait()
    assert two.idle_slots == [1]
    upper(two, 0)
    two.wait()
    assert two.idle_slots == [0, 1]


def test_a_search_that_is_asked_to_end_ends_when_its_trials_have(two: SlotPool) -> None:
    """Stop requests are repeated: a starting trial consumes earlier requests."""
    for slot in range(2):
        two.assign(slot, ORDERS[slot])
    initial = two.search.trial(0)
    initial.folder.mkdir()
    two.stop_signal.is_requested = True
    answer = threading.Timer(0.3, tell, (two, SlotReport(0, "box 0", ORDERS[0])))
    answer.start()
    assert two.wait() == (ORDERS[0], ())
    answer.join()
    assert stop_request.consume_stop(initial) == stop_request.SIGNALED
    assert not two.search.trial(1).folder.exists()
    assert two.idle_slots == []
    tell(two, SlotReport(1, "box 1", ORDERS[1], ({"kind": "finished"},)))
    assert two.wait() == (ORDERS[1], ({"kind": "finished"},))  # its outcome is not lost
    with pytest.raises(stop_request.StoppedByRequest):
        two.wait()


@pytest.mark.slow
def test_a_trial_that_kills_its_slot_each_time_fails_and_the_search_goes_on(ray_session: Path) -> None:
    """The only slot dies more often than a default of Ray Tune allows."""
    root = ray_session / "killer" / "search"
    selection, deaths = searched(ray_session / "killer"), list[int]()

    def kill(event: dict[str, Any]) -> None:
        # At the start of an attempt: this trial's few steps may be over when their progress is read.
        if event["kind"] == "started" and event.get("trial") == 1 and (pids := slot_processes()):
            deaths.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

    result = search.run_search(selection, root, on_event=kill)
    assert result.history.trials[1].error == f"its process died {MAX_LOSSES + 1} times"
    assert len(Run(root).events("assignment_lost")) == MAX_LOSSES + 1
    assert len(set(deaths)) == MAX_LOSSES + 1
    assert [trial.number for trial in result.history.original_trials if not trial.is_valid] == [1]
    assert result.history.winner is not None
