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
from rtrain.core.ragged import Head, Ragged, Tokens, single
from rtrain.data.store.store import Store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import registry
from rtrain.tasks import base
from rtrain.tasks.regression import Regression
from serve.app import build_app
from tests.causes import caused_by
from tests.conftest import labelled_rows
from tests.serving import call
from tests.tiny import make_encoder, make_store, make_task_artifact

TASK = Regression()
GRADES = Head(("score",), {"mean": 5.0, "std": 2.0, "lowest": 1.0, "highest": 9.0, "step": 0.5})


def batch(targets: list[float], teacher: list[list[float]] | None = None) -> Tokens:
    ones = np.ones(len(targets), dtype=np.int32)
    answers = None if teacher is None else np.array(teacher, dtype=np.float32)
    return single(ones, ones, ones, np.array(targets), np.arange(len(targets), dtype=np.uint64), answers)


@pytest.mark.parametrize("label", ["seven", "", "nan", "inf", "-inf", "1,5", "0x10", "1_000"])
def test_a_score_that_is_no_number_is_named(label: str) -> None:
    assert TASK.flaw("text", None, label)


@pytest.mark.parametrize("label", ["7", "-1.5", " 6.5 ", "1e3"])
def test_numbers_of_any_form_are_scores(label: str) -> None:
    assert TASK.flaw("text", None, label) is None


def test_the_head_has_the_mean_and_the_deviation_of_all_training_rows() -> None:
    found = TASK.head({"1": 3, "4": 1, "4.0": 2, "2.5": 2})
    scores = [1, 1, 1, 4, 4, 4, 2.5, 2.5]
    assert found.labels == ("score",)
    assert found.facts["mean"] == pytest.approx(np.mean(scores), rel=1e-12)
    assert found.facts["std"] == pytest.approx(np.std(scores), rel=1e-12)
    assert (found.facts["lowest"], found.facts["highest"], found.facts["step"]) == (1.0, 4.0, 1.5)


@pytest.mark.parametrize(
    ("scores", "step"), [([1, 2, 4], 1.0), ([1, 1.5, 9], 0.5), ([0.1, 0.25, 0.72], None), ([0, 1, 200], None)]
)
def test_grades_are_told_from_other_numbers(scores: list[float], step: float | None) -> None:
    found = TASK.head({str(value): 1 for value in scores}).facts["step"]
    assert found == (None if step is None else pytest.approx(step))


@pytest.mark.parametrize("steps", [3, 5, 6, 20])
@pytest.mark.parametrize("width", [np.float32, np.float64])
def test_a_scale_of_fractions_is_one_however_they_are_rounded(steps: int, width: type[np.floating[Any]]) -> None:
    """Parquet keeps a fifth as 0.2 or as 0.20000000298."""
    grades = [float(width(place / steps)) for place in range(steps + 1)]
    head = TASK.head({str(grade): 1 for grade in grades})
    assert head.facts["step"] == pytest.approx(1 / steps)
    true = TASK.targets([str(grade) for grade in grades], None, head).values
    assert registry.METRICS["number"].scores(true, true, head)["qwk"] == 1


def test_one_score_for_all_rows_is_refused() -> None:
    with pytest.raises(UserError, check=caused_by("one_label")):
        TASK.head({"3": 5, "3.0": 1})


@pytest.mark.parametrize(("first", "step"), [(1.7e9, 1), (1e6, 0.1), (-2e7, 1)])
def test_scores_that_float32_cannot_tell_apart_are_refused(first: float, step: float) -> None:
    """A hundred Unix times would be two targets."""
    values = [first + step * number for number in range(100)]
    with pytest.raises(UserError, check=caused_by("too_close")):
        TASK.head({str(value): 1 for value in values})
    TASK.head({str(value - first): 1 for value in values})
    TASK.head({str(value): 1 for value in [*values, first / 2]})  # beside that spread such steps do not count


def test_the_loss_is_the_squared_error_in_standard_deviations() -> None:
    # Targets 5, 9, 1 are 0, 2, -2 standard deviations from the mean.
    logits = torch.tensor([[1.0], [2.5], [-2.0]], dtype=torch.float64)
    rows = batch([5, 9, 1])
    assert TASK.loss(logits, rows, GRADES)["loss"].item() == pytest.approx(1 + 0.25 + 0)
    assert TASK.counts(rows, GRADES) == {"loss": 3}


def test_a_student_learns_its_teacher_s_numbers() -> None:
    rows = batch([5, 9], teacher=[[0.5], [1.0]])
    logits = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    assert TASK.imitation(logits, rows, GRADES, 7.0)["loss"].item() == pytest.approx(0.25 + 4.0)


def scores_of(found: list[float], true: list[float], head: Head = GRADES) -> dict[str, float]:
    return registry.METRICS["number"].scores(Ragged.even(np.array(found)), Ragged.even(np.array(true)), head)


def test_constant_answers_have_scores_too() -> None:
    found = scores_of([5, 5], [4, 6])
    assert (found["pearson"], found["r2"], found["qwk"], found["neg_rmse"]) == (0, 0, 0, -1)
    assert all(math.isfinite(value) for value in [*found.values(), *scores_of([], []).values()])


# ------------------------------------------------------------------------------------------------------- the whole way


def write(folder: Path, rows: int = 300) -> Path:
    """Rows whose score is the number of words; of thirty, one has none, and one says so in a word."""
    lines = []
    for number, (text, label) in enumerate(labelled_rows(rows)):
        given = "" if number % 30 == 7 else "high" if number % 30 == 8 else str(len(text.split()))
        lines.append(f"{text},{given},{label},question {number % 2}")
    path = folder / "essays.csv"
    path.write_text("essay,score,kind,prompt\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("essays")
    settings = {"data.path": str(write(folder)), "data.slices": ["kind", "prompt"], "data.max_tokens": 64}
    recipe = config.load("essay", settings).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder), folder


def test_rows_without_a_score_are_counted_and_named(made: tuple[Store, Path]) -> None:
    store, _ = made
    assert store.manifest.quarantined == 20
    assert sum(store.manifest.rows.values()) == 280
    reasons = pyarrow.parquet.read_table(store.folder / "quarantine.parquet")["reason"].to_pylist()
    assert [reasons.count(reason) for reason in set(reasons)] == [10, 10]


def test_an_artefact_answers_with_numbers_over_http_and_in_a_file(tmp_path: Path) -> None:
    folder = make_task_artifact(tmp_path / "artifact", "regression", GRADES)
    predictor = Predictor.load(folder, threads=1)
    asked: list[base.Input] = [{"text": "where is my parcel", "text_pair": "it was due"}, "money back"]
    app = build_app(predictor, config.Serve())
    reply = call(app, "POST", "/predict", json={"inputs": asked})
    assert reply.status_code == 200
    assert reply.json() == pytest.approx(predictor(asked), abs=1e-5)
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["money back"]}
    reply = call(app, "POST", "/v2/models/tiny/infer", json={"inputs": [tensor]})
    [output] = reply.json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [1])
    assert output["data"] == pytest.approx(predictor(["money back"]), abs=1e-5)
    scored = score.run(folder, config.load("essay", {"data.path": str(write(tmp_path))}).recipe.data)
    assert (scored["rows"], scored["bad_rows"]) == (280, 20)
