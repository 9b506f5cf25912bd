"""Regression: scores in standard deviations, metrics against scikit-learn, and rows without a score."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from rtrain import config
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, RaggedArray, TokenBatch, single_window_batch
from rtrain.data.store.store import Store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import registry
from rtrain.tasks import base
from rtrain.tasks.regression import Regression
from serve.app import build_app
from tests.conftest import labelled_rows
from tests.support.causes import caused_by
from tests.support.serving import call
from tests.support.tiny import make_encoder, make_store, make_task_artifact

TASK = Regression()
GRADES = Head(("score",), {"mean": 5.0, "std": 2.0, "lowest": 1.0, "highest": 9.0, "step": 0.5})


def batch(targets: list[float], teacher: list[list[float]] | None = None) -> TokenBatch:
    one_per_row = np.ones(len(targets), dtype=np.int32)
    answers = None if teacher is None else np.array(teacher, dtype=np.float32)
    return single_window_batch(
        one_per_row, one_per_row, one_per_row, np.array(targets), np.arange(len(targets), dtype=np.uint64), answers
    )


@pytest.mark.parametrize("label", ["seven", "", "nan", "inf", "-inf", "1,5", "0x10", "1_000"])
def test_a_score_that_is_no_number_is_named(label: str) -> None:
    assert TASK.validate_row("text", None, label)


@pytest.mark.parametrize("label", ["7", "-1.5", " 6.5 ", "1e3"])
def test_numbers_of_any_form_are_scores(label: str) -> None:
    assert TASK.validate_row("text", None, label) is None


def test_the_head_has_the_mean_and_the_deviation_of_all_training_rows() -> None:
    head = TASK.build_head({"1": 3, "4": 1, "4.0": 2, "2.5": 2})
    scores = [1, 1, 1, 4, 4, 4, 2.5, 2.5]
    assert head.labels == ("score",)
    assert head.facts["mean"] == pytest.approx(np.mean(scores), rel=1e-12)
    assert head.facts["std"] == pytest.approx(np.std(scores), rel=1e-12)
    assert (head.facts["lowest"], head.facts["highest"], head.facts["step"]) == (1.0, 4.0, 1.5)


@pytest.mark.parametrize(
    ("scores", "step"), [([1, 2, 4], 1.0), ([1, 1.5, 9], 0.5), ([0.1, 0.25, 0.72], None), ([0, 1, 200], None)]
)
def test_grades_are_told_from_other_numbers(scores: list[float], step: float | None) -> None:
    head = TASK.build_head({str(value): 1 for value in scores}).facts["step"]
    assert head == (None if step is None else pytest.approx(step))


@pytest.mark.parametrize("steps", [3, 5, 6, 20])
@pytest.mark.parametrize("width", [np.float32, np.float64])
def test_a_scale_of_fractions_is_one_however_they_are_rounded(steps: int, width: type[np.floating[Any]]) -> None:
    """Parquet keeps a fifth as 0.2 or as 0.20000000298."""
    grades = [float(width(place / steps)) for place in range(steps + 1)]
    head = TASK.build_head({str(grade): 1 for grade in grades})
    assert head.facts["step"] == pytest.approx(1 / steps)
    true = TASK.build_targets([str(grade) for grade in grades], None, head).values
    assert registry.METRICS["number"].main_scores(true, true, head)["qwk"] == 1


def test_one_score_for_all_rows_is_refused() -> None:
    with pytest.raises(UserError, check=caused_by("one_label")):
        TASK.build_head({"3": 5, "3.0": 1})


@pytest.mark.parametrize(("first", "step"), [(1.7e9, 1), (1e6, 0.1), (-2e7, 1)])
def test_scores_that_float32_cannot_tell_apart_are_refused(first: float, step: float) -> None:
    """A hundred Unix times would be two targets."""
    values = [first + step * number for number in range(100)]
    with pytest.raises(UserError, check=caused_by("scores_too_close")):
        TASK.build_head({str(value): 1 for value in values})
    TASK.build_head({str(value - first): 1 for value in values})
    TASK.build_head({str(value): 1 for value in [*values, first / 2]})  # beside that spread such steps do not count


def test_the_loss_is_the_squared_error_in_standard_deviations() -> None:
    # Targets 5, 9, 1 are 0, 2, -2 standard deviations from the mean.
    logits = torch.tensor([[1.0], [2.5], [-2.0]], dtype=torch.float64)
    rows = batch([5, 9, 1])
    assert TASK.loss(logits, rows, GRADES)["loss"].item() == pytest.approx(1 + 0.25 + 0)
    assert TASK.count_targets(rows, GRADES) == {"loss": 3}


def test_a_student_learns_its_teacher_s_numbers() -> None:
    rows = batch([5, 9], teacher=[[0.5], [1.0]])
    logits = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    assert TASK.distillation_loss(logits, rows, GRADES, 7.0)["loss"].item() == pytest.approx(0.25 + 4.0)


def scores_of(predicted: list[float], true: list[float], head: Head = GRADES) -> dict[str, float]:
    return registry.METRICS["number"].main_scores(
        RaggedArray.from_matrix(np.array(predicted)), RaggedArray.from_matrix(np.array(true)), head
    )


def test_constant_answers_have_scores_too() -> None:
    scores = scores_of([5, 5], [4, 6])
    assert (scores["pearson"], scores["r2"], scores["qwk"], scores["neg_rmse"]) == (0, 0, 0, -1)
    assert all(math.isfinite(value) for value in [*scores.values(), *scores_of([], []).values()])


# ------------------------------------------------------------------------------------------------------- the whole way


def write(folder: Path, rows: int = 300) -> Path:
    """Rows whose score is the number of words; of thirty, one has none, and one says so in a word."""
    lines = []
    for number, (text, label) in enumerate(labelled_rows(rows)):
        overrides = "" if number % 30 == 7 else "high" if number % 30 == 8 else str(len(text.split()))
        lines.append(f"{text},{overrides},{label},question {number % 2}")
    path = folder / "essays.csv"
    path.write_text("essay,score,kind,prompt\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def store_and_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("essays")
    settings = {"data.path": str(write(folder)), "data.slices": ["kind", "prompt"], "data.max_tokens": 64}
    recipe = config.load_config("essay", settings).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder), folder


def test_rows_without_a_score_are_counted_and_named(store_and_encoder: tuple[Store, Path]) -> None:
    store, _ = store_and_encoder
    assert store.manifest.quarantined == 20
    assert sum(store.manifest.rows.values()) == 280
    reasons = pyarrow.parquet.read_table(store.folder / "quarantine.parquet")["reason"].to_pylist()
    assert [reasons.count(reason) for reason in set(reasons)] == [10, 10]


def test_an_artefact_answers_with_numbers_over_http_and_in_a_file(tmp_path: Path) -> None:
    folder = make_task_artifact(tmp_path / "artifact", "regression", GRADES)
    predictor = Predictor.load(folder, threads=1)
    inputs: list[base.Input] = [{"text": "where is my parcel", "text_pair": "it was due"}, "money back"]
    app = build_app(predictor, config.ServeConfig())
    reply = call(app, "POST", "/predict", json={"inputs": inputs})
    assert reply.status_code == 200
    assert reply.json() == pytest.approx(predictor(inputs), abs=1e-5)
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["money back"]}
    reply = call(app, "POST", "/v2/models/tiny/infer", json={"inputs": [tensor]})
    [output] = reply.json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [1])
    assert output["data"] == pytest.approx(predictor(["money back"]), abs=1e-5)
    scored = score.score_file(folder, config.load_config("essay", {"data.path": str(write(tmp_path))}).recipe.data)
    assert (scored["rows"], scored["bad_rows"]) == (280, 20)
