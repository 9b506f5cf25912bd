"""What `rtrain clean` removes, what it never removes, and what a kill in the middle of it leaves."""

import errno
import json
import os
import shutil
import signal
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
from rtrain.runs import prepare, run_folders
from rtrain.runs.store import clean, clean_plan, disk_usage, run_info, scan, table
from rtrain.runs.store.clean_plan import Keep, Removal
from rtrain.runs.store.run_info import Known
from rtrain.verification import ledger
from tests import stock, test_cli
from tests.conftest import labelled_rows
from tests.reports import answers_of, make_run, page_of, write_predictions
from tests.root import ROOT
from tests.tiny import make_artifact

run = test_cli.run  # a fixture: the command line, in an empty folder
Cli = test_cli.Cli


def planned(folder: Path, keep: Keep) -> list[Removal]:
    return clean_plan.of_run(known_of(folder), keep, scan.around(folder))


def known_of(folder: Path) -> Known:
    known = scan.around(folder).of(folder)
    assert known is not None
    return known


def gone(removals: list[Removal], root: Path) -> set[str]:
    return {part.path.relative_to(root).as_posix() for removed in removals for part in removed.parts}


# ----------------------------------------------------------------------------------------------------------- one run


def test_artifact_keeps_all_that_is_finished(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a")
    (one.ray / "attempt").mkdir(parents=True)
    (one.ray / "attempt" / "state").write_bytes(b"r" * 100)
    (one.folder / "my-notes.md").write_text("mine")
    before = stock.names(one.folder)
    removals = planned(one.folder, "artifact")
    size = disk_usage.size(one.checkpoints) + 100
    assert (size > 3 * stock.WEIGHTS, clean.carry_out(removals)) == (True, size)
    kept = {name for name in before if not name.startswith(("checkpoints/", "ray/"))}
    assert {"my-notes.md", "config.yaml", "artifact/model.safetensors"} <= kept
    assert stock.names(one.folder) == kept | {"lock"}
    event = Run(one.folder).last("cleaned")
    assert event is not None
    assert (event["keep"], event["bytes"], event["removed"]) == ("artifact", size, ["ray", "checkpoints"])


def test_a_run_without_an_artefact_keeps_what_it_goes_on_from(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a", ended="interrupted")
    removals = planned(one.folder, "artifact")
    clean.carry_out(removals)
    assert {int(path.name[-8:]) for path in one.checkpoints.iterdir()} == {5, 10, 20}
    assert len(removals[0].stays) == 1
    assert Run(one.folder).last("cleaned") is None  # nothing was, so nothing is told of it


def test_the_checkpoints_of_trials_go_once_the_winner_is_finished(tmp_path: Path) -> None:
    stock.search(tmp_path / "done")
    stock.search(tmp_path / "open", best=None)
    clean.carry_out(planned(tmp_path / "done", "artifact"))
    clean.carry_out(planned(tmp_path / "open", "artifact"))
    assert not list((tmp_path / "done").rglob("update-*"))
    assert not (tmp_path / "done" / "ray").exists()
    assert len(list((tmp_path / "open").rglob("update-*"))) == 6
    winner = Run(tmp_path / "done").winner
    assert winner is not None
    assert winner.finished


def test_leftovers_go_when_they_have_settled_and_the_only_artefact_never(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a", ended="interrupted")
    for name in (".artifact.0123abcd", ".artifact-int8.0123abcd", ".artifact-int8.89abcdef"):
        (one.folder / name).mkdir()
        (one.folder / name / "model.safetensors").write_bytes(b"d" * 10)
    (one.checkpoints / ".update-00000030.0123abcd").mkdir()
    stock.artifact(one.folder / ".artifact.old", "moved away, and its successor never came")
    for path in one.folder.rglob(".*"):
        stock.age(path)
    (one.folder / ".artifact-int8.89abcdef" / "model.safetensors").write_bytes(b"is being written")
    assert gone(planned(one.folder, "artifact"), one.folder) == {
        *(".artifact.0123abcd", ".artifact-int8.0123abcd", "checkpoints/.update-00000030.0123abcd"),
    }


def test_a_link_in_place_of_checkpoints_is_left_alone(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a")
    one.checkpoints.rename(tmp_path / "elsewhere")
    one.checkpoints.symlink_to(tmp_path / "elsewhere")
    removals = planned(one.folder, "artifact")
    assert removals[0].stays
    clean.carry_out(removals)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3
    clean.carry_out(planned(one.folder, "none"))
    assert not one.folder.exists()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


def test_checkpoints_stay_while_the_artefact_is_damaged(tmp_path: Path) -> None:
    """A disk has changed a byte of it: the checkpoints may be the only good weights."""
    ended, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    (ended.artifact / "model.safetensors").write_bytes(b"A" * stock.WEIGHTS)
    removals = clean_plan.checked(clean_plan.of_root(scan.look(tmp_path / "runs"), "artifact"))
    assert [(bool(one.parts), one.unread) for one in removals] == [(False, False), (True, False)]
    clean.carry_out(removals)
    assert (ended.checkpoints.exists(), other.checkpoints.exists()) == (True, False)


def test_it_goes_on_past_a_file_that_cannot_be_read(tmp_path: Path, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays, with what depends on it, and is told, while what else was asked for goes."""
    unread, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    bad, whole = unread.artifact / "model.safetensors", Path.open

    def failing(path: Path, *rest: Any, **options: Any) -> Any:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path, *rest, **options)

    monkeypatch.setattr(Path, "open", failing)
    code, out, _ = run("clean", "runs", "--json")
    assert (code, [one["name"] for one in json.loads(out)["removed"] if one["stays"]]) == (1, ["a"])
    assert (unread.checkpoints.exists(), other.checkpoints.exists()) == (True, False)
    monkeypatch.undo()
    assert run("clean", tmp_path / "runs")[0] == 0
    assert not unread.checkpoints.exists()


def test_it_goes_on_past_what_cannot_be_removed(tmp_path: Path) -> None:
    held, other = (stock.make(tmp_path / "runs" / name) for name in ("a", "b"))
    removals = clean_plan.of_root(scan.look(tmp_path / "runs"), "artifact")
    with run_folders.hold(held), pytest.raises(UserError):
        clean.carry_out(removals)
    assert (held.checkpoints.exists(), other.checkpoints.exists()) == (True, False)


def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a", ended=None)
    searched = stock.search(tmp_path / "s", best=None)
    with run_folders.hold(one), run_folders.hold(searched.trial(2)):
        for folder in (one.folder, searched.folder):
            assert ([part for each in planned(folder, "none") for part in each.parts]) == []
        assert gone(clean_plan.of_root(scan.look(tmp_path), "none"), tmp_path) == set()
    removals = planned(one.folder, "none")
    with run_folders.hold(one), pytest.raises(UserError):
        clean.carry_out(removals)  # begun after it was planned
    assert one.config.is_file()


def test_a_whole_run_goes_without_what_is_not_rtrain_s(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    trial = searched.trial(0)
    names = ("best.yaml", "search.html", "mlflow.json", ".ending", "error-20260101-000000.txt", "config.draft")
    for path in (*(searched.folder / name for name in names), trial.profile(1)):
        path.write_text("rtrain's")
    (trial.folder / "wheels").mkdir()
    (trial.folder / "wheels" / "numpy-2-py3-none-any.whl").write_text("came with an import")
    (trial.folder / "rungs").mkdir()
    trial.rung(5).write_bytes(b"answers")
    (searched.folder / "notes.txt").write_text("mine")
    (trial.folder / "mine").mkdir()
    (trial.folder / "mine" / "rows.csv").write_text("mine")
    (searched.folder / "wheels").mkdir()
    (searched.folder / "wheels" / "spokes.csv").write_text("mine")
    [removed] = removals = planned(searched.folder, "none")
    stay = ("notes.txt", "wheels", "trial-000/mine")
    assert len(removed.stays) == len(stay)
    assert removed.size == disk_usage.size(searched.folder) - len(stay) * len("mine")
    for _ in range(2):  # asked for again, it goes no further
        clean.carry_out(removals)
        assert stock.names(searched.folder) == {"notes.txt", "wheels/spokes.csv", "trial-000/mine/rows.csv"}
    assert not scan.look(tmp_path).runs


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


# ------------------------------------------------------------------------------------------------- what others need


def test_a_run_goes_as_a_whole_unless_another_needs_it(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "teacher", version="v1")
    stock.make(tmp_path / "student", distill__teacher="v1", ended="interrupted")
    stock.make(tmp_path / "tuned", model__name=str(teacher.artifact))
    [refused] = planned(teacher.folder, "none")
    assert not refused.parts
    assert len(clean_plan.needed_by(known_of(teacher.folder), scan.look(tmp_path))) == 2
    assert gone(planned(tmp_path / "tuned", "none"), tmp_path) == {"tuned"}
    clean.carry_out(planned(tmp_path / "tuned", "none"))
    clean.carry_out(planned(tmp_path / "student", "none"))
    assert gone(planned(teacher.folder, "none"), tmp_path) == {"teacher"}


def test_what_is_needed_is_found_through_a_link_too(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "runs" / "teacher")
    stock.make(tmp_path / "runs" / "tuned", model__name=str(teacher.artifact))
    (tmp_path / "alias").symlink_to(tmp_path / "runs")
    [refused] = planned(tmp_path / "alias" / "teacher", "none")
    assert not refused.parts


def test_the_winner_of_a_search_is_not_taken_out_of_it(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    [refused] = planned(searched.trial(1).folder, "none")
    assert not refused.parts
    assert gone(planned(searched.trial(0).folder, "none"), searched.folder) == {"trial-000"}


def test_a_whole_folder_goes_with_all_that_need_one_another_but_what_a_running_one_needs(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "teacher", version="v1")
    stock.make(tmp_path / "tuned", model__name=str(teacher.artifact))
    running = stock.make(tmp_path / "running", ended=None, distill__teacher="v1", store="bbbb")
    stock.store(tmp_path, "aaaa")
    stock.store(tmp_path, "bbbb")
    with run_folders.hold(running):
        assert gone(clean_plan.of_root(scan.look(tmp_path), "none"), tmp_path) == {"tuned"}
    assert gone(clean_plan.of_root(scan.look(tmp_path), "none"), tmp_path) == {
        *("teacher", "tuned", "running", ".tokens/aaaa", ".tokens/bbbb"),
    }


def test_what_stays_for_a_running_one_keeps_what_it_needs_itself(tmp_path: Path) -> None:
    first = stock.make(tmp_path / "first")
    second = stock.make(tmp_path / "second", model__name=str(first.artifact))
    running = stock.make(tmp_path / "running", ended=None, model__name=str(second.artifact))
    stock.make(tmp_path / "other")
    with run_folders.hold(running):
        assert gone(clean_plan.of_root(scan.look(tmp_path), "none"), tmp_path) == {"other"}


def test_while_a_run_cannot_be_read_what_it_may_use_stays(tmp_path: Path) -> None:
    stock.age(stock.store(tmp_path, "cccc"))
    stock.make(tmp_path / "torn").config.write_text("[")
    [told] = [removed for removed in clean_plan.of_root(scan.look(tmp_path), "artifact") if removed.run is None]
    assert (told.parts, len(told.stays)) == ((), 1)
    assert gone(clean_plan.of_root(scan.look(tmp_path), "none"), tmp_path) == {"torn", ".tokens/cccc"}


def test_a_run_behind_a_link_keeps_what_it_uses(tmp_path: Path) -> None:
    """Runs are put on a larger disk and linked from the folder of runs, beside which their stores lie."""
    teacher = stock.make(tmp_path / "runs" / "teacher", version="v1", store="bbbb")
    live = stock.make(tmp_path / "disk" / "live", ended=None, distill__teacher="v1", store="aaaa")
    (tmp_path / "runs" / "live").symlink_to(live.folder)
    for digest in ("aaaa", "cccc"):
        stock.age(stock.store(tmp_path / "runs", digest))
    with run_folders.hold(live):
        assert gone(clean_plan.of_root(scan.look(tmp_path / "runs"), "none"), tmp_path / "runs") == {".tokens/cccc"}
    assert not planned(teacher.folder, "none")[0].parts
    assert [known.name for known in scan.look(tmp_path / "runs").runs] == ["teacher"]
    live.config.write_text("[")
    assert gone(clean_plan.of_root(scan.look(tmp_path / "runs"), "artifact"), tmp_path / "runs") == {
        "teacher/checkpoints"
    }


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
    student["distill__copied"] = str(tmp_path / ".copies" / "1111" / "rows.jsonl")
    stock.make(tmp_path / "ended", store="aaaa", updates=(), **student)
    stock.make(tmp_path / "open", ended="interrupted", store="bbbb")
    orphaned = atomic_write.Draft(tmp_path / ".tokens" / "eeee")
    written = atomic_write.Draft(tmp_path / ".tokens" / "ffff")
    orphaned.release()
    found = scan.look(tmp_path)
    unused = {".students/v2-3", ".copies/2222", ".tokens/cccc", ".tokens/.cccc.classes.baselines.json"}
    left = {orphaned.folder.relative_to(tmp_path).as_posix()}
    removals = clean_plan.of_root(found, "artifact")
    assert gone(removals, tmp_path) == unused | left
    written.release()
    assert [one.name for one in removals if one.run is None and one.stays] == [".tokens/dddd"]
    asked = clean_plan.of_root(found, "artifact", stores=True)
    assert gone(asked, tmp_path) == unused | left | {".tokens/aaaa"}
    assert [one.name for one in asked if one.run is None and one.stays] == [".tokens/bbbb", ".tokens/dddd"]
    freed = clean.carry_out(asked)
    assert freed == sum(removed.size for removed in asked)
    assert (tmp_path / ".tokens" / "bbbb" / "manifest.json").is_file()
    assert not (tmp_path / ".tokens" / "aaaa").exists()


def test_an_import_that_was_killed_leaves_a_draft_that_goes_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    killed, writing = atomic_write.Draft(tmp_path / "a"), atomic_write.Draft(tmp_path / "b")
    (killed.folder / "weights").write_bytes(b"w" * 100)
    killed.release()
    (tmp_path / ".mine.0123abcd").mkdir()
    stock.age(tmp_path / ".mine.0123abcd")
    removals = clean_plan.of_root(scan.look(tmp_path), "artifact")
    assert gone(removals, tmp_path) == {killed.folder.name}
    clean.carry_out(removals)
    writing.release()
    assert {path.name for path in tmp_path.iterdir()} == {writing.folder.name, ".mine.0123abcd"}


def test_the_copy_of_a_run_in_storage_is_not_touched(tmp_path: Path) -> None:
    copy = tmp_path / "storage" / "a" / "checkpoints" / "update-00000010"
    copy.mkdir(parents=True)
    (copy / "MANIFEST.json").write_text("{}")
    stock.make(tmp_path / "runs" / "a", cluster__storage=str(tmp_path / "storage"))
    removals = planned(tmp_path / "runs" / "a", "artifact")
    assert f"its copy at {tmp_path / 'storage'}" in removals[0].stays
    clean.carry_out(removals)
    clean.carry_out(planned(tmp_path / "runs" / "a", "none"))
    assert (copy / "MANIFEST.json").is_file()


# --------------------------------------------------------------------------------------------------- what still works


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a real store, answers and artefact, as a training leaves it."""
    root = tmp_path_factory.mktemp("whole")
    folder = make_run(root)
    for split in ("test", "valid"):
        write_predictions(folder, *answers_of(("login", "parcel", "refund"), 30, 0.8), split=split)
    make_artifact(folder / "artifact", ("login", "parcel", "refund"))
    summary.write(Run(folder))
    stock.checkpoint(Run(folder), 20)
    return root


def test_a_cleaned_run_answers_is_scored_and_has_the_same_report(whole: Path, tmp_path: Path, run: Cli) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    html.make(Run(folder))
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


def test_a_report_without_its_token_store_keeps_its_scores_answers_and_baselines(whole: Path, tmp_path: Path) -> None:
    """`report` measures baselines from the store, once: afterwards they are read."""
    shutil.copytree(whole, tmp_path / "runs")
    one = Run(tmp_path / "runs" / "run")
    text = one.log.read_text().replace(str(whole), str(tmp_path / "runs"))
    one.log.write_text(text)
    html.make(one)
    assert one.baselines.is_file()
    kept = one.baselines.read_bytes()
    removals = clean_plan.of_root(scan.look(tmp_path / "runs"), "artifact", stores=True)
    clean.carry_out(removals)
    assert Run(one.folder).store is None
    with pytest.raises(UserError):
        ledger.check(Run(one.folder))
    html.make(Run(one.folder))
    assert one.baselines.read_bytes() == kept


def test_a_resume_says_that_the_checkpoints_were_cleaned(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "s")
    clean.carry_out(planned(searched.folder, "artifact"))
    trial, winner = searched.trial(0), searched.trial(1)
    with pytest.raises(UserError):
        run_folders.choose(trial.folder, run_folders.stored(trial.folder), "resume")
    assert run_folders.choose(winner.folder, run_folders.stored(winner.folder), "resume")[0] == winner.folder
    storage = config.with_overrides(run_folders.stored(trial.folder), {"cluster.storage": "memory://copy"})
    assert run_folders.choose(trial.folder, storage, "resume")[0] == trial.folder


def test_a_search_that_has_not_chosen_goes_on_after_a_removal(tmp_path: Path) -> None:
    """Its own folder has no checkpoints at all, and its trials keep theirs."""
    searched = stock.search(tmp_path / "s", best=None)
    clean.carry_out(planned(searched.folder, "artifact"))
    assert Run(searched.folder).last("cleaned") is not None
    for one in (searched, searched.trial(0)):
        assert run_folders.choose(one.folder, run_folders.stored(one.folder), "resume")[0] == one.folder


def test_a_run_of_which_leftovers_alone_went_is_resumed(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a", ended="interrupted")
    (one.ray / "x").mkdir(parents=True)
    (one.ray / "x" / "state").write_text("x")
    shutil.rmtree(one.checkpoints)  # it was stopped before its first one
    clean.carry_out(planned(one.folder, "artifact"))
    assert Run(one.folder).last("cleaned") is not None
    assert run_folders.choose(one.folder, run_folders.stored(one.folder), "resume")[0] == one.folder


# --------------------------------------------------------------------------------------------------------------- kills

KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from rtrain.proof import ledger
from rtrain.inventory import plan, removal, walk
left = int(sys.argv[3])
def counted(do):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*arguments, **options)
    return call
folder = Path(sys.argv[1])
found = walk.around(folder)
removals = plan.of_run(found.of(folder), sys.argv[2], found)
for name in ("unlink", "rmdir", "rename"):
    setattr(os, name, counted(getattr(os, name)))
removal.carry_out(removals)
"""


@pytest.mark.parametrize("keep", ["artifact", "none"])
def test_a_removal_that_is_killed_at_any_moment_leaves_a_run_and_the_next_one_ends_it(
    tmp_path: Path, keep: Keep
) -> None:
    moment, killed = 0, 0
    while True:
        one = stock.make(tmp_path / str(moment) / "a", updates=(10, 20))
        words = [sys.executable, "-c", KILLED, str(one.folder), keep, str(moment)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        if keep == "artifact":
            assert Run(one.folder).finished
        if one.folder.exists():
            # Whatever has a final name is whole, and while anything is left it is a run that can be listed.
            assert one.config.is_file() or not list(one.folder.iterdir())
            assert one.log.is_file() or not (one.artifact.exists() or one.checkpoints.exists())
            for folder in (one.artifact, *one.checkpoints.glob("update-*")):
                assert not folder.exists() or manifest.damage(folder) is None
            if one.config.is_file():
                for hidden in one.folder.glob(".*"):
                    stock.age(hidden)
                clean.carry_out(planned(one.folder, keep))
        if keep == "artifact":
            kept = {"config.yaml", "decisions.json", "events.jsonl", "artifact", "lock"}
            assert {path.name for path in one.folder.iterdir()} == kept
        elif one.folder.exists():
            assert not list(one.folder.iterdir())  # killed before the last rmdir
        moment += 3
    assert killed >= 3
    assert one.folder.exists() == (keep == "artifact")


# --------------------------------------------------------------------------------------------------- the command line


def test_the_command_line_lists_says_what_goes_and_removes_it(run: Cli, tmp_path: Path) -> None:
    one = stock.make(tmp_path / "runs" / "a b")
    stock.make(tmp_path / "runs" / "c", ended="interrupted")
    size = disk_usage.size(one.checkpoints)
    code, out, err = run("runs", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert ({each["name"] for each in document["runs"]}, document["clean_frees"]) == ({"a b", "c"}, size)
    for dry in (("--dry-run",), ()):
        assert one.checkpoints.is_dir()
        code, out, _ = run("clean", "runs", "--json", *dry)
        assert (code, json.loads(out)["bytes"], json.loads(out)["dry_run"]) == (0, size, bool(dry))
    assert (run("clean", "runs")[0], one.checkpoints.exists()) == (0, False)
    assert [event["kind"] for event in events.read(one.folder)].count("cleaned") == 1
    told = {each["name"]: each["cleaned"] for each in json.loads(run("runs", "--json")[1])["runs"]}
    assert told == {"a b": "artifact", "c": None}


def test_whole_runs_go_only_when_someone_says_so(run: Cli, tmp_path: Path) -> None:
    one = stock.make(tmp_path / "runs" / "a")
    assert run("clean", "runs/a", "--keep", "none")[0] == 2
    assert run("clean", "runs/a", "--keep", "none", "--dry-run")[0] == 0
    assert one.exists
    assert (run("clean", "runs/a", "--keep", "none", "--yes")[0], one.folder.exists()) == (0, False)


def test_what_cannot_be_cleaned_is_refused(run: Cli, tmp_path: Path) -> None:
    one = stock.make(tmp_path / "runs" / "a", ended=None)
    (tmp_path / "other").mkdir()
    with run_folders.hold(one):
        assert run("clean", "runs/a")[0] == 1
    assert run("clean", "runs/a", "--stores")[0] == 2
    for words in (("clean", "other"), ("clean", "nowhere"), ("runs", "nowhere")):
        code, _, err = run(*words)
        assert (code, "Traceback" in err) == (1, False)


# ------------------------------------------------------------------------------------------------ what a reading found


def test_no_trial_of_a_search_goes_while_one_is_trained(tmp_path: Path) -> None:
    """A paused one may be gone on with at any moment."""
    search = stock.search(tmp_path / "s", best=None)
    for held in (search.trial(0), search):
        with run_folders.hold(held):
            [removal] = planned(search.trial(1).folder, "none")
            assert not removal.parts
    [removal] = planned(search.trial(1).folder, "none")
    assert removal.whole


def test_a_run_stays_that_an_unreadable_one_may_be_taught_by(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "t", version="abc")
    student = stock.make(tmp_path / "s", ended=None)
    student.config.write_text("a: [")
    [removal] = planned(teacher.folder, "none")
    assert not removal.parts
    assert all(one.whole for one in clean_plan.of_root(scan.look(tmp_path), "none") if one.run is not None)


def test_a_password_of_the_storage_is_not_told(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a", cluster__storage="ftp://me:hunter2@host/runs")
    for keep in ("artifact", "none"):
        text = table.removals_text(planned(one.folder, keep), dry=True)
        assert "hunter2" not in text
        assert "ftp://***@host/runs" in text


def test_a_folder_that_cannot_be_read_is_listed_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.make(tmp_path / "a")
    stock.age(stock.store(tmp_path, "unused"))
    closed, asked = ["lost+found"], os.access
    for name in ("lost+found", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name not in closed and asked(path, mode))

    def unused() -> Removal:
        return next(
            one for one in clean_plan.of_root(scan.look(tmp_path), "none", True) if one.name == ".tokens/unused"
        )

    found = scan.look(tmp_path)
    assert [known.name for known in found.runs] == ["a"]
    assert found.unread == ("lost+found",)
    assert unused().parts
    closed.append("theirs")  # it may hold a run that uses the store
    assert (unused().parts, "theirs" in str(unused().stays)) == ((), True)


def test_the_days_until_a_finished_run_is_asked_for_again_are_none_of_its_own(tmp_path: Path) -> None:
    one = stock.make(tmp_path / "a")
    before = scan.look(tmp_path).runs[0].seconds
    for kind in run_info.OF_ROWS:
        stock.log(one, kind, 1_700_000_000.0 + 3 * 86_400, store="s")
    assert scan.look(tmp_path).runs[0].seconds == before
    assert {*run_info.OF_ROWS, "tokenised"} == {*prepare.TOLD}
