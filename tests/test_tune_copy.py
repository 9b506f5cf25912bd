"""The copy of a search at `cluster.storage`, and what comes back of it where the search's folder is lost."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.checkpoint.remote_copy import Lost, Replica
from rtrain.config import Config
from rtrain.core.errors import TryAgain, UserError
from rtrain.core.ragged import Ragged
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from rtrain.trainer import rung_predictions
from tests.searches import make_search, settings
from tune import holdout_scores, student_costs, trainable
from tune.history import Journal, read_journal
from tune.search_log import Record

SCORES = [0.5, 0.6, 0.7, 0.8]


def stored(folder: Path) -> Config:
    return settings(folder, len(SCORES), **{"cluster.storage": (folder / "mounted").as_uri()})


def copied(folder: Path, ended: bool = True) -> Run:
    """A search with a copy, and copies of all its trials but the last."""
    storage: dict[str, Any] = {"cluster.storage": (folder / "mounted").as_uri()}
    made = make_search(folder, SCORES, ended=ended, **storage)
    (made.folder / student_costs.NAME).write_text("{}")  # of a search over students: measured once, on one machine
    for number in range(len(SCORES) - 1):
        run = made.trial(number)
        run.append("claimed", token="its")
        copy = Replica((folder / "mounted" / "search").as_uri(), run.name, ("its",))
        copy.push(run.folder, [])
        if run.last("finished"):
            (run.folder / "artifact").mkdir()
            (run.folder / "artifact" / "MANIFEST.json").write_text("{}")
            copy.push_artifact(run.folder)
    Record(made, None, stored(folder).deploy.cluster).finish_copy()
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ended", [False, True])
def test_a_search_whose_folder_is_lost_comes_back_with_its_journal_and_trials(ended: bool, tmp_path: Path) -> None:
    made = copied(tmp_path, ended=ended)
    known, share = Journal(made.trials).history, stored(tmp_path).deploy.tune.held_back
    answers = holdout_scores.every(made, known, share, 1)
    # Scores by slice are a report's; trial 3 has no copy.
    before = {name: held for name, held in files_of(made.folder).items() if not re.search("scores-|trial-003", name)}
    shutil.rmtree(made.folder)
    with trainable.held(stored(tmp_path), made.folder, "resume", None) as (_, task):
        back = Run(task.search)
        assert Journal(back.trials).history == known
        found = files_of(back.folder)
        assert {name: found[name] for name in before} == before
        assert set(found) - set(before) == {"lock"}
        assert [event["kind"] for event in back.events()] == [event["kind"] for event in made.events()]
        again = holdout_scores.every(back, known, share, 1)
        assert again.keys() == {run for run in answers if run.of != 3}
        for run, one in again.items():
            assert (one.score, one.ids.tolist()) == (answers[run].score, answers[run].ids.tolist())


def test_what_is_written_after_it_came_back_goes_to_the_copy_and_the_machine_before_is_refused(tmp_path: Path) -> None:
    made = copied(tmp_path, ended=False)
    first = Record(made, None, stored(tmp_path).deploy.cluster)
    first.write("stopped", why="time")
    away = made.folder.rename(tmp_path / "elsewhere")  # the other machine still has it, and its process lives
    with trainable.held(stored(tmp_path), tmp_path / "search", "resume", None) as (_, task):
        second = Record(Run(task.search), None, stored(tmp_path).deploy.cluster)
        assert second.history.stopped == "time"
        second.write("ending")
    made.folder.rename(tmp_path / "second")
    away.rename(made.folder)
    with pytest.raises(Lost):
        first.write("ending")
    shutil.rmtree(made.folder)
    with trainable.held(stored(tmp_path), tmp_path / "search", "resume", None) as (_, task):
        assert [event["kind"] for event in read_journal(Run(task.search).trials)][-2:] == ["stopped", "ending"]


def test_a_storage_that_is_away_is_told_of_once_and_given_all_when_it_is_back(tmp_path: Path) -> None:
    made, told = make_search(tmp_path, SCORES, ended=False), list[dict[str, Any]]()
    mounted = tmp_path / "mounted"
    mounted.touch()  # whatever is asked of a storage below it fails
    record = Record(made, told.append, stored(tmp_path).deploy.cluster)
    for why in ("a", "b"):
        record.write("stopped", why=why)
    with pytest.raises(TryAgain) as raised:
        record.finish_copy()
    assert raised.value.code == "unreachable"
    assert [event["kind"] for event in told] == ["uncopied", "search", "search"]
    mounted.unlink()
    record.write("ending")
    record.finish_copy()
    shutil.rmtree(made.folder)
    with trainable.held(stored(tmp_path), made.folder, "resume", None) as (_, task):
        assert [event["kind"] for event in read_journal(Run(task.search).trials)][-3:] == [
            "stopped",
            "stopped",
            "ending",
        ]
    mounted.rename(tmp_path / "away")
    mounted.touch()
    record.write("reopened", budget={})
    assert [event["kind"] for event in told][-2:] == ["uncopied", "search"]


@pytest.mark.parametrize("reuse", ["refuse", "new"])
def test_a_new_search_under_the_name_of_one_in_the_storage_is_refused(reuse: run_folders.Reuse, tmp_path: Path) -> None:
    shutil.rmtree(copied(tmp_path).folder)
    with pytest.raises(UserError), trainable.held(stored(tmp_path), tmp_path / "search", reuse, None):
        pass


def test_a_rung_s_answers_come_back_with_a_trial(tmp_path: Path) -> None:
    made = copied(tmp_path, ended=False)
    kept = Ragged.even(np.arange(12, dtype=np.float32).reshape(6, 2))
    rung_predictions.keep(made.trial(0), 10, kept)
    Replica((tmp_path / "mounted" / "search").as_uri(), "trial-000", ("its",)).push(made.trial(0).folder, [])
    shutil.rmtree(made.folder)
    with trainable.held(stored(tmp_path), made.folder, "resume", None) as (_, task):
        back = rung_predictions.read(Run(task.search).trial(0), 10)
    assert back is not None
    assert (back.values.tolist(), back.counts.tolist()) == (kept.values.tolist(), kept.counts.tolist())
