"""When the faults of a rehearsal come, what became of the run, and how all of it is judged."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rtrain.checkpoints import checkpoint
from rtrain.cluster.rehearsal import (
    compared,
    faults as sabotage,
    following,
    plan as plans,
)
from rtrain.cluster.rehearsal.book import Machine
from rtrain.cluster.rehearsal.certificate import Certificate
from rtrain.cluster.rehearsal.faults import Fault, due, follow
from rtrain.cluster.rehearsal.measured import Rows, Served, Weights, dollars_between, most_at_a_time, nodes_of
from rtrain.cluster.rehearsal.ports import Listener
from rtrain.errors import UserError
from rtrain.run import Run

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.of(TEXT)
SERVED = Served(31.0, 2, 1, 20, 20, 20, 0, None, 0.1, 4.0, 0)
NOWHERE = replace(SERVED, nodes=0)


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **fields}


def test_a_fault_comes_once_the_run_is_over_the_last_one() -> None:
    wanted: tuple[sabotage.Kind, ...] = ("notice", "kill")
    log = [event("started", 0, update=0), event("progress", 1, update=24)]
    assert due([], [], wanted, 100) is None
    assert due(log, [], wanted, 100) is None
    log.append(event("progress", 2, update=25))
    assert due(log, [], wanted, 100) == "notice"
    met = Fault("notice", "worker-1", "worker", 2.0)
    log.append(event("progress", 9, update=60))
    assert due(log, [met], wanted, 100) is None
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


def made(**changes: Any) -> Certificate:
    machines = {
        "head-1": Machine("head-1", "head", {}, {}, {}, 100.0, ended=460.0, why="down"),
        "worker-1": Machine("worker-1", "worker", {}, {}, {}, 110.0, ended=200.0, why="terminated"),
        "worker-2": Machine("worker-2", "worker", {}, {}, {}, 190.0, ended=300.0, why="killed"),
        "worker-3": Machine("worker-3", "worker", {}, {}, {}, 301.0, ended=440.0, why="terminated"),
    }
    faults = [
        Fault("notice", "worker-1", "worker", 190.0, 25, 25, 0, 4.0, 30.0, 220.0, 12.5),
        Fault("kill", "worker-2", "worker", 300.0, 50, 45, 5, None, 40.0, 340.0),
    ]
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
        "left_behind": [],
        "seconds": 360.0,
        "dollars_of_run": 0.021,
    }
    return Certificate(**{**given, **changes})


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
        ({"scale_down_s": None}, "nodes without work were not ended"),
        ({"left_behind": ["process 7 (x)"]}, "left behind: process 7"),
        ({"errors": ["broken off"]}, "broken off"),
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


def test_what_is_not_rehearsed_is_said() -> None:
    gpu = replace(PLAN, kinds=(replace(PLAN.kinds[0], resources={"CPU": 8.0, "GPU": 1.0}),), watcher=None)
    said = "\n".join(made(plan=gpu, device="gpu").not_rehearsed())
    for expected in (
        "which were counted and not there",
        "NCCL sums gradients (here gloo)",
        "the file starts no watcher",
    ):
        assert expected in said
    assert "trained on CPUs, as it asks for" in "\n".join(made(plan=gpu).not_rehearsed())
    assert "GPU" not in "\n".join(made().not_rehearsed())


# ----------------------------------------------------------------------------------------------------------- its runs


def test_a_head_that_is_late_is_asked_again_and_one_that_is_gone_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.0)
    answers: list[Any] = [UserError("late"), UserError("late"), {"job": SimpleNamespace(status="RUNNING")}]

    def all_jobs() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return dict(answer)

    made: Any = SimpleNamespace(jobs=SimpleNamespace(all=all_jobs), head="head-1", book=SimpleNamespace())
    made.metrics_port, made.book.up = 1, lambda: {"head-1": None}
    follower = following.Follower(made, tmp_path, lambda text: None)
    assert follower.status("job") == "RUNNING"
    answers.append({"another": SimpleNamespace(status="RUNNING")})
    with pytest.raises(following.Broken, match="started anew, and knows the job job no more"):
        follower.status("job")
    made.book.up = dict
    answers.append(UserError("gone"))
    with pytest.raises(UserError, match="gone"):
        follower.status("job")


def test_the_last_weights_of_two_runs_are_compared(tmp_path: Path) -> None:
    def run(name: str, off: float, updates: tuple[int, ...] = (3,)) -> Run:
        for update in updates:
            folder = checkpoint.path_of(Run(tmp_path / name).checkpoints, update)
            folder.mkdir(parents=True)
            tensors = {"a": np.full((3, 4), 2.0 + off, np.float32), "b": np.ones(2, np.float32)}
            save_file(tensors, folder / "model.safetensors")
            (folder / "MANIFEST.json").write_text("{}")
        return Run(tmp_path / name)

    control = run("control", 0.0, (2, 3))
    assert compared.weights(control, run("same", 0.0), True) == Weights(True, 0.0, True)
    other = compared.weights(control, run("other", 0.5), False)
    assert (other.identical, other.same_workers) == (False, False)
    assert other.difference == pytest.approx((12 * 0.25 / (12 * 4 + 2)) ** 0.5)
