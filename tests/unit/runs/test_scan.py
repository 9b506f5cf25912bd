"""Scans of a folder of runs in any state, and their output."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from rtrain.runs.store import clean, run_info, scan, table
from tests.support import stock


def test_a_finished_run_is_told_with_its_score_its_time_its_size_and_where_it_came_from(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "intent")
    [history] = scan.scan_folder(tmp_path).runs
    assert history.score is not None
    assert str(replace(history.score, name="neg_rmse", value=-0.42)) == "0.4200 rmse (test)"
    assert (history.kind, history.status, str(history.score)) == ("run", "finished", "0.6000 accuracy (test)")
    assert (history.started_at, history.seconds) == (1_700_000_000.0, 60.0)
    assert history.size == sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert history.bytes_by_part["checkpoints"] == run_info.measure_bytes(run.checkpoints) > 3 * stock.WEIGHTS


@pytest.mark.parametrize(
    ("ended", "status"),
    [("failed", "failed"), ("interrupted", "interrupted"), ("paused", "paused"), (None, "interrupted")],
)
def test_how_a_run_ended_is_its_status(tmp_path: Path, ended: str | None, status: str) -> None:
    stock.make(tmp_path / "run", ended=ended, test=None)
    [history] = scan.scan_folder(tmp_path).runs
    assert (history.status, str(history.score)) == (status, "0.5000 accuracy (valid)")
    assert not history.is_complete


def test_a_run_that_is_held_is_running_and_one_without_a_start_is_new(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "run", ended=None)
    fresh = Run(tmp_path / "fresh")
    fresh.folder.mkdir()
    fresh.config.write_text("name: intent\ntask: classification\n")
    with run_folders.lock(run):
        assert run_info.is_locked(run)
        assert {run.name: run.status for run in scan.scan_folder(tmp_path).runs} == {"run": "running", "fresh": "new"}
    assert not run_info.is_locked(run)


def test_looking_at_a_run_does_not_keep_another_process_from_training_it(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "run", ended=None)
    with run_folders.lock(run):
        pass
    scan.scan_folder(tmp_path)
    with run_folders.lock(run):
        pass


def test_damaged_and_foreign_folders_are_listed_as_what_they_are(tmp_path: Path) -> None:
    stock.make(tmp_path / "good")
    for name, text in (("torn", "name: [intent"), ("list", "- a\n- b\n"), ("binary", "\udcff")):
        (stock.make(tmp_path / name)).config.write_bytes(text.encode("utf-8", "surrogateescape"))
    stock.make(tmp_path / "headless").config.unlink()
    stock.make(tmp_path / "mute").log.unlink()
    stock.make(tmp_path / "noise").log.write_bytes(b'\xff\xfe{"time": 1\n5\n[]\nnull\n{"kind": 3}\n{"kind": "progress"')
    (tmp_path / "notes").mkdir()
    stock.artifact(tmp_path / "int8", "v")
    (tmp_path / "loose.csv").write_text("abc")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    result = scan.scan_folder(tmp_path)
    assert {run.name: run.problem for run in result.runs} == {
        "good": None,
        "torn": "its config.yaml cannot be read",
        "list": "its config.yaml cannot be read",
        "binary": "its config.yaml cannot be read",
        "headless": "it has no config.yaml",
        "mute": "its log is missing or unreadable",
        "noise": "its log is missing or unreadable",
    }
    json.dumps(table.inventory_document(result))


ODD = ("null", "5", "-1", "1e400", "NaN", '"x"', "[[1]]", '{"a": [null]}', "true", '"../x"')


@pytest.mark.parametrize("odd", ODD)
def test_strange_values_in_a_log_and_in_settings_are_no_reason_to_fail(tmp_path: Path, odd: str) -> None:
    run, searched = stock.make(tmp_path / "a"), stock.search(tmp_path / "s")
    for element in (run, searched):
        with element.log.open("a") as file:
            for kind in ("created", "evaluated", "trained", "cleaned", "searched", "tokens_reused", odd.strip('"')):
                fields = "".join(
                    f', "{name}": {odd}' for name in ("store", "scores", "best_update", "best", "keep", "split")
                )
                file.write(f'{{"time": 1700000070, "kind": "{kind}"{fields}}}\n')
            file.write(f'{{"time": {odd}, "kind": "finished"}}\n')
            file.write(
                f'{{"time": 1700000080, "kind": "evaluated", "split": "test", "scores": {{"accuracy": {odd}}}}}\n'
            )
    for section in ("model", "distill", "cluster", "data", "name", "task"):
        other = stock.make(tmp_path / section, ended=None)
        other.config.write_text(f"task: classification\n{section}: {odd}\n")
        nested = stock.make(tmp_path / f"{section}-nested", ended=None)
        fields = "".join(f"  {name}: {odd}\n" for name in ("name", "teacher", "storage", "path", "valid"))
        nested.config.write_text(f"task: classification\n{section}:\n{fields}")
    result = scan.scan_folder(tmp_path)
    assert len(result.runs) == 14
    assert table.format_inventory(result)
    json.dumps(table.inventory_document(result))
    for keep in get_args(clean.Keep):
        assert clean.plan_root_removal(result, keep, with_stores=True)


def test_a_folder_that_is_not_there_is_refused_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        scan.scan_folder(tmp_path / "none")
    assert refused.value.code == "not_found"
    assert scan.scan_folder(tmp_path).runs == ()


def test_the_trials_of_a_search_are_folded_into_its_line(tmp_path: Path) -> None:
    stock.search(tmp_path / "s")
    [history] = scan.scan_folder(tmp_path).runs
    assert (history.kind, history.status, history.winner, len(history.trials)) == ("search", "finished", "trial-001", 3)
    assert str(history.score) == "0.6000 accuracy (test)"
    assert history.is_complete
    assert history.size == run_info.measure_bytes(tmp_path / "s")
    assert "s/trial-000" not in table.format_inventory(scan.scan_folder(tmp_path))
    assert "s/trial-000" in table.format_inventory(scan.scan_folder(tmp_path), with_trials=True)


def test_a_search_that_has_not_chosen_is_interrupted_and_shows_its_best_trial(tmp_path: Path) -> None:
    run = stock.search(tmp_path / "s", best=None)
    [history] = scan.scan_folder(tmp_path).runs
    assert (history.status, history.winner, history.is_complete) == ("interrupted", None, False)
    with run_folders.lock(run):
        assert scan.scan_folder(tmp_path).runs[0].status == "running"


def test_a_student_names_its_teacher_and_a_run_the_run_whose_weights_it_began_with(tmp_path: Path) -> None:
    teacher = stock.make(tmp_path / "teacher", version="abc123")
    student: dict[str, Any] = {"distill__teacher": "abc123", "model__name": str(tmp_path / ".students" / "abc123-3")}
    stock.make(tmp_path / "student", **student)
    stock.make(tmp_path / "tuned", model__name=str(teacher.artifact))
    stock.make(tmp_path / "orphan", distill__teacher="gone", model__name="/elsewhere/model")
    result = scan.scan_folder(tmp_path)
    assert {run.name: (run.kind, table.describe_origin(run, result)) for run in result.runs} == {
        "teacher": ("run", "minilm"),
        "student": ("student", "student of teacher"),
        "tuned": ("run", "weights of teacher"),
        "orphan": ("student", "student of artifact gone"),
    }


def test_stores_and_copies_are_told_with_the_runs_that_use_them(tmp_path: Path) -> None:
    stock.store(tmp_path, "aaaa")
    stock.store(tmp_path, "bbbb")
    (tmp_path / ".tokens" / ".aaaa.classes.baselines.json").write_text("{}")
    stock.search(tmp_path / "s")
    commit = "0" * 40
    stock.make(tmp_path / "hub", model__name=f"owner/name@{commit}", store="cccc")
    for name in (f"owner--name@{commit}", "other--model@1", "minilm@53aa51172d142c89"):
        (tmp_path / ".models" / name).mkdir(parents=True)
    result = scan.scan_folder(tmp_path)
    used = {item.name: {user.name for user in item.users} for item in result.shared}
    assert used == {
        ".tokens/aaaa": {"s", "s/trial-000", "s/trial-001", "s/trial-002"},
        ".tokens/bbbb": set(),
        f".models/owner--name@{commit}": {"hub"},
        ".models/other--model@1": set(),
        # What nodes without the package read of the model of the recipe.
        ".models/minilm@53aa51172d142c89": {"s", "s/trial-000", "s/trial-001", "s/trial-002"},
    }


def test_runs_in_a_folder_of_their_own_are_found_with_their_store(tmp_path: Path) -> None:
    stock.make(tmp_path / "demo" / "student")
    stock.store(tmp_path / "demo")
    stock.make(tmp_path / "a" / "b" / "c" / "too-deep")
    result = scan.scan_folder(tmp_path)
    assert [run.name for run in result.runs] == ["demo/student"]
    assert [item.name for item in result.shared] == ["demo/.tokens/aaaa"]


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for name, initial in (("b", 1e9), ("a", 2e9), ("c", 1.5e9)):
        stock.make(tmp_path / name, begun=initial, updates=())
    stock.make(tmp_path / "x").config.unlink()
    assert [item["name"] for item in table.inventory_document(scan.scan_folder(tmp_path))["runs"]] == [
        "a",
        "c",
        "b",
        "x",
    ]


def test_a_name_with_control_codes_does_not_write_on_the_terminal(tmp_path: Path) -> None:
    stock.make(tmp_path / "bad\x1b[31m")
    stock.make(tmp_path / "büro ☕")
    text = table.format_inventory(scan.scan_folder(tmp_path))
    assert "\x1b" not in text
    assert "bad\\x1b[31m" in text
    assert "büro ☕" in text


def test_a_task_that_this_rtrain_does_not_know_has_no_score(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "run")
    run.config.write_text(run.config.read_text().replace("task: classification", "task: base"))
    assert run_info.read_run(run, "run").score is None


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        (".artifact.0123abcd", True),
        (".artifact-int8.0123abcd", True),
        (".report.html.draft", True),
        ("decisions.draft", True),
        (".predictions-test.parquet", True),
        (".artifact.old", False),  # the only one there is: it was moved away to make room for a new one
        (".git", False),
        ("artifact", False),
        ("notes.0123abcd", False),
    ],
)
def test_drafts_are_told_by_their_names(tmp_path: Path, name: str, draft: bool) -> None:
    assert run_info.is_draft(tmp_path / name) is draft
    (tmp_path / "artifact").mkdir()
    assert run_info.is_draft(tmp_path / ".artifact.old")


def test_a_folder_that_goes_meanwhile_has_no_size(tmp_path: Path) -> None:
    assert run_info.measure_bytes(tmp_path / "gone") == 0
    os.mkfifo(tmp_path / "pipe")
    assert run_info.measure_bytes(tmp_path) == 0
