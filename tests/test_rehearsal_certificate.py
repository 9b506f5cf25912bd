"""When the faults of a rehearsal come, what became of the run, and how all of it is judged."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain.cluster.rehearsal import (
    faults as sabotage,
    plan as plans,
)
from rtrain.cluster.rehearsal.certificate import Certificate
from rtrain.cluster.rehearsal.faults import Fault, due, follow
from rtrain.cluster.rehearsal.machines.book import Machine
from rtrain.cluster.rehearsal.machines.commands import Commands
from rtrain.cluster.rehearsal.measured import Resized, Rows, Served, Weights, dollars_between, most_at_a_time, nodes_of
from rtrain.cluster.rehearsal.ports import Listener

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.of(TEXT)
SERVED = Served(31.0, 2, 1, 20, 20, 20, 0, None, 0.1, 4.0, 0)
NOWHERE = replace(SERVED, nodes=0)


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
        "upload": {"files": 2, "bytes": 3000, "largest": (("a.py", 2000), ("b.py", 1000))},
        "ports": [Listener("head-1", "dashboard", "loopback", 8265), Listener("worker-1", "raylet", "network", 1)],
        "faults": faults,
        "wanted_faults": 2,
        "restarts": 2,
        "rows": Rows(True, 0, 0, True),
        "weights": Weights(True, 0.0, True),
        "updates": 100,
        "workers": [2, 2, 2],
        "device": "cpu",
        "served": SERVED,
        "resized": None,
        "left_behind": [],
        "seconds": 360.0,
        "dollars_of_run": 0.021,
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
    text = found.text()
    assert text.splitlines()[-1] == "passed (360 s)"
    for said in (
        "rows: 0 lost, 0 repeated",
        "bit for bit",
        "3 started, 3 do",
        "checkpoint after 4.0 s, training again after 30.0 s",
        "with all workers 12.5 s after a node had joined, 0 updates",
        "5 updates computed again for 0.0010 $",
        "a.py",
        "after 300 s there, here after 60",
    ):
        assert said in text
    document = found.to_document()
    assert json.loads(json.dumps(document))["passed"] is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"faults": [], "nodes": []}, "the run had ended before 2 of 2 faults"),
        ({"rows": Rows(True, 1, 0, True)}, "1 rows lost, 0 repeated"),
        ({"rows": Rows(True, 0, 0, False)}, "other rows than"),
        ({"rows": None}, "other rows than"),
        ({"weights": Weights(False, 1e-7, True)}, "other weights than"),
        ({"weights": None}, "other weights than"),
        ({"weights": Weights(True, math.nan, True)}, "weights that are no finite numbers"),
        ({"weights": Weights(False, math.nan, False)}, "weights that are no finite numbers"),
        ({"weights": Weights(False, math.inf, False)}, "weights that are no finite numbers"),
        ({"ports": [Listener("head-1", "dashboard", "network", 8265)]}, "dashboard listens on the network, port 8265"),
        ({"most_at_a_time": 5}, "5 worker nodes at a time, and the file allows 4"),
        ({"needed": 0, "served": NOWHERE}, "3 worker nodes were started, where 2 do"),
        ({"needed": 0, "served": NOWHERE, "idled": 1}, "3 worker nodes were started, where 2 do"),
        ({"served": None}, "the run was not served"),
        ({"served": replace(SERVED, answers=19)}, "the endpoint answered 19 of 20 requests"),
        ({"served": replace(SERVED, equal=18)}, "2 answers of the endpoint are not those of rtrain predict"),
        ({"served": replace(SERVED, cut=1)}, "1 requests were taken and not answered"),
        (met(replace(NOTICE, whole=None)), "spot notice (worker-1): the run did not get over it"),
        (met(replace(NOTICE, recomputed=2)), "spot notice (worker-1): 2 updates were computed again"),
        (met(replace(NOTICE, seconds_to_checkpoint=None)), "spot notice (worker-1): no checkpoint was written for it"),
        (met(replace(NOTICE, seconds_to_checkpoint=10.1)), "(worker-1): its checkpoint was whole after 10.1 s, 10 are"),
        (met(replace(NOTICE, seconds_after_join=60.1)), "(worker-1): all workers trained 60.1 s after a node had"),
        (met(replace(KILL, seconds_after_join=61.0)), "killed without notice (worker-2): all workers trained 61.0 s"),
        ({"scale_down_s": None}, "nodes without work were not ended"),
        ({"left_behind": ["process 7 (x)"]}, "left behind: process 7"),
        ({"errors": ["broken off"]}, "broken off"),
        (
            {"failed": {"worker-2": "ray stop (exit code 127)"}},
            "worker-2: the command failed: ray stop (exit code 127)",
        ),
        ({"file_ports": {"raylet": {6380, 6381}}}, "raylet listens on the network, port 1 (worker-1), which the file"),
    ],
)
def test_whatever_is_wrong_fails_it_and_is_said(changes: dict[str, Any], why: str) -> None:
    found = made(**changes)
    assert [one for one in found.problems() if why in one]
    assert found.text().splitlines()[-1].startswith("FAILED")
    assert found.to_document()["passed"] is False


def test_what_is_computed_again_costs_its_share_of_the_run_s_nodes() -> None:
    found = made()
    assert [found.dollars_again(fault) for fault in found.faults] == [0.0, 0.001]  # 5 of 105 updates
    assert [fault["dollars_again"] for fault in found.to_document()["faults"]] == [0.0, 0.001]
    assert made(dollars_of_run=None).dollars_again(found.faults[1]) is None
    half = dollars_between(found.nodes, 10.0, 55.0)  # of the head an eighth, of the first worker a half
    assert half == pytest.approx(0.125 * found.nodes[0].dollars + 0.5 * found.nodes[1].dollars, abs=1e-6)  # type: ignore[operator]
    assert dollars_between([replace(found.nodes[0], dollars=None)], 0.0, 1.0) is None


def test_nodes_that_went_as_idle_between_two_runs_are_needed_anew() -> None:
    assert made(idled=1, faults=made().faults[:1], wanted_faults=1).wanted_nodes == 3
    assert made(idled=7).wanted_nodes == 4  # of more than a run needs, the others were too many


def test_an_endpoint_needs_a_node_for_each_replica_and_one_for_each_that_is_lost() -> None:
    assert made(served=SERVED).wanted_nodes == 3
    spread = replace(SERVED, nodes=2, lost="worker-3", refused=2)
    assert made(served=spread).wanted_nodes == 5
    assert "worker-3 cut off in the middle, 2 requests asked again" in made(served=spread).text()


def test_other_numbers_of_workers_may_round_otherwise() -> None:
    found = made(weights=Weights(False, 3e-7, False), workers=[2, 1, 2])
    assert found.passed
    assert "not rehearsed: whether the weights are the undisturbed run's" in found.text()
    assert "whether the weights are" not in made().text()
    assert "relative difference 3.0e-07" in found.text()


RESIZED = Resized(
    notice=Fault("notice", "worker-1", "worker", 0.0, 30, 30, 0, 2.0, 15.0, 50.0, 20.0),
    workers=(2, 1, 2),
    update=400,
    agrees=True,
    lost=0,
    repeated=0,
    same_order=True,
    difference=3e-12,
    started=3,
    needed=3,
    seconds=200.0,
    left_behind=(),
)


def test_a_run_that_has_shrunk_and_grown_passes_and_is_told() -> None:
    found = made(resized=RESIZED)
    assert found.passed
    assert made(resized=replace(RESIZED, workers=(1, 2, 1, 2))).passed
    assert "workers 2, 1, 2; training again 15.0 s after the notice; at update 400 0 rows lost" in found.text()
    assert "--also resize" not in found.text()
    assert "--also resize tries it" in made().text()
    document = json.loads(json.dumps(found.to_document()))
    assert (document["resized"]["difference"], document["resized"]["notice"]["recomputed"]) == (3e-12, 0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workers": (2, 2)}, "its starts had [2, 2] workers"),
        ({"workers": (2, 1)}, "its starts had [2, 1] workers"),
        ({"workers": (1, 2)}, "its starts had [1, 2] workers"),
        ({"difference": 2e-8}, "2.0e-08 off the steady one's"),
        ({"difference": math.nan}, "nan off the steady one's"),
        ({"same_order": False}, "other rows than the steady one"),
        ({"agrees": False}, "other rows than the steady one"),
        ({"repeated": 1}, "other rows than the steady one"),
        ({"started": 4}, "4 worker nodes were started for the resized run, where 3 do"),
        ({"notice": replace(RESIZED.notice, recomputed=2)}, "its notice: 2 updates were computed again"),
        ({"left_behind": ["process 7"]}, "left behind: process 7"),
    ],
)
def test_whatever_is_wrong_with_a_resized_run_is_said(changes: dict[str, Any], why: str) -> None:
    assert [one for one in made(resized=replace(RESIZED, **changes)).problems() if why in one]


def test_what_is_not_rehearsed_is_said() -> None:
    gpu = replace(PLAN, kinds=(replace(PLAN.kinds[0], resources={"CPU": 8.0, "GPU": 1.0}),), watcher=None)
    said = "\n".join(made(plan=gpu, device="gpu").not_rehearsed())
    for expected in (
        "which were counted and not there",
        "NCCL sums gradients (here gloo)",
        "the file starts no watcher",
    ):
        assert expected in said
    run = Commands((), ("ray stop",), ("sudo   apt-get\n update", "x" * 200), ("venv",))
    own = made(commands={"head": run, "worker": run}, file_ports={"raylet": {1, 2}}).not_rehearsed()
    assert own[:3:2] == [
        "images, disks and rights: rtrain cluster lint reads them",
        "a command that changes the system, or fetches something: sudo apt-get update",
    ]
    assert own[3].endswith(f"{'x' * 96} ...")
    assert "trained on CPUs, as it asks for" in "\n".join(made(plan=gpu).not_rehearsed())
    assert "GPU" not in "\n".join(made().not_rehearsed())
