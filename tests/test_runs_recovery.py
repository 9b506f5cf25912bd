"""What a run does about faults: when it starts again, with how many workers, and that it ends as if undisturbed."""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import capacity
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import TryAgain, UserError
from rtrain.core.manifest import Unreadable
from rtrain.core.run_folder import Run
from rtrain.parallel import collectives
from rtrain.runs import controller, failures, run_folders
from rtrain.runs.recovery import (
    Growth,
    Recovery,
    halvings,
    memory_told,
    most_after,
    out_of_memory,
    tokens_per_pass,
    workers_for,
)
from rtrain.verification import drill
from rtrain.verification.faults import FAULTS
from tests import test_training_loop
from tests.conftest import labelled_rows, write_rows
from tests.test_training_loop import Ran, start, weights_digest
from tests.tiny import make_encoder

ground, straight = test_training_loop.ground, test_training_loop.straight  # fixtures

# ------------------------------------------------------------------------------------------------------------ decisions


def test_crashes_without_progress_are_counted() -> None:
    recovery = Recovery(max_crashes=2)
    assert [recovery.retry("crash", 0) for _ in range(3)] == [True, True, False]  # max_crashes + 1 starts in all


def test_a_run_that_gets_on_may_crash_as_often_as_it_likes() -> None:
    recovery = Recovery(max_crashes=1)
    assert all(recovery.retry("crash", update) for update in range(100))
    assert not recovery.retry("crash", 99)


def test_an_error_that_is_the_same_each_time_is_tried_again_once() -> None:
    recovery = Recovery(max_crashes=3)
    assert [recovery.retry("crash", 0, error="no padding token") for _ in range(2)] == [True, False]
    recovery = Recovery(max_crashes=3)
    assert all(recovery.retry("crash", 0, error=error) for error in ("a", "b", None))
    assert all(recovery.retry("crash", update, error="a") for update in (1, 2, 3))  # it got on meanwhile


@pytest.mark.parametrize(("error", "starts"), [(ValueError("no padding token"), 2), (OSError("stale handle"), 4)])
def test_a_worker_s_own_error_ends_a_run_at_its_second_time(tmp_path: Path, error: Exception, starts: int) -> None:
    failure = RuntimeError("training failed")
    failure.worker_failures = {0: error}  # type: ignore[attr-defined]
    recovery = Recovery(max_crashes=3)
    for _ in range(starts - 1):
        controller.recover(Run(tmp_path), failure, recovery)
    with pytest.raises(UserError):
        controller.recover(Run(tmp_path), failure, recovery)
    assert [event["kind"] for event in events.read(tmp_path)] == [*["crashed"] * (starts - 1), "failed"]


def test_preemptions_cost_nothing_and_errors_of_the_user_end_the_run() -> None:
    recovery = Recovery(max_crashes=0)
    assert all(recovery.retry("preemption", 0) for _ in range(50))
    assert not recovery.retry("refused", 0)
    assert not recovery.retry("crash", 0)


def test_a_spot_node_that_is_lost_costs_nothing_and_another_one_is_a_crash() -> None:
    recovery = Recovery(max_crashes=1)
    assert all(recovery.retry("lost", 0, spot=True) for _ in range(50))
    assert [recovery.retry("lost", 0) for _ in range(2)] == [True, False]


def test_what_may_come_of_a_lost_node_is_told_from_what_a_worker_says(tmp_path: Path) -> None:
    from ray.exceptions import ActorDiedError

    for error, maybe in (
        (ActorDiedError(), True),
        (collectives.Elsewhere("another worker failed"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4242"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ):
        failure = RuntimeError("training failed")
        failure.worker_failures = {0: error}  # type: ignore[attr-defined]
        assert failures.maybe_of_a_node(failures.causes(failure)) == maybe


@pytest.mark.parametrize(("labels", "spends"), [({"ray.io/market-type": "spot"}, False), ({}, True)])
def test_the_loss_of_a_node_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], spends: bool
) -> None:
    waited = []

    def lost(nodes: Collection[str], patience_s: float) -> dict[str, capacity.Host]:
        waited.append((set(nodes), patience_s))
        return {"5a" * 28: capacity.Host({}, labels)}

    monkeypatch.setattr(capacity, "lost", lost)
    failure = RuntimeError("training failed")
    failure.worker_failures = {0: collectives.Elsewhere("another worker failed")}  # type: ignore[attr-defined]
    recovery = Recovery(max_crashes=1)
    controller.recover(Run(tmp_path), failure, recovery, {"5a" * 28, "6b" * 28})
    assert waited == [({"5a" * 28, "6b" * 28}, controller.LOST_S)]
    [event] = events.read(tmp_path)
    assert event["cause"] == "lost"
    named = f"{'' if spends else 'spot '}node 5a5a5a5a gone without notice; another worker failed"
    assert event["error"] == named
    assert recovery.crashes == spends
    failure.worker_failures = {0: OSError("no space left")}  # type: ignore[attr-defined]
    controller.recover(Run(tmp_path), failure, Recovery(max_crashes=1), {"5a" * 28})
    assert waited[-1][1] == 0  # a worker that says what it failed of: nobody waits for a node to show as gone


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("MemoryError", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
        ("Task was killed due to the node running low on memory.", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_start_that_ran_out_of_memory_is_followed_by_one_with_smaller_passes(
    error: str, found: bool, tmp_path: Path
) -> None:
    assert out_of_memory(["", f"Traceback ...\n{error}"]) == found
    failure = RuntimeError("training failed")
    cause = MemoryError() if error == "MemoryError" else RuntimeError(error)  # Python's own says nothing more
    failure.worker_failures = {0: cause}  # type: ignore[attr-defined]
    failure.args = (f"a worker failed: {error}",)
    controller.recover(Run(tmp_path), failure, Recovery(max_crashes=1))
    [crashed] = events.read(tmp_path)
    assert (crashed["cause"], crashed["error"]) == ("memory" if found else "crash", error)
    assert halvings(events.read(tmp_path)) == found
    with pytest.raises(UserError, check=lambda error: error.code == ("out_of_memory" if found else "training_failed")):
        controller.recover(Run(tmp_path), failure, Recovery(max_crashes=0))


RAY_2_60 = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: "
    "7e4ea81b540f81cbe17373bd0a7a0e654401015498543e3413b88ac5) was 22.47GB used / 23.54GB limit (0.954546)\n"
    "OOM kill reason: Memory usage 24127202099B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)\n"
    "Selected to kill: (Actor(55f5ce2569177a80e180281301000000): task name=RayTrainWorker.__init__, "
    "pid=21945, actual memory used=9.52GB, worker ID=616d3410cdb48aa692dd7501f8a1f4630add94073780d4f4a62ad586)\n]\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n21945\t9.52\tray::RayTrainWorker\n21741\t1.09\tpython -m jupyter lab\n"
    "Refer to the documentation on how to address the out of memory issue. Set max_restarts to enable retry. "
)
"""What its memory monitor says."""


def test_who_used_a_node_s_memory_is_told(tmp_path: Path) -> None:
    told = memory_told(["Training failed", RAY_2_60])
    assert told is not None
    assert all(part in told for part in ("192.0.2.2", "22.47", "23.54", "95 %", "21945", "9.52", "jupyter lab (21741)"))
    assert memory_told(["MemoryError"]) is None
    failure = RuntimeError("training failed")
    failure.worker_failures = {0: RuntimeError(RAY_2_60)}  # type: ignore[attr-defined]
    controller.recover(Run(tmp_path), failure, Recovery(max_crashes=1))
    [crashed] = events.read(tmp_path)
    assert (crashed["cause"], crashed["error"]) == ("memory", told)
    with pytest.raises(UserError, check=lambda error: error.code == "out_of_memory"):
        controller.recover(Run(tmp_path), failure, Recovery(max_crashes=0))


def test_a_file_that_cannot_be_read_now_is_tried_again_and_then_left_to_another_start(tmp_path: Path) -> None:
    failure = RuntimeError("training failed")
    failure.worker_failures = {0: Unreadable("state.json cannot be read"), 1: collectives.Elsewhere("")}  # type: ignore[attr-defined]
    controller.recover(Run(tmp_path), failure, Recovery(max_crashes=1))
    assert [event["cause"] for event in events.read(tmp_path)] == ["crash"]
    with pytest.raises(TryAgain, check=lambda error: isinstance(error, Unreadable)):
        controller.recover(Run(tmp_path), failure, Recovery(max_crashes=0))
    assert [event["kind"] for event in events.read(tmp_path)] == ["crashed"]  # whoever asks again goes on


def test_passes_are_halved_down_to_what_saves_memory_no_more() -> None:
    assert [tokens_per_pass(2048, times) for times in range(8)] == [2048, 1024, 512, 256, 128, 64, 64, 64]
    assert tokens_per_pass(50, 3) == 50


@pytest.mark.parametrize(
    ("most", "least", "room", "workers"),
    [(4, None, 1, 4), (4, 1, 6, 4), (4, 1, 3, 3), (4, 1, 1, 1), (4, 2, 1, 0), (4, 2, 2, 2), (2, 2, 1, 0)],
)
def test_workers_follow_the_room_between_least_and_most(most: int, least: int | None, room: int, workers: int) -> None:
    assert workers_for(most, least, room) == workers


def test_a_start_that_could_not_be_placed_is_followed_by_one_with_fewer_workers() -> None:
    assert most_after(placed=False, workers=4, least=1, most=8) == 3
    assert most_after(placed=False, workers=1, least=1, most=8) == 1
    assert most_after(placed=True, workers=3, least=1, most=8) == 8
    assert most_after(placed=False, workers=4, least=None, most=4) == 4


def test_a_run_grows_into_what_was_there_all_the_time_and_free_once() -> None:
    growth = Growth(after_s=10.0)
    # Two workers; the nodes allow four. Data tasks hold what is free, but not in the third look.
    looks = [growth.look(float(now), 2, 4, 4 if now == 3 else 2) for now in range(1, 13)]
    assert looks == [False] * 10 + [True, False]


def test_a_run_does_not_grow_into_what_others_hold_nor_into_nodes_that_come_and_go() -> None:
    growth = Growth(after_s=10.0)
    assert not any(growth.look(float(now), 2, 4, 2) for now in range(60))
    assert not any(growth.look(float(now), 2, 2 if now % 8 == 0 else 4, 4) for now in range(60, 120))


# --------------------------------------------------------------------------------------------------------------- notice


def test_on_notice_a_start_ends_with_a_checkpoint_and_the_next_goes_on(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_training_loop.Recorder, "notice", lambda recorder: len(recorder.of("progress")) == 1)
    noticed = start(ground, tmp_path, log_every=1)
    assert noticed.outcome is not None
    assert (noticed.outcome.finished, noticed.recorder.of("trained")[0]["updates"]) == (False, 2)
    assert checkpoint_format.updates(tmp_path / "checkpoints") == [2]
    monkeypatch.undo()
    resumed = start(ground, tmp_path, log_every=1)
    assert resumed.recorder.of("started")[0]["update"] == 2
    assert weights_digest(resumed.network) == weights_digest(straight[0].network)


# ----------------------------------------------------------------------------------------------------------- two of one


def test_a_run_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from rtrain.core.run_folder import Run; from rtrain.runs import run_folders\n"
        "with run_folders.hold(Run(pathlib.Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, check=lambda error: error.code == "in_use" and str(other.pid) in str(error)),
            run_folders.hold(Run(tmp_path)),
        ):
            pass
        other.kill()  # its lock goes with it
        other.wait()
        with run_folders.hold(Run(tmp_path)):
            pass


# ---------------------------------------------------------------------------------------------------------------- drill


def settings(folder: Path, **train: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.rows_per_update": 24,
        "train.evaluate_every": 200,
    }
    return config.load("intent", {**base, **{f"train.{name}": value for name, value in train.items()}})


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_drilled_run_ends_like_one_that_was_never_touched(ray_session: Path) -> None:
    """Its workers are killed and its newest checkpoint is torn; every other fault is in the slow tests."""
    faults = [fault for fault in FAULTS if "torn" in fault.name]
    said: list[dict[str, Any]] = []
    folder = ray_session / "drill" / "run"
    chosen = settings(ray_session / "drill", save_every=30, evaluate_every=90)
    certificate = drill.run(chosen, folder, faults, said.append)
    assert [fault["name"] for fault in certificate.faults] == [fault.name for fault in faults]
    assert all(fault["resumed_from"] > 0 for fault in certificate.faults)
    assert all(0 <= fault["recomputed_updates"] <= fault["allowed"] for fault in certificate.faults)
    assert all(fault["seconds_to_next_update"] > 0 for fault in certificate.faults)
    assert (certificate.weights_identical, certificate.order_identical) == (True, True)
    assert (certificate.rows_lost, certificate.rows_repeated, certificate.passed) == (0, 0, True)
    log = events.read(folder / "drilled")
    assert [event["cause"] for event in log if event["kind"] == "crashed"] == ["crash"]
    assert log[-1]["certificate"] == json.loads(json.dumps(certificate.to_document()))
    assert len(list((folder / "drilled" / "checkpoints" / "damaged").iterdir())) == 1
    summary = json.loads((folder / "drilled" / "summary.json").read_text())
    assert (summary["restarts"], summary["updates"]) == (1, certificate.updates)
    assert summary["certificate"] == json.loads(json.dumps(certificate.to_document()))
    assert certificate.left_behind == []
    assert not Run(folder / "drilled").notice.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_fault_of_the_drill(ray_session: Path) -> None:
    chosen = settings(ray_session / "full-drill", save_every=60)
    certificate = drill.run(chosen, ray_session / "full-drill" / "run")
    assert certificate.passed, certificate.text()
    assert len(certificate.faults) == len(FAULTS)
