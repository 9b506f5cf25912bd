"""The study of aggregation frequencies: which runs it asks for, what it reads of them, and its table."""

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
from rtrain.core.errors import ConfigError, TryAgain, UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import metric_for
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.reports import Page, make_run
from tests.trained import ROWS, settings
from tune import study, trainable
from tune.history import read_journal, replay
from tune.report import study_table
from tune.report.study_table import Cell, Result

RECIPE = "aggregation-study"
ENOUGH = 7000
"""Rows; with 5 epochs, 100 passes of 2 x 8 rows make 25 updates of them."""


def recipe(**overrides: Any) -> Config:
    return config.load(RECIPE, {"data.path": "rows.csv", **overrides})


def rows_of(table: str, title: str) -> dict[str, list[str]]:
    """The lines of the part with this title, by their first cell."""
    part = next(part for part in table.split("\n\n") if part.startswith(f"| {title}"))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    return {line[0]: line[1:] for line in lines if not line[0].startswith("---")}


# ----------------------------------------------------------------------------------------------------------------- plan


def test_the_published_study_takes_eleven_runs_for_its_twelve_cells() -> None:
    found = study.plan(recipe(), ENOUGH)
    assert [(cell.optimizer, cell.frequency) for cell in found.cells] == [
        (optimizer, k) for optimizer in ("AdamW", "AdamW, linear rule", "RAdam") for k in (1, 2, 10, 100)
    ]
    # At k = 1 the linear rule changes nothing: both cells have the same weights, and one run.
    numbers = {(cell.optimizer, cell.frequency): cell.number for cell in found.cells}
    assert numbers["AdamW", 1] == numbers["AdamW, linear rule", 1] == 0
    assert sorted(found.runs) == list(range(11))
    assert (found.runs[0], found.left_out) == ({}, {})


@pytest.mark.parametrize("name", ["aggregation-study", "squad"])
def test_each_run_has_its_optimizer_its_passes_and_its_rate(name: str) -> None:
    made = config.load(name, {"data.path": "rows.csv", "tune.study": "aggregation", "optim.lr": 1e-4})
    found = study.plan(made, ENOUGH * 2)
    assert found.runs[0] == study.first(made)
    for cell in found.cells:
        one = config.with_overrides(made, found.runs[cell.number]).recipe
        assert one.optim.name == ("radam" if cell.optimizer == "RAdam" else "adamw")
        assert one.rows_per_update == 2 * 8 * cell.frequency
        assert one.peak_lr == pytest.approx(1e-4 * (cell.frequency if "linear" in cell.optimizer else 1))
    assert [cell.frequency for cell in found.cells[:4]] == [1, 2, 10, 100]


@pytest.mark.parametrize(
    ("begun", "asked"),
    [
        ("aggregation", {"train.workers": 4}),
        ("aggregation", {"tune.space": {study.FREQUENCY: [1, 2]}}),
        ("aggregation", {"tune.study": None}),
        (None, {"tune.study": "aggregation"}),
    ],
)
def test_a_resume_that_would_be_another_is_refused_before_it_changes_what_is_stored(
    begun: str | None, asked: dict[str, Any], tmp_path: Path
) -> None:
    """Once that was written, every resume was refused, also the one that leaves the change out."""
    folder, workers = tmp_path / "study", 2
    rows = write_rows(tmp_path / "rows.csv", [("a parcel", "parcel")])
    first = config.load("intent", {"data.path": str(rows), "tune.study": begun, "train.workers": workers})
    with trainable.held(first, folder, "refuse", None):
        pass
    before = Run(folder).config.read_bytes()
    with pytest.raises(ConfigError) as refused, trainable.held(config.load("intent", asked), folder, "resume", None):
        pass
    assert (next(iter(asked)), "changed_setting") in [(one.field, one.code) for one in refused.value.problems]
    assert Run(folder).config.read_bytes() == before
    for may_change in ({}, {"tune.concurrent": 2}):
        with trainable.held(config.load("intent", may_change), folder, "resume", None) as (settled, _):
            assert settled.recipe.train.workers == workers


@pytest.mark.parametrize("begun", ["aggregation", None])
def test_a_search_or_a_study_whose_disk_becomes_full_ends_with_the_reason_and_75(
    begun: str | None, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.csv", [("a parcel", "parcel")])
    made = config.load("intent", {"data.path": str(rows), "tune.study": begun})
    with pytest.raises(TryAgain) as raised, trainable.held(made, tmp_path / "s", "new", None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert raised.value.code == "disk_full"
    with pytest.raises(PermissionError), trainable.held(made, tmp_path / "s", "resume", None):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_space_of_one_s_own_names_the_frequencies() -> None:
    found = study.plan(recipe(**{"tune.space": {study.FREQUENCY: [8, 1]}}), ENOUGH)
    assert [cell.frequency for cell in found.cells] == [1, 8] * 3


@pytest.mark.parametrize(
    ("rows", "left_out"),
    [
        (6400, {}),  # 4 updates of 1,600 rows in each of 5 epochs
        (4800, {100: "15 updates, fewer than 20"}),
        (1599, {100: "one update takes 1600 rows, and there are 1599"}),
        (161, {10: "10 updates, fewer than 20", 100: "one update takes 1600 rows, and there are 161"}),
    ],
)
def test_frequencies_that_the_rows_are_too_few_for_are_left_out(rows: int, left_out: dict[int, str]) -> None:
    found = study.plan(recipe(), rows)
    assert found.left_out == left_out
    assert {cell.frequency for cell in found.cells} == {1, 2, 10, 100} - left_out.keys()


def test_rows_that_leave_nothing_to_compare_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        study.plan(recipe(), 70)
    assert refused.value.code == "too_few_rows"


def test_what_contradicts_a_study_is_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        study.plan(recipe(**{"data.valid_share": 0, "tune.space": {study.FREQUENCY: [2, 4]}}), ENOUGH)
    assert [problem.field for problem in caught.value.problems] == ["data.valid_share", "tune.space"]
    for values in ([1, 1.5, 2], [1, "two"], [1, 0], [1, 2, 2], {"low": 1, "high": 8}):
        with pytest.raises(ConfigError) as caught:
            study.check(recipe(**{"tune.space": {study.FREQUENCY: values}}))
        [problem] = caught.value.problems
        assert (problem.field, problem.code) == (f"tune.space.{study.FREQUENCY}", "wrong_type")
    with pytest.raises(ConfigError) as caught:
        study.check(recipe(**{"tune.space": {study.FREQUENCY: [1, 2], "optim.lr": [1e-4, 1e-3]}}))
    assert [(one.field, one.code) for one in caught.value.problems] == [("tune.space.optim.lr", "not_searchable")]
    with pytest.raises(ConfigError):  # 100 times 0.02 is no learning rate
        study.plan(recipe(**{"optim.lr": 0.02}), ENOUGH)


# ---------------------------------------------------------------------------------------------------------------- table

# 1,000 updates of 0.1 s each and exchanges of 0.05 s beside; with k = 10, a tenth of the exchanges.
FIRST = Result("AdamW", 1, 0.9, 150.0, 1000, 0.05, 10_000_000, 2)
TENTH = replace(FIRST, frequency=10, score=0.89, seconds=105.0, updates=100)


def test_a_table_tells_what_fewer_exchanges_save_and_cost() -> None:
    found = study_table.table([FIRST, TENTH], "accuracy")
    assert rows_of(found.text, "accuracy on the test rows") == {
        "accuracy on the test rows": ["k = 1", "k = 10"],
        "AdamW": ["0.9000", "0.8900"],
    }
    assert rows_of(found.text, "lost")["AdamW"] == ["+0.0000", "+0.0100"]
    assert rows_of(found.text, "seconds of training here")["AdamW"] == ["150.0", "105.0"]
    assert rows_of(found.text, "share of them in the exchange")["AdamW"] == ["33.3%", "4.8%"]
    assert rows_of(found.text, "time saved")["AdamW"] == ["0.0%", "30.0%"]


def test_times_over_a_link_are_those_of_the_gradient_s_bytes() -> None:
    # Each of two workers sends the whole gradient once: 80 million bits take 0.08 s over 1 Gbit/s.
    assert study_table.over_link(10_000_000, 2, 1e9) == pytest.approx(0.08)
    assert study_table.over_link(10_000_000, 4, 1e9) == pytest.approx(0.12)
    assert study_table.over_link(10_000_000, 1, 1e9) == 0.0
    found = study_table.table([FIRST, TENTH], "accuracy")
    assert rows_of(found.text, "seconds over 1 Gbit/s, predicted")["AdamW"] == ["180.0 (0%)", "108.0 (40%)"]


def test_times_over_a_network_that_was_measured_stand_beside() -> None:
    found = study_table.of_document(
        study_table.table([FIRST, TENTH], "accuracy", {100: "few"}).document, {"a link": 0.45}
    )
    assert rows_of(found.text, "seconds over a link, measured")["AdamW"] == ["550.0 (0%)", "145.0 (74%)"]
    assert found.document["networks"]["a link"]["results"][1]["saved"] == pytest.approx(1 - 145 / 550)
    assert "k = 100 is left out: few." in found.text


def test_networks_that_were_measured_stay_in_the_study(tmp_path: Path) -> None:
    first = study_table.of_document(study_table.table([FIRST, TENTH], "accuracy").document, {"sockets": 0.01})
    second = study_table.of_document(first.document, {"a link": 0.45})
    assert study_table.measured(second.document) == {"sockets": 0.01, "a link": 0.45}
    assert study_table.measured(study_table.of_document(second.document).document) == {"sockets": 0.01, "a link": 0.45}
    assert [part.title for part in second.parts[-2:]] == [
        "seconds over sockets, measured (saved)",
        "seconds over a link, measured (saved)",
    ]


def test_a_run_that_failed_is_told_with_its_error(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path, trained=False))
    run.append("failed", error="the gradient is not finite: lower optim.lr\n  trace")
    failed = study_table.of_run(Cell("AdamW", 100, 3), run)
    assert failed == Result("AdamW", 100, error="the gradient is not finite: lower optim.lr")
    found = study_table.table([FIRST, failed], "accuracy").text
    assert rows_of(found, "accuracy")["AdamW"] == ["0.9000", "failed"]
    assert "AdamW, k = 100: the gradient is not finite: lower optim.lr" in found


# ----------------------------------------------------------------------------------------------------------------- page


def test_the_page_of_a_study_has_its_table_its_finding_and_each_training(tmp_path: Path) -> None:
    failed = Result("AdamW", 100, error="the gradient is not finite")
    document = study_table.table([FIRST, TENTH, failed], "accuracy", {200: "3 updates"}).document
    (made := Run(tmp_path)).study_table.write_text(json.dumps(document))
    shown = Page(study_table.write(made).read_text())
    assert "AdamW with k = 10 takes 30% less time than with k = 1, for -0.0100 of accuracy." in shown.text
    for told in ("k = 200 is left out: 3 updates", "AdamW, k = 100: the gradient is not finite", "0.8900", "failed"):
        assert told in shown.text
    points = re.findall(r"<title>([^<]*)</title>", made.study_page.read_text())
    assert [point for point in points if point.startswith("AdamW, k = ")] == [
        "AdamW, k = 1: 0.9000 in 150 s",
        "AdamW, k = 10: 0.8900 in 105 s",
    ]


@pytest.mark.parametrize("lost", [0.02, None])
def test_a_study_in_which_nothing_pays_says_so(tmp_path: Path, lost: float | None) -> None:
    other = Result("AdamW", 10, error="failed") if lost is None else replace(TENTH, score=0.9 - lost)
    document = study_table.table([FIRST, other], "accuracy").document
    found = study_table.told("accuracy", [one for one in document["results"] if one["error"] is None])
    assert found.startswith("No frequency")


def test_a_study_that_has_not_ended_has_no_page_and_names_what_goes_on(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        study_table.write(Run(tmp_path))
    assert refused.value.code == "not_finished"


# ------------------------------------------------------------------------------------------------------------ real runs


@pytest.mark.ray
@pytest.mark.slow
def test_a_study_trains_its_runs_and_tells_their_scores_and_what_their_exchanges_cost(ray_session: Path) -> None:
    folder = ray_session / "study"
    chosen = settings(
        folder,
        **{"train.rows_per_update": None, "train.epochs": 2, "train.micro_batch": 4},
        **{"train.aggregation_frequency": 2, "tune.study": "aggregation", "tune.space": {study.FREQUENCY: [1, 4, 50]}},
    )
    heard: list[dict[str, Any]] = []
    found = study.run(chosen, folder / "made", on_event=heard.append)
    results = found.table.document["results"]
    assert [(one["optimizer"], one["frequency"]) for one in results] == [
        (optimizer, k) for optimizer in study.OPTIMIZERS for k in (1, 4)
    ]
    assert list(found.table.document["left_out"]) == ["50"]
    headline = metric_for(base.get("classification").output).headline
    assert found.table.document["headline"] == headline
    history = replay(read_journal(found.study.trials))
    assert [trial.status for trial in history.trials] == ["finished"] * 5
    numbers = {(cell.optimizer, cell.frequency): cell.number for cell in study.plan(chosen, ROWS * 9 // 10).cells}
    for one in results:
        log = found.study.trial(numbers[one["optimizer"], one["frequency"]]).events()
        scores = next(event["scores"] for event in log if event["kind"] == "evaluated" and event["split"] == "test")
        assert one["error"] is None
        assert one["score"] == scores[headline]
        assert one["exchange_s"] >= 0  # beside other work it may be any share of the seconds
        assert one["share"] == one["exchange_s"] * one["updates"] / one["seconds"]
        assert one["workers"] == 2
        assert one["exchange_bytes"] > 0
    first, fourth = results[:2]
    assert first["updates"] > 3 * fourth["updates"]
    assert study_table.of_document(json.loads(found.study.study_table.read_text())).text == found.table.text
    assert {event.get("trial") for event in heard if event["kind"] == "progress"} == set(range(5))

    assert f"{results[0]['score']:.4f}" in found.study.study_page.read_text()

    before = found.study.trials.read_bytes()
    again = study.run(config.load(str(found.study.config)), folder / "made", "resume")
    assert again.table.document == found.table.document
    assert found.study.trials.read_bytes() == before
    other = config.with_overrides(chosen, {"tune.space": {study.FREQUENCY: [1, 2, 4]}})
    with pytest.raises(ConfigError) as caught:
        study.run(other, folder / "made", "resume")
    assert [(one.field, one.code) for one in caught.value.problems] == [("tune.space", "changed_setting")]
