"""Training on real Ray, from a file to an artefact: two DDP workers, Ray Data streams, one run in many asserts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rtrain import artifact, config, events, manifest
from rtrain.checkpoints import checkpoint
from rtrain.data import ingest
from rtrain.data.order import Order, chain, rows_digest
from rtrain.data.stores import store as token_store
from rtrain.errors import TryAgain, UserError
from rtrain.predict import Predictor
from rtrain.proof import ledger
from rtrain.report.live import progress
from rtrain.run import Run
from rtrain.runs import driver, group, preparing
from rtrain.runs.kept import Kept
from rtrain.runs.start import Start
from rtrain.training.loop import GENESIS
from tests.conftest import labelled_rows
from tests.test_runs_notice import within
from tests.trained import EPOCHS, TEST_ROWS, Trained, settings

pytestmark = pytest.mark.ray


def kinds(log: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in log]


def test_summary_has_every_contracted_key(trained: Trained) -> None:
    wanted = {
        *("run", "task", "recipe", "status", "workers", "updates", "passes_per_update", "rows_seen", "real_tokens"),
        *("padded_tokens", "seconds", "rows_per_second", "real_tokens_per_second", "metrics", "best_update"),
        *("restarts", "data_digest", "order_digest"),
    }
    assert wanted <= set(trained.summary)
    assert set(trained.summary["seconds"]) == {
        *("total", "setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait")
    }
    assert trained.summary == json.loads((trained.run / "summary.json").read_text())
    assert trained.summary["status"] == "finished"
    assert trained.summary["workers"] == 2
    classes = trained.summary["classes"]["test"]
    assert sum(one["support"] for one in classes) == trained.summary["metrics"]["test"]["rows"]
    lines = progress.summary_text(trained.summary, Run(trained.run)).splitlines()
    assert all(any(line.split()[:1] == [one["class"]] for line in lines) for one in classes)
    assert trained.summary["restarts"] == 0


def test_a_finished_run_has_its_report(trained: Trained) -> None:
    page = (trained.run / "report.html").read_text(encoding="utf-8")
    assert 0 < page.index(">Outcome<") < page.index(">How it was run<")
    assert "The training loss fell" in page
    assert trained.summary["order_digest"][:22] in page  # long digests may be broken after 22 characters
    versions = next(event["versions"] for event in events.read(trained.run) if event["kind"] == "created")
    assert {"python", "ray", "torch"} <= set(versions)


def test_every_row_is_trained_once_per_epoch(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read(trained.run) if e["kind"] == "created")))
    rows = store.rows("train")
    order = Order(store.manifest.digest, rows, 24, EPOCHS, 0)
    assert trained.summary["rows_seen"] == EPOCHS * rows
    assert trained.summary["real_tokens"] == EPOCHS * store.manifest.tokens["train"]
    assert trained.summary["updates"] == order.updates == EPOCHS * -(-rows // 24)


def test_order_digest_is_the_pure_order_s(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read(trained.run) if e["kind"] == "created")))
    order = Order(store.manifest.digest, store.rows("train"), 24, EPOCHS, 0)
    ids = store.column("train", "row_id")
    ledger = GENESIS
    for update in range(order.updates):
        ledger = chain(ledger, rows_digest(update, ids[order.positions(update)]))
    assert trained.summary["order_digest"] == ledger.hex()


def test_evaluations_count_every_row_of_their_split(trained: Trained) -> None:
    store = token_store.Store(Path(next(e["store"] for e in events.read(trained.run) if e["kind"] == "created")))
    evaluated = [event for event in events.read(trained.run) if event["kind"] == "evaluated"]
    assert [(event["split"], event["scores"]["rows"]) for event in evaluated] == [
        *[("valid", store.rows("valid"))] * EPOCHS,
        ("test", TEST_ROWS),
    ]


def test_encoder_learned_the_words(trained: Trained) -> None:
    assert trained.summary["metrics"]["test"]["accuracy"] >= 0.9  # 1/3 by chance


def test_progress_reaches_the_caller_in_order(trained: Trained) -> None:
    # On a busy machine it also says that it waits for the workers.
    assert [kind for kind in kinds(trained.events) if kind not in ("progress", "noise", "waiting")] == [
        *("tokenised", "labels", "texts", "doing", "machines", "started", "first_rows"),
        *(*["evaluated"] * EPOCHS, "best", "evaluated", "trained", "writing", "sliced", "sliced"),
        *["doing"] * 2,
    ]
    assert [event["text"] for event in trained.events if event["kind"] == "doing"] == [
        "starting 2 workers",
        "measuring baselines for the report",
        "writing the report",
    ]
    progress = [event for event in trained.events if event["kind"] == "progress"]
    # Over both workers, whoever reports it.
    assert [event["rows"] for event in progress][-1] == trained.summary["rows_seen"]
    assert [event["real_tokens"] for event in progress][-1] == trained.summary["real_tokens"]
    updates = [event["update"] for event in progress]
    assert updates == list(range(1, trained.summary["updates"] + 1))


def test_a_training_starts_no_process_that_it_has_no_use_for(trained: Trained) -> None:
    """Each one that idles takes 1 % of a core from the workers, and a second of two cores when it starts."""
    import ray

    started = {actor["ActorClassName"].split(".")[-1] for actor in ray._private.state.actors().values()}
    assert started >= {"TrainController", "RayTrainWorker"}
    assert not started & {"DatasetManager", "PreemptionWatcher", "_StatsActor", "_AutoscalingCoordinatorActor"}
    own = {child.pid for child in psutil.Process().children(recursive=True)}
    known = psutil.process_iter(["cmdline"])  # of one that has just ended, None
    programs = [" ".join(one.info["cmdline"] or ()) for one in known if one.pid in own]
    assert any("raylet" in program for program in programs)
    left_out = ("log_monitor.py", "dashboard.py", "monitor.py", "ray::DashboardAgent")
    assert [program for program in programs if any(name in program for name in left_out)] == []


def test_run_folder_holds_best_and_last_checkpoint_and_no_draft(trained: Trained) -> None:
    kept = checkpoint.updates(trained.run / "checkpoints")
    saved = [event["update"] for event in events.read(trained.run) if event["kind"] == "evaluated"]
    newest = sorted(set(saved))[-trained.config.recipe.train.keep :]
    assert set(kept) == {trained.summary["best_update"], *newest}
    assert all(manifest.damage(checkpoint.path_of(trained.run / "checkpoints", update)) is None for update in kept)
    drafts = [path.name for path in trained.run.iterdir() if path.name.startswith(".")]
    assert drafts == []


def test_config_is_complete_and_replayable(trained: Trained) -> None:
    frozen = config.load(str(trained.run / "config.yaml"))
    assert frozen == trained.config
    assert frozen.recipe.train.rows_per_update == 24
    assert frozen.recipe.train.aggregation_frequency is None
    assert Path(frozen.recipe.data.path or "").is_absolute()


def test_artefact_answers_alone_as_in_a_batch(trained: Trained) -> None:
    predictor = Predictor.load(trained.run / "artifact")
    texts = ["money back", "where is my package please " * 5, "account locked", "return my money now", "x"]
    alone = np.concatenate([predictor.logits([text]) for text in texts])
    assert np.abs(alone - predictor.logits(texts)).max() <= 1e-5
    asked = [text for text, _ in labelled_rows(6)]
    assert [answer[0]["label"] for answer in predictor(asked)] == ["login", "parcel", "refund"] * 2


def test_artefact_is_a_transformers_checkpoint(trained: Trained) -> None:
    import transformers

    folder = trained.run / "artifact"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logits = model.eval()(**tokenizer("money back", return_tensors="pt")).logits.detach().numpy()
    assert np.abs(logits - Predictor.load(folder).logits(["money back"])).max() <= 1e-5
    assert model.config.id2label == {0: "login", 1: "parcel", 2: "refund"}


def test_artefact_tells_its_lineage(trained: Trained) -> None:
    made = artifact.read(trained.run / "artifact")
    assert made.lineage["order_digest"] == trained.summary["order_digest"]
    assert made.lineage["data_digest"] == trained.summary["data_digest"]
    assert made.metrics["test"] == trained.summary["metrics"]["test"]
    assert made.labels == ("login", "parcel", "refund")


def test_finished_run_is_left_as_it_is(trained: Trained) -> None:
    before = (trained.run / "events.jsonl").read_bytes()
    prepared = preparing.prepare(settings(trained.run.parent), trained.run, "resume")
    summary = driver.fit(prepared)
    assert summary["updates"] == trained.summary["updates"]
    assert kinds(events.read(trained.run))[len(before.splitlines()) :] == ["tokens_reused", "labels", "texts"]


def test_used_name_is_refused_with_the_ways_on(trained: Trained) -> None:
    with pytest.raises(UserError, match=r"holds a run already; write --resume to continue it, or --new for run-2"):
        preparing.prepare(settings(trained.run.parent), trained.run)


def test_resume_with_other_settings_is_refused_by_name(trained: Trained) -> None:
    changed = settings(trained.run.parent, **{"optim.lr": 1e-4})
    with pytest.raises(UserError, match=r"optim\.lr=0\.0001: the run was started with 0\.003"):
        preparing.prepare(changed, trained.run, "resume")


class EndsEarly:
    """Workers whose first start ends at an update before its time, as one does that reads a notice from the cache of a
    shared folder when the driver has taken it."""

    def __init__(self, workers: Kept, at: int):
        self._workers, self._at = workers, iter([at])
        self.taken, self.left = workers.taken, workers.left

    def train(self, start: Start, layout: group.Layout) -> None:
        self._workers.train(replace(start, until=next(self._at, start.until)), layout)

    def lost(self, run: Run) -> None:
        """They are as good as before."""


def test_a_run_whose_folder_is_lost_resumes_from_its_storage_and_ends_bit_for_bit_like_the_straight_one(
    trained: Trained, kept_workers: Kept
) -> None:
    folder = trained.run.parent
    mounted = folder / "mounted"
    stored = settings(folder, **{"cluster.storage": mounted.as_uri()})
    half = preparing.prepare(stored, folder / "halves")
    stop = trained.summary["updates"] // 2 + 1
    paused = driver.fit(half, until=stop, workers=kept_workers)
    assert (paused["status"], paused["updates"]) == ("paused", stop)
    assert not (folder / "halves" / "artifact").exists()
    mounted.rename(folder / "away")
    mounted.touch()  # whatever is asked of a storage below it fails
    cut_off = preparing.prepare(config.load("intent"), folder / "halves", "resume")
    further = driver.fit(cut_off, until=stop + 1, workers=kept_workers)
    assert (further["status"], further["updates"]) == ("paused", stop + 1)
    told = [event for event in events.read(folder / "halves") if event["kind"] in ("unreachable", "uncopied")]
    assert (told[0]["kind"], told[0]["update"], told[-1]["kind"]) == ("unreachable", stop, "uncopied")
    mounted.unlink()
    (folder / "away").rename(mounted)
    shutil.rmtree(folder / "halves")
    with pytest.raises(UserError, match=r"mounted/halves holds a run already; write --resume"):
        preparing.prepare(stored, folder / "halves")

    def away_again(event: dict[str, Any]) -> None:
        if event["kind"] == "started" and mounted.is_dir():
            mounted.rename(folder / "away")
            mounted.touch()

    last_part = preparing.prepare(stored, folder / "halves", "resume")
    unwhole = r"halves is finished, and its copy is not whole \(cluster\.storage: .* --resume copies the rest"
    with pytest.raises(TryAgain, match=unwhole):
        driver.fit(last_part, workers=EndsEarly(kept_workers, stop + 2), on_event=away_again)
    kept_workers.end()
    mounted.unlink()
    (folder / "away").rename(mounted)
    held, here = (sorted(path.name for path in (at / "halves" / "checkpoints").iterdir()) for at in (mounted, folder))
    assert here[-1] not in held
    resumed = driver.fit(preparing.prepare(stored, folder / "halves", "resume"))
    assert (resumed["status"], resumed["restarts"]) == ("finished", 2)
    yielded = [(event["update"], event["reason"]) for event in Run(folder / "halves").events("yielded")]
    assert yielded == [(stop + 2, "a notice of an earlier start")]
    assert sorted(path.name for path in (mounted / "halves" / "checkpoints").iterdir()) == here
    assert resumed["order_digest"] == trained.summary["order_digest"]
    last = trained.summary["updates"]
    one, other = (
        (checkpoint.path_of(run / "checkpoints", last) / "model.safetensors").read_bytes()
        for run in (trained.run, folder / "halves")
    )
    assert one == other
    copy = mounted / "halves"
    assert {path.name for path in copy.iterdir()} == {
        *("artifact", "checkpoints", "config.yaml", "decisions.json", "events.jsonl", "owner"),
        *("predictions-test.parquet", "predictions-valid.parquet"),
    }
    assert manifest.damage(copy / "artifact") is None
    assert checkpoint.updates(copy / "checkpoints") == checkpoint.updates(folder / "halves" / "checkpoints")
    assert "finished" in kinds(events.read(copy))
    shutil.rmtree(folder / "halves")  # a finished run comes back with its artefact, and its copy stays whole
    assert driver.fit(preparing.prepare(stored, folder / "halves", "resume"))["status"] == "finished"
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
        found = driver.fit(
            preparing.prepare(resized, folder / "resized", "resume" if stop is None else "refuse"), until=stop
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
    prepared = preparing.prepare(settings(folder, **{"cluster.max_crashes": 0}), folder / "broken")
    with pytest.raises(UserError, match=r"training failed: .*nowhere") as caught:
        driver.fit(replace(prepared, model=folder / "nowhere"))
    path = Path(str(caught.value).rsplit(" ", 1)[-1])
    assert path.parent == prepared.run.folder
    assert "Traceback" in path.read_text()
    assert [event["kind"] for event in prepared.run.events("crashed", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert not prepared.run.artifact.exists()


class Unreachable(group.Fresh):
    """Workers of a Ray that does not answer the driver."""

    def taken(self, run: Run) -> None:
        import ray

        raise ray.exceptions.RaySystemError("the head does not answer")


def test_an_error_of_ray_in_the_driver_is_an_event_that_ends_the_run(trained: Trained) -> None:
    prepared = preparing.prepare(settings(trained.run.parent), trained.run.parent / "unreachable")
    with pytest.raises(UserError, match="the head does not answer"):
        driver.fit(prepared, workers=Unreachable())
    assert [event["kind"] for event in prepared.run.events("started", "failed")] == ["failed"]
    assert json.loads(prepared.run.summary.read_text())["status"] == "failed"
    assert driver.fit(preparing.prepare(prepared.config, prepared.run.folder, "resume"), until=1)["status"] == "paused"


def test_what_warms_a_worker_up_is_a_real_data_task(ray_session: Path) -> None:
    """In a worker what fails in it is left to the stream, so that nobody would see it."""
    assert ingest.one_task() == [{"id": 0}]
