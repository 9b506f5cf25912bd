"""The study of aggregation frequencies: its runs, their results, and its table."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core.errors import ConfigError, TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import get_metric
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.support.reports import Page, make_run
from tests.support.trained import ROWS, settings
from tune import study, trainable
from tune.history import read_journal, replay_journal
from tune.study import CellResult, StudyCell

RECIPE, K = "aggregation-study", "train.aggregation_frequency"
ENOUGH = 7000
"""Rows; with 5 epochs, 100 passes of 2 x 8 rows make 25 updates of them."""


def recipe(**overrides: Any) -> Config:
    return config.load_config(RECIPE, {"data.path": "rows.csv", **overrides})


def rows_of(table: str, title: str) -> dict[str, list[str]]:
    """The lines of the part with this title, by their first cell."""
    part = next(part for part in table.split("\n\n") if part.startswith(f"| {title}"))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    return {line[0]: line[1:] for line in lines if not line[0].startswith("---")}


def test_the_published_study_takes_eleven_runs_for_its_twelve_cells() -> None:
    outcome = study.plan_study(recipe(), ENOUGH)
    assert [(cell.optimizer, cell.frequency) for cell in outcome.cells] == [
        (optimizer, k) for optimizer in ("AdamW", "AdamW, linear rule", "RAdam") for k in (1, 2, 10, 100)
    ]
    # At k = 1 the linear rule changes nothing: both cells have the same weights, and one run.
    numbers = {(cell.optimizer, cell.frequency): cell.run_number for cell in outcome.cells}
    assert numbers["AdamW", 1] == numbers["AdamW, linear rule", 1] == 0
    assert sorted(outcome.runs) == list(range(11))
    assert (outcome.runs[0], outcome.skipped_frequencies) == ({}, {})


@pytest.mark.parametrize("name", ["aggregation-study", "squad"])
def test_each_run_has_its_optimizer_its_passes_and_its_rate(name: str) -> None:
    instance = config.load_config(name, {"data.path": "rows.csv", "tune.study": "aggregation", "optim.lr": 1e-4})
    outcome = study.plan_study(instance, ENOUGH * 2)
    assert outcome.runs[0] == study.first_overrides(instance)
    for cell in outcome.cells:
        element = config.with_overrides(instance, outcome.runs[cell.run_number]).recipe
        assert element.optim.name == ("radam" if cell.optimizer == "RAdam" else "adamw")
        assert element.global_batch_size == 2 * 8 * cell.frequency
        assert element.peak_lr == pytest.approx(1e-4 * (cell.frequency if "linear" in cell.optimizer else 1))
    assert [cell.frequency for cell in outcome.cells[:4]] == [1, 2, 10, 100]


@pytest.mark.parametrize(
    ("initial", "requested_settings"),
    [
        ("aggregation", {"train.workers": 4}),
        ("aggregation", {"tune.space": {K: [1, 2]}}),
        ("aggregation", {"tune.study": None}),
        (None, {"tune.study": "aggregation"}),
    ],
)
def test_a_resume_that_would_be_another_is_refused_before_it_changes_what_is_stored(
    initial: str | None, requested_settings: dict[str, Any], tmp_path: Path
) -> None:
    """After a write every resume would be refused, with and without the change."""
    folder, workers = tmp_path / "study", 2
    rows = write_rows(tmp_path / "rows.csv", [("a parcel", "parcel")])
    first = config.load_config("intent", {"data.path": str(rows), "tune.study": initial, "train.workers": workers})
    with trainable.open_search(first, folder, "refuse", None):
        pass
    before = Run(folder).config.read_bytes()
    with (
        pytest.raises(ConfigError) as refused,
        trainable.open_search(config.load_config("intent", requested_settings), folder, "resume", None),
    ):
        pass
    assert (next(iter(requested_settings)), "changed_setting") in [
        (problem.field, problem.code) for problem in refused.value.problems
    ]
    assert Run(folder).config.read_bytes() == before
    for may_change in ({}, {"tune.max_concurrent_trials": 2}):
        with trainable.open_search(config.load_config("intent", may_change), folder, "resume", None) as (resolved, _):
            assert resolved.recipe.train.workers == workers


@pytest.mark.parametrize("initial", ["aggregation", None])
def test_a_search_or_a_study_whose_disk_becomes_full_ends_with_the_reason_and_75(
    initial: str | None, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.csv", [("a parcel", "parcel")])
    instance = config.load_config("intent", {"data.path": str(rows), "tune.study": initial})
    with pytest.raises(TemporaryFailureError) as raised, trainable.open_search(instance, tmp_path / "s", "new", None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert raised.value.code == "disk_full"
    with pytest.raises(PermissionError), trainable.open_search(instance, tmp_path / "s", "resume", None):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_space_of_one_s_own_names_the_frequencies() -> None:
    outcome = study.plan_study(recipe(**{"tune.space": {K: [8, 1]}}), ENOUGH)
    assert [cell.frequency for cell in outcome.cells] == [1, 8] * 3


@pytest.mark.parametrize(
    ("rows", "left_out"),
    [
        (6400, {}),  # 4 updates of 1,600 rows in each of 5 epochs
        (4800, {100: "15 steps, fewer than 20"}),
        (1599, {100: "one step takes 1600 rows, and there are 1599"}),
        (161, {10: "10 steps, fewer than 20", 100: "one step takes 1600 rows, and there are 161"}),
    ],
)
def test_frequencies_that_the_rows_are_too_few_for_are_left_out(rows: int, left_out: dict[int, str]) -> None:
    outcome = study.plan_study(recipe(), rows)
    assert outcome.skipped_frequencies == left_out
    assert {cell.frequency for cell in outcome.cells} == {1, 2, 10, 100} - left_out.keys()


def test_rows_that_leave_nothing_to_compare_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        study.plan_study(recipe(), 70)
    assert refused.value.code == "too_few_rows"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (
            {"data.valid_share": 0, "tune.space": {K: [2, 4]}},
            [("data.valid_share", "no_rows"), ("tune.space", "missing")],
        ),
        *(
            ({"tune.space": {K: values}}, [(f"tune.space.{K}", "wrong_type")])
            for values in ([1, 1.5, 2], [1, "two"], [1, 0], [1, 2, 2], {"low": 1, "high": 8})
        ),
        ({"tune.space": {K: [1, 2], "optim.lr": [1e-4, 1e-3]}}, [("tune.space.optim.lr", "not_searchable")]),
        ({"optim.lr": 0.02}, None),  # 100 times 0.02 is no learning rate
    ],
)
def test_what_contradicts_a_study_is_refused_at_once(
    overrides: dict[str, Any], refused: list[tuple[str, str]] | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        study.plan_study(recipe(**overrides), ENOUGH)
    assert refused in (None, [(problem.field, problem.code) for problem in caught.value.problems])


# 1,000 updates of 0.1 s each and exchanges of 0.05 s beside; with k = 10, a tenth of the exchanges.
FIRST = CellResult("AdamW", 1, 0.9, 150.0, 1000, 0.05, 10_000_000, 2)
TENTH = replace(FIRST, frequency=10, score=0.89, seconds=105.0, steps=100)


def test_a_table_tells_what_fewer_exchanges_save_and_cost() -> None:
    # Each of two workers sends the whole gradient once: 80 million bits take 0.08 s over 1 Gbit/s.
    assert study.predict_sync_seconds(10_000_000, 2, 1e9) == pytest.approx(0.08)
    assert study.predict_sync_seconds(10_000_000, 4, 1e9) == pytest.approx(0.12)
    assert study.predict_sync_seconds(10_000_000, 1, 1e9) == 0.0
    text = study.build_study_table([FIRST, TENTH], "accuracy", {100: "few"}).to_markdown
    assert rows_of(text, "accuracy on the test rows")["accuracy on the test rows"] == ["k = 1", "k = 10"]
    for title, cells in (
        ("accuracy on the test rows", ["0.9000", "0.8900"]),
        ("score loss", ["+0.0000", "+0.0100"]),
        ("seconds of training here", ["150.0", "105.0"]),
        ("share in gradient synchronization", ["33.3%", "4.8%"]),
        ("time saved", ["0.0%", "30.0%"]),
        ("seconds over 1 Gbit/s, predicted", ["180.0 (0%)", "108.0 (40%)"]),
    ):
        assert rows_of(text, title)["AdamW"] == cells
    assert "k = 100 is skipped: few." in text


def test_a_run_that_failed_is_told_with_its_error(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path, trained=False))
    run.append_event("failed", error="the gradient is not finite: lower optim.lr\n  trace")
    failed = study.read_cell_result(StudyCell("AdamW", 100, 3), run)
    assert failed == CellResult("AdamW", 100, error="the gradient is not finite: lower optim.lr")
    outcome = study.build_study_table([FIRST, failed], "accuracy").to_markdown
    assert rows_of(outcome, "accuracy")["AdamW"] == ["0.9000", "failed"]


def test_the_page_of_a_study_has_its_table_its_finding_and_each_training(tmp_path: Path) -> None:
    failed = CellResult("AdamW", 100, error="the gradient is not finite")
    document = study.build_study_table([FIRST, TENTH, failed], "accuracy", {200: "3 updates"}).document
    (instance := Run(tmp_path)).study_table.write_text(json.dumps(document))
    shown = Page(study.write_study_page(instance).read_text())
    assert "AdamW with k = 10 takes 30% less time than with k = 1, for -0.0100 of accuracy." in shown.text
    for messages in ("k = 200 is skipped: 3 updates", "AdamW, k = 100: the gradient is not finite", "0.8900", "failed"):
        assert messages in shown.text
    points = re.findall(r"<title>([^<]*)</title>", instance.study_page.read_text())
    assert [point for point in points if point.startswith("AdamW, k = ")] == [
        "AdamW, k = 1: 0.9000 in 150 s",
        "AdamW, k = 10: 0.8900 in 105 s",
    ]


@pytest.mark.parametrize("lost", [0.02, None])
def test_a_study_in_which_nothing_pays_says_so(tmp_path: Path, lost: float | None) -> None:
    other = CellResult("AdamW", 10, error="failed") if lost is None else replace(TENTH, score=0.9 - lost)
    document = study.build_study_table([FIRST, other], "accuracy").document
    outcome = study.summarize_finding("accuracy", [item for item in document["results"] if item["error"] is None])
    assert outcome.startswith("No frequency")


def test_a_study_that_has_not_ended_has_no_page_and_names_what_goes_on(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        study.write_study_page(Run(tmp_path))
    assert refused.value.code == "not_finished"


@pytest.mark.ray
@pytest.mark.slow
def test_a_study_trains_its_runs_and_tells_their_scores_and_what_their_exchanges_cost(ray_session: Path) -> None:
    folder = ray_session / "study"
    training = {"train.global_batch_size": None, "train.epochs": 2, "train.micro_batch_size": 4, K: 2}
    selection = settings(folder, **training, **{"tune.study": "aggregation", "tune.space": {K: [1, 4, 50]}})
    heard: list[dict[str, Any]] = []
    outcome = study.run_study(selection, folder / "made", on_event=heard.append)
    results = outcome.table.document["results"]
    assert [(result["optimizer"], result["frequency"]) for result in results] == [
        (optimizer, k) for optimizer in study.OPTIMIZERS for k in (1, 4)
    ]
    assert list(outcome.table.document["skipped"]) == ["50"]
    headline = get_metric(base.get_task("classification").output).headline
    assert outcome.table.document["headline"] == headline
    history = replay_journal(read_journal(outcome.study.trials))
    assert [trial.status for trial in history.trials] == ["finished"] * 5
    numbers = {
        (cell.optimizer, cell.frequency): cell.run_number for cell in study.plan_study(selection, ROWS * 9 // 10).cells
    }
    for element in results:
        log = outcome.study.trial(numbers[element["optimizer"], element["frequency"]]).events()
        scores = next(event["scores"] for event in log if event["kind"] == "evaluated" and event["split"] == "test")
        assert element["error"] is None
        assert element["score"] == scores[headline]
        assert element["sync_s"] >= 0  # beside other work it may be any share of the seconds
        assert element["sync_share"] == element["sync_s"] * element["steps"] / element["seconds"]
        assert element["workers"] == 2
        assert element["gradient_bytes"] > 0
    first, fourth = results[:2]
    assert first["steps"] > 3 * fourth["steps"]
    assert (
        study.load_study_table(json.loads(outcome.study.study_table.read_text())).to_markdown
        == outcome.table.to_markdown
    )
    assert {event.get("trial") for event in heard if event["kind"] == "progress"} == set(range(5))

    assert f"{results[0]['score']:.4f}" in outcome.study.study_page.read_text()

    before = outcome.study.trials.read_bytes()
    repeat = study.run_study(config.load_config(str(outcome.study.config)), folder / "made", "resume")
    assert repeat.table.document == outcome.table.document
    assert outcome.study.trials.read_bytes() == before
    other = config.with_overrides(selection, {"tune.space": {K: [1, 2, 4]}})
    with pytest.raises(ConfigError) as caught:
        study.run_study(other, folder / "made", "resume")
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [("tune.space", "changed_setting")]
