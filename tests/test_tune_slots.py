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
from tests.test_tune_search import searched, slot_processes
from tune import search, trial_pool
from tune.trainable import Order
from tune.trial_pool import LOSSES, Answer, Slots

pytestmark = pytest.mark.ray
ORDERS = [Order(number, {}, 0, 100) for number in range(4)]


@pytest.fixture(scope="module")
def office(ray_session: Path) -> Iterator[Any]:
    made = worker_pool.post()
    yield made
    ray.kill(made)


@pytest.fixture
def two(
    office: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Slots]:
    """Two slots that are up. Their processes are this test, and so is Ray Tune's thread."""
    monkeypatch.setattr(trial_pool, "LOOK_S", 0.05)
    monkeypatch.setattr(trial_pool, "ANSWERS", f"answers of {request.node.name}")
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    found = Slots(Run(tmp_path), office, thread)
    for slot in range(2):
        up(found, slot)
        assert found.wait() == (None, ())
    yield found
    over.set()


def tell(found: Slots, answer: Answer) -> None:
    ray.get(found.office.put.remote(trial_pool.ANSWERS, answer))


def up(found: Slots, slot: int) -> None:
    tell(found, Answer(slot, f"box {slot}"))


def dead(found: Slots, slot: int, again: bool = True) -> None:
    """Ray Tune's word on it."""
    trial: Any = SimpleNamespace(config={"slot": slot})
    (found.deaths.on_trial_recover if again else found.deaths.on_trial_error)(1, [], trial)


def test_a_slot_that_is_not_started_again_gives_its_order_back(two: Slots) -> None:
    two.give(0, ORDERS[0])
    two.give(1, ORDERS[1])
    dead(two, 1, again=False)
    assert two.wait() == (ORDERS[1], None)
    assert (two.idle, list(two.orders)) == ([], [0])  # no order is given to it any more
    tell(two, Answer(0, "box 0", ORDERS[0], ({"kind": "failed"},)))
    assert two.wait() == (ORDERS[0], ({"kind": "failed"},))
    assert two.idle == [0]


def test_what_a_slot_has_answered_before_its_end_is_not_lost(two: Slots) -> None:
    two.give(1, ORDERS[1])
    tell(two, Answer(1, "box 1", ORDERS[1], ({"kind": "failed"},)))
    dead(two, 1, again=False)
    assert two.wait() == (ORDERS[1], ({"kind": "failed"},))


def test_a_slot_that_dies_again_and_again_without_an_order_ends_the_search(two: Slots) -> None:
    for _ in range(LOSSES):
        dead(two, 0)
    up(two, 0)
    assert two.wait() == (None, ())
    dead(two, 0)
    with pytest.raises(UserError) as raised:
        two.wait()
    assert raised.value.code == "workers_lost"


def test_deaths_with_orders_are_no_fault_of_the_slot_however_many_there_are(two: Slots) -> None:
    for order in ORDERS * 2:
        two.give(0, order)
        dead(two, 0)
        up(two, 0)
        assert two.wait() == (order, None)


def test_deaths_do_not_add_up_while_orders_are_done(two: Slots) -> None:
    for order in ORDERS * 2:
        dead(two, 0)
        up(two, 0)
        two.wait()
        two.give(0, order)
        tell(two, Answer(0, "box 0", order))
        assert two.wait() == (order, ())


def test_a_dead_slot_gets_no_order_before_it_is_up_again(two: Slots) -> None:
    dead(two, 0)
    tell(two, Answer(1, "box 1"))
    two.wait()
    assert two.idle == [1]
    up(two, 0)
    two.wait()
    assert two.idle == [0, 1]


def test_a_search_that_is_asked_to_end_ends_when_its_trials_have(two: Slots) -> None:
    """Each trial has notice, again and again: one that starts takes what it finds for an older one."""
    for slot in range(2):
        two.give(slot, ORDERS[slot])
    begun = two.search.trial(0)
    begun.folder.mkdir()
    two.asked.given = True
    answer = threading.Timer(0.3, tell, (two, Answer(0, "box 0", ORDERS[0])))
    answer.start()
    assert two.wait() == (ORDERS[0], ())
    answer.join()
    assert stop_request.take(begun) == stop_request.ASKED
    assert not two.search.trial(1).folder.exists()
    assert two.idle == []
    tell(two, Answer(1, "box 1", ORDERS[1], ({"kind": "finished"},)))
    assert two.wait() == (ORDERS[1], ({"kind": "finished"},))  # what it came to all the same is not lost
    with pytest.raises(stop_request.AskedToEnd):
        two.wait()


@pytest.mark.slow
def test_a_trial_that_kills_its_slot_each_time_fails_and_the_search_goes_on(ray_session: Path) -> None:
    """With one slot, which dies once more often than Ray Tune would recover it by a number of its own."""
    root = ray_session / "killer" / "search"
    chosen, deaths = searched(ray_session / "killer"), list[int]()

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event.get("trial") == 1 and (pids := slot_processes()):
            deaths.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

    found = search.run(chosen, root, on_event=kill)
    assert found.history.trials[1].error == f"the process that ran it died {LOSSES + 1} times"
    assert len(Run(root).events("lost")) == LOSSES + 1
    assert len(set(deaths)) == LOSSES + 1
    assert [one.number for one in found.history.own if not one.sound] == [1]
    assert found.history.chosen is not None
