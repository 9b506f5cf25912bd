"""Worker processes that are kept: what they train equals, bit for bit, what new ones train; a death costs one start."""

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
from rtrain.models import tokenizer_files
from rtrain.report.live import event_messages
from rtrain.runs import controller, prepare, stop_request, worker_group, worker_pool
from rtrain.trainer import rung_predictions
from rtrain.verification import faults
from rtrain.verification.faults import workers_left
from tests.test_runs_notice import within
from tests.tiny import make_encoder
from tests.trained import Trained

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def workers(trained: Trained) -> Iterator[worker_pool.Kept]:
    import ray

    office = worker_pool.post()
    made = worker_pool.Kept(Run(trained.run.parent / "slot"), office)
    yield made
    made.end()
    ray.kill(office)
    within(lambda: workers_left() == [], 120)  # on a machine that is busy otherwise half a minute is not enough


def weights(run: Path, update: int) -> bytes:
    return (checkpoint_format.path_of(run / "checkpoints", update) / "model.safetensors").read_bytes()


def test_a_run_frozen_at_rungs_and_thawed_in_used_workers_ends_like_one_that_never_paused(
    trained: Trained, workers: worker_pool.Kept
) -> None:
    """Another run is trained between, with other settings, by the same processes; it tells that the tokenizer files of
    its encoder disagree."""
    folder, last = trained.run.parent, trained.summary["updates"]
    encoder = make_encoder(folder / "disagreeing")
    (encoder / tokenizer_files.CONFIG).write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    changed = {"optim.lr": 1e-4, "train.seed": 7, "model.name": str(encoder)}
    other = prepare.prepare(with_overrides(trained.config, changed), folder / "other")
    mine, processes = folder / "frozen", list[list[str]]()
    for stop in (5, last // 2 + 1, None):
        prepared = prepare.prepare(trained.config, mine, "resume" if stop != 5 else "refuse")
        summary = controller.fit(prepared, until=stop, rung=stop is not None, workers=workers, reports=False)
        processes.append([one.split()[1] for one in workers_left()])  # by id: their titles say what they do just now
        if stop == 5:
            controller.fit(other, until=3, workers=workers)
            assert rung_predictions.read(Run(mine), 5) is not None
    assert summary["status"] == "finished"
    [differing] = other.run.events("tokenizer")
    assert differing["differing"] == tokenizer_files.differing_texts(encoder) != []
    assert differing["texts"] == len(tokenizer_files.STRANGE_TEXTS)
    assert event_messages.of(differing) is not None
    assert Run(mine).events("tokenizer") == []
    assert processes[0] == processes[1] == processes[2] != []
    assert weights(mine, last) == weights(trained.run, last)
    assert summary["best_update"] == trained.summary["best_update"]
    model = "artifact/model.safetensors"
    assert (mine / model).read_bytes() == (trained.run / model).read_bytes()
    scored = [event["update"] for event in events.read(mine) if event["kind"] == "evaluated"]
    assert scored == [event["update"] for event in events.read(trained.run) if event["kind"] == "evaluated"]
    assert not (mine / "report.html").exists()


@pytest.mark.slow
def test_a_killed_worker_costs_its_start_alone(trained: Trained, workers: worker_pool.Kept) -> None:
    folder, last = trained.run.parent, trained.summary["updates"]
    killed: list[dict[str, object]] = []

    def kill(event: dict[str, object]) -> None:
        if event["kind"] == "progress" and event["update"] == 9 and not killed:
            killed.append(event)
            worker = next(one for one in workers_left() if faults.WORKER in one)
            os.kill(int(worker.split()[1]), signal.SIGKILL)

    prepared = prepare.prepare(trained.config, folder / "hurt")
    summary = controller.fit(prepared, workers=workers, reports=False, on_event=kill)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert weights(folder / "hurt", last) == weights(trained.run, last)


@pytest.mark.slow
def test_another_layout_gets_other_processes_and_a_notice_of_divergence_ends_the_order(
    trained: Trained, workers: worker_pool.Kept
) -> None:
    folder = trained.run.parent
    run = Run(folder / "alone")

    def diverge(event: dict[str, object]) -> None:
        if event["kind"] == "progress" and event["update"] == 4:
            stop_request.give(run, stop_request.DIVERGED)

    prepared = prepare.prepare(with_overrides(trained.config, {"train.workers": 1}), run.folder)
    summary = controller.fit(prepared, workers=workers, reports=False, on_event=diverge)
    assert (summary["status"], summary["workers"]) == ("paused", 1)
    assert 4 <= summary["updates"] < trained.summary["updates"]
    assert [event["kind"] for event in run.events("yielded", "crashed")] == []


class Hanging:
    """A worker group of a Ray that does not answer."""

    def fit(self) -> None:
        threading.Event().wait()


def test_the_end_of_workers_does_not_wait_for_a_ray_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: Path
) -> None:
    import ray

    monkeypatch.setattr(worker_pool, "END_S", 0.1)
    monkeypatch.setattr(worker_pool, "UNANSWERED_S", 0.1)
    monkeypatch.setattr(worker_group, "trainer", lambda *args, **options: Hanging())
    post = worker_pool.post()
    hanging = worker_pool.Kept(Run(tmp_path / "slot"), post)
    with pytest.raises(AttributeError):  # of the start, which is none: the group is there by then
        hanging.train(None, worker_group.Layout(1))  # type: ignore[arg-type]
    ending = threading.Thread(target=hanging.end, daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()
    assert not hanging.alive
    ray.kill(post)
