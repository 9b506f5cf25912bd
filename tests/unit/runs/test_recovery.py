"""Recovery after faults: retries, number of workers, and equal results."""

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
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.manifest import UnreadableFileError
from rtrain.core.run_folder import Run
from rtrain.parallel import collectives
from rtrain.runs import controller, recovery, run_folders
from rtrain.runs.recovery import (
    GrowthTimer,
    RetryBudget,
    count_halvings,
    describe_out_of_memory,
    halve_micro_batch_tokens,
    is_out_of_memory,
    next_worker_limit,
    usable_workers,
)
from rtrain.verification import drill
from rtrain.verification.drill import FAULTS
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import Ran, start, weights_digest

ground, straight = test_trainer.ground, test_trainer.straight  # fixtures

# ------------------------------------------------------------------------------------------------------------ decisions


def failed(*errors: Exception) -> RuntimeError:
    """Ray Train's error, with an error of each worker."""
    failure: Any = RuntimeError("training failed")
    failure.worker_failures = dict(enumerate(errors))
    return failure  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("max_failures", "failures", "retries"),
    [
        (2, [("crash", 0)] * 3, [True, True, False]),
        # Crashes are counted since the last progress.
        (1, [*(("crash", step) for step in range(100)), ("crash", 99)], [*[True] * 100, False]),
        # The same program error at the same step ends the run.
        (3, [("crash", 0, False, "no padding token")] * 2, [True, False]),
        (3, [("crash", 0, False, error) for error in ("a", "b", None)], [True] * 3),
        (3, [("crash", step, False, "a") for step in (1, 2, 3)], [True] * 3),
        (0, [*[("preemption", 0)] * 50, ("refused", 0), ("crash", 0)], [*[True] * 50, False, False]),
        # A lost spot node does not count, another lost node does.
        (1, [*[("node_lost", 0, True)] * 50, ("node_lost", 0), ("node_lost", 0)], [*[True] * 51, False]),
    ],
)
def test_the_budget_decides_which_failures_are_retried(
    max_failures: int, failures: list[tuple[Any, ...]], retries: list[bool]
) -> None:
    budget = RetryBudget(max_failures)
    assert [budget.should_retry(*failure) for failure in failures] == retries


@pytest.mark.parametrize(("error", "starts"), [(ValueError("no padding token"), 2), (OSError("stale handle"), 4)])
def test_a_worker_s_own_error_ends_a_run_at_its_second_time(tmp_path: Path, error: Exception, starts: int) -> None:
    budget = RetryBudget(max_failures=3)
    for _ in range(starts - 1):
        controller.recover_or_raise(Run(tmp_path), failed(error), budget)
    with pytest.raises(UserError):
        controller.recover_or_raise(Run(tmp_path), failed(error), budget)
    assert [event["kind"] for event in events.read_events(tmp_path)] == [*["crashed"] * (starts - 1), "failed"]


@pytest.mark.parametrize(
    ("error", "is_preempted", "cause"),
    [
        (UserError("no such column", code="missing"), True, "refused"),
        (UnreadableFileError("state.json cannot be read"), False, "crash"),
        (RuntimeError("CUDA out of memory"), True, "preemption"),
        (RuntimeError("CUDA out of memory"), False, "memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, "crash"),
    ],
)
def test_a_failure_has_one_cause(error: Exception, is_preempted: bool, cause: str) -> None:
    assert recovery.classify_failure(recovery.find_causes(failed(error)), is_preempted=is_preempted) == cause


def test_what_may_come_of_a_lost_node_is_told_from_what_a_worker_says() -> None:
    from ray.exceptions import ActorDiedError

    for error, maybe in (
        (ActorDiedError(), True),
        (collectives.OtherRankFailed("another worker failed"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4242"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ):
        assert recovery.may_be_node_loss(recovery.find_causes(failed(error))) == maybe


@pytest.mark.parametrize(("labels", "spends"), [({"ray.io/market-type": "spot"}, False), ({}, True)])
def test_the_loss_of_a_node_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], spends: bool
) -> None:
    seconds_ = []

    def lost(nodes: Collection[str], patience_s: float) -> dict[str, capacity.NodeSpec]:
        seconds_.append((set(nodes), patience_s))
        return {"5a" * 28: capacity.NodeSpec({}, labels)}

    monkeypatch.setattr(capacity, "find_lost_nodes", lost)
    budget, failure = RetryBudget(max_failures=1), failed(collectives.OtherRankFailed("another worker failed"))
    controller.recover_or_raise(Run(tmp_path), failure, budget, {"5a" * 28, "6b" * 28})
    assert seconds_ == [({"5a" * 28, "6b" * 28}, controller.NODE_LOSS_TIMEOUT_S)]
    [event] = events.read_events(tmp_path)
    assert event["cause"] == "node_lost"
    named_settings = f"{'' if spends else 'spot '}node 5a5a5a5a lost without notice; another worker failed"
    assert event["error"] == named_settings
    assert budget.failures == spends
    failure = failed(OSError("no space left"))
    controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=1), {"5a" * 28})
    assert seconds_[-1][1] == 0  # a worker reported its error: no wait for a lost node


@pytest.mark.parametrize(
    ("error", "result"),
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
    error: str, result: bool, tmp_path: Path
) -> None:
    assert is_out_of_memory(["", f"Traceback ...\n{error}"]) == result
    # Python's own error has no message.
    failure = failed(MemoryError() if error == "MemoryError" else RuntimeError(error))
    failure.args = (f"a worker failed: {error}",)
    controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=1))
    [crashed] = events.read_events(tmp_path)
    assert (crashed["cause"], crashed["error"]) == ("memory" if result else "crash", error)
    assert count_halvings(events.read_events(tmp_path)) == result
    with pytest.raises(UserError, check=lambda error: error.code == ("out_of_memory" if result else "training_failed")):
        controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=0))


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
    messages = describe_out_of_memory(["Training failed", RAY_2_60])
    assert messages is not None
    assert all(
        part in messages for part in ("192.0.2.2", "22.47", "23.54", "95 %", "21945", "9.52", "jupyter lab (21741)")
    )
    assert describe_out_of_memory(["MemoryError"]) is None
    failure = failed(RuntimeError(RAY_2_60))
    controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=1))
    [crashed] = events.read_events(tmp_path)
    assert (crashed["cause"], crashed["error"]) == ("memory", messages)
    with pytest.raises(UserError, check=lambda error: error.code == "out_of_memory"):
        controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=0))


def test_a_file_that_cannot_be_read_now_is_tried_again_and_then_left_to_another_start(tmp_path: Path) -> None:
    failure = failed(UnreadableFileError("state.json cannot be read"), collectives.OtherRankFailed(""))
    controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=1))
    assert [event["cause"] for event in events.read_events(tmp_path)] == ["crash"]
    with pytest.raises(TemporaryFailureError, check=lambda error: isinstance(error, UnreadableFileError)):
        controller.recover_or_raise(Run(tmp_path), failure, RetryBudget(max_failures=0))
    assert [event["kind"] for event in events.read_events(tmp_path)] == ["crashed"]  # a second call retries


def test_passes_are_halved_down_to_what_saves_memory_no_more() -> None:
    assert [halve_micro_batch_tokens(2048, times) for times in range(8)] == [2048, 1024, 512, 256, 128, 64, 64, 64]
    assert halve_micro_batch_tokens(50, 3) == 50


@pytest.mark.parametrize(
    ("maximum", "minimum", "capacity_", "workers"),
    [(4, None, 1, 4), (4, 1, 6, 4), (4, 1, 3, 3), (4, 1, 1, 1), (4, 2, 1, 0), (4, 2, 2, 2), (2, 2, 1, 0)],
)
def test_workers_follow_the_room_between_least_and_most(
    maximum: int, minimum: int | None, capacity_: int, workers: int
) -> None:
    assert usable_workers(maximum, minimum, capacity_) == workers


def test_a_start_that_could_not_be_placed_is_followed_by_one_with_fewer_workers() -> None:
    assert next_worker_limit(was_placed=False, workers=4, min_workers=1, max_workers=8) == 3
    assert next_worker_limit(was_placed=False, workers=1, min_workers=1, max_workers=8) == 1
    assert next_worker_limit(was_placed=True, workers=3, min_workers=1, max_workers=8) == 8
    assert next_worker_limit(was_placed=False, workers=4, min_workers=None, max_workers=4) == 4


def test_a_run_grows_into_what_was_there_all_the_time_and_free_once() -> None:
    growth = GrowthTimer(delay_s=10.0)
    # Two workers; the nodes allow four. Data tasks hold the free CPUs, except in the third poll.
    looks = [growth.should_grow(float(now), 2, 4, 4 if now == 3 else 2) for now in range(1, 13)]
    assert looks == [False] * 10 + [True, False]


def test_a_run_does_not_grow_into_what_others_hold_nor_into_nodes_that_come_and_go() -> None:
    growth = GrowthTimer(delay_s=10.0)
    assert not any(growth.should_grow(float(now), 2, 4, 2) for now in range(60))
    assert not any(growth.should_grow(float(now), 2, 2 if now % 8 == 0 else 4, 4) for now in range(60, 120))


# --------------------------------------------------------------------------------------------------------------- notice


def test_on_notice_a_start_ends_with_a_checkpoint_and_the_next_goes_on(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_trainer.Recorder, "stop_requested", lambda recorder: len(recorder.of("progress")) == 1)
    noticed = start(ground, tmp_path, log_every=1)
    assert noticed.outcome is not None
    assert (noticed.outcome.is_finished, noticed.recorder.of("trained")[0]["steps"]) == (False, 2)
    assert checkpoint_format.list_steps(tmp_path / "checkpoints") == [2]
    monkeypatch.undo()
    resumed = start(ground, tmp_path, log_every=1)
    assert resumed.recorder.of("started")[0]["step"] == 2
    assert weights_digest(resumed.network) == weights_digest(straight[0].network)


# ----------------------------------------------------------------------------------------------------------- two of one


def test_a_run_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from rtrain.core.run_folder import Run; from rtrain.runs import run_folders\n"
        "with run_folders.lock(Run(pathlib.Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, check=lambda error: error.code == "in_use" and str(other.pid) in str(error)),
            run_folders.lock(Run(tmp_path)),
        ):
            pass
        other.kill()  # its lock goes with it
        other.wait()
        with run_folders.lock(Run(tmp_path)):
            pass


# ---------------------------------------------------------------------------------------------------------------- drill


def settings(folder: Path, **train: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.global_batch_size": 24,
        "train.evaluate_every": 200,
    }
    return config.load_config("intent", {**base, **{f"train.{name}": value for name, value in train.items()}})


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_drilled_run_ends_like_one_that_was_never_touched(ray_session: Path) -> None:
    """Its workers are killed and its newest checkpoint is torn; every other fault is in the slow tests. It trains the
    used rows of the word embedding."""
    faults = [fault for fault in FAULTS if "torn" in fault.name]
    message: list[dict[str, Any]] = []
    folder = ray_session / "drill" / "run"
    selection = settings(ray_session / "drill", save_every=30, evaluate_every=90, embedding_rows="used")
    certificate = drill.run(selection, folder, faults, message.append)
    assert [fault["name"] for fault in certificate.faults] == [fault.name for fault in faults]
    assert all(fault["resumed_from"] > 0 for fault in certificate.faults)
    assert all(0 <= fault["recomputed_steps"] <= fault["max_recomputed_steps"] for fault in certificate.faults)
    assert all(fault["seconds_to_next_step"] > 0 for fault in certificate.faults)
    assert (certificate.is_same_weights, certificate.is_same_order) == (True, True)
    assert (certificate.rows_lost, certificate.rows_repeated, certificate.passed) == (0, 0, True)
    log = events.read_events(folder / "drilled")
    assert [event["cause"] for event in log if event["kind"] == "crashed"] == ["crash"]
    assert log[-1]["report"] == json.loads(json.dumps(certificate.to_document()))
    assert len(list((folder / "drilled" / "checkpoints" / "quarantine").iterdir())) == 1
    summary = json.loads((folder / "drilled" / "summary.json").read_text())
    assert (summary["restarts"], summary["steps"]) == (1, certificate.steps)
    assert summary["certificate"] == json.loads(json.dumps(certificate.to_document()))
    assert certificate.leftovers == []
    assert not Run(folder / "drilled").stop_request.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_fault_of_the_drill(ray_session: Path) -> None:
    selection = settings(ray_session / "full-drill", save_every=60)
    certificate = drill.run(selection, ray_session / "full-drill" / "run")
    assert certificate.passed, certificate.format_text()
    assert len(certificate.faults) == len(FAULTS)
