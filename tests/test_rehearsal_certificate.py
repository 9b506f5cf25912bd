"""When the faults of a rehearsal come, what became of the run, and how all of it is judged."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rtrain.rehearsal import faults as sabotage, plan as plans
from rtrain.rehearsal.certificate import Certificate
from rtrain.rehearsal.faults import Fault, due, follow
from rtrain.rehearsal.machines.machine_registry import Machine
from rtrain.rehearsal.measurements import Resized, Rows, Weights, most_at_a_time, nodes_of
from rtrain.rehearsal.ports import Listener
from tests.root import ROOT

PLAN = plans.of((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **fields}


def test_a_fault_comes_once_the_run_is_over_the_last_one() -> None:
    wanted: tuple[sabotage.Kind, ...] = ("notice", "kill")
    log = [event("started", 0, update=0, workers=2), event("progress", 1, update=11)]
    assert due([], [], wanted, 100) is None
    assert due(log, [], wanted, 100) is None
    log.append(event("progress", 2, update=12))
    assert due(log, [], wanted, 100) == due(log, [], wanted, 100, 2) == "notice"
    assert due(log, [], wanted, 100, 3) is None  # it is still to grow
    met = Fault("notice", "worker-1", "worker", 2.0)
    log.append(event("progress", 9, update=60))
    assert due(log, [met], wanted, 100) is None
    assert due(log[:-1], [], wanted[1:], 100) is None  # half of the run comes first
    met.seconds_to_next_update, met.whole = 5.0, 7.0
    assert due(log, [met], wanted, 100) == "kill"
    assert due([*log, event("yielded", 10, reason="resize", update=60)], [met], wanted, 100) is None
    assert due(log, [met, met], wanted, 100) is None


def test_what_a_fault_has_cost_is_read_from_the_log() -> None:
    log = [event("started", 0, update=0, workers=2), *(event("progress", n, update=n) for n in range(1, 6))]
    notice = Fault("notice", "worker-1", "worker", 5.0)
    log += [event("progress", 6, update=6), event("saved", 7, update=6)]
    follow(notice, log)
    log += [event("yielded", 12, reason="preemption", update=6)]  # the workers' own end is no part of the checkpoint
    follow(notice, log)
    assert (notice.seconds_to_checkpoint, notice.is_over, notice.passed) == (2.0, False, False)
    log += [event("started", 20, update=6, workers=2), event("progress", 21, update=7)]
    follow(notice, log)
    assert (notice.at_update, notice.resumed_from, notice.recomputed) == (6, 6, 0)
    assert (notice.seconds_to_next_update, notice.passed) == (16.0, True)
    kill = Fault("kill", "worker-2", "worker", 25.0)
    log += [event("progress", 24, update=9), event("crashed", 26, cause="crash", resumes_from=6)]
    log += [
        event("started", 30, update=6, workers=2),
        event("progress", 31, update=7),
        event("progress", 33, update=10),
    ]
    follow(kill, log)
    assert (kill.at_update, kill.recomputed, kill.seconds_to_next_update, kill.passed) == (9, 3, 8.0, True)
    assert (kill.seconds_to_checkpoint, replace(kill, kind="notice").passed) == (None, False)


def test_a_run_is_whole_again_with_all_its_workers_and_the_node_s_own_start_does_not_count() -> None:
    log = [event("started", 0, update=0, workers=2), event("progress", 4, update=4), event("saved", 6, update=4)]
    log += [event("started", 8, update=4, workers=1), event("progress", 9, update=5)]
    notice = Fault("notice", "worker-1", "worker", 5.0)
    follow(notice, log)
    assert (notice.seconds_to_next_update, notice.whole, notice.is_over) == (4.0, None, False)
    log += [event("saved", 31, update=20), event("started", 38, update=20, workers=2), event("progress", 40, update=21)]
    follow(notice, log)
    assert (notice.seconds_to_checkpoint, notice.seconds_to_next_update, notice.whole) == (1.0, 4.0, 40)
    assert sabotage.after_join(notice, [1.0, 28.5, 30.0]) == 11.5
    assert sabotage.after_join(notice, [1.0]) is None  # there was room enough without another node
    assert sabotage.after_join(notice, [41.0]) is None


# -------------------------------------------------------------------------------------------------------- certificate


NOTICE = Fault("notice", "worker-1", "worker", 190.0, 25, 25, 0, 4.0, 30.0, 220.0, 12.5)
KILL = Fault("kill", "worker-2", "worker", 300.0, 50, 45, 5, None, 40.0, 340.0)


def made(**changes: Any) -> Certificate:
    machines = {
        "head-1": Machine("head-1", "head", {}, {}, {}, 100.0, ended=460.0, why="down"),
        "worker-1": Machine("worker-1", "worker", {}, {}, {}, 110.0, ended=200.0, why="terminated"),
        "worker-2": Machine("worker-2", "worker", {}, {}, {}, 190.0, ended=300.0, why="killed"),
        "worker-3": Machine("worker-3", "worker", {}, {}, {}, 301.0, ended=440.0, why="terminated"),
    }
    faults = [replace(NOTICE), replace(KILL)]
    nodes = nodes_of(machines, {"head-1": 105.0, "worker-1": 118.0, "worker-2": 197.0}, PLAN, faults, 100.0)
    given: dict[str, Any] = {
        "plan": PLAN,
        "nodes": nodes,
        "most_at_a_time": most_at_a_time([node for node in nodes if node.type == "worker"]),
        "needed": 1,
        "scale_up_s": 18.0,
        "scale_down_s": 22.0,
        "ports": [Listener("head-1", "dashboard", "loopback", 8265), Listener("worker-1", "raylet", "network", 1)],
        "faults": faults,
        "wanted_faults": 2,
        "restarts": 2,
        "rows": Rows(True, 0, 0, True),
        "weights": Weights(True, 0.0, True),
        "updates": 100,
        "workers": [2, 2, 2],
        "device": "cpu",
        "resized": None,
        "left_behind": [],
        "seconds": 360.0,
    }
    return Certificate(**{**given, **changes})


def met(fault: Fault) -> dict[str, Any]:
    """The sound rehearsal's faults, with this one in its kind's place."""
    return {"faults": [fault if fault.kind == one.kind else replace(one) for one in (NOTICE, KILL)]}


def test_a_sound_rehearsal_passes_and_says_what_it_came_to() -> None:
    found = made()
    assert found.problems() == []
    assert (found.started, found.wanted_nodes, found.most_at_a_time) == (3, 3, 2)
    assert [node.end for node in found.nodes] == ["taken down", "spot notice", "killed", "idle"]
    assert [node.seconds_to_join for node in found.nodes] == [5.0, 8.0, 7.0, None]
    worker = (90 + 110 + 139) / 3600 * 0.357
    assert found.dollars == pytest.approx(0.101 / 10 + worker, abs=1e-5)
    assert found.dollars_an_hour_at_most == pytest.approx(0.101 + 4 * 0.357)
    assert json.loads(json.dumps(found.to_document()))["passed"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": [], "nodes": []},
        {"rows": Rows(True, 1, 0, True)},
        {"rows": Rows(True, 0, 0, False)},
        {"rows": None},
        {"weights": Weights(False, 1e-7, True)},
        {"weights": None},
        {"weights": Weights(True, math.nan, True)},
        {"weights": Weights(False, math.inf, False)},
        {"ports": [Listener("head-1", "dashboard", "network", 8265)]},
        {"most_at_a_time": 5},
        {"needed": 0},
        {"needed": 0, "idled": 1},
        met(replace(NOTICE, whole=None)),
        met(replace(NOTICE, recomputed=2)),
        met(replace(NOTICE, seconds_to_checkpoint=None)),
        met(replace(NOTICE, seconds_to_checkpoint=10.1)),
        met(replace(NOTICE, seconds_after_join=60.1)),
        met(replace(KILL, seconds_after_join=61.0)),
        {"scale_down_s": None},
        {"left_behind": ["process 7 (x)"]},
        {"errors": ["broken off"]},
    ],
)
def test_whatever_is_wrong_fails_it(changes: dict[str, Any]) -> None:
    found = made(**changes)
    assert len(found.problems()) == 1
    assert found.to_document()["passed"] is False


def test_nodes_that_went_as_idle_between_two_runs_are_needed_anew() -> None:
    assert made(idled=1, faults=made().faults[:1], wanted_faults=1).wanted_nodes == 3
    assert made(idled=7).wanted_nodes == 4  # of more than a run needs, the others were too many


def test_other_numbers_of_workers_may_round_otherwise() -> None:
    found = made(weights=Weights(False, 3e-7, False), workers=[2, 1, 2])
    assert found.passed
    assert len(found.not_rehearsed()) == len(made().not_rehearsed()) + 1


RESIZED = Resized(
    notice=Fault("notice", "worker-1", "worker", 0.0, 30, 30, 0, 2.0, 15.0, 50.0, 20.0),
    workers=(2, 1, 2),
    update=400,
    rows=Rows(True, 0, 0, True),
    difference=3e-12,
    started=3,
    needed=3,
    seconds=200.0,
    left_behind=(),
)


def test_a_run_that_has_shrunk_and_grown_passes() -> None:
    found = made(resized=RESIZED)
    assert found.passed
    assert made(resized=replace(RESIZED, workers=(1, 2, 1, 2))).passed
    assert len(found.not_rehearsed()) == len(made().not_rehearsed()) - 1
    document = json.loads(json.dumps(found.to_document()))
    assert (document["resized"]["difference"], document["resized"]["notice"]["recomputed"]) == (3e-12, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": (2, 2)},
        {"workers": (2, 1)},
        {"workers": (1, 2)},
        {"difference": 2e-8},
        {"difference": math.nan},
        {"rows": Rows(True, 0, 0, False)},
        {"rows": Rows(False, 0, 0, True)},
        {"rows": Rows(True, 0, 1, True)},
        {"started": 4},
        {"notice": replace(RESIZED.notice, recomputed=2)},
        {"left_behind": ["process 7"]},
    ],
)
def test_whatever_is_wrong_with_a_resized_run_fails_the_rehearsal(changes: dict[str, Any]) -> None:
    assert len(made(resized=replace(RESIZED, **changes)).problems()) == 1


def test_what_is_not_rehearsed_is_said() -> None:
    gpu = replace(PLAN, kinds=(replace(PLAN.kinds[0], resources={"CPU": 8.0, "GPU": 1.0}),))
    of_cpus = len(made().not_rehearsed())
    assert len(made(plan=gpu, device="gpu").not_rehearsed()) == of_cpus + 2
    assert len(made(plan=gpu).not_rehearsed()) == of_cpus + 1
    assert len(made(plan=replace(PLAN, watcher=None)).not_rehearsed()) == of_cpus + 1
