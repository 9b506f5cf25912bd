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
from rtrain.models import model_files, pooling
from rtrain.report import summary
from rtrain.runs import controller, prepare
from rtrain.runs.worker_pool import ReusableWorkerGroup
from rtrain.tasks import base
from tests.conftest import labelled_rows
from tests.support.tiny import make_encoder
from tests.unit.tasks import test_extractive_summary, test_several_labels, test_span_qa, test_token_tags

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

TASKS = ("regression", "multi_label", "multi_head", "token_tags", "span_qa", "extractive_summary")
DISTILLED = ("token_tags",)
"""The others' students are slow tests, and so are the others without one: each takes half a minute."""
ASKED: dict[str, Any] = {"span_qa": {"question": "when was it due?", "context": test_span_qa.CONTEXT}}


def rows_of(task: str, folder: Path) -> dict[str, Any]:
    """A file of rows for the task, and the settings to read it."""
    if task == "token_tags":
        return {
            "data.path": str(test_token_tags.write(folder / "rows.conll")),
            "data.max_tokens": 32,
            "data.stride": 8,
        }
    if task == "span_qa":
        path = test_span_qa.write(folder / "squad.json.gz")
        return {"data.path": str(path), "data.window": 48, "data.stride": 12, "train.epochs": 1}
    if task == "extractive_summary":
        path = test_extractive_summary.write(folder / "rows.jsonl")
        return {"data.path": str(path), "data.window": 32, "data.stride": 8, "data.max_bad_rows": 0.1}
    if task == "regression":
        lines = [f"{text},{1 + len(text.split()) // 3},{label}" for text, label in labelled_rows(160)]
        path = folder / "essays.csv"
        path.write_text("essay,score,kind\n" + "\n".join(lines) + "\n")
        columns = {"data.text": "essay", "data.text_pair": None, "data.max_tokens": 64, "data.slices": ["kind"]}
        return {"data.path": str(path), **columns}
    pair = {"data.label": ["intent", "mood"]} if task == "multi_head" else {"data.label": "topics"}
    return {"data.path": str(test_several_labels.write(folder)), "data.separator": "|", **pair}


def settings(task: str, folder: Path) -> Config:
    recipes = {
        "regression": "essay",
        "token_tags": "entities",
        "span_qa": "squad",
        "extractive_summary": "summary",
    }
    train = {"workers": 2, "epochs": 2, "precision": "fp32", "global_batch_size": 16, "aggregation_frequency": None}
    overrides = {f"train.{name}": value for name, value in train.items()} | {"optim.lr": 3e-3, "task": task}
    overrides |= {"model.name": str(make_encoder(folder / "encoder")), **rows_of(task, folder)}
    overrides |= {
        "distill.layers": 1,
        "distill.epochs": 1,
        "quantize.calibration_rows": 16,
        "gate.latency_seconds": 0.5,
    }
    return config.load_config(recipes.get(task, "intent"), overrides)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task not in DISTILLED])
def test_from_rows_to_an_int8_answer(task: str, ray_session: Path, kept_workers: ReusableWorkerGroup) -> None:
    selection, run, _ = trained(task, ray_session / f"tasks-{task}", kept_workers)
    answers_in_int8(task, selection, run)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task in DISTILLED else pytest.mark.slow) for task in TASKS]
)
def test_from_rows_to_an_int8_student_s_answer(task: str, ray_session: Path, kept_workers: ReusableWorkerGroup) -> None:
    selection, run, store = trained(task, ray_session / f"tasks-{task}-distilled", kept_workers)
    student, report = distill.run_distillation(selection, run, run.parent / "student", workers=kept_workers)
    assert report["status"] == "finished"
    teacher = Store(quantize.find_token_store(student)).open_teacher_logits(_version(run))
    lines = store.manifest.tokens["train"] if base.get_task(task).is_token_level else store.num_rows("train")
    assert teacher.shape == (lines, len(store.manifest.labels))
    answers_in_int8(task, selection, student)
    if task == "token_tags":
        messages = Run(student).last_event("running_text")
        assert messages is not None
        assert 0 <= messages["scores"]["f1"] <= 1
        assert (
            "," in artifact.read_artifact(Run(student).artifact).facts["cut_before"]
        )  # commas are words of these rows


def trained(task: str, folder: Path, workers: ReusableWorkerGroup) -> tuple[Config, Path, Store]:
    """Train on two workers, and check the run's predictions."""
    folder.mkdir()
    selection, run = settings(task, folder), folder / "run"
    prepared = prepare.prepare_run(selection, run)
    result = controller.fit(prepared, workers=workers)
    assert result["status"] == "finished"
    store = prepared.store
    assert result["metrics"]["test"]["rows"] == store.num_rows("test")
    for split in ("valid", "test"):
        table = pyarrow.parquet.read_table(run / f"predictions-{split}.parquet")
        assert table.num_rows == store.num_rows(split)
        assert np.isfinite(table["loss"].to_numpy()).all()
    losses = [event["loss"] for event in events.read_events(run) if event["kind"] == "progress"]
    assert np.isfinite(losses).all()
    if task == "regression":
        assert sum(scores["rows"] for scores in result["slices"]["test"]["kind"].values()) == store.num_rows("test")
    assert summary.summarize(Run(run))["metrics"]["valid"] is not None
    return selection, run, store


def answers_in_int8(task: str, selection: Config, run: Path) -> None:
    instance = quantize.run_quantization(selection.recipe, quantize.find_token_store(run), run, run / "artifact-int8")
    assert instance["batch_max_logit_difference"] <= 0.05
    assert instance["test"]["rows"] == Store(quantize.find_token_store(run)).num_rows("test")
    requested_settings = ASKED.get(task, "please help with parcel number 4")
    [answer] = Predictor.load(run / "artifact-int8")([requested_settings])
    [parent] = Predictor.load(run / "artifact")([requested_settings])
    assert type(answer) is type(parent)


def _version(run: Path) -> str:
    return artifact.read_artifact(run / "artifact").version


@pytest.mark.slow
def test_a_run_on_all_rows_keeps_its_last_weights_and_its_pooling(
    ray_session: Path, kept_workers: ReusableWorkerGroup
) -> None:
    folder = ray_session / "tasks-refit"
    folder.mkdir()
    overrides = {"task": "classification", "data.label": "kind", "data.valid_share": 0}
    selection = config.with_overrides(settings("regression", folder), overrides)
    pooling.write_sentence_files(folder / "encoder", "mean", 32, 128)
    run = folder / "run"
    prepared = prepare.prepare_run(selection, run)
    assert selection.recipe.model.pooling == "auto"
    assert config.load_config(str(run / "config.yaml")).recipe.model.pooling == "mean"
    result = controller.fit(prepared, workers=kept_workers)
    assert (result["status"], prepared.store.num_rows("valid")) == ("finished", 0)
    assert {event["split"] for event in events.read_events(run) if event["kind"] == "evaluated"} == {"test"}
    assert result["best_step"] == result["steps"]
    assert result["metrics"]["valid"] is None
    assert not (run / "predictions-valid.parquet").exists()
    assert "test" in (run / "report.html").read_text()

    remaining = load_file(run / "artifact" / "model.safetensors")
    last = load_file(checkpoint_format.checkpoint_path(run / "checkpoints", result["steps"]) / "model.safetensors")
    assert remaining.keys() == last.keys()
    assert remaining["classifier.weight"].shape == (*model_files.GUARD_SHAPE, *last["classifier.weight"].shape)
    assert all(torch.equal(remaining[name].reshape(last[name].shape), last[name]) for name in remaining)
    assert pooling.read_pooling(run / "artifact") == "mean"
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForSequenceClassification.from_pretrained(run / "artifact")
    # Resumed by a recipe that leaves the pooling open, though its encoder says otherwise by now.
    (folder / "encoder" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    second = prepare.prepare_run(selection, run, "resume")
    assert second.config.recipe.model.pooling == "mean"

    student, report = distill.run_distillation(selection, run, folder / "student", workers=kept_workers)
    assert report["status"] == "finished"
    assert config.load_config(str(student / "config.yaml")).recipe.model.pooling == "mean"
    instance = quantize.run_quantization(
        selection.recipe, quantize.find_token_store(student), student, student / "artifact-int8"
    )
    assert instance["test"]["rows"] == prepared.store.num_rows("test")
    texts = [f"{text} {number}" for number, (text, _) in enumerate(labelled_rows(24))]
    float_logits, int8_logits = (
        np.stack(Predictor.load(student / name).logits(texts)) for name in ("artifact", "artifact-int8")
    )
    # An int8 graph that read the first token would not follow the float model: see how far they are apart at most.
    assert np.abs(int8_logits - float_logits).max() < 0.2 * np.ptp(float_logits)
