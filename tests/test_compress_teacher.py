"""A teacher's answers: what its tasks reserve, and what is left of them where they fail. Without Ray."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import predict, score
from rtrain.compress import teacher
from rtrain.data.stores.store import Store
from rtrain.errors import UserError
from tests.conftest import labelled_rows
from tests.reports import settings
from tests.tiny import make_store, make_task_artifact


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
    np.save(store.teacher_file("v1"), np.zeros((store.rows("train"), 3), dtype=np.float32))
    before = left(store)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        teacher.carry(store, store, "v1")
    assert left(store) == before


def test_answers_that_do_not_fit_on_the_disk_are_refused_before_they_are_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(store.teacher_file("v1"), np.zeros((store.rows("train"), 3), dtype=np.float32))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"the teacher's answers take 0 MB, and .* has no room"):
        teacher.carry(store, store, "v1")
    assert left(store) == ["teacher-v1.npy"]


def test_what_a_killed_process_has_left_goes_with_the_next_one(store: Store) -> None:
    np.save(store.teacher_file("v1"), np.zeros((store.rows("train"), 3), dtype=np.float32))
    lines = (
        "import os, sys, signal; from pathlib import Path; from rtrain.compress import teacher",
        "with teacher._written(Path(sys.argv[1]), (4, 3)): os.kill(os.getpid(), signal.SIGKILL)",
    )
    killed = subprocess.run([sys.executable, "-c", "\n".join(lines), str(store.teacher_file("v1"))], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(left(store)) == 2
    teacher.carry(store, store, "v1")
    assert left(store) == ["teacher-v1.npy"]


def test_answers_are_those_of_whole_precision(store: Store, tmp_path: Path) -> None:
    """They are kept under the teacher's version alone: those for a student in bf16 were taken for one in fp32 too."""
    folder = make_task_artifact(tmp_path / "teacher", "classification", store.manifest.head)
    rows = np.arange(store.rows("train"))
    found = teacher._answer({"id": rows}, store.folder, folder)
    expected = score.on_split(predict.Predictor.load(folder), store, "train", found["position"]).outputs
    assert np.abs(np.stack([row.reshape(-1) for row in found["logits"]]) - np.stack(expected)).max() <= 1e-5
