"""The page as a whole: what it says of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.report import html, summary
from rtrain.report.page import Figure, Note, Section, Table
from rtrain.report.sections import answers, data, outcome, run_details
from tests.conftest import labelled_rows
from tests.support.reports import answers_of, make_run, page_of, read, write_predictions

LABELS = ("login", "parcel", "refund")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier with its answers."""
    run = make_run(tmp_path_factory.mktemp("finished"))
    targets, result = answers_of(LABELS, 200, right=0.8)
    language = ["de" if row % 4 else "en" for row in range(200)]
    result = [("login" if code == "en" else messages) for messages, code in zip(result, language, strict=True)]
    write_predictions(run, targets, result, language=language, serial=[str(row) for row in range(200)])
    return run


@pytest.fixture(scope="module")
def known(finished: Path) -> Any:
    return read(finished)


def table(section: Section | None, title: str) -> Table:
    assert section is not None
    (result,) = (block for block in section.blocks if isinstance(block, Table) and block.title.startswith(title))
    return result


def rewrite_log(run: Path, log: list[dict[str, Any]]) -> None:
    (run / events.FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in log))


# ----------------------------------------------------------------------------------------------------- what it tells


def test_every_section_of_a_finished_run_is_there(finished: Path) -> None:
    page = page_of(finished)
    headings = ("Outcome", "How it was run", "Data", "Training", "Answers", "Slices", "Time")
    assert all(heading in page.words for heading in headings)
    assert "Drill certificate" not in page.words
    assert f"rtrain train {finished}/config.yaml --out NEW_FOLDER" in page.text


def test_settings_that_differ_from_the_defaults(known: Any) -> None:
    rows = {str(row[0]): row[1:] for row in table(run_details.build_settings_section(known), "Settings").rows}
    assert rows["train.epochs"] == ("2", "3")
    assert rows["train.save_every"] == ("5", "none")
    assert "train.seed" not in rows


def test_what_opens_an_address_is_not_shown(known: Any) -> None:
    signed = "https://b.example/rows.csv?X-Amz-Credential=AKIAX&X-Amz-Signature=deadbeef"
    values = config.with_overrides(
        known.config, {"data.path": signed, "report.mlflow_uri": "http://u:pass@127.0.0.1:5000"}
    )
    rows = {
        str(row[0]): row[1]
        for row in table(run_details.build_settings_section(replace(known, config=values)), "Settings").rows
    }
    assert rows["data.path"] == "https://b.example/rows.csv?***"
    assert rows["report.mlflow_uri"] == "http://***@127.0.0.1:5000"


def test_digests_and_versions(known: Any) -> None:
    digests = {row[0]: row[1] for row in table(run_details.build_settings_section(known), "Digests").rows}
    assert digests["digest of the rows"] == known.store.manifest.digest
    assert digests["digest of the order"] == "cd"
    assert table(run_details.build_settings_section(known), "Versions").rows == [("ray", "2.60")]


def test_rows_of_each_split(known: Any) -> None:
    rows = {str(row[0]): row[1] for row in table(data.build_section(known), "Rows and tokens").rows}
    assert rows == {name: known.store.num_rows(split) for split, name in data.SPLIT_NAMES.items()}


def test_set_aside_rows_have_file_line_and_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, [*labelled_rows(100), ("", "parcel"), ("no label", " ")], trained=False)
    result = table(data.build_section(read(run)), "Quarantined rows")
    assert [row[:2] for row in result.rows] == [("rows.csv", 102), ("rows.csv", 103)]
    assert "column 'text' is empty" in str(result.rows[0][2])


def test_curve_of_repeated_updates_is_drawn_once_and_the_crash_is_marked(known: Any) -> None:
    assert [event["step"] for event in run_details.last_event_per_step(known.events_of_kind("progress"))] == list(
        range(1, 21)
    )
    assert [(mark.x, mark.kind) for mark in run_details.list_marks(known)] == [
        (10, "epoch"),
        (20, "epoch"),
        (10, "crash"),
    ]
    assert run_details.checkpoint_steps(known) == [5, 10, 15, 20]
    stops = table(run_details.build_training_section(known), "Interruptions")
    assert [row[1:] for row in stops.rows] == [("crashed", "crash: Worker died; resumed from step 10")]


def test_a_node_that_was_lost_has_a_name_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    loaded = {"cause": "node_lost", "error": "spot node 5a5a5a5a gone without notice; Worker died"}
    rewrite_log(run, [{**event, **loaded} if event["kind"] == "crashed" else event for event in Run(run).events()])
    result = read(run)
    stops = table(run_details.build_training_section(result), "Interruptions")
    assert stops.rows[0][1:] == ("crashed", f"lost node: {loaded['error']}; resumed from step 10")
    [tile] = [item for item in outcome.build_tiles(result) if item.name == "restarts"]
    assert tile.note == "0 after a crash, 1 after a lost node"
    assert summary.summarize(Run(run))["interruptions"] == {"node_lost": 1}


def test_a_score_that_never_changes_has_no_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for update in (10, 20):
        scores = {"answered": 1.0, "f1": update / 40, "rows": 30}
        events.append_event(run, "evaluated", split="valid", step=update, scores=scores)
    result = run_details.build_training_section(read(run))
    names = [block.title for block in result.blocks if isinstance(block, Figure)]
    assert any(name.startswith("Validation F1") for name in names)
    assert not any("answered" in name for name in names)
    assert ("validation", 20, "answered", "1.0000") in table(result, "Scores").rows


def test_rows_that_are_read_in_windows_are_not_said_to_be_cut(known: Any) -> None:
    windows = config.with_overrides(known.config, {"data.window": 16, "data.stride": 4})
    result = data.build_section(replace(known, config=windows))
    assert "windows of 16 tokens" in table(result, "Rows and tokens").note
    assert not any("limit" in block.chart for block in result.blocks if isinstance(block, Figure))


def test_a_restart_without_a_crash_is_marked_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rewrite_log(run, [event for event in Run(run).events() if event["kind"] != "crashed"])
    assert [(mark.x, mark.kind) for mark in run_details.list_marks(read(run))][2:] == [(10, "restart")]


def test_scores_have_intervals_that_hold_them(known: Any) -> None:
    value, (low, high) = known.answers.is_correct.mean(), answers.score_intervals(known)["accuracy"]
    assert low < value < high
    rows = {row[0]: row[1:] for row in table(answers.build_answers_section(known), "Scores").rows}
    assert rows["accuracy"] == (f"{value:.4f}", f"{low:.4f} to {high:.4f}")
    assert rows["AUC"][1] == "-"  # no sum over rows
    assert f"95 % interval {low:.3f} to {high:.3f}" in page_of(known.folder).text


def test_most_confused_pair_is_named(known: Any) -> None:
    pairs = list(zip(known.answers.target, known.answers.prediction, strict=True))
    rows = table(answers.build_answers_section(known), "Most confused").rows
    for true, messages, count in rows:
        assert pairs.count((true, messages)) == count
    assert sum(int(row[2]) for row in rows) == (~known.answers.is_correct).sum()


def test_worst_slice_is_the_planted_one(known: Any) -> None:
    """English rows were all answered `login`; serial numbers make no slices: all of them together are all rows."""
    rows = table(answers.build_slices_section(known), "Worst slice").rows
    assert (rows[0][0], rows[0][4]) == ("language: en", "worse")
    assert not any("serial" in str(row[0]) for row in rows)


def test_slices_that_are_too_small_are_named_and_a_worst_one_within_chance_is_no_weakness(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    true = ["a", "b"] * 60
    messages = [
        ("b" if row in (0, 30, 60) else label) for row, label in enumerate(true)
    ]  # three of the eight are wrong
    language = ["en" if row % 15 else "es" for row in range(120)]
    write_predictions(run, true, messages, language=language)
    section = answers.build_slices_section(read(run))
    assert section is not None
    [note] = (block for block in section.blocks if isinstance(block, Note))
    assert "language: es (8 rows, 0.625)" in note.text
    rows = table(section, "No slice is significantly worse").rows
    assert not any("es" in str(row[0]) or row[4] == "worse" for row in rows)


def test_seconds_and_what_is_left_of_the_total(known: Any) -> None:
    rows = {str(row[0]): row[2] for row in table(run_details.build_timing_section(known), "Seconds").rows}
    assert rows["train"] == "20.0"
    assert rows["input_wait"] == "0.2"
    shown = ("setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait", "rest")
    assert set(rows) - {run_details.CUT_SHORT} == set(shown)


def test_seconds_of_a_start_without_an_end_are_told_and_not_shared_out(tmp_path: Path) -> None:
    """The second start of `reports.train` computed 10 of the 20 updates; the first one ran for a while and crashed."""
    run = make_run(tmp_path)
    log = Run(run).events()
    times = {"created": 0.0, "tokenized": 1.0}
    started = 0
    for event in log:
        started += event["kind"] == "started"
        event["time"] = times.get(event["kind"], 100.0 * started)
        if event["kind"] == "crashed":
            event["time"] = 130.0
    rewrite_log(run, log)
    assert run_details.sum_cut_short_seconds(log) == 30.0
    assert run_details.count_measured_steps(log) == 10
    rows = {str(row[0]): row[2:] for row in table(run_details.build_timing_section(read(run)), "Seconds").rows}
    assert rows["train"] == ("20.0", "2,000.0")
    assert rows[run_details.CUT_SHORT] == ("30.0", "-")
    assert run_details.sum_cut_short_seconds(log[:-3]) >= 30.0  # the second one has no end, either


def test_the_days_before_a_resume_are_in_no_part_of_the_time() -> None:
    """A start that was killed without a word, and resumed, or cleaned, a day later."""
    started = [
        {"kind": "created", "time": 0.0},
        {"kind": "tokenized", "time": 1.0},
        {"kind": "started", "time": 10.0, "step": 0},
        {"kind": "progress", "time": 40.0, "step": 5},
    ]
    day = 86_400.0
    resumed = [
        {"kind": "tokens_reused", "time": day},
        {"kind": "started", "time": day + 5, "step": 4},
        {"kind": "trained", "time": day + 25},
        {"kind": "finished", "time": day + 30},
    ]
    assert run_details.sum_cut_short_seconds([*started, *resumed]) == 30.0
    assert run_details.sum_cut_short_seconds([*started, {"kind": "cleaned", "time": day}]) == 30.0


def test_drill_certificate(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fault = {"name": "a dead worker", "at_step": 20, "resumed_from": 16, "recomputed_steps": 4, "passed": True}
    result: dict[str, Any] = {"passed": True, "is_same_weights": True, "is_same_order": True, "rows_lost": 0}
    result |= {"rows_repeated": 0, "steps": 48, "workers": 2, "save_every": 8, "seconds": 99.0}
    result["faults"] = [{**fault, "seconds_to_next_step": 12.5}]
    events.append_event(run, "drill_report", report=result)
    section = html.build_drill_section(read(run))
    assert table(section, "Faults and recovery").rows == [("a dead worker", 20, 16, 4, "12.5", "passed")]
