"""Reused worker processes: training equals that of new processes bit for bit; a death costs one attempt."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import with_overrides
from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.models import model_files
from rtrain.report import event_messages
from rtrain.runs import controller, prepare, stop_request, worker_pool
from rtrain.trainer import evaluate
from rtrain.verification import drill
from rtrain.verification.drill import find_leftover_workers
from tests.support.tiny import make_encoder
from tests.support.trained import Trained
from tests.unit.runs.test_stop_request import within

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def workers(trained: Trained) -> Iterator[worker_pool.ReusableWorkerGroup]:
    import ray

    office = worker_pool.start_mailbox_server()
    instance = worker_pool.ReusableWorkerGroup(Run(trained.run.parent / "slot"), office)
    yield instance
    instance.shut_down()
    ray.kill(office)
    within(
        lambda: find_leftover_workers() == [], 120
    )  # on a machine that is busy otherwise half a minute is not enough


def weights(run: Path, update: int) -> bytes:
    return (checkpoint_format.checkpoint_path(run / "checkpoints", update) / "model.safetensors").read_bytes()


def test_a_run_frozen_at_rungs_and_thawed_in_used_workers_ends_like_one_that_never_paused(
    trained: Trained, workers: worker_pool.ReusableWorkerGroup
) -> None:
    """Another run is trained between, with other settings, by the same processes; it tells that the tokenizer files of
    its encoder disagree."""
    folder, last = trained.run.parent, trained.summary["steps"]
    encoder = make_encoder(folder / "disagreeing")
    (encoder / model_files.CONFIG_FILE).write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    changed = {"optim.lr": 1e-4, "train.seed": 7, "model.name": str(encoder)}
    other = prepare.prepare_run(with_overrides(trained.config, changed), folder / "other")
    mine, processes = folder / "frozen", list[list[str]]()
    for stop in (5, last // 2 + 1, None):
        prepared = prepare.prepare_run(trained.config, mine, "resume" if stop != 5 else "refuse")
        summary = controller.fit(
            prepared, end_step=stop, is_rung=stop is not None, workers=workers, write_reports=False
        )
        processes.append([worker.split()[1] for worker in find_leftover_workers()])  # by id: their titles change
        if stop == 5:
            controller.fit(other, end_step=3, workers=workers)
            assert evaluate.read_rung(Run(mine), 5) is not None
    assert summary["status"] == "finished"
    [differing] = other.run.events("tokenizer")
    assert differing["differing"] == model_files.find_differing_texts(encoder) != []
    assert differing["texts"] == len(model_files.PROBE_TEXTS)
    assert event_messages.format_event(differing) is not None
    assert Run(mine).events("tokenizer") == []
    assert processes[0] == processes[1] == processes[2] != []
    assert weights(mine, last) == weights(trained.run, last)
    assert summary["best_step"] == trained.summary["best_step"]
    model = "artifact/model.safetensors"
    assert (mine / model).read_bytes() == (trained.run / model).read_bytes()
    scored = [event["step"] for event in events.read_events(mine) if event["kind"] == "evaluated"]
    assert scored == [event["step"] for event in events.read_events(trained.run) if event["kind"] == "evaluated"]
    assert not (mine / "report.html").exists()


@pytest.mark.slow
def test_a_killed_worker_costs_its_start_alone(trained: Trained, workers: worker_pool.ReusableWorkerGroup) -> None:
    folder, last = trained.run.parent, trained.summary["steps"]
    killed: list[dict[str, object]] = []

    def kill(event: dict[str, object]) -> None:
        if event["kind"] == "progress" and event["step"] == 9 and not killed:
            killed.append(event)
            worker = next(worker for worker in find_leftover_workers() if drill.WORKER_CLASS in worker)
            os.kill(int(worker.split()[1]), signal.SIGKILL)

    prepared = prepare.prepare_run(trained.config, folder / "hurt")
    summary = controller.fit(prepared, workers=workers, write_reports=False, on_event=kill)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert weights(folder / "hurt", last) == weights(trained.run, last)


@pytest.mark.slow
def test_another_layout_gets_other_processes_and_a_notice_of_divergence_ends_the_order(
    trained: Trained, workers: worker_pool.ReusableWorkerGroup
) -> None:
    folder = trained.run.parent
    run = Run(folder / "alone")

    def diverge(event: dict[str, object]) -> None:
        if event["kind"] == "progress" and event["step"] == 4:
            stop_request.request_stop(run, stop_request.DIVERGED)

    prepared = prepare.prepare_run(with_overrides(trained.config, {"train.workers": 1}), run.folder)
    summary = controller.fit(prepared, workers=workers, write_reports=False, on_event=diverge)
    assert (summary["status"], summary["workers"]) == ("paused", 1)
    assert 4 <= summary["steps"] < trained.summary["steps"]
    assert [event["kind"] for event in run.events("restart_requested", "crashed")] == []


class Hanging:
    """A worker group of a Ray that does not answer."""

    def fit(self) -> None:
        threading.Event().wait()


def test_the_end_of_workers_does_not_wait_for_a_ray_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: Path
) -> None:
    import ray

    monkeypatch.setattr(worker_pool, "SHUTDOWN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker_pool, "RAY_SHUTDOWN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker_pool, "make_trainer", lambda *args, **options: Hanging())
    post = worker_pool.start_mailbox_server()
    hanging = worker_pool.ReusableWorkerGroup(Run(tmp_path / "slot"), post)
    with pytest.raises(AttributeError):  # of the attempt, since `None` is not an attempt
        hanging.run_attempt(None, worker_pool.WorkerGroupSpec(1))  # type: ignore[arg-type]
    ending = threading.Thread(target=hanging.shut_down, daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()
    assert not hanging.is_alive
    ray.kill(post)
