"""Every kind of task on real Ray: trained, its rows' answers kept, distilled, quantized, asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.compress import distill, quantize
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import pooling, sentence_transformers_format
from rtrain.report import summary
from rtrain.runs import controller, prepare
from rtrain.runs.worker_pool import Kept
from rtrain.tasks import base
from tests import test_tasks_extractive_summary, test_tasks_several_labels, test_tasks_span_qa, test_tasks_token_tags
from tests.conftest import labelled_rows
from tests.tiny import make_encoder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

TASKS = ("regression", "multi_label", "multi_head", "token_tags", "span_qa", "extractive_summary")
DISTILLED = ("token_tags",)
"""The others' students are slow tests, and so are the others without one: each takes half a minute."""
ASKED: dict[str, Any] = {"span_qa": {"question": "when was it due?", "context": test_tasks_span_qa.CONTEXT}}


def rows_of(task: str, folder: Path) -> dict[str, Any]:
    """A file of rows for the task, and the settings to read it."""
    if task == "token_tags":
        return {
            "data.path": str(test_tasks_token_tags.write(folder / "rows.conll")),
            "data.max_tokens": 32,
            "data.stride": 8,
        }
    if task == "span_qa":
        path = test_tasks_span_qa.write(folder / "squad.json.gz")
        return {"data.path": str(path), "data.window": 48, "data.stride": 12, "train.epochs": 1}
    if task == "extractive_summary":
        path = test_tasks_extractive_summary.write(folder / "rows.jsonl")
        return {"data.path": str(path), "data.window": 32, "data.stride": 8, "data.max_bad_rows": 0.1}
    if task == "regression":
        lines = [f"{text},{1 + len(text.split()) // 3},{label}" for text, label in labelled_rows(160)]
        path = folder / "essays.csv"
        path.write_text("essay,score,kind\n" + "\n".join(lines) + "\n")
        columns = {"data.text": "essay", "data.text_pair": None, "data.max_tokens": 64, "data.slices": ["kind"]}
        return {"data.path": str(path), **columns}
    both = {"data.label": ["intent", "mood"]} if task == "multi_head" else {"data.label": "topics"}
    return {"data.path": str(test_tasks_several_labels.write(folder)), "data.separator": "|", **both}


def settings(task: str, folder: Path) -> Config:
    recipes = {
        "regression": "essay",
        "token_tags": "entities",
        "span_qa": "squad",
        "extractive_summary": "summary",
    }
    train = {"workers": 2, "epochs": 2, "precision": "fp32", "rows_per_update": 16, "aggregation_frequency": None}
    overrides = {f"train.{name}": value for name, value in train.items()} | {"optim.lr": 3e-3, "task": task}
    overrides |= {"model.name": str(make_encoder(folder / "encoder")), **rows_of(task, folder)}
    overrides |= {"distill.layers": 1, "distill.epochs": 1, "quantize.calibration_rows": 16, "gate.seconds": 0.5}
    return config.load(recipes.get(task, "intent"), overrides)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task not in DISTILLED])
def test_from_rows_to_an_int8_answer(task: str, ray_session: Path, kept_workers: Kept) -> None:
    chosen, run, _ = trained(task, ray_session / f"tasks-{task}", kept_workers)
    answers_in_int8(task, chosen, run)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task in DISTILLED else pytest.mark.slow) for task in TASKS]
)
def test_from_rows_to_an_int8_student_s_answer(task: str, ray_session: Path, kept_workers: Kept) -> None:
    chosen, run, store = trained(task, ray_session / f"tasks-{task}-distilled", kept_workers)
    student, report = distill.run(chosen, run, run.parent / "student", workers=kept_workers)
    assert report["status"] == "finished"
    teacher = Store(quantize.store_of(student)).teacher(_version(run))
    lines = store.manifest.tokens["train"] if base.get(task).by_token else store.rows("train")
    assert teacher.shape == (lines, len(store.manifest.labels))
    answers_in_int8(task, chosen, student)
    if task == "token_tags":
        told = Run(student).last("running_text")
        assert told is not None
        assert 0 <= told["scores"]["f1"] <= 1
        assert "," in artifact.read(Run(student).artifact).facts["cut_before"]  # commas are words of these rows


def trained(task: str, folder: Path, workers: Kept) -> tuple[Config, Path, Store]:
    """Train on two workers, and look at what the run keeps of its rows."""
    folder.mkdir()
    chosen, run = settings(task, folder), folder / "run"
    prepared = prepare.prepare(chosen, run)
    found = controller.fit(prepared, workers=workers)
    assert found["status"] == "finished"
    store = prepared.store
    assert found["metrics"]["test"]["rows"] == store.rows("test")
    for split in ("valid", "test"):
        table = pyarrow.parquet.read_table(run / f"predictions-{split}.parquet")
        assert table.num_rows == store.rows(split)
        assert np.isfinite(table["loss"].to_numpy()).all()
    losses = [event["loss"] for event in events.read(run) if event["kind"] == "progress"]
    assert np.isfinite(losses).all()
    if task == "regression":
        assert sum(scores["rows"] for scores in found["slices"]["test"]["kind"].values()) == store.rows("test")
    assert summary.summarise(Run(run))["metrics"]["valid"] is not None
    return chosen, run, store


def answers_in_int8(task: str, chosen: Config, run: Path) -> None:
    made = quantize.run(chosen.recipe, quantize.store_of(run), run, run / "artifact-int8")
    assert made["largest_logit_difference_alone_against_batch"] <= 0.05
    assert made["test"]["rows"] == Store(quantize.store_of(run)).rows("test")
    asked = ASKED.get(task, "please help with parcel number 4")
    [answer] = Predictor.load(run / "artifact-int8")([asked])
    [parent] = Predictor.load(run / "artifact")([asked])
    assert type(answer) is type(parent)


def _version(run: Path) -> str:
    return artifact.read(run / "artifact").version


@pytest.mark.slow
def test_a_run_on_all_rows_keeps_its_last_weights_and_its_pooling(ray_session: Path, kept_workers: Kept) -> None:
    folder = ray_session / "tasks-refit"
    folder.mkdir()
    overrides = {"task": "classification", "data.label": "kind", "data.valid_share": 0}
    chosen = config.with_overrides(settings("regression", folder), overrides)
    sentence_transformers_format.write(folder / "encoder", "mean", 32, 128)
    run = folder / "run"
    prepared = prepare.prepare(chosen, run)
    assert chosen.recipe.model.pooling == "auto"
    assert config.load(str(run / "config.yaml")).recipe.model.pooling == "mean"
    found = controller.fit(prepared, workers=kept_workers)
    assert (found["status"], prepared.store.rows("valid")) == ("finished", 0)
    assert {event["split"] for event in events.read(run) if event["kind"] == "evaluated"} == {"test"}
    assert found["best_update"] == found["updates"]
    assert found["metrics"]["valid"] is None
    assert not (run / "predictions-valid.parquet").exists()
    assert "test" in (run / "report.html").read_text()

    kept = load_file(run / "artifact" / "model.safetensors")
    last = load_file(checkpoint_format.path_of(run / "checkpoints", found["updates"]) / "model.safetensors")
    assert kept.keys() == last.keys()
    assert kept["classifier.weight"].shape == (*pooling.GUARD, *last["classifier.weight"].shape)
    assert all(torch.equal(kept[name].reshape(last[name].shape), last[name]) for name in kept)
    assert sentence_transformers_format.pooling_of(run / "artifact") == "mean"
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForSequenceClassification.from_pretrained(run / "artifact")
    # Resumed by a recipe that leaves the pooling open, though its encoder says otherwise by now.
    (folder / "encoder" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    again = prepare.prepare(chosen, run, "resume")
    assert again.config.recipe.model.pooling == "mean"

    student, report = distill.run(chosen, run, folder / "student", workers=kept_workers)
    assert report["status"] == "finished"
    assert config.load(str(student / "config.yaml")).recipe.model.pooling == "mean"
    made = quantize.run(chosen.recipe, quantize.store_of(student), student, student / "artifact-int8")
    assert made["test"]["rows"] == prepared.store.rows("test")
    texts = [f"{text} {number}" for number, (text, _) in enumerate(labelled_rows(24))]
    float_logits, int8_logits = (
        np.stack(Predictor.load(student / name).logits(texts)) for name in ("artifact", "artifact-int8")
    )
    # An int8 graph that read the first token would not follow the float model: see how far they are apart at most.
    assert np.abs(int8_logits - float_logits).max() < 0.2 * np.ptp(float_logits)
