"""The remote copy of a search at `cluster.storage`, and the restore of a lost folder."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.checkpoint.remote_copy import RemoteCopy, RunTakenOverError
from rtrain.config import Config
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from rtrain.trainer import evaluate
from tests.support.searches import make_search, settings
from tune import holdout_scores, students, trainable
from tune.history import Journal, read_journal
from tune.search_log import SearchLog

SCORES = [0.5, 0.6, 0.7, 0.8]


def stored_config(folder: Path) -> Config:
    return settings(folder, len(SCORES), **{"cluster.storage": (folder / "mounted").as_uri()})


def duplicate(folder: Path, ended: bool = True) -> Run:
    """A search with a copy, and copies of all its trials but the last."""
    storage: dict[str, Any] = {"cluster.storage": (folder / "mounted").as_uri()}
    instance = make_search(folder, SCORES, ended=ended, **storage)
    (instance.folder / students.FILE_NAME).write_text("{}")  # of a search over students: measured once, on one machine
    for number in range(len(SCORES) - 1):
        run = instance.trial(number)
        run.append_event("storage_claimed", token="its")
        copy = RemoteCopy((folder / "mounted" / "search").as_uri(), run.name, ("its",))
        copy.push(run.folder, [])
        if run.last_event("finished"):
            (run.folder / "artifact").mkdir()
            (run.folder / "artifact" / "MANIFEST.json").write_text("{}")
            copy.push_artifact(run.folder)
    SearchLog(instance, None, stored_config(folder).deploy.cluster).complete_copy()
    return instance


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ended", [False, True])
def test_a_search_whose_folder_is_lost_comes_back_with_its_journal_and_trials(ended: bool, tmp_path: Path) -> None:
    instance = duplicate(tmp_path, ended=ended)
    history, share = Journal(instance.trials).history, stored_config(tmp_path).deploy.tune.holdout_fraction
    answers = holdout_scores.collect_holdout_scores(instance, history, share, 1)
    # Scores by slice are a report's; trial 3 has no copy.
    before = {
        name: value for name, value in files_of(instance.folder).items() if not re.search("scores-|trial-003", name)
    }
    shutil.rmtree(instance.folder)
    with trainable.open_search(stored_config(tmp_path), instance.folder, "resume", None) as (_, task):
        restored = Run(task.search)
        assert Journal(restored.trials).history == history
        result = files_of(restored.folder)
        assert {name: result[name] for name in before} == before
        assert set(result) - set(before) == {"lock"}
        assert [event["kind"] for event in restored.events()] == [event["kind"] for event in instance.events()]
        repeat = holdout_scores.collect_holdout_scores(restored, history, share, 1)
        assert repeat.keys() == {run for run in answers if run.trial != 3}
        for run, item in repeat.items():
            assert (item.score, item.row_ids.tolist()) == (answers[run].score, answers[run].row_ids.tolist())


def test_what_is_written_after_it_came_back_goes_to_the_copy_and_the_machine_before_is_refused(tmp_path: Path) -> None:
    instance = duplicate(tmp_path, ended=False)
    first = SearchLog(instance, None, stored_config(tmp_path).deploy.cluster)
    first.write("stopped", reason="time")
    distance = instance.folder.rename(tmp_path / "elsewhere")  # the other machine still has the folder and its process
    with trainable.open_search(stored_config(tmp_path), tmp_path / "search", "resume", None) as (_, task):
        second = SearchLog(Run(task.search), None, stored_config(tmp_path).deploy.cluster)
        assert second.history.stop_reason == "time"
        second.write("finals_started")
    instance.folder.rename(tmp_path / "second")
    distance.rename(instance.folder)
    with pytest.raises(RunTakenOverError):
        first.write("finals_started")
    shutil.rmtree(instance.folder)
    with trainable.open_search(stored_config(tmp_path), tmp_path / "search", "resume", None) as (_, task):
        assert [event["kind"] for event in read_journal(Run(task.search).trials)][-2:] == ["stopped", "finals_started"]


def test_a_storage_that_is_away_is_told_of_once_and_given_all_when_it_is_back(tmp_path: Path) -> None:
    instance, messages = make_search(tmp_path, SCORES, ended=False), list[dict[str, Any]]()
    mounted = tmp_path / "mounted"
    mounted.touch()  # whatever is asked of a storage below it fails
    record = SearchLog(instance, messages.append, stored_config(tmp_path).deploy.cluster)
    for why in ("a", "b"):
        record.write("stopped", reason=why)
    with pytest.raises(TemporaryFailureError) as raised:
        record.complete_copy()
    assert raised.value.code == "unreachable"
    assert [event["kind"] for event in messages] == ["remote_copy_incomplete", "search", "search"]
    mounted.unlink()
    record.write("finals_started")
    record.complete_copy()
    shutil.rmtree(instance.folder)
    with trainable.open_search(stored_config(tmp_path), instance.folder, "resume", None) as (_, task):
        assert [event["kind"] for event in read_journal(Run(task.search).trials)][-3:] == [
            "stopped",
            "stopped",
            "finals_started",
        ]
    mounted.rename(tmp_path / "away")
    mounted.touch()
    record.write("reopened", budget={})
    assert [event["kind"] for event in messages][-2:] == ["remote_copy_incomplete", "search"]


@pytest.mark.parametrize("reuse", ["refuse", "new"])
def test_a_new_search_under_the_name_of_one_in_the_storage_is_refused(reuse: run_folders.Reuse, tmp_path: Path) -> None:
    shutil.rmtree(duplicate(tmp_path).folder)
    with pytest.raises(UserError), trainable.open_search(stored_config(tmp_path), tmp_path / "search", reuse, None):
        pass


def test_a_rung_s_answers_come_back_with_a_trial(tmp_path: Path) -> None:
    instance = duplicate(tmp_path, ended=False)
    remaining = RaggedArray.from_matrix(np.arange(12, dtype=np.float32).reshape(6, 2))
    evaluate.write_rung(instance.trial(0), 10, remaining)
    RemoteCopy((tmp_path / "mounted" / "search").as_uri(), "trial-000", ("its",)).push(instance.trial(0).folder, [])
    shutil.rmtree(instance.folder)
    with trainable.open_search(stored_config(tmp_path), instance.folder, "resume", None) as (_, task):
        restored = evaluate.read_rung(Run(task.search).trial(0), 10)
    assert restored is not None
    assert (restored.values.tolist(), restored.counts.tolist()) == (
        remaining.values.tolist(),
        remaining.counts.tolist(),
    )
