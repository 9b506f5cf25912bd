"""Students on real Ray: of rows without labels, of another tokenizer, narrower, and learning inside their teacher."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rtrain.checkpoint import format as checkpoint_format
from rtrain.compress import distill, quantize, teacher as teaching
from rtrain.config import Config, with_overrides
from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import network_parts, vocab_trimming
from rtrain.report import event_messages
from rtrain.runs import controller, prepare, run_folders
from rtrain.runs.worker_pool import ReusableWorkerGroup
from tests.conftest import labelled_rows
from tests.support import reports
from tests.support.tiny import make_encoder
from tests.support.trained import ROWS, TEST_ROWS, Trained

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

NEW = 90
"""Rows without labels that are nowhere else."""
STUDENT = {"distill.layers": 1, "distill.epochs": 2, "distill.lr": 5e-3}


@pytest.fixture(scope="module")
def further(trained: Trained) -> Path:
    """New texts, one of them without words; then three training rows and a test row."""
    rows = labelled_rows(ROWS + TEST_ROWS + NEW)
    texts = [text for text, _ in [*rows[-NEW:], *rows[:3], rows[ROWS]]]
    path = trained.run.parent / "further.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, " "]))
    return path


def asked(trained: Trained, **settings: Any) -> Config:
    return run_folders.load_config(trained.run, {**STUDENT, **settings})


def told(run: Path, kind: str) -> dict[str, Any]:
    return next(event for event in events.read_events(run) if event["kind"] == kind)


@pytest.fixture(scope="module")
def student(trained: Trained, further: Path, kept_workers: ReusableWorkerGroup) -> Path:
    config = asked(trained, **{"distill.unlabeled_rows_path": str(further)})
    return distill.run_distillation(config, trained.run, trained.run.parent / "more-rows", workers=kept_workers)[0]


def never(*arguments: Any, **named: Any) -> bool:
    raise AssertionError("the teacher was asked again")


def test_rows_without_labels_are_trained_on_with_the_teacher_s_answers(trained: Trained, student: Path) -> None:
    store, values = Store(quantize.find_token_store(student)), Store(quantize.find_token_store(trained.run))
    counts = {"rows": NEW, "low_confidence": 0, "duplicates": 4, "bad": 1}
    event = told(student, "unlabeled")
    assert store.manifest.unlabeled == {name: event[name] for name in counts} == counts
    assert event_messages.format_event(event) == (
        "90 rows without a label are trained on; left out: 4 with the texts of labelled rows; 1 that cannot be used"
    )
    assert (store.num_rows("train"), store.num_labeled("train")) == (
        values.num_rows("train") + NEW,
        values.num_rows("train"),
    )
    assert {split: store.num_rows(split) for split in ("valid", "test")} == {
        split: values.num_rows(split) for split in ("valid", "test")
    }
    assert told(student, "trained")["rows_seen"] == 2 * store.num_rows("train")
    version = artifact.read_artifact(trained.run / "artifact").version
    assert told(student, "created")["data_digest"] == store.manifest.digest != values.manifest.digest
    texts = [text for text, _ in labelled_rows(ROWS + TEST_ROWS + NEW)[-NEW:]]
    predictor = Predictor.load(trained.run / "artifact")
    expected = {
        tuple(predictor.encode([text])[0].ids): row[0]["label"]
        for text, row in zip(texts, predictor(texts), strict=True)
    }
    answers, labels = store.teacher_logits(version, np.arange(store.num_rows("train"))), store.manifest.labels
    assert np.array_equal(answers[: values.num_rows("train")], values.open_teacher_logits(version))
    tokens = store.read_tokens("train", np.arange(values.num_rows("train"), store.num_rows("train")))
    assert tokens.is_unlabeled is not None
    assert tokens.is_unlabeled.all()
    rows = np.split(tokens.ids, np.cumsum(tokens.row_lengths)[:-1])
    result = {tuple(row.tolist()): labels[answer.argmax()] for row, answer in zip(rows, answers[-NEW:], strict=True)}
    assert result == expected


def test_a_second_student_another_seed_and_a_resume_ask_the_teacher_nothing(
    trained: Trained, student: Path, further: Path, kept_workers: ReusableWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another confidence takes other rows of the same answers."""
    monkeypatch.setattr(teaching, "ensure_answers", never)
    folder = trained.run.parent / "surer"
    rows, version = Store(quantize.find_token_store(student)), artifact.read_artifact(trained.run / "artifact").version
    logits = rows.open_teacher_logits(version)[rows.num_labeled("train") :].astype(np.float64)
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    sure = (chances / chances.sum(axis=1, keepdims=True)).max(axis=1)
    least = float(np.median(sure))
    config = {"distill.unlabeled_rows_path": str(further), "distill.confidence": least, "train.seed": 7}
    _, paused = distill.run_distillation(asked(trained, **config), trained.run, folder, until=5, workers=kept_workers)
    assert (paused["status"], paused["steps"]) == ("paused", 5)
    result = told(folder, "unlabeled")
    assert (result["rows"], result["low_confidence"]) == (int((sure >= least).sum()), int((sure < least).sum()))
    assert 0 < result["low_confidence"] < NEW
    _, ended = distill.run_distillation(
        run_folders.load_config(trained.run), trained.run, folder, "resume", workers=kept_workers
    )
    assert (ended["status"], [e["step"] for e in events.read_events(folder) if e["kind"] == "started"]) == (
        "finished",
        [0, 5],
    )
    plain = asked(trained, **{"distill.alpha": 0.5})
    _, repeated = distill.run_distillation(plain, trained.run, folder.with_name("plain-again"), workers=kept_workers)
    assert repeated["status"] == "finished"


@pytest.mark.slow
def test_a_narrow_student_learns_inside_its_teacher_and_resumes(
    trained: Trained, kept_workers: ReusableWorkerGroup
) -> None:
    """The map between the widths is in its checkpoints and not in its artefact."""
    import transformers

    folder, other = trained.run.parent / "narrow", trained.run.parent / "narrow-resumed"
    settings = {
        "distill.relation_loss_weight": 1.0,
        "distill.relation_heads": 4,
        "distill.hidden_loss_weight": 1.0,
        "distill.width": 16,
    }
    inside = partial(distill.run_distillation, asked(trained, **settings), trained.run, workers=kept_workers)
    assert inside(folder)[1]["status"] == "finished"
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "artifact")
    assert (network.config.hidden_size, network.config.num_attention_heads) == (16, 1)
    assert not any(network_parts.MODULE_NAME in name for name in load_file(folder / "artifact" / "model.safetensors"))
    newest = checkpoint_format.checkpoint_path(
        Run(folder).checkpoints, max(checkpoint_format.list_steps(Run(folder).checkpoints))
    )
    assert load_file(newest / "model.safetensors")[f"{network_parts.MODULE_NAME}.weight"].shape == (32, 16)
    assert f"{network_parts.MODULE_NAME}.weight:exp_avg" in load_file(newest / "optim.safetensors")
    assert inside(other, until=5)[1]["status"] == "paused"
    distill.run_distillation(run_folders.load_config(trained.run), trained.run, other, "resume", workers=kept_workers)
    item, two = ((run / "artifact" / "model.safetensors").read_bytes() for run in (folder, other))
    assert item == two


@pytest.fixture(scope="module")
def stranger(trained: Trained) -> Path:
    """A model with pieces of its own."""
    folder = trained.run.parent / "stranger"
    encoder = make_encoder(folder / "whole", seed=3)
    ids = vocab_trimming.select_folder_ids(encoder, range(0, vocab_trimming.vocabulary_size(encoder), 2))
    created = vocab_trimming.trim(encoder, ids, folder / "other")
    (created / vocab_trimming.VOCABULARY_FILE).unlink()
    return created


@pytest.mark.slow
def test_a_student_by_name_may_have_another_tokenizer(
    trained: Trained, stranger: Path, further: Path, kept_workers: ReusableWorkerGroup
) -> None:
    config = asked(trained, **{"distill.student": str(stranger), "distill.unlabeled_rows_path": str(further)})
    run, result = distill.run_distillation(config, trained.run, trained.run.parent / "by-name", workers=kept_workers)
    assert result["status"] == "finished"
    version = artifact.read_artifact(trained.run / "artifact").version
    store, values = Store(quantize.find_token_store(run)), Store(quantize.find_token_store(trained.run))
    assert store.manifest.unlabeled["rows"] == NEW
    at = np.searchsorted(order := np.sort(values.column("train", "row_id")), store.column("train", "row_id")[:10])
    places = np.argsort(values.column("train", "row_id"))[at]
    assert order[at].tolist() == store.column("train", "row_id")[:10].tolist()
    assert np.array_equal(store.open_teacher_logits(version)[:10], values.open_teacher_logits(version)[places])
    assert run_folders.load_config(run).recipe.model.name == str(stranger)
    assert vocab_trimming.vocabulary_size(run / "artifact") == vocab_trimming.vocabulary_size(stranger)


@pytest.mark.slow
def test_a_student_learns_the_mean_of_several_teachers(
    trained: Trained, further: Path, kept_workers: ReusableWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows without labels too; resumed, it asks none of them again."""
    other = trained.run.parent / "other-seed"
    repeated = with_overrides(trained.config, {"train.seed": 5, "train.epochs": 2})
    controller.fit(prepare.prepare_run(repeated, other), workers=kept_workers)
    folder = trained.run.parent / "of-two"
    config = asked(trained, **{"distill.unlabeled_rows_path": str(further), "distill.teachers": [str(other)]})
    assert distill.run_distillation(config, trained.run, folder, until=5, workers=kept_workers)[1]["status"] == "paused"
    monkeypatch.setattr(teaching, "ensure_answers", never)
    _, result = distill.run_distillation(
        run_folders.load_config(trained.run), trained.run, folder, "resume", workers=kept_workers
    )
    assert result["status"] == "finished"
    store, versions = (
        Store(quantize.find_token_store(folder)),
        [artifact.read_artifact(run / "artifact").version for run in (trained.run, other)],
    )
    created = artifact.read_artifact(folder / "artifact")
    assert (created.lineage["teacher"], created.lineage["co_teachers"]) == (versions[0], versions[1:])
    values = Store(quantize.find_token_store(trained.run))
    mean = np.mean([values.open_teacher_logits(version) for version in versions], axis=0)
    answers = store.open_teacher_logits(str(run_folders.load_config(folder).recipe.distill.teacher_logits_key))
    assert np.allclose(answers[: values.num_rows("train")], mean, atol=1e-5)
    assert store.num_labeled("train") == values.num_rows("train") < store.num_rows("train")


@pytest.mark.slow
def test_a_masked_language_model_s_student_learns_what_is_inside_it(
    ray_session: Path, kept_workers: ReusableWorkerGroup
) -> None:
    """With guesses of its own; none of the teacher's answers are kept."""
    folder = ray_session / "masked-students"
    folder.mkdir()
    train = {"train.epochs": 2, "train.precision": "fp32", "train.global_batch_size": 8}
    train |= {"train.aggregation_frequency": None, "gate.latency_seconds": 0.5}
    settings_used = with_overrides(reports.settings_of("masked_lm", folder), train)
    controller.fit(prepare.prepare_run(settings_used, folder / "teacher"), workers=kept_workers)
    inside = {
        "distill.alpha": 0.0,
        "distill.hidden_loss_weight": 1.0,
        "distill.relation_loss_weight": 1.0,
        "distill.relation_heads": 4,
    }
    config = run_folders.load_config(folder / "teacher", {**STUDENT, **inside})
    run, result = distill.run_distillation(config, folder / "teacher", folder / "student", workers=kept_workers)
    assert result["status"] == "finished"
    losses = [event["loss"] for event in events.read_events(run) if event["kind"] == "progress"]
    assert losses[-1] < losses[0]
    assert not list(Store(quantize.find_token_store(run)).folder.glob("teacher-*"))
    gated = result["gate"]
    assert gated["headline"]["name"] == "neg_loss"
    assert gated["is_student"]
    assert gated["rivals"][1]["absence_reason"]
