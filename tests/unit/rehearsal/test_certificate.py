"""When the faults of a rehearsal come, what became of the run, and how all of it is judged."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rtrain.rehearsal import faults as rehearsal_faults, plan as plans
from rtrain.rehearsal.certificate import (
    RehearsalCertificate,
    ResizeResult,
    RowComparison,
    WeightComparison,
    max_concurrent,
    rehearsed_nodes,
)
from rtrain.rehearsal.faults import InjectedFault, Listener, due_fault, record_recovery
from rtrain.rehearsal.machine import MachineRecord
from tests.support.root import ROOT

PLAN = plans.parse_plan((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **fields}


def test_a_fault_comes_once_the_run_is_over_the_last_one() -> None:
    expected: tuple[rehearsal_faults.FaultKind, ...] = ("notice", "kill")
    log = [event("started", 0, step=0, workers=2), event("progress", 1, step=11)]
    assert due_fault([], [], expected, 100) is None
    assert due_fault(log, [], expected, 100) is None
    log.append(event("progress", 2, step=12))
    assert due_fault(log, [], expected, 100) == due_fault(log, [], expected, 100, 2) == "notice"
    assert due_fault(log, [], expected, 100, 3) is None  # it is still to grow
    met = InjectedFault("notice", "worker-1", "worker", 2.0)
    log.append(event("progress", 9, step=60))
    assert due_fault(log, [met], expected, 100) is None
    assert due_fault(log[:-1], [], expected[1:], 100) is None  # half of the run comes first
    met.seconds_to_next_step, met.full_size_at = 5.0, 7.0
    assert due_fault(log, [met], expected, 100) == "kill"
    assert due_fault([*log, event("restart_requested", 10, reason="resize", step=60)], [met], expected, 100) is None
    assert due_fault(log, [met, met], expected, 100) is None


def test_what_a_fault_has_cost_is_read_from_the_log() -> None:
    log = [event("started", 0, step=0, workers=2), *(event("progress", n, step=n) for n in range(1, 6))]
    notice = InjectedFault("notice", "worker-1", "worker", 5.0)
    log += [event("progress", 6, step=6), event("saved", 7, step=6)]
    record_recovery(notice, log)
    log += [
        event("restart_requested", 12, reason="preemption", step=6)
    ]  # the workers' own end is no part of the checkpoint
    record_recovery(notice, log)
    assert (notice.seconds_to_checkpoint, notice.has_recovered, notice.has_passed) == (2.0, False, False)
    log += [event("started", 20, step=6, workers=2), event("progress", 21, step=7)]
    record_recovery(notice, log)
    assert (notice.at_step, notice.resumed_from_step, notice.recomputed_steps) == (6, 6, 0)
    assert (notice.seconds_to_next_step, notice.has_passed) == (16.0, True)
    kill = InjectedFault("kill", "worker-2", "worker", 25.0)
    log += [event("progress", 24, step=9), event("crashed", 26, cause="crash", resumes_from=6)]
    log += [event("started", 30, step=6, workers=2), event("progress", 31, step=7), event("progress", 33, step=10)]
    record_recovery(kill, log)
    assert (kill.at_step, kill.recomputed_steps, kill.seconds_to_next_step, kill.has_passed) == (9, 3, 8.0, True)
    assert (kill.seconds_to_checkpoint, replace(kill, kind="notice").has_passed) == (None, False)


def test_a_run_is_whole_again_with_all_its_workers_and_the_node_s_own_start_does_not_count() -> None:
    log = [event("started", 0, step=0, workers=2), event("progress", 4, step=4), event("saved", 6, step=4)]
    log += [event("started", 8, step=4, workers=1), event("progress", 9, step=5)]
    notice = InjectedFault("notice", "worker-1", "worker", 5.0)
    record_recovery(notice, log)
    assert (notice.seconds_to_next_step, notice.full_size_at, notice.has_recovered) == (4.0, None, False)
    log += [event("saved", 31, step=20), event("started", 38, step=20, workers=2), event("progress", 40, step=21)]
    record_recovery(notice, log)
    assert (notice.seconds_to_checkpoint, notice.seconds_to_next_step, notice.full_size_at) == (1.0, 4.0, 40)
    assert rehearsal_faults.seconds_after_join(notice, [1.0, 28.5, 30.0]) == 11.5
    assert rehearsal_faults.seconds_after_join(notice, [1.0]) is None  # there was room enough without another node
    assert rehearsal_faults.seconds_after_join(notice, [41.0]) is None


# -------------------------------------------------------------------------------------------------------- certificate


NOTICE = InjectedFault("notice", "worker-1", "worker", 190.0, 25, 25, 0, 4.0, 30.0, 220.0, 12.5)
KILL = InjectedFault("kill", "worker-2", "worker", 300.0, 50, 45, 5, None, 40.0, 340.0)


def make_certificate(**changes: Any) -> RehearsalCertificate:
    machines = {
        "head-1": MachineRecord("head-1", "head", {}, {}, {}, 100.0, ended_at=460.0, end_reason="down"),
        "worker-1": MachineRecord("worker-1", "worker", {}, {}, {}, 110.0, ended_at=200.0, end_reason="terminated"),
        "worker-2": MachineRecord("worker-2", "worker", {}, {}, {}, 190.0, ended_at=300.0, end_reason="killed"),
        "worker-3": MachineRecord("worker-3", "worker", {}, {}, {}, 301.0, ended_at=440.0, end_reason="terminated"),
    }
    faults = [replace(NOTICE), replace(KILL)]
    nodes = rehearsed_nodes(machines, {"head-1": 105.0, "worker-1": 118.0, "worker-2": 197.0}, PLAN, faults, 100.0)
    arguments: dict[str, Any] = {
        "plan": PLAN,
        "nodes": nodes,
        "max_concurrent_nodes": max_concurrent([node for node in nodes if node.type == "worker"]),
        "required_nodes": 1,
        "scale_up_s": 18.0,
        "scale_down_s": 22.0,
        "listeners": [Listener("head-1", "dashboard", "loopback", 8265), Listener("worker-1", "raylet", "network", 1)],
        "faults": faults,
        "planned_faults": 2,
        "restarts": 2,
        "row_comparison": RowComparison(True, 0, 0, True),
        "weight_comparison": WeightComparison(True, 0.0, True),
        "steps": 100,
        "workers_by_attempt": [2, 2, 2],
        "device": "cpu",
        "resize_result": None,
        "left_behind": [],
        "seconds": 360.0,
    }
    return RehearsalCertificate(**{**arguments, **changes})


def met(fault: InjectedFault) -> dict[str, Any]:
    """The sound rehearsal's faults, with this one in its kind's place."""
    return {"faults": [fault if fault.kind == template.kind else replace(template) for template in (NOTICE, KILL)]}


def test_a_sound_rehearsal_passes_and_says_what_it_came_to() -> None:
    certificate = make_certificate()
    assert certificate.problems() == []
    assert (certificate.started_nodes, certificate.expected_nodes, certificate.max_concurrent_nodes) == (3, 3, 2)
    assert [node.end_reason for node in certificate.nodes] == ["taken down", "spot notice", "killed", "idle"]
    assert [node.seconds_to_join for node in certificate.nodes] == [5.0, 8.0, 7.0, None]
    worker = (90 + 110 + 139) / 3600 * 0.357
    assert certificate.dollars == pytest.approx(0.101 / 10 + worker, abs=1e-5)
    assert certificate.max_dollars_per_hour == pytest.approx(0.101 + 4 * 0.357)
    assert json.loads(json.dumps(certificate.to_document()))["passed"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": [], "nodes": []},
        {"row_comparison": RowComparison(True, 1, 0, True)},
        {"row_comparison": RowComparison(True, 0, 0, False)},
        {"row_comparison": None},
        {"weight_comparison": WeightComparison(False, 1e-7, True)},
        {"weight_comparison": None},
        {"weight_comparison": WeightComparison(True, math.nan, True)},
        {"weight_comparison": WeightComparison(False, math.inf, False)},
        {"listeners": [Listener("head-1", "dashboard", "network", 8265)]},
        {"max_concurrent_nodes": 5},
        {"required_nodes": 0},
        {"required_nodes": 0, "idle_terminations": 1},
        met(replace(NOTICE, full_size_at=None)),
        met(replace(NOTICE, recomputed_steps=2)),
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
    certificate = make_certificate(**changes)
    assert len(certificate.problems()) == 1
    assert certificate.to_document()["passed"] is False


def test_nodes_that_went_as_idle_between_two_runs_are_needed_anew() -> None:
    one_fault = make_certificate().faults[:1]
    assert make_certificate(idle_terminations=1, faults=one_fault, planned_faults=1).expected_nodes == 3
    assert make_certificate(idle_terminations=7).expected_nodes == 4  # of more than a run needs, the rest were too many


def test_other_numbers_of_workers_may_round_otherwise() -> None:
    certificate = make_certificate(weight_comparison=WeightComparison(False, 3e-7, False), workers_by_attempt=[2, 1, 2])
    assert certificate.has_passed
    assert len(certificate.list_not_rehearsed()) == len(make_certificate().list_not_rehearsed()) + 1


RESIZED = ResizeResult(
    notice=InjectedFault("notice", "worker-1", "worker", 0.0, 30, 30, 0, 2.0, 15.0, 50.0, 20.0),
    workers_by_attempt=(2, 1, 2),
    step=400,
    rows=RowComparison(True, 0, 0, True),
    difference=3e-12,
    started_nodes=3,
    required_nodes=3,
    seconds=200.0,
    left_behind=(),
)


def test_a_run_that_has_shrunk_and_grown_passes() -> None:
    certificate = make_certificate(resize_result=RESIZED)
    assert certificate.has_passed
    assert make_certificate(resize_result=replace(RESIZED, workers_by_attempt=(1, 2, 1, 2))).has_passed
    assert len(certificate.list_not_rehearsed()) == len(make_certificate().list_not_rehearsed()) - 1
    document = json.loads(json.dumps(certificate.to_document()))
    assert (document["resized"]["difference"], document["resized"]["notice"]["recomputed_steps"]) == (3e-12, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers_by_attempt": (2, 2)},
        {"workers_by_attempt": (2, 1)},
        {"workers_by_attempt": (1, 2)},
        {"difference": 2e-8},
        {"difference": math.nan},
        {"rows": RowComparison(True, 0, 0, False)},
        {"rows": RowComparison(False, 0, 0, True)},
        {"rows": RowComparison(True, 0, 1, True)},
        {"started_nodes": 4},
        {"notice": replace(RESIZED.notice, recomputed_steps=2)},
        {"left_behind": ["process 7"]},
    ],
)
def test_whatever_is_wrong_with_a_resized_run_fails_the_rehearsal(changes: dict[str, Any]) -> None:
    assert len(make_certificate(resize_result=replace(RESIZED, **changes)).problems()) == 1


def test_what_is_not_rehearsed_is_said() -> None:
    gpu = replace(PLAN, node_types=(replace(PLAN.node_types[0], resources={"CPU": 8.0, "GPU": 1.0}),))
    of_cpus = len(make_certificate().list_not_rehearsed())
    assert len(make_certificate(plan=gpu, device="gpu").list_not_rehearsed()) == of_cpus + 2
    assert len(make_certificate(plan=gpu).list_not_rehearsed()) == of_cpus + 1
    assert len(make_certificate(plan=replace(PLAN, watcher=None)).list_not_rehearsed()) == of_cpus + 1
