"""A teacher's answers: CPUs of its tasks, and files after failures. Without Ray."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import data as ray_data

from rtrain import config
from rtrain.compress import teacher
from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, Head
from rtrain.data.store.store import Store
from rtrain.inference import artifact, predictor, score
from rtrain.models import vocab_trimming
from tests.conftest import labelled_rows, write_rows
from tests.support.reports import settings
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(settings(tmp_path, labelled_rows(60)).recipe, tmp_path / "encoder", tmp_path)


def left(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if "teacher" in path.name)


def test_a_teacher_s_process_reserves_the_core_that_it_uses() -> None:
    """A private Ray on two cores says that it has six; a cluster's nodes have as many as they say."""
    assert teacher.logical_cpus([6.0], cores=2) == 3.0
    assert teacher.logical_cpus([2.0], cores=2) == 1.0
    assert teacher.logical_cpus([0.5], cores=2) == 1.0
    # A driver of two cores on a head that gives none, and nodes of 64: 32 for each process, before.
    assert teacher.logical_cpus([0.0, 64.0, 64.0], cores=2) == 1.0
    assert teacher.logical_cpus([2.0, 64.0], cores=2) == 1.0


def test_nothing_is_left_of_answers_that_could_not_be_carried_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(store.teacher_file("v1"), np.zeros((store.num_rows("train"), 3), dtype=np.float32))
    before = left(store)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        teacher.copy_answers(store, store, "v1")
    assert left(store) == before


def test_answers_that_do_not_fit_on_the_disk_are_refused_before_they_are_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(store.teacher_file("v1"), np.zeros((store.num_rows("train"), 3), dtype=np.float32))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError) as error:
        teacher.copy_answers(store, store, "v1")
    assert error.value.code == "disk_full"
    assert left(store) == ["teacher-v1.npy"]


def test_what_a_killed_process_has_left_goes_with_the_next_one(store: Store) -> None:
    np.save(store.teacher_file("v1"), np.zeros((store.num_rows("train"), 3), dtype=np.float32))
    lines = (
        "import os, sys, signal; from pathlib import Path",
        "from rtrain.compress import teacher; from rtrain.data.store.store import Store",
        "os.posix_fallocate = lambda *given: os.kill(os.getpid(), signal.SIGKILL)",
        "store = Store(Path(sys.argv[1])); teacher.copy_answers(store, store, 'v1')",
    )
    killed = subprocess.run([sys.executable, "-c", "\n".join(lines), str(store.folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(left(store)) == 2
    teacher.copy_answers(store, store, "v1")
    assert left(store) == ["teacher-v1.npy"]


def test_answers_are_those_of_whole_precision(store: Store, tmp_path: Path) -> None:
    """They are kept under the teacher's version alone: those for a student in bf16 were taken for one in fp32 too."""
    folder = make_task_artifact(tmp_path / "teacher", "classification", store.manifest.head)
    rows = np.arange(store.num_rows("train"))
    result = teacher.answer_rows({"id": rows}, store.folder, folder)
    expected = score.predict_split(predictor.Predictor.load(folder), store, "train", result["position"]).outputs
    assert np.abs(np.stack([row.reshape(-1) for row in result["logits"]]) - np.stack(expected)).max() <= 1e-5


@pytest.mark.parametrize("labels", [("login", "parcels", "refund"), ("login", "parcel"), ("refund", "parcel", "login")])
def test_rows_with_other_labels_than_the_teacher_s_are_refused(
    store: Store, tmp_path: Path, labels: tuple[str, ...]
) -> None:
    created = artifact.Artifact("a", "classification", labels, 16, "torch")
    with pytest.raises(UserError) as error:
        teacher.answer_with_teacher(
            teacher.TeacherQuery(tmp_path, created, True), store, tmp_path, lambda weights: store
        )
    assert error.value.code == "label_mismatch"


def test_a_teacher_s_numbers_are_kept_on_the_scale_of_the_student_s_rows(tmp_path: Path) -> None:
    """Its 0 was learned as the mean of the student's rows, and its 1 as their spread."""
    rows = [(text, str(50 + 20 * place)) for place, text in enumerate(CORPUS)]
    arguments = {"data.path": str(write_rows(tmp_path / "rows.csv", rows)), "task": "regression", "data.valid_share": 0}
    encoder = make_encoder(tmp_path / "encoder")
    store = make_store(
        config.load_config("intent", {**arguments, "model.name": str(encoder)}).recipe, encoder, tmp_path
    )
    values, every = store.manifest.head, np.arange(store.num_rows("train"))
    assert values.facts["std"] > 10
    for place, facts in enumerate((values.facts, {**values.facts, "mean": 3.0, "std": 1.0})):
        folder = make_task_artifact(tmp_path / f"teacher{place}", "regression", Head(values.labels, facts))
        result = teacher.answer_rows({"id": every}, store.folder, folder)
        outputs = score.predict_split(predictor.Predictor.load(folder), store, "train", result["position"]).outputs
        messages = np.stack(outputs).ravel() * facts["std"] + facts["mean"]
        learned = np.concatenate([row.ravel() for row in result["logits"]]) * values.facts["std"] + values.facts["mean"]
        assert np.abs(learned - messages).max() <= 1e-3
        assert learned.std() > 0


def test_a_teacher_s_tags_are_carried_over_by_their_words(tmp_path: Path) -> None:
    """A student whose vocabulary is smaller has other tokens, and as many words."""
    path = tmp_path / "rows.conll"
    texts = [f"{text} {more}" for more in ("now", "please", "today") for text in CORPUS]
    rows = ["\n".join(f"{word} {'B-X' if len(word) > 5 else 'O'}" for word in text.split()) for text in texts]
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    encoder = make_encoder(tmp_path / "encoder")
    arguments = {"data.path": str(path), "data.max_tokens": 24, "data.stride": 8, "model.name": str(encoder)}
    recipe = config.load_config("entities", arguments).recipe
    full = make_store(recipe, encoder, tmp_path)
    cut = vocab_trimming.trim(encoder, vocab_trimming.select_folder_ids(encoder, []), tmp_path / "cut")
    store = make_store(recipe, cut, tmp_path)
    assert store.manifest.tokens["train"] > full.manifest.tokens["train"]
    samples = np.random.default_rng(0).normal(size=(full.manifest.tokens["train"], 2)).astype(np.float32)
    np.save(full.teacher_file("v1"), samples)
    teacher.copy_answers(full, store, "v1", by_word=True)
    places = np.argsort(full.column("train", "row_id"))
    for place in range(0, store.num_rows("train"), 5):
        row = np.array([place])
        at = places[np.searchsorted(full.column("train", "row_id")[places], store.column("train", "row_id")[row])]
        result, expected = store.teacher_logits("v1", row), full.teacher_logits("v1", at)
        mine, theirs = (item.targets("train", rows).values != IGNORE_INDEX for item, rows in ((store, row), (full, at)))
        assert mine.sum() == theirs.sum() > 1
        assert np.array_equal(result[mine], expected[theirs])


def test_a_trimmed_student_s_teacher_is_asked_for_the_rows_as_it_reads_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it has answered already where another student has learned from it, and reads no word in characters."""
    folder = make_task_artifact(tmp_path / "teacher", "classification", store.manifest.head)
    encoder = tmp_path / "encoder"
    cut = vocab_trimming.trim(encoder, vocab_trimming.select_folder_ids(encoder, []), tmp_path / "cut")
    small = make_store(settings(tmp_path, labelled_rows(60)).recipe, cut, tmp_path)
    created = artifact.read_artifact(folder)
    np.save(store.teacher_file(created.version), np.ones((store.num_rows("train"), 3), dtype=np.float32))
    monkeypatch.setattr(ray_data, "range", None)  # nobody is asked
    teacher.answer_with_teacher(teacher.TeacherQuery(folder, created, True), small, cut, lambda other: store)
    assert small.open_teacher_logits(created.version).tolist() == [[1.0, 1.0, 1.0]] * small.num_rows("train")
