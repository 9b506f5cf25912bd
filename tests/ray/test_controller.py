"""Training on real Ray, from a file to an artefact: two DDP workers, Ray Data streams, one run in many asserts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.core import events, manifest
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.data.order import RowOrder
from rtrain.data.store import store as token_store
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.runs import controller, prepare, worker_pool
from rtrain.runs.worker import WorkerArgs
from rtrain.runs.worker_pool import ReusableWorkerGroup
from rtrain.verification import verify
from tests.conftest import labelled_rows
from tests.support.trained import EPOCHS, TEST_ROWS, Trained, settings
from tests.unit.runs.test_stop_request import within

pytestmark = pytest.mark.ray


def kinds(log: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in log]


def test_every_row_is_trained_once_per_epoch(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read_events(trained.run) if e["kind"] == "created")))
    rows = store.num_rows("train")
    order = RowOrder(store.manifest.digest, rows, 24, EPOCHS, 0)
    assert trained.summary["rows_seen"] == EPOCHS * rows
    assert trained.summary["real_tokens"] == EPOCHS * store.manifest.tokens["train"]
    assert trained.summary["steps"] == order.num_steps == EPOCHS * -(-rows // 24)


def test_evaluations_count_every_row_of_their_split(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read_events(trained.run) if e["kind"] == "created")))
    evaluated = [event for event in events.read_events(trained.run) if event["kind"] == "evaluated"]
    assert [(event["split"], event["scores"]["rows"]) for event in evaluated] == [
        *[("valid", store.num_rows("valid"))] * EPOCHS,
        ("test", TEST_ROWS),
    ]


def test_encoder_learned_the_words(trained: Trained) -> None:
    assert trained.summary["metrics"]["test"]["accuracy"] >= 0.9  # 1/3 by chance


def test_run_folder_holds_best_and_last_checkpoint_and_no_draft(trained: Trained) -> None:
    remaining = checkpoint_format.list_steps(trained.run / "checkpoints")
    saved = [event["step"] for event in events.read_events(trained.run) if event["kind"] == "evaluated"]
    newest = sorted(set(saved))[-trained.config.recipe.train.keep_checkpoints :]
    assert set(remaining) == {trained.summary["best_step"], *newest}
    assert all(
        manifest.find_damage(checkpoint_format.checkpoint_path(trained.run / "checkpoints", update)) is None
        for update in remaining
    )
    drafts = [path.name for path in trained.run.iterdir() if path.name.startswith(".")]
    assert drafts == []


def test_artefact_answers_alone_as_in_a_batch(trained: Trained) -> None:
    predictor = Predictor.load(trained.run / "artifact")
    texts = ["money back", "where is my package please " * 5, "account locked", "return my money now", "x"]
    single = np.concatenate([predictor.logits([text]) for text in texts])
    assert np.abs(single - predictor.logits(texts)).max() <= 1e-5
    overrides = [text for text, _ in labelled_rows(6)]
    assert [answer[0]["label"] for answer in predictor(overrides)] == ["login", "parcel", "refund"] * 2


def test_artefact_tells_its_lineage(trained: Trained) -> None:
    instance = artifact.read_artifact(trained.run / "artifact")
    assert instance.lineage["order_digest"] == trained.summary["order_digest"]
    assert instance.lineage["data_digest"] == trained.summary["data_digest"]
    assert instance.metrics["test"] == trained.summary["metrics"]["test"]
    assert instance.labels == ("login", "parcel", "refund")


def test_finished_run_is_left_as_it_is(trained: Trained) -> None:
    before = (trained.run / "events.jsonl").read_bytes()
    prepared = prepare.prepare_run(settings(trained.run.parent), trained.run, "resume")
    summary = controller.fit(prepared)
    assert summary["steps"] == trained.summary["steps"]
    assert kinds(events.read_events(trained.run))[len(before.splitlines()) :] == ["tokens_reused", "labels", "texts"]


class EndsEarly:
    """Workers whose first start ends at an update before its time, as one does that reads a notice from the cache of a
    shared folder when the driver has taken it."""

    def __init__(self, workers: ReusableWorkerGroup, at: int):
        self._workers, self._at = workers, iter([at])
        self.acquire, self.release = workers.acquire, workers.release

    def run_attempt(self, worker_args: WorkerArgs, group_spec: worker_pool.WorkerGroupSpec) -> None:
        self._workers.run_attempt(replace(worker_args, end_step=next(self._at, worker_args.end_step)), group_spec)

    def discard(self, run: Run) -> None:
        """They are as good as before."""


def test_a_run_whose_folder_is_lost_resumes_from_its_storage_and_ends_bit_for_bit_like_the_straight_one(
    trained: Trained, kept_workers: ReusableWorkerGroup
) -> None:
    folder = trained.run.parent
    mounted = folder / "mounted"
    stored_config = settings(folder, **{"cluster.storage": mounted.as_uri()})
    half = prepare.prepare_run(stored_config, folder / "halves")
    stop = trained.summary["steps"] // 2 + 1
    paused = controller.fit(half, end_step=stop, workers=kept_workers)
    assert (paused["status"], paused["steps"]) == ("paused", stop)
    assert not (folder / "halves" / "artifact").exists()
    mounted.rename(folder / "away")
    mounted.touch()  # whatever is asked of a storage below it fails
    cut_off = prepare.prepare_run(config.load_config("intent"), folder / "halves", "resume")
    further = controller.fit(cut_off, end_step=stop + 1, workers=kept_workers)
    assert (further["status"], further["steps"]) == ("paused", stop + 1)
    messages = [
        event
        for event in events.read_events(folder / "halves")
        if event["kind"] in ("storage_unreachable", "remote_copy_incomplete")
    ]
    assert (messages[0]["kind"], messages[0]["step"], messages[-1]["kind"]) == (
        "storage_unreachable",
        stop,
        "remote_copy_incomplete",
    )
    mounted.unlink()
    (folder / "away").rename(mounted)
    shutil.rmtree(folder / "halves")
    with pytest.raises(UserError, check=lambda error: error.code == "already_exists"):
        prepare.prepare_run(stored_config, folder / "halves")

    def away_again(event: dict[str, Any]) -> None:
        if event["kind"] == "started" and mounted.is_dir():
            mounted.rename(folder / "away")
            mounted.touch()

    last_part = prepare.prepare_run(stored_config, folder / "halves", "resume")
    with pytest.raises(TemporaryFailureError, check=lambda error: error.code == "unreachable"):
        controller.fit(last_part, workers=EndsEarly(kept_workers, stop + 2), on_event=away_again)
    kept_workers.shut_down()
    mounted.unlink()
    (folder / "away").rename(mounted)
    holdout, local = (
        sorted(path.name for path in (at / "halves" / "checkpoints").iterdir()) for at in (mounted, folder)
    )
    assert local[-1] not in holdout
    resumed = controller.fit(prepare.prepare_run(stored_config, folder / "halves", "resume"))
    assert (resumed["status"], resumed["restarts"]) == ("finished", 2)
    yielded = [(event["step"], event["reason"]) for event in Run(folder / "halves").events("restart_requested")]
    assert yielded == [(stop + 2, "an earlier stop request")]
    assert sorted(path.name for path in (mounted / "halves" / "checkpoints").iterdir()) == local
    assert resumed["order_digest"] == trained.summary["order_digest"]
    last = trained.summary["steps"]
    item, other = (
        (checkpoint_format.checkpoint_path(run / "checkpoints", last) / "model.safetensors").read_bytes()
        for run in (trained.run, folder / "halves")
    )
    assert item == other
    copy = mounted / "halves"
    assert {path.name for path in copy.iterdir()} == {
        *("artifact", "checkpoints", "config.yaml", "decisions.json", "events.jsonl", "owner"),
        *("predictions-test.parquet", "predictions-valid.parquet"),
    }
    assert manifest.find_damage(copy / "artifact") is None
    assert checkpoint_format.list_steps(copy / "checkpoints") == checkpoint_format.list_steps(
        folder / "halves" / "checkpoints"
    )
    assert "finished" in kinds(events.read_events(copy))
    shutil.rmtree(folder / "halves")  # a finished run comes back with its artefact, and its copy stays whole
    assert controller.fit(prepare.prepare_run(stored_config, folder / "halves", "resume"))["status"] == "finished"
    for run in (folder / "halves", mounted / "halves"):
        assert artifact.read_artifact(run / "artifact").labels == ("login", "parcel", "refund")
        assert (run / "predictions-valid.parquet").is_file()
    assert sorted(path.name for path in (mounted / "halves" / "checkpoints").iterdir()) == local


@pytest.mark.slow
def test_a_resized_run_trains_on_the_same_rows_and_its_ledger_shows_it(trained: Trained) -> None:
    """Two workers, then one, which takes over in the middle of an epoch."""
    folder, last = trained.run.parent, trained.summary["steps"]
    middle = last // 2 + 1
    assert middle % (last // EPOCHS)
    for workers, stop in ((2, middle), (1, None)):
        resized = settings(folder, **{"train.workers": workers, "train.micro_batch_size": 5})
        result = controller.fit(
            prepare.prepare_run(resized, folder / "resized", "resume" if stop is None else "refuse"), end_step=stop
        )
        assert result["steps"] == (stop or last)
    log = events.read_events(folder / "resized")
    assert [(event["workers"], event["step"]) for event in log if event["kind"] == "started"] == [(2, 0), (1, middle)]
    assert result["order_digest"] == trained.summary["order_digest"]
    report = verify.check_ledger(Run(folder / "resized"))
    assert (report.passed, report.steps, report.order_digest) == (True, last, result["order_digest"])
    assert len(report.matching_records) == last  # log_every=1: every update's link was recorded, by whoever trained it
    assert report.format_text().startswith(f"every row once per epoch: {report.rows} rows x {EPOCHS} epochs")


def test_second_run_reuses_the_token_store(trained: Trained) -> None:
    log = events.read_events(trained.run.parent / "halves")
    assert kinds(log)[:2] == ["created", "tokens_reused"]
    assert log[0]["store"] == events.read_events(trained.run)[0]["store"]


def test_no_worker_or_placement_group_is_left(trained: Trained) -> None:
    import ray
    import ray.util

    groups = ray.util.placement_group_table().values()
    assert [group for group in groups if group["state"] not in ("REMOVED",)] == []
    within(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])


def test_an_error_of_a_start_ends_the_run_after_its_budget_with_its_traceback_in_a_file(trained: Trained) -> None:
    """A budget of more is more of the same starts."""
    folder = trained.run.parent
    prepared = prepare.prepare_run(settings(folder, **{"cluster.max_failures": 0}), folder / "broken")
    with pytest.raises(UserError, check=lambda error: error.code == "training_failed") as caught:
        controller.fit(replace(prepared, model=folder / "nowhere"))
    path = Path(str(caught.value).rsplit(" ", 1)[-1])
    assert path.parent == prepared.run.folder
    assert "Traceback" in path.read_text()
    assert [event["kind"] for event in prepared.run.events("crashed", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert not prepared.run.artifact.exists()


class Unreachable(worker_pool.FreshWorkerGroup):
    """Workers of a Ray that does not answer the driver."""

    def acquire(self, run: Run) -> None:
        import ray

        raise ray.exceptions.RaySystemError("the head does not answer")


def test_an_error_of_ray_in_the_driver_is_an_event_that_ends_the_run(trained: Trained) -> None:
    prepared = prepare.prepare_run(settings(trained.run.parent), trained.run.parent / "unreachable")
    with pytest.raises(UserError, check=lambda error: error.code == "training_failed"):
        controller.fit(prepared, workers=Unreachable())
    assert [event["kind"] for event in prepared.run.events("started", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert (
        controller.fit(prepare.prepare_run(prepared.config, prepared.run.folder, "resume"), end_step=1)["status"]
        == "paused"
    )


def test_what_warms_a_worker_up_is_a_real_data_task(ray_session: Path) -> None:
    """In a worker what fails in it is left to the stream, so that nobody would see it."""
    assert stream.run_one_task() == [{"id": 0}]
