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
from rtrain.core.errors import TryAgain, UserError
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.data.order import Order
from rtrain.data.store import store as token_store
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.runs import controller, prepare, worker_group
from rtrain.runs.worker import Start
from rtrain.runs.worker_pool import Kept
from rtrain.verification import ledger
from tests.conftest import labelled_rows
from tests.test_runs_notice import within
from tests.trained import EPOCHS, TEST_ROWS, Trained, settings

pytestmark = pytest.mark.ray


def kinds(log: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in log]


def test_every_row_is_trained_once_per_epoch(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read(trained.run) if e["kind"] == "created")))
    rows = store.rows("train")
    order = Order(store.manifest.digest, rows, 24, EPOCHS, 0)
    assert trained.summary["rows_seen"] == EPOCHS * rows
    assert trained.summary["real_tokens"] == EPOCHS * store.manifest.tokens["train"]
    assert trained.summary["updates"] == order.updates == EPOCHS * -(-rows // 24)


def test_evaluations_count_every_row_of_their_split(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read(trained.run) if e["kind"] == "created")))
    evaluated = [event for event in events.read(trained.run) if event["kind"] == "evaluated"]
    assert [(event["split"], event["scores"]["rows"]) for event in evaluated] == [
        *[("valid", store.rows("valid"))] * EPOCHS,
        ("test", TEST_ROWS),
    ]


def test_encoder_learned_the_words(trained: Trained) -> None:
    assert trained.summary["metrics"]["test"]["accuracy"] >= 0.9  # 1/3 by chance


def test_run_folder_holds_best_and_last_checkpoint_and_no_draft(trained: Trained) -> None:
    kept = checkpoint_format.updates(trained.run / "checkpoints")
    saved = [event["update"] for event in events.read(trained.run) if event["kind"] == "evaluated"]
    newest = sorted(set(saved))[-trained.config.recipe.train.keep :]
    assert set(kept) == {trained.summary["best_update"], *newest}
    assert all(
        manifest.damage(checkpoint_format.path_of(trained.run / "checkpoints", update)) is None for update in kept
    )
    drafts = [path.name for path in trained.run.iterdir() if path.name.startswith(".")]
    assert drafts == []


def test_artefact_answers_alone_as_in_a_batch(trained: Trained) -> None:
    predictor = Predictor.load(trained.run / "artifact")
    texts = ["money back", "where is my package please " * 5, "account locked", "return my money now", "x"]
    alone = np.concatenate([predictor.logits([text]) for text in texts])
    assert np.abs(alone - predictor.logits(texts)).max() <= 1e-5
    asked = [text for text, _ in labelled_rows(6)]
    assert [answer[0]["label"] for answer in predictor(asked)] == ["login", "parcel", "refund"] * 2


def test_artefact_tells_its_lineage(trained: Trained) -> None:
    made = artifact.read(trained.run / "artifact")
    assert made.lineage["order_digest"] == trained.summary["order_digest"]
    assert made.lineage["data_digest"] == trained.summary["data_digest"]
    assert made.metrics["test"] == trained.summary["metrics"]["test"]
    assert made.labels == ("login", "parcel", "refund")


def test_finished_run_is_left_as_it_is(trained: Trained) -> None:
    before = (trained.run / "events.jsonl").read_bytes()
    prepared = prepare.prepare(settings(trained.run.parent), trained.run, "resume")
    summary = controller.fit(prepared)
    assert summary["updates"] == trained.summary["updates"]
    assert kinds(events.read(trained.run))[len(before.splitlines()) :] == ["tokens_reused", "labels", "texts"]


class EndsEarly:
    """Workers whose first start ends at an update before its time, as one does that reads a notice from the cache of a
    shared folder when the driver has taken it."""

    def __init__(self, workers: Kept, at: int):
        self._workers, self._at = workers, iter([at])
        self.taken, self.left = workers.taken, workers.left

    def train(self, start: Start, layout: worker_group.Layout) -> None:
        self._workers.train(replace(start, until=next(self._at, start.until)), layout)

    def lost(self, run: Run) -> None:
        """They are as good as before."""


def test_a_run_whose_folder_is_lost_resumes_from_its_storage_and_ends_bit_for_bit_like_the_straight_one(
    trained: Trained, kept_workers: Kept
) -> None:
    folder = trained.run.parent
    mounted = folder / "mounted"
    stored = settings(folder, **{"cluster.storage": mounted.as_uri()})
    half = prepare.prepare(stored, folder / "halves")
    stop = trained.summary["updates"] // 2 + 1
    paused = controller.fit(half, until=stop, workers=kept_workers)
    assert (paused["status"], paused["updates"]) == ("paused", stop)
    assert not (folder / "halves" / "artifact").exists()
    mounted.rename(folder / "away")
    mounted.touch()  # whatever is asked of a storage below it fails
    cut_off = prepare.prepare(config.load("intent"), folder / "halves", "resume")
    further = controller.fit(cut_off, until=stop + 1, workers=kept_workers)
    assert (further["status"], further["updates"]) == ("paused", stop + 1)
    told = [event for event in events.read(folder / "halves") if event["kind"] in ("unreachable", "uncopied")]
    assert (told[0]["kind"], told[0]["update"], told[-1]["kind"]) == ("unreachable", stop, "uncopied")
    mounted.unlink()
    (folder / "away").rename(mounted)
    shutil.rmtree(folder / "halves")
    with pytest.raises(UserError, check=lambda error: error.code == "already_exists"):
        prepare.prepare(stored, folder / "halves")

    def away_again(event: dict[str, Any]) -> None:
        if event["kind"] == "started" and mounted.is_dir():
            mounted.rename(folder / "away")
            mounted.touch()

    last_part = prepare.prepare(stored, folder / "halves", "resume")
    with pytest.raises(TryAgain, check=lambda error: error.code == "unreachable"):
        controller.fit(last_part, workers=EndsEarly(kept_workers, stop + 2), on_event=away_again)
    kept_workers.end()
    mounted.unlink()
    (folder / "away").rename(mounted)
    held, here = (sorted(path.name for path in (at / "halves" / "checkpoints").iterdir()) for at in (mounted, folder))
    assert here[-1] not in held
    resumed = controller.fit(prepare.prepare(stored, folder / "halves", "resume"))
    assert (resumed["status"], resumed["restarts"]) == ("finished", 2)
    yielded = [(event["update"], event["reason"]) for event in Run(folder / "halves").events("yielded")]
    assert yielded == [(stop + 2, "a notice of an earlier start")]
    assert sorted(path.name for path in (mounted / "halves" / "checkpoints").iterdir()) == here
    assert resumed["order_digest"] == trained.summary["order_digest"]
    last = trained.summary["updates"]
    one, other = (
        (checkpoint_format.path_of(run / "checkpoints", last) / "model.safetensors").read_bytes()
        for run in (trained.run, folder / "halves")
    )
    assert one == other
    copy = mounted / "halves"
    assert {path.name for path in copy.iterdir()} == {
        *("artifact", "checkpoints", "config.yaml", "decisions.json", "events.jsonl", "owner"),
        *("predictions-test.parquet", "predictions-valid.parquet"),
    }
    assert manifest.damage(copy / "artifact") is None
    assert checkpoint_format.updates(copy / "checkpoints") == checkpoint_format.updates(
        folder / "halves" / "checkpoints"
    )
    assert "finished" in kinds(events.read(copy))
    shutil.rmtree(folder / "halves")  # a finished run comes back with its artefact, and its copy stays whole
    assert controller.fit(prepare.prepare(stored, folder / "halves", "resume"))["status"] == "finished"
    for run in (folder / "halves", mounted / "halves"):
        assert artifact.read(run / "artifact").labels == ("login", "parcel", "refund")
        assert (run / "predictions-valid.parquet").is_file()
    assert sorted(path.name for path in (mounted / "halves" / "checkpoints").iterdir()) == here


@pytest.mark.slow
def test_a_resized_run_trains_on_the_same_rows_and_its_ledger_shows_it(trained: Trained) -> None:
    """Two workers, then one, which takes over in the middle of an epoch."""
    folder, last = trained.run.parent, trained.summary["updates"]
    middle = last // 2 + 1
    assert middle % (last // EPOCHS)
    for workers, stop in ((2, middle), (1, None)):
        resized = settings(folder, **{"train.workers": workers, "train.micro_batch": 5})
        found = controller.fit(
            prepare.prepare(resized, folder / "resized", "resume" if stop is None else "refuse"), until=stop
        )
        assert found["updates"] == (stop or last)
    log = events.read(folder / "resized")
    assert [(event["workers"], event["update"]) for event in log if event["kind"] == "started"] == [(2, 0), (1, middle)]
    assert found["order_digest"] == trained.summary["order_digest"]
    report = ledger.check(Run(folder / "resized"))
    assert (report.passed, report.updates, report.order_digest) == (True, last, found["order_digest"])
    assert len(report.checked) == last  # log_every=1: every update's link was recorded, by whoever trained it
    assert report.text().startswith(f"every row once per epoch: {report.rows} rows x {EPOCHS} epochs")


def test_second_run_reuses_the_token_store(trained: Trained) -> None:
    log = events.read(trained.run.parent / "halves")
    assert kinds(log)[:2] == ["created", "tokens_reused"]
    assert log[0]["store"] == events.read(trained.run)[0]["store"]


def test_no_worker_or_placement_group_is_left(trained: Trained) -> None:
    import ray
    import ray.util

    groups = ray.util.placement_group_table().values()
    assert [group for group in groups if group["state"] not in ("REMOVED",)] == []
    within(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])


def test_an_error_of_a_start_ends_the_run_after_its_budget_with_its_traceback_in_a_file(trained: Trained) -> None:
    """A budget of more is more of the same starts."""
    folder = trained.run.parent
    prepared = prepare.prepare(settings(folder, **{"cluster.max_crashes": 0}), folder / "broken")
    with pytest.raises(UserError, check=lambda error: error.code == "training_failed") as caught:
        controller.fit(replace(prepared, model=folder / "nowhere"))
    path = Path(str(caught.value).rsplit(" ", 1)[-1])
    assert path.parent == prepared.run.folder
    assert "Traceback" in path.read_text()
    assert [event["kind"] for event in prepared.run.events("crashed", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert not prepared.run.artifact.exists()


class Unreachable(worker_group.Fresh):
    """Workers of a Ray that does not answer the driver."""

    def taken(self, run: Run) -> None:
        import ray

        raise ray.exceptions.RaySystemError("the head does not answer")


def test_an_error_of_ray_in_the_driver_is_an_event_that_ends_the_run(trained: Trained) -> None:
    prepared = prepare.prepare(settings(trained.run.parent), trained.run.parent / "unreachable")
    with pytest.raises(UserError, check=lambda error: error.code == "training_failed"):
        controller.fit(prepared, workers=Unreachable())
    assert [event["kind"] for event in prepared.run.events("started", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert (
        controller.fit(prepare.prepare(prepared.config, prepared.run.folder, "resume"), until=1)["status"] == "paused"
    )


def test_what_warms_a_worker_up_is_a_real_data_task(ray_session: Path) -> None:
    """In a worker what fails in it is left to the stream, so that nobody would see it."""
    assert stream.one_task() == [{"id": 0}]
