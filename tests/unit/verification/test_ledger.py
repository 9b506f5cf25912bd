"""The ledger of a run, recomputed from its token store: every row once per epoch, or where not."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from rtrain.data.store.store import Store
from rtrain.runs import run_folders
from rtrain.verification import verify
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import UPDATES, Ran, recipe_of, start

ground = test_trainer.ground  # a fixture


@pytest.fixture(scope="module")
def recorded(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Path]:
    """Runs with their configuration and their log, as the driver leaves them: a finished one, and one that was killed
    in its fifth update."""
    runs = {kill: tmp_path_factory.mktemp("recorded") for kill in (None, 4)}
    for kill, run in runs.items():
        log(run, start(ground, run, log_every=1, save_every=2, kill=kill), ground)
    return runs


@pytest.fixture
def run(recorded: dict[int | None, Path], tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(recorded[None], tmp_path / "run"))


@pytest.fixture
def killed(recorded: dict[int | None, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[4], tmp_path / "killed"))


def log(run: Path, ran: Ran, ground: Path) -> None:
    if not Run(run).exists:
        recipe = recipe_of(ground)
        run_folders.write_frozen_config(Run(run), config.Config(recipe, config.DeployConfig()))
        store = Store(next((ground / ".tokens").iterdir()))
        events.append_event(run, "created", store=str(store.folder), data_digest=store.manifest.digest)
    for kind, fields in ran.recorder.events:
        if kind != "score":
            events.append_event(run, kind, **fields)


def test_a_finished_run_saw_every_row_once_per_epoch(ground: Path, run: Path) -> None:
    report = verify.check_ledger(Run(run))
    rows = Store(next((ground / ".tokens").iterdir())).num_rows("train")
    assert (report.passed, report.rows, report.steps, report.steps_per_epoch) == (True, rows, UPDATES, 3)
    assert (report.repeated_rows, report.missing_rows, report.mismatching_records) == (0, 0, {})
    assert list(report.matching_records) == [1, 2, 3, 4, 5, 6]
    assert report.to_document()["passed"] is True


def test_a_killed_run_is_checked_as_far_as_it_came(ground: Path, killed: Path) -> None:
    report = verify.check_ledger(Run(killed))
    assert (report.passed, report.steps) == (True, 4)
    log(killed, start(ground, killed, log_every=1), ground)
    report = verify.check_ledger(Run(killed))
    assert (report.passed, report.steps) == (True, UPDATES)


def test_where_a_run_left_its_order_is_told(run: Path, killed: Path) -> None:
    """Another ledger from update 5 on, as of a process that resumed it and mixed the rows otherwise."""
    for fields in Run(run).events("progress")[4:]:
        events.append_event(killed, "progress", step=fields["step"], ledger="0" * 64)
    report = verify.check_ledger(Run(killed))
    assert (report.passed, sorted(report.mismatching_records)) == (False, [5, 6])
    assert "between step 4 and step 5" in report.format_text()


def test_a_checkpoint_with_another_ledger_is_told(run: Path) -> None:
    path = checkpoint_format.checkpoint_path(run / "checkpoints", UPDATES) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ledger": "ab" * 32}))
    report = verify.check_ledger(Run(run))
    assert (report.passed, report.mismatching_records) == (False, {UPDATES: "checkpoint"})


def test_rows_that_an_order_repeats_or_leaves_out_are_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = RowOrder.positions

    def repeating(order: RowOrder, update: int) -> Any:
        positions = complete(order, update).copy()
        positions[0] = positions[1]
        return positions

    monkeypatch.setattr(RowOrder, "positions", repeating)
    report = verify.check_ledger(Run(run))
    assert not report.passed
    assert (report.repeated_rows, report.missing_rows) == (UPDATES, UPDATES)


def test_another_store_under_the_run_s_name_is_refused(run: Path) -> None:
    actual = next(event for event in events.read_events(run) if event["kind"] == "created")
    text = (run / events.FILE_NAME).read_text().replace(actual["data_digest"], "f" * 16)
    (run / events.FILE_NAME).write_text(text.replace(f"{actual['store'][:-16]}{'f' * 16}", actual["store"]))
    assert refused(run) == "different_rows"


def refused(run: Path) -> str:
    with pytest.raises(UserError) as error:
        verify.check_ledger(Run(run))
    return error.value.code


def test_runs_that_tell_too_little_are_refused(ground: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing") == "not_a_run"
    run = tmp_path / "run"
    run.mkdir()
    log(run, dataclasses.replace(start(ground, run, kill=0), recorder=test_trainer.Recorder()), ground)
    assert refused(run) == "not_started"
    shutil.copy(Run(run).config, Run(tmp_path).config)
    assert refused(tmp_path) == "damaged"
