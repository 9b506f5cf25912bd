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
from rtrain.runs.worker_pool import Kept
from tests.conftest import labelled_rows
from tests.trained import ROWS, Trained, settings

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def teacher(trained: Trained) -> Path:
    return trained.run


@pytest.fixture(scope="module")
def student(teacher: Path, kept_workers: Kept) -> Path:
    config = with_overrides(settings(teacher.parent), {"distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3})
    run, _ = distill.run(config, teacher, teacher.parent / "student", workers=kept_workers)
    return run


@pytest.fixture(scope="module")
def int8(student: Path) -> dict[str, Any]:
    config = settings(student.parent)
    return quantize.run(config.recipe, quantize.store_of(student), student, student / "artifact-int8")


def store_of(run: Path) -> Store:
    return Store(quantize.store_of(run))


def test_student_has_fewer_layers_and_the_teacher_s_labels(teacher: Path, student: Path) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(student / "artifact")
    assert model.config.num_hidden_layers == 1
    assert artifact.read(student / "artifact").labels == artifact.read(teacher / "artifact").labels


def test_student_learned_from_the_teacher(student: Path) -> None:
    test = artifact.read(student / "artifact").metrics["test"]
    assert test["accuracy"] >= 0.8  # 1/3 by chance


def test_teacher_s_answers_are_kept_by_row(teacher: Path, student: Path) -> None:
    store, made = store_of(teacher), artifact.read(teacher / "artifact")
    kept = store.teacher(made.version)
    assert kept.shape == (store.rows("train"), 3)
    answered = score.on_split(Predictor.load(teacher / "artifact"), store, "train", np.arange(store.rows("train")))
    assert np.abs(kept - np.stack(answered.outputs)).max() <= 1e-4
    assert not teaching.ensure_answers(store, teacher / "artifact", made)  # nothing is computed twice


def test_distilled_run_names_its_teacher_and_trains_on_every_row(teacher: Path, student: Path) -> None:
    from rtrain import config

    recipe = config.load(str(student / "config.yaml")).recipe
    assert recipe.distill.teacher == artifact.read(teacher / "artifact").version
    trained = next(event for event in events.read(student) if event["kind"] == "trained")
    assert trained["rows_seen"] == 8 * store_of(student).rows("train")


def test_a_student_is_gated_against_its_teacher_by_limits_of_its_own(teacher: Path, student: Path) -> None:
    made = artifact.read(student / "artifact")
    assert made.lineage["teacher"] == artifact.read(teacher / "artifact").version
    assert made.gate is not None
    assert (made.gate["version"], made.gate["student"]) == (made.version, True)
    assert made.gate["against"]["version"] == made.lineage["teacher"]
    assert made.gate["limits"]["loss"] == settings(teacher.parent).recipe.gate.student_loss


def test_student_as_deep_as_its_teacher_is_refused(teacher: Path) -> None:
    config = with_overrides(settings(teacher.parent), {"distill.layers": 2})
    with pytest.raises(ConfigError) as error:
        distill.run(config, teacher, teacher.parent / "too-deep")
    assert [(one.field, one.code) for one in error.value.problems] == [("distill.layers", "out_of_range")]
    assert not (teacher.parent / "too-deep").exists()


def test_a_student_that_was_cut_short_is_resumed_by_its_own_settings(
    teacher: Path, student: Path, kept_workers: Kept
) -> None:
    folder = teacher.parent / "cut-short"
    asked = {"distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3, "train.keep": 3}
    chosen = with_overrides(run_folders.stored(teacher), asked)
    _, paused = distill.run(chosen, teacher, folder, until=5, workers=kept_workers)
    assert (paused["status"], paused["updates"]) == ("paused", 5)
    with pytest.raises(ConfigError):
        distill.run(run_folders.stored(teacher, {"distill.temperature": 3.0}), teacher, folder, "resume")
    more = run_folders.stored(teacher, {"train.log_every": 7})
    _, ended = distill.run(more, teacher, folder, "resume", workers=kept_workers)
    assert [event["update"] for event in events.read(folder) if event["kind"] == "started"] == [0, 5]
    assert (ended["status"], ended["order_digest"]) == ("finished", summary.summarise(Run(student))["order_digest"])
    recipe = run_folders.stored(folder).recipe
    assert (recipe.train.keep, recipe.train.log_every, recipe.distill.layers) == (3, 7, 1)
    one, other = ((run / "artifact" / "model.safetensors").read_bytes() for run in (student, folder))
    assert one == other


def test_int8_keeps_labels_and_answers_alone_as_in_a_batch(student: Path, int8: dict[str, Any]) -> None:
    assert int8["flips_alone_against_batch"] == 0.0
    assert int8["largest_logit_difference_alone_against_batch"] <= 0.05
    assert int8["flips_against_parent"] <= 0.1
    assert int8["test"]["rows"] == int8["parent"]["rows"] == store_of(student).rows("test")


def test_int8_artefact_is_complete_and_reproduces_its_golden_answers(student: Path, int8: dict[str, Any]) -> None:
    made = artifact.read(student / "artifact-int8")
    assert made.engine == "openvino"
    assert made.lineage["parent"] == artifact.read(student / "artifact").version
    predictor = Predictor.load(student / "artifact-int8")
    asked = [text for text, _ in labelled_rows(ROWS)[:6]]
    parent = Predictor.load(student / "artifact")
    assert [answer[0]["label"] for answer in predictor(asked)] == [answer[0]["label"] for answer in parent(asked)]


def test_each_artefact_knows_what_its_validation_rows_looked_like(student: Path, int8: dict[str, Any]) -> None:
    rows = store_of(student).rows("valid")
    made = [artifact.read(student / name) for name in ("artifact", "artifact-int8")]
    for one in made:
        assert one.reference["rows"] == rows
        assert {sum(one.reference[name]["counts"]) for name in ("tokens", "unknown", "score")} == {rows}
        assert sum(one.reference["labels"].values()) == rows
        assert 0 < one.facts["abstain"] <= 1
    assert made[0].reference["tokens"] == made[1].reference["tokens"]


def test_quantizing_twice_is_refused(student: Path, int8: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "artifact").symlink_to(student / "artifact-int8")
    with pytest.raises(UserError) as error:
        quantize.run(settings(student.parent).recipe, quantize.store_of(student), tmp_path, tmp_path / "out")
    assert error.value.code == "already_quantized"


def test_failed_quantization_leaves_nothing(student: Path, tmp_path: Path) -> None:
    recipe = settings(student.parent).recipe
    with pytest.raises(UserError):
        quantize.run(recipe, tmp_path / "no-store", student, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_scores_a_file_through_the_serving_path(teacher: Path) -> None:
    data, made = settings(teacher.parent).recipe.data, artifact.read(teacher / "artifact")
    scored = score.run(teacher / "artifact", score.settings(made, {"data.path": data.test}))
    assert scored["scores"]["accuracy"] == made.metrics["test"]["accuracy"]
    assert (scored["rows"], scored["bad_rows"]) == (20, 0)
    kept = scores.read(Run(teacher).scores("test"))
    assert kept is not None
    same = ("scores", "intervals", "slices", "tables", "headline", "rows")
    # Not to the last bit: the file's rows are batched otherwise than in the run's evaluation, and what that leaves
    # equal depends on the processor's kernels.
    found, expected = ({name: document[name] for name in same} for document in (scored, kept))
    one, other = leaves(found), leaves(expected)
    floats = {path for path, value in other.items() if isinstance(value, float)}
    assert {path: value for path, value in one.items() if path not in floats} == {
        path: value for path, value in other.items() if path not in floats
    }
    apart = {path: (one[path], other[path]) for path in floats if one[path] != pytest.approx(other[path], 1e-5, 1e-7)}
    assert apart == {}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """A nested document as its values by path."""
    if isinstance(value, dict):
        pairs = [(str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(place), inner) for place, inner in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, inner in pairs for name, leaf in leaves(inner, f"{path}/{key}").items()}
