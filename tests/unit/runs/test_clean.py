"""`rtrain clean`: removed parts, kept parts, and the state after a kill."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.core import atomic_write, events, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import html, summary
from rtrain.runs import run_folders
from rtrain.runs.store import clean, run_info, scan, table
from rtrain.runs.store.clean import Keep, Removal
from rtrain.runs.store.run_info import RunInfo
from rtrain.verification import verify
from tests.conftest import labelled_rows
from tests.support import stock
from tests.support.reports import answers_of, make_run, page_of, write_predictions
from tests.support.root import ROOT
from tests.support.tiny import make_artifact
from tests.unit.cli import test_cli

run = test_cli.run  # a fixture: the command line, in an empty folder
Cli = test_cli.Cli


def planned(folder: Path, keep: Keep) -> list[Removal]:
    return clean.plan_run_removal(known_of(folder), keep, scan.scan_surroundings(folder))


def planned_root(root: Path, keep: Keep, with_stores: bool = False) -> list[Removal]:
    return clean.plan_root_removal(scan.scan_folder(root), keep, with_stores=with_stores)


def resumes(run: Run) -> bool:
    return run_folders.choose_folder(run.folder, run_folders.load_config(run.folder), "resume")[0] == run.folder


def known_of(folder: Path) -> RunInfo:
    history = scan.scan_surroundings(folder).find(folder)
    assert history is not None
    return history


def gone(removals: list[Removal], root: Path) -> set[str]:
    return {part.path.relative_to(root).as_posix() for removed in removals for part in removed.items}


# ----------------------------------------------------------------------------------------------------------- one run


def test_artifact_keeps_all_that_is_finished(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a")
    (element.ray_storage / "attempt").mkdir(parents=True)
    (element.ray_storage / "attempt" / "state").write_bytes(b"r" * 100)
    (element.folder / "my-notes.md").write_text("mine")
    before = stock.names(element.folder)
    removals = planned(element.folder, "artifact")
    size = run_info.measure_bytes(element.checkpoints) + 100
    assert (size > 3 * stock.WEIGHTS, clean.remove_all(removals)) == (True, size)
    remaining = {name for name in before if not name.startswith(("checkpoints/", "ray/"))}
    assert {"my-notes.md", "config.yaml", "artifact/model.safetensors"} <= remaining
    assert stock.names(element.folder) == remaining | {"lock"}
    event = Run(element.folder).last_event("cleaned")
    assert event is not None
    assert (event["keep"], event["bytes"], event["removed"]) == ("artifact", size, ["ray", "checkpoints"])


def test_a_run_without_an_artefact_keeps_what_it_goes_on_from(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a", ended="interrupted")
    removals = planned(element.folder, "artifact")
    clean.remove_all(removals)
    assert {int(path.name[-8:]) for path in element.checkpoints.iterdir()} == {5, 10, 20}
    assert len(removals[0].kept_reasons) == 1
    assert Run(element.folder).last_event("cleaned") is None  # nothing was removed, so there is no event


def test_the_checkpoints_of_trials_go_once_the_winner_is_finished(tmp_path: Path) -> None:
    stock.search(tmp_path / "done")
    stock.search(tmp_path / "open", best=None)
    clean.remove_all(planned(tmp_path / "done", "artifact"))
    clean.remove_all(planned(tmp_path / "open", "artifact"))
    assert not list((tmp_path / "done").rglob("step-*"))
    assert not (tmp_path / "done" / "ray").exists()
    assert len(list((tmp_path / "open").rglob("step-*"))) == 6
    winner = Run(tmp_path / "done").winner
    assert winner is not None
    assert winner.is_finished


def test_leftovers_go_when_they_have_settled_and_the_only_artefact_never(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a", ended="interrupted")
    for name in (".artifact.0123abcd", ".artifact-int8.0123abcd", ".artifact-int8.89abcdef"):
        (element.folder / name).mkdir()
        (element.folder / name / "model.safetensors").write_bytes(b"d" * 10)
    (element.checkpoints / ".step-00000030.0123abcd").mkdir()
    stock.artifact(element.folder / ".artifact.old", "moved away, and its successor never came")
    for path in element.folder.rglob(".*"):
        stock.age(path)
    (element.folder / ".artifact-int8.89abcdef" / "model.safetensors").write_bytes(b"is being written")
    assert gone(planned(element.folder, "artifact"), element.folder) == {
        *(".artifact.0123abcd", ".artifact-int8.0123abcd", "checkpoints/.step-00000030.0123abcd")
    }


def test_a_link_in_place_of_checkpoints_is_left_alone(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a")
    element.checkpoints.rename(tmp_path / "elsewhere")
    element.checkpoints.symlink_to(tmp_path / "elsewhere")
    removals = planned(element.folder, "artifact")
    assert removals[0].kept_reasons
    clean.remove_all(removals)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3
    clean.remove_all(planned(element.folder, "none"))
    assert not element.folder.exists()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


def test_checkpoints_stay_while_the_artefact_is_damaged(tmp_path: Path) -> None:
    """A disk has changed a byte of it: the checkpoints may be the only good weights."""
    ended, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    (ended.artifact / "model.safetensors").write_bytes(b"A" * stock.WEIGHTS)
    removals = clean.verify_removals(planned_root(tmp_path / "runs", "artifact"))
    assert [(bool(removal.items), removal.is_unreadable) for removal in removals] == [(False, False), (True, False)]
    clean.remove_all(removals)
    assert (ended.checkpoints.exists(), other.checkpoints.exists()) == (True, False)


def test_it_goes_on_past_a_file_that_cannot_be_read(tmp_path: Path, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept with its dependencies and reported; the other removals are made."""
    unread, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    bad, full = unread.artifact / "model.safetensors", Path.open

    def failing(path: Path, *rest: Any, **options: Any) -> Any:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return full(path, *rest, **options)

    monkeypatch.setattr(Path, "open", failing)
    code, out, _ = run("clean", "runs", "--json")
    assert (code, [load["name"] for load in json.loads(out)["removed"] if load["kept_reasons"]]) == (1, ["a"])
    assert (unread.checkpoints.exists(), other.checkpoints.exists()) == (True, False)
    monkeypatch.undo()
    assert run("clean", tmp_path / "runs")[0] == 0
    assert not unread.checkpoints.exists()


def test_it_goes_on_past_what_cannot_be_removed(tmp_path: Path) -> None:
    holdout, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    removals = planned_root(tmp_path / "runs", "artifact")
    with run_folders.lock(holdout), pytest.raises(UserError):
        clean.remove_all(removals)
    assert (holdout.checkpoints.exists(), other.checkpoints.exists()) == (True, False)


def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a", ended=None)
    searched = stock.search(tmp_path / "s", best=None)
    with run_folders.lock(element), run_folders.lock(searched.trial(2)):
        for folder in (element.folder, searched.folder):
            assert ([part for item in planned(folder, "none") for part in item.items]) == []
        assert gone(planned_root(tmp_path, "none"), tmp_path) == set()
    removals = planned(element.folder, "none")
    with run_folders.lock(element), pytest.raises(UserError):
        clean.remove_all(removals)  # begun after it was planned
    assert element.config.is_file()


def test_a_whole_run_goes_without_what_is_not_rtrain_s(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    trial = searched.trial(0)
    names = ("best.yaml", "search.html", "trackers.json", ".stop_slots", "error-20260101-000000.txt", "config.draft")
    for path in (*(searched.folder / name for name in names), trial.profile(1)):
        path.write_text("rtrain's")
    (trial.folder / "wheels").mkdir()
    (trial.folder / "wheels" / "numpy-2-py3-none-any.whl").write_text("came with an import")
    (trial.folder / "rungs").mkdir()
    trial.rung_predictions(5).write_bytes(b"answers")
    (searched.folder / "notes.txt").write_text("mine")
    (trial.folder / "mine").mkdir()
    (trial.folder / "mine" / "rows.csv").write_text("mine")
    (searched.folder / "wheels").mkdir()
    (searched.folder / "wheels" / "spokes.csv").write_text("mine")
    [removed] = removals = planned(searched.folder, "none")
    stay = ("notes.txt", "wheels", "trial-000/mine")
    assert len(removed.kept_reasons) == len(stay)
    assert removed.size == run_info.measure_bytes(searched.folder) - len(stay) * len("mine")
    for _ in range(2):  # asked for again, it goes no further
        clean.remove_all(removals)
        assert stock.names(searched.folder) == {"notes.txt", "wheels/spokes.csv", "trial-000/mine/rows.csv"}
    assert not scan.scan_folder(tmp_path).runs


@pytest.mark.parametrize("place", ["link", "a/copy"])
def test_a_run_behind_a_link_or_in_another_run_is_no_reason_to_clean_all_runs(
    tmp_path: Path, run: Cli, place: str
) -> None:
    stock.make(tmp_path / "runs" / "a")
    stock.make(tmp_path / "runs" / "a" / "copy")
    stock.make(tmp_path / "elsewhere")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    before = stock.names(tmp_path)
    assert run("clean", f"runs/{place}", "--keep", "none", "--yes")[0] == 1
    assert stock.names(tmp_path) == before


# ------------------------------------------------------------------------------------------------- dependents


def test_a_run_goes_as_a_whole_unless_another_needs_it(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "teacher", version="v1")
    stock.make(tmp_path / "student", distill__teacher="v1", ended="interrupted")
    stock.make(tmp_path / "tuned", model__name=str(teacher.artifact))
    [refused] = planned(teacher.folder, "none")
    assert not refused.items
    assert len(clean.list_dependents(known_of(teacher.folder), scan.scan_folder(tmp_path))) == 2
    assert gone(planned(tmp_path / "tuned", "none"), tmp_path) == {"tuned"}
    clean.remove_all(planned(tmp_path / "tuned", "none"))
    clean.remove_all(planned(tmp_path / "student", "none"))
    assert gone(planned(teacher.folder, "none"), tmp_path) == {"teacher"}


def test_what_is_needed_is_found_through_a_link_too(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "runs" / "teacher")
    stock.make(tmp_path / "runs" / "tuned", model__name=str(teacher.artifact))
    (tmp_path / "alias").symlink_to(tmp_path / "runs")
    [refused] = planned(tmp_path / "alias" / "teacher", "none")
    assert not refused.items


def test_the_winner_of_a_search_is_not_taken_out_of_it(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    [refused] = planned(searched.trial(1).folder, "none")
    assert not refused.items
    assert gone(planned(searched.trial(0).folder, "none"), searched.folder) == {"trial-000"}


def test_a_whole_folder_goes_with_all_that_need_one_another_but_what_a_running_one_needs(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "teacher", version="v1")
    stock.make(tmp_path / "tuned", model__name=str(teacher.artifact))
    running = stock.make(tmp_path / "running", ended=None, distill__teacher="v1", store="bbbb")
    stock.store(tmp_path, "aaaa")
    stock.store(tmp_path, "bbbb")
    with run_folders.lock(running):
        assert gone(planned_root(tmp_path, "none"), tmp_path) == {"tuned"}
    assert gone(planned_root(tmp_path, "none"), tmp_path) == {
        *("teacher", "tuned", "running", ".tokens/aaaa", ".tokens/bbbb")
    }


def test_what_stays_for_a_running_one_keeps_what_it_needs_itself(tmp_path: Path) -> None:
    first = stock.make(tmp_path / "first")
    second = stock.make(tmp_path / "second", model__name=str(first.artifact))
    running = stock.make(tmp_path / "running", ended=None, model__name=str(second.artifact))
    stock.make(tmp_path / "other")
    with run_folders.lock(running):
        assert gone(planned_root(tmp_path, "none"), tmp_path) == {"other"}


def test_while_a_run_cannot_be_read_what_it_may_use_stays(tmp_path: Path) -> None:
    stock.age(stock.store(tmp_path, "cccc"))
    stock.make(tmp_path / "torn").config.write_text("[")
    [messages] = [removed for removed in planned_root(tmp_path, "artifact") if removed.run is None]
    assert (messages.items, len(messages.kept_reasons)) == ((), 1)
    assert gone(planned_root(tmp_path, "none"), tmp_path) == {"torn", ".tokens/cccc"}


def test_a_run_behind_a_link_keeps_what_it_uses(tmp_path: Path) -> None:
    """Runs on another disk are linked from the folder of runs, which has their stores."""
    teacher = stock.make(tmp_path / "runs" / "teacher", version="v1", store="bbbb")
    live = stock.make(tmp_path / "disk" / "live", ended=None, distill__teacher="v1", store="aaaa")
    (tmp_path / "runs" / "live").symlink_to(live.folder)
    for digest in ("aaaa", "cccc"):
        stock.age(stock.store(tmp_path / "runs", digest))
    with run_folders.lock(live):
        assert gone(planned_root(tmp_path / "runs", "none"), tmp_path / "runs") == {".tokens/cccc"}
    assert not planned(teacher.folder, "none")[0].items
    assert [run.name for run in scan.scan_folder(tmp_path / "runs").runs] == ["teacher"]
    live.config.write_text("[")
    assert gone(planned_root(tmp_path / "runs", "artifact"), tmp_path / "runs") == {"teacher/checkpoints"}


def test_stores_and_copies_that_no_run_uses_go_and_others_only_when_asked(tmp_path: Path) -> None:
    for digest in ("aaaa", "bbbb", "cccc", "dddd"):
        stock.store(tmp_path, digest)
    stock.age(tmp_path / ".tokens" / "cccc")
    (tmp_path / ".tokens" / ".cccc.classes.baselines.json").write_text("{}")
    for name in (".students/v1-3", ".students/v2-3"):
        stock.age(stock.artifact(tmp_path / name, "start"))
    for name in ("1111", "2222"):
        (tmp_path / ".copies" / name).mkdir(parents=True)
        (tmp_path / ".copies" / name / "rows.jsonl").write_text("{}")
        stock.age(tmp_path / ".copies" / name)
    student: dict[str, Any] = {"model__name": str(tmp_path / ".students" / "v1-3")}
    student["distill__augmented_rows_path"] = str(tmp_path / ".copies" / "1111" / "rows.jsonl")
    stock.make(tmp_path / "ended", store="aaaa", updates=(), **student)
    stock.make(tmp_path / "open", ended="interrupted", store="bbbb")
    orphaned = atomic_write.Draft(tmp_path / ".tokens" / "eeee")
    written = atomic_write.Draft(tmp_path / ".tokens" / "ffff")
    orphaned.release()
    result = scan.scan_folder(tmp_path)
    unused = {".students/v2-3", ".copies/2222", ".tokens/cccc", ".tokens/.cccc.classes.baselines.json"}
    left = {orphaned.folder.relative_to(tmp_path).as_posix()}
    removals = clean.plan_root_removal(result, "artifact")
    assert gone(removals, tmp_path) == unused | left
    written.release()
    assert [removal.name for removal in removals if removal.run is None and removal.kept_reasons] == [".tokens/dddd"]
    overrides = clean.plan_root_removal(result, "artifact", with_stores=True)
    assert gone(overrides, tmp_path) == unused | left | {".tokens/aaaa"}
    assert [item.name for item in overrides if item.run is None and item.kept_reasons] == [
        ".tokens/bbbb",
        ".tokens/dddd",
    ]
    freed = clean.remove_all(overrides)
    assert freed == sum(removed.size for removed in overrides)
    assert (tmp_path / ".tokens" / "bbbb" / "manifest.json").is_file()
    assert not (tmp_path / ".tokens" / "aaaa").exists()


def test_an_import_that_was_killed_leaves_a_draft_that_goes_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    killed, writing = atomic_write.Draft(tmp_path / "a"), atomic_write.Draft(tmp_path / "b")
    (killed.folder / "weights").write_bytes(b"w" * 100)
    killed.release()
    (tmp_path / ".mine.0123abcd").mkdir()
    stock.age(tmp_path / ".mine.0123abcd")
    removals = planned_root(tmp_path, "artifact")
    assert gone(removals, tmp_path) == {killed.folder.name}
    clean.remove_all(removals)
    writing.release()
    assert {path.name for path in tmp_path.iterdir()} == {writing.folder.name, ".mine.0123abcd"}


def test_the_copy_of_a_run_in_storage_is_not_touched(tmp_path: Path) -> None:
    copy = tmp_path / "storage" / "a" / "checkpoints" / "step-00000010"
    copy.mkdir(parents=True)
    (copy / "MANIFEST.json").write_text("{}")
    stock.make(tmp_path / "runs" / "a", cluster__storage=str(tmp_path / "storage"))
    removals = planned(tmp_path / "runs" / "a", "artifact")
    assert f"its remote copy at {tmp_path / 'storage'}" in removals[0].kept_reasons
    clean.remove_all(removals)
    clean.remove_all(planned(tmp_path / "runs" / "a", "none"))
    assert (copy / "MANIFEST.json").is_file()


# --------------------------------------------------------------------------------------------------- what still works


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a real store, answers and artefact, as a training leaves it."""
    root = tmp_path_factory.mktemp("whole")
    folder = make_run(root)
    for split in ("test", "valid"):
        write_predictions(folder, *answers_of(("login", "parcel", "refund"), 30, 0.8), split=split)
    make_artifact(folder / "artifact", ("login", "parcel", "refund"))
    summary.write_summary(Run(folder))
    stock.checkpoint(Run(folder), 20)
    return root


def test_a_cleaned_run_answers_is_scored_and_has_the_same_report(full: Path, tmp_path: Path, run: Cli) -> None:
    shutil.copytree(full, tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    html.make_report(Run(folder))
    before = page_of(folder).text
    code, out, err = run("clean", "runs/run")
    assert code == 0, err
    assert not Run(folder).checkpoints.exists()
    assert run("predict", "runs/run", "where is my parcel?")[0] == 0
    code, out, err = run("report", "runs/run")
    assert code == 0, err
    assert page_of(folder).text == before
    csv = test_cli.csv_of(tmp_path, labelled_rows(30))
    code, out, err = run("evaluate", "runs/run", "--data", csv, "--json")
    assert (code, json.loads(out)["scores"]["rows"]) == (0, 30), err


def test_a_report_without_its_token_store_keeps_its_scores_answers_and_baselines(full: Path, tmp_path: Path) -> None:
    """`report` measures baselines from the store, once: afterwards they are read."""
    shutil.copytree(full, tmp_path / "runs")
    element = Run(tmp_path / "runs" / "run")
    text = element.log.read_text().replace(str(full), str(tmp_path / "runs"))
    element.log.write_text(text)
    html.make_report(element)
    assert element.baselines.is_file()
    remaining = element.baselines.read_bytes()
    removals = planned_root(tmp_path / "runs", "artifact", with_stores=True)
    clean.remove_all(removals)
    assert Run(element.folder).token_store is None
    with pytest.raises(UserError):
        verify.check_ledger(Run(element.folder))
    html.make_report(Run(element.folder))
    assert element.baselines.read_bytes() == remaining


def test_a_resume_says_that_the_checkpoints_were_cleaned(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    clean.remove_all(planned(searched.folder, "artifact"))
    trial, winner = searched.trial(0), searched.trial(1)
    with pytest.raises(UserError):
        resumes(trial)
    assert resumes(winner)
    storage = config.with_overrides(run_folders.load_config(trial.folder), {"cluster.storage": "memory://copy"})
    assert run_folders.choose_folder(trial.folder, storage, "resume")[0] == trial.folder


def test_a_search_that_has_not_chosen_goes_on_after_a_removal(tmp_path: Path) -> None:
    """Its own folder has no checkpoints at all, and its trials keep theirs."""
    searched = stock.search(tmp_path / "s", best=None)
    clean.remove_all(planned(searched.folder, "artifact"))
    assert Run(searched.folder).last_event("cleaned") is not None
    assert resumes(searched)
    assert resumes(searched.trial(0))


def test_a_run_of_which_leftovers_alone_went_is_resumed(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a", ended="interrupted")
    (element.ray_storage / "x").mkdir(parents=True)
    (element.ray_storage / "x" / "state").write_text("x")
    shutil.rmtree(element.checkpoints)  # it was stopped before its first one
    clean.remove_all(planned(element.folder, "artifact"))
    assert Run(element.folder).last_event("cleaned") is not None
    assert resumes(element)


# --------------------------------------------------------------------------------------------------------------- kills

KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from rtrain.runs.store import clean, scan
from tests.support import stock

def remove(folder, keep, left):
    def counted(do):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*arguments, **options)
        return call
    inventory = scan.scan_surroundings(folder)
    removals = clean.plan_run_removal(inventory.find(folder), keep, inventory)
    for name in ("unlink", "rmdir", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    clean.remove_all(removals)

code = -signal.SIGKILL
for moment in itertools.count(0, 3):
    run = stock.make(Path(sys.argv[1]) / f"{moment:03}" / "a", updates=(10, 20))
    child = os.fork()
    if child == 0:
        remove(run.folder, sys.argv[2], moment)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != -signal.SIGKILL:
        sys.exit(code)
"""
"""Kills removals of equal runs, each three calls later, until one ends."""


@pytest.mark.parametrize("keep", ["artifact", "none"])
def test_a_removal_that_is_killed_at_any_moment_leaves_a_run_and_the_next_one_ends_it(
    tmp_path: Path, keep: Keep
) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path), keep]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *killed, finished = (Run(path / "a") for path in sorted(tmp_path.iterdir()))
    assert len(killed) >= 3
    assert finished.folder.exists() == (keep == "artifact")
    for element in killed:
        assert element.is_finished or keep == "none"
        if element.folder.exists():
            # Whatever has a final name is whole, and while anything is left it is a run that can be listed.
            assert element.config.is_file() or not list(element.folder.iterdir())
            assert element.log.is_file() or not (element.artifact.exists() or element.checkpoints.exists())
            for folder in (element.artifact, *element.checkpoints.glob("step-*")):
                assert not folder.exists() or manifest.find_damage(folder) is None
            if element.config.is_file():
                for hidden in element.folder.glob(".*"):
                    stock.age(hidden)
                clean.remove_all(planned(element.folder, keep))
        if keep == "artifact":
            remaining = {"config.yaml", "decisions.json", "events.jsonl", "artifact", "lock"}
            assert {path.name for path in element.folder.iterdir()} == remaining
        elif element.folder.exists():
            assert not list(element.folder.iterdir())  # killed before the last rmdir


# --------------------------------------------------------------------------------------------------- the command line


def test_the_command_line_lists_says_what_goes_and_removes_it(run: Cli, tmp_path: Path) -> None:
    element = stock.make(tmp_path / "runs" / "a b")
    stock.make(tmp_path / "runs" / "c", ended="interrupted")
    size = run_info.measure_bytes(element.checkpoints)
    code, out, err = run("runs", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert ({item["name"] for item in document["runs"]}, document["clean_frees"]) == ({"a b", "c"}, size)
    for dry in (("--dry-run",), ()):
        assert element.checkpoints.is_dir()
        code, out, _ = run("clean", "runs", "--json", *dry)
        assert (code, json.loads(out)["bytes"], json.loads(out)["dry_run"]) == (0, size, bool(dry))
    assert (run("clean", "runs")[0], element.checkpoints.exists()) == (0, False)
    assert [event["kind"] for event in events.read_events(element.folder)].count("cleaned") == 1
    messages = {load["name"]: load["cleaned"] for load in json.loads(run("runs", "--json")[1])["runs"]}
    assert messages == {"a b": "artifact", "c": None}


def test_whole_runs_go_only_when_someone_says_so(run: Cli, tmp_path: Path) -> None:
    element = stock.make(tmp_path / "runs" / "a")
    assert run("clean", "runs/a", "--keep", "none")[0] == 2
    assert run("clean", "runs/a", "--keep", "none", "--dry-run")[0] == 0
    assert element.exists
    assert (run("clean", "runs/a", "--keep", "none", "--yes")[0], element.folder.exists()) == (0, False)


def test_what_cannot_be_cleaned_is_refused(run: Cli, tmp_path: Path) -> None:
    element = stock.make(tmp_path / "runs" / "a", ended=None)
    (tmp_path / "other").mkdir()
    with run_folders.lock(element):
        assert run("clean", "runs/a")[0] == 1
    assert run("clean", "runs/a", "--stores")[0] == 2
    for words in (("clean", "other"), ("clean", "nowhere"), ("runs", "nowhere")):
        code, _, err = run(*words)
        assert (code, "Traceback" in err) == (1, False)


# ------------------------------------------------------------------------------------------------ verification


def test_no_trial_of_a_search_goes_while_one_is_trained(tmp_path: Path) -> None:
    """A paused run may be resumed at any moment."""
    search = stock.search(tmp_path / "s", best=None)
    for holdout in (search.trial(0), search):
        with run_folders.lock(holdout):
            [removal] = planned(search.trial(1).folder, "none")
            assert not removal.items
    [removal] = planned(search.trial(1).folder, "none")
    assert removal.removes_run


def test_a_run_stays_that_an_unreadable_one_may_be_taught_by(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "t", version="abc")
    student = stock.make(tmp_path / "s", ended=None)
    student.config.write_text("a: [")
    [removal] = planned(teacher.folder, "none")
    assert not removal.items
    assert all(item.removes_run for item in planned_root(tmp_path, "none") if item.run is not None)


def test_a_password_of_the_storage_is_not_told(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a", cluster__storage="ftp://me:hunter2@host/runs")
    for keep in ("artifact", "none"):
        text = table.format_removals(planned(element.folder, keep), is_dry_run=True)
        assert "hunter2" not in text
        assert "ftp://***@host/runs" in text


def test_a_folder_that_cannot_be_read_is_listed_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.make(tmp_path / "a")
    stock.age(stock.store(tmp_path, "unused"))
    closed, overrides = ["lost+found"], os.access
    for name in ("lost+found", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name not in closed and overrides(path, mode))

    def unused() -> Removal:
        return next(item for item in planned_root(tmp_path, "none", with_stores=True) if item.name == ".tokens/unused")

    result = scan.scan_folder(tmp_path)
    assert [run.name for run in result.runs] == ["a"]
    assert result.unreadable == ("lost+found",)
    assert unused().items
    closed.append("theirs")  # it may hold a run that uses the store
    assert (unused().items, "theirs" in str(unused().kept_reasons)) == ((), True)


def test_the_days_until_a_finished_run_is_asked_for_again_are_none_of_its_own(tmp_path: Path) -> None:
    element = stock.make(tmp_path / "a")
    before = scan.scan_folder(tmp_path).runs[0].seconds
    for kind in events.ROW_EVENTS[1:]:
        stock.log(element, kind, 1_700_000_000.0 + 3 * 86_400, store="s")
    assert scan.scan_folder(tmp_path).runs[0].seconds == before
