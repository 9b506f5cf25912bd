"""Several teachers: their outputs have a mean, or are refused by name; a student of several is another student."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain import config as configuration
from rtrain.compress import distill, teacher as answers
from rtrain.config import Config
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.runs import run_folders
from tests.conftest import labelled_rows
from tests.support import reports
from tests.support.tiny import make_store, make_task_artifact

LABELS = ("invoice", "parcel", "password")


def run_of(folder: Path, seed: int, task: str = "classification", head: Head | None = None) -> Run:
    """A finished run; only its artifact matters."""
    run = Run(folder / f"{task}-{seed}")
    run_folders.write_frozen_config(run, reports.settings(folder, labelled_rows(60)))
    make_task_artifact(run.artifact, task, head or Head(LABELS), seed=seed)
    return run


def settings(folder: Path, *teachers: Run | Path, **more: Any) -> Config:
    keywords = {"distill.layers": 1, "distill.teachers": [str(teacher) for teacher in teachers], **more}
    return configuration.with_overrides(reports.settings(folder, labelled_rows(60)), keywords)


def test_a_student_of_several_teachers_is_another_student(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, seed) for seed in range(3)]
    teacher = distill.Teacher.load(runs[0].artifact)
    single, two, three = (
        distill.derive_student_config(settings(tmp_path, *runs[1:many]), teacher, tmp_path).recipe for many in (1, 2, 3)
    )
    versions = [artifact.read_artifact(run.artifact).version for run in runs]
    assert (three.distill.teacher, list(three.distill.co_teachers)) == (versions[0], versions[1:])
    assert len({recipe.recipe_digest() for recipe in (single, two, three)}) == 3
    assert len({recipe.distill.teacher_logits_key for recipe in (single, two, three)}) == 3
    assert single.distill.teacher_logits_key == versions[0]
    assert "co_teachers" not in single.weight_settings()["distill"]  # older students have no such setting
    # Folders and order of the runs do not change the student.
    changed = run_of(tmp_path / "moved", 1)
    elsewhere = distill.derive_student_config(settings(tmp_path, changed), teacher, tmp_path).recipe
    assert elsewhere.recipe_digest() == two.recipe_digest()
    turned = distill.derive_student_config(settings(tmp_path, runs[2], runs[1]), teacher, tmp_path).recipe
    assert turned.distill.teacher_logits_key == three.distill.teacher_logits_key


def test_the_mean_of_all_outputs_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(reports.settings(tmp_path, labelled_rows(60)).recipe, tmp_path / "encoder", tmp_path)
    runs = [run_of(tmp_path, seed, head=store.manifest.head) for seed in range(3)]
    inputs = [answers.TeacherQuery(run.artifact, artifact.read_artifact(run.artifact), True) for run in runs]
    samples = np.random.default_rng(0).normal(size=(3, store.num_rows("train"), 3)).astype(np.float32)
    for item, drawing in zip(inputs, samples, strict=True):
        np.save(store.teacher_file(item.metadata.version), drawing)
    monkeypatch.setattr(answers, "MEAN_CHUNK_ROWS", 7)
    answers.answer_with_all_teachers(inputs, "mean", store, tmp_path / "encoder", lambda other: store)
    remaining = store.open_teacher_logits("mean")
    assert np.allclose(remaining, samples.mean(axis=0), atol=1e-6)
    # It is the geometric mean of the softened answers, at any temperature.
    for temperature in (0.5, 2.0):
        softened = torch.log_softmax(torch.from_numpy(samples) / temperature, dim=-1).mean(dim=0)
        mean = torch.softmax(torch.from_numpy(np.array(remaining)) / temperature, dim=-1)
        assert torch.allclose(torch.softmax(softened, dim=-1), mean, atol=1e-5)


TEACHER = Head(LABELS)
NUMBER = Head(("score",), {"mean": 3.0, "std": 1.0})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (("classification", TEACHER), ("token_tags", Head(("O", "B-X")))),
        (("classification", TEACHER), ("classification", Head(LABELS[::-1]))),
        (("regression", NUMBER), ("regression", Head(("score",), {"mean": 4.0, "std": 1.0}))),  # another scale
    ],
)
def test_models_whose_outputs_have_no_mean_are_refused(
    tmp_path: Path, first: tuple[str, Head], other: tuple[str, Head]
) -> None:
    teacher = distill.Teacher.load(run_of(tmp_path, 0, *first).artifact)
    with pytest.raises(ConfigError) as error:
        distill.load_co_teachers(settings(tmp_path, run_of(tmp_path, 1, *other)), teacher)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("distill.teachers", "model_mismatch")
    ]


def test_a_teacher_is_named_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, 0)
    with pytest.raises(ConfigError) as error:
        distill.load_co_teachers(settings(tmp_path, run), distill.Teacher.load(run.artifact))
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("distill.teachers", "duplicate_name")
    ]


def test_paths_of_teachers_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    result = run_folders.resolve_paths(settings(tmp_path, Path(run.folder.name)))
    assert result.recipe.distill.teachers == (str(run.folder),)
