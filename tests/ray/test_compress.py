"""Distillation and int8 on real Ray and real engines, from a trained run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.compress import distill, quantize, teacher as teaching
from rtrain.config import with_overrides
from rtrain.core import events
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact, score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import scores
from rtrain.report import summary
from rtrain.runs import run_folders
from rtrain.runs.worker_pool import ReusableWorkerGroup
from tests.conftest import labelled_rows
from tests.support.trained import ROWS, Trained, settings

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def teacher(trained: Trained) -> Path:
    return trained.run


@pytest.fixture(scope="module")
def student(teacher: Path, kept_workers: ReusableWorkerGroup) -> Path:
    config = with_overrides(settings(teacher.parent), {"distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3})
    run, _ = distill.run_distillation(config, teacher, teacher.parent / "student", workers=kept_workers)
    return run


@pytest.fixture(scope="module")
def int8(student: Path) -> dict[str, Any]:
    config = settings(student.parent)
    return quantize.run_quantization(
        config.recipe, quantize.find_token_store(student), student, student / "artifact-int8"
    )


def store_of(run: Path) -> Store:
    return Store(quantize.find_token_store(run))


def test_student_has_fewer_layers_and_the_teacher_s_labels(teacher: Path, student: Path) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(student / "artifact")
    assert model.config.num_hidden_layers == 1
    assert artifact.read_artifact(student / "artifact").labels == artifact.read_artifact(teacher / "artifact").labels


def test_student_learned_from_the_teacher(student: Path) -> None:
    test = artifact.read_artifact(student / "artifact").metrics["test"]
    assert test["accuracy"] >= 0.8  # 1/3 by chance


def test_teacher_s_answers_are_kept_by_row(teacher: Path, student: Path) -> None:
    store, created = store_of(teacher), artifact.read_artifact(teacher / "artifact")
    remaining = store.open_teacher_logits(created.version)
    assert remaining.shape == (store.num_rows("train"), 3)
    answered = score.predict_split(
        Predictor.load(teacher / "artifact"), store, "train", np.arange(store.num_rows("train"))
    )
    assert np.abs(remaining - np.stack(answered.outputs)).max() <= 1e-4
    assert not teaching.ensure_answers(store, teacher / "artifact", created)  # nothing is computed twice


def test_distilled_run_names_its_teacher_and_trains_on_every_row(teacher: Path, student: Path) -> None:
    from rtrain import config

    recipe = config.load_config(str(student / "config.yaml")).recipe
    assert recipe.distill.teacher == artifact.read_artifact(teacher / "artifact").version
    trained = next(event for event in events.read_events(student) if event["kind"] == "trained")
    assert trained["rows_seen"] == 8 * store_of(student).num_rows("train")


def test_a_student_is_gated_against_its_teacher_by_limits_of_its_own(teacher: Path, student: Path) -> None:
    created = artifact.read_artifact(student / "artifact")
    assert created.lineage["teacher"] == artifact.read_artifact(teacher / "artifact").version
    assert created.gate is not None
    assert (created.gate["version"], created.gate["is_student"]) == (created.version, True)
    assert created.gate["baseline"]["version"] == created.lineage["teacher"]
    assert created.gate["limits"]["max_score_drop"] == settings(teacher.parent).recipe.gate.student_max_score_drop


def test_student_as_deep_as_its_teacher_is_refused(teacher: Path) -> None:
    config = with_overrides(settings(teacher.parent), {"distill.layers": 2})
    with pytest.raises(ConfigError) as error:
        distill.run_distillation(config, teacher, teacher.parent / "too-deep")
    assert [(problem.field, problem.code) for problem in error.value.problems] == [("distill.layers", "out_of_range")]
    assert not (teacher.parent / "too-deep").exists()


def test_a_student_that_was_cut_short_is_resumed_by_its_own_settings(
    teacher: Path, student: Path, kept_workers: ReusableWorkerGroup
) -> None:
    folder = teacher.parent / "cut-short"
    inputs = {"distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3, "train.keep_checkpoints": 3}
    config = with_overrides(run_folders.load_config(teacher), inputs)
    _, paused = distill.run_distillation(config, teacher, folder, until=5, workers=kept_workers)
    assert (paused["status"], paused["steps"]) == ("paused", 5)
    with pytest.raises(ConfigError):
        distill.run_distillation(
            run_folders.load_config(teacher, {"distill.temperature": 3.0}), teacher, folder, "resume"
        )
    more = run_folders.load_config(teacher, {"train.log_every": 7})
    _, ended = distill.run_distillation(more, teacher, folder, "resume", workers=kept_workers)
    assert [event["step"] for event in events.read_events(folder) if event["kind"] == "started"] == [0, 5]
    assert (ended["status"], ended["order_digest"]) == ("finished", summary.summarize(Run(student))["order_digest"])
    recipe = run_folders.load_config(folder).recipe
    assert (recipe.train.keep_checkpoints, recipe.train.log_every, recipe.distill.layers) == (3, 7, 1)
    item, other = ((run / "artifact" / "model.safetensors").read_bytes() for run in (student, folder))
    assert item == other


def test_int8_keeps_labels_and_answers_alone_as_in_a_batch(student: Path, int8: dict[str, Any]) -> None:
    assert int8["batch_changed_share"] == 0.0
    assert int8["batch_max_logit_difference"] <= 0.05
    assert int8["changed_share"] <= 0.1
    assert int8["test"]["rows"] == int8["parent"]["rows"] == store_of(student).num_rows("test")


def test_int8_artefact_is_complete_and_reproduces_its_golden_answers(student: Path, int8: dict[str, Any]) -> None:
    created = artifact.read_artifact(student / "artifact-int8")
    assert created.engine == "openvino"
    assert created.lineage["parent"] == artifact.read_artifact(student / "artifact").version
    predictor = Predictor.load(student / "artifact-int8")
    inputs = [text for text, _ in labelled_rows(ROWS)[:6]]
    parent = Predictor.load(student / "artifact")
    assert [answer[0]["label"] for answer in predictor(inputs)] == [answer[0]["label"] for answer in parent(inputs)]


def test_each_artefact_knows_what_its_validation_rows_looked_like(student: Path, int8: dict[str, Any]) -> None:
    rows = store_of(student).num_rows("valid")
    created = [artifact.read_artifact(student / name) for name in ("artifact", "artifact-int8")]
    for item in created:
        assert item.drift_baseline["rows"] == rows
        assert {sum(item.drift_baseline[name]["counts"]) for name in ("tokens", "unknown", "score")} == {rows}
        assert sum(item.drift_baseline["labels"].values()) == rows
        assert 0 < item.facts["abstain"] <= 1
    assert created[0].drift_baseline["tokens"] == created[1].drift_baseline["tokens"]


def test_quantizing_twice_is_refused(student: Path, int8: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "artifact").symlink_to(student / "artifact-int8")
    with pytest.raises(UserError) as error:
        quantize.run_quantization(
            settings(student.parent).recipe, quantize.find_token_store(student), tmp_path, tmp_path / "out"
        )
    assert error.value.code == "already_quantized"


def test_failed_quantization_leaves_nothing(student: Path, tmp_path: Path) -> None:
    recipe = settings(student.parent).recipe
    with pytest.raises(UserError):
        quantize.run_quantization(recipe, tmp_path / "no-store", student, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_scores_a_file_through_the_serving_path(teacher: Path) -> None:
    data, created = settings(teacher.parent).recipe.data, artifact.read_artifact(teacher / "artifact")
    scored = score.score_file(teacher / "artifact", score.resolve_data_settings(created, {"data.path": data.test}))
    assert scored["scores"]["accuracy"] == created.metrics["test"]["accuracy"]
    assert (scored["rows"], scored["bad_rows"]) == (20, 0)
    remaining = scores.read_scores(Run(teacher).scores("test"))
    assert remaining is not None
    same = ("scores", "intervals", "slices", "tables", "headline", "rows")
    # Not to the last bit: the file's rows are batched otherwise than in the run's evaluation, and what that leaves
    # equal depends on the processor's kernels.
    result, expected = ({name: document[name] for name in same} for document in (scored, remaining))
    item, other = leaves(result), leaves(expected)
    floats = {path for path, value in other.items() if isinstance(value, float)}
    assert {path: value for path, value in item.items() if path not in floats} == {
        path: value for path, value in other.items() if path not in floats
    }
    separate = {
        path: (item[path], other[path]) for path in floats if item[path] != pytest.approx(other[path], 1e-5, 1e-7)
    }
    assert separate == {}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """A nested document as its values by path."""
    if isinstance(value, dict):
        pairs = [(str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(place), inner) for place, inner in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, inner in pairs for name, leaf in leaves(inner, f"{path}/{key}").items()}
