"""The runs of a rehearsal: followed to their end, and compared with each other."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.rehearsal import certificate, faults
from rtrain.rehearsal.certificate import WeightComparison
from tests.support.refusals import refused_with


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "POLL_INTERVAL_S", 0.0)


def test_a_head_that_is_late_is_asked_again_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    answers: list[Any] = [UserError("late"), UserError("late"), {"job": SimpleNamespace(status="RUNNING")}]

    def all_jobs() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return dict(answer)

    document: Any = SimpleNamespace(
        jobs=SimpleNamespace(list_jobs=all_jobs), head_name="head-1", registry=SimpleNamespace()
    )
    document.metrics_port, document.registry.live_machines = 1, lambda: {"head-1": None}
    follower = faults.JobFollower(document, tmp_path, lambda text: None)
    assert follower.wait_for_status("job") == "RUNNING"
    answers.append({"another": SimpleNamespace(status="RUNNING")})
    with refused_with("head_restarted"):
        follower.wait_for_status("job")
    document.registry.live_machines = dict
    answers.append(UserError("gone", code="gone"))
    with refused_with("gone"):
        follower.wait_for_status("job")


class Cluster:
    """A cluster with one job, whose run logs a line at each look."""

    def __init__(self, run: Run, ends_as: str = "RUNNING"):
        self.run, self.jobs, self.head_name, self.metrics_port = run, self, "head-1", 1
        self.registry, self.stopped, self._looks = SimpleNamespace(live_machines=dict), False, 0
        self._ends_as = ends_as

    def list_jobs(self) -> dict[str, Any]:
        self._looks += 1
        self.run.append_event("progress", step=self._looks)
        over = self._looks > 5 and self._ends_as != "RUNNING"
        return {"job": SimpleNamespace(status="STOPPED" if self.stopped else self._ends_as if over else "RUNNING")}

    def stop(self, job: str) -> bool:
        self.stopped = True
        return True

    def get_logs(self, job: str) -> str:
        return "the last line"


def test_a_job_is_followed_to_its_end_or_until_its_log_is_enough(tmp_path: Path) -> None:

    def follower(cluster: Any) -> faults.JobFollower:
        cluster.run.folder.mkdir()
        return faults.JobFollower(cluster, tmp_path, lambda text: None)

    ended: Any = Cluster(Run(tmp_path / "ended"), "SUCCEEDED")
    follower(ended).follow_training("job", ended.run)
    assert not ended.stopped
    enough: Any = Cluster(Run(tmp_path / "enough"))
    follower(enough).follow_training("job", enough.run, should_stop=lambda log: len(log) >= 3)
    assert enough.stopped
    failed: Any = Cluster(Run(tmp_path / "failed"), "FAILED")
    with refused_with("run_failed"):
        follower(failed).follow_training("job", failed.run)


def test_the_last_weights_of_two_runs_are_compared(tmp_path: Path) -> None:
    def run(name: str, off: float, updates: tuple[int, ...] = (3,)) -> Run:
        for update in updates:
            folder = checkpoint_format.checkpoint_path(Run(tmp_path / name).checkpoints, update)
            folder.mkdir(parents=True)
            tensors = {"a": np.full((3, 4), 2.0 + off, np.float32), "b": np.ones(2, np.float32)}
            save_file(tensors, folder / "model.safetensors")
            (folder / "MANIFEST.json").write_text("{}")
        return Run(tmp_path / name)

    control = run("control", 0.0, (2, 3))
    assert certificate.compare_weights(control, run("same", 0.0), True) == WeightComparison(True, 0.0, True)
    other = certificate.compare_weights(control, run("other", 0.5), False)
    assert (other.identical, other.same_workers) == (False, False)
    assert other.difference == pytest.approx((12 * 0.25 / (12 * 4 + 2)) ** 0.5)


def test_weights_are_compared_by_how_far_they_have_moved(tmp_path: Path) -> None:
    def run(name: str, **by_update: tuple[str, float]) -> Run:
        for update, (ledger, value) in by_update.items():
            folder = checkpoint_format.checkpoint_path(Run(tmp_path / name).checkpoints, int(update[1:]))
            folder.mkdir(parents=True)
            save_file({"a": np.full(4, value)}, folder / "model.safetensors")
            state = checkpoint_format.CheckpointState(
                step=3, ledger=ledger, best_step=None, best_score=None, run_id="r"
            )
            (folder / "state.json").write_text(json.dumps({"schema_version": 1, **asdict(state)}))
            (folder / "MANIFEST.json").write_text("{}")
        return Run(tmp_path / name)

    steady = run("steady", u3=("aa", 1.0), u6=("bb", 3.0))
    same, off = certificate.compare_checkpoints(run("resized", u4=("cc", 0.0), u6=("bb", 3.0 + 2e-10)), steady, 6)
    assert same
    assert off == pytest.approx(1e-10, rel=1e-5)
    assert certificate.compare_checkpoints(run("other", u6=("cc", 3.0)), steady, 6) == (False, 0.0)
