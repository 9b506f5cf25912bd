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
from rtrain.data.order import Order
from rtrain.data.store.store import Store
from rtrain.runs import run_folders
from rtrain.verification import ledger
from tests import test_training_loop
from tests.test_training_loop import UPDATES, Ran, recipe_of, start

ground = test_training_loop.ground  # a fixture


def recorded(ground: Path, run: Path, **settings: Any) -> Path:
    """A run with its configuration and its log, as the driver leaves them."""
    run.mkdir(exist_ok=True)
    log(run, start(ground, run, log_every=1, save_every=2, **settings), ground)
    return run


def log(run: Path, ran: Ran, ground: Path) -> None:
    if not Run(run).exists:
        recipe = recipe_of(ground)
        run_folders.freeze(Run(run), config.Config(recipe, config.Deploy()))
        store = Store(next((ground / ".tokens").iterdir()))
        events.append(run, "created", store=str(store.folder), data_digest=store.manifest.digest)
    for kind, fields in ran.recorder.events:
        if kind != "score":
            events.append(run, kind, **fields)


def test_a_finished_run_saw_every_row_once_per_epoch(ground: Path, tmp_path: Path) -> None:
    report = ledger.check(Run(recorded(ground, tmp_path / "run")))
    rows = Store(next((ground / ".tokens").iterdir())).rows("train")
    assert (report.passed, report.rows, report.updates, report.updates_per_epoch) == (True, rows, UPDATES, 3)
    assert (report.repeated, report.missing, report.mismatched) == (0, 0, {})
    assert list(report.checked) == [1, 2, 3, 4, 5, 6]
    assert report.to_document()["passed"] is True


def test_a_killed_run_is_checked_as_far_as_it_came(ground: Path, tmp_path: Path) -> None:
    run = recorded(ground, tmp_path / "run", kill=4)
    report = ledger.check(Run(run))
    assert (report.passed, report.updates) == (True, 4)
    log(run, start(ground, run, log_every=1), ground)
    assert (ledger.check(Run(run)).passed, ledger.check(Run(run)).updates) == (True, UPDATES)


def test_where_a_run_left_its_order_is_told(ground: Path, tmp_path: Path) -> None:
    """Another seed from update 3 on: the run is resumed by a process that mixes the rows otherwise."""
    run = recorded(ground, tmp_path / "run", kill=4)
    other = start(ground, tmp_path / "other", log_every=1, seed=3)
    wrong = [fields | {"ledger": "0" * 64} for fields in other.recorder.of("progress") if fields["update"] > 4]
    for fields in wrong:
        events.append(run, "progress", **fields)
    report = ledger.check(Run(run))
    assert (report.passed, sorted(report.mismatched)) == (False, [5, 6])
    assert "between update 4 and update 5" in report.text()


def test_a_checkpoint_with_another_ledger_is_told(ground: Path, tmp_path: Path) -> None:
    run = recorded(ground, tmp_path / "run")
    path = checkpoint_format.path_of(run / "checkpoints", UPDATES) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ledger": "ab" * 32}))
    report = ledger.check(Run(run))
    assert (report.passed, report.mismatched) == (False, {UPDATES: "checkpoint"})


def test_rows_that_an_order_repeats_or_leaves_out_are_counted(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(ground, tmp_path / "run")
    whole = Order.positions

    def repeating(order: Order, update: int) -> Any:
        positions = whole(order, update).copy()
        positions[0] = positions[1]
        return positions

    monkeypatch.setattr(Order, "positions", repeating)
    report = ledger.check(Run(run))
    assert not report.passed
    assert (report.repeated, report.missing) == (UPDATES, UPDATES)


def test_another_store_under_the_run_s_name_is_refused(ground: Path, tmp_path: Path) -> None:
    run = recorded(ground, tmp_path / "run")
    found = next(event for event in events.read(run) if event["kind"] == "created")
    text = (run / events.NAME).read_text().replace(found["data_digest"], "f" * 16)
    (run / events.NAME).write_text(text.replace(f"{found['store'][:-16]}{'f' * 16}", found["store"]))
    assert refused(run) == "different_rows"


def refused(run: Path) -> str:
    with pytest.raises(UserError) as error:
        ledger.check(Run(run))
    return error.value.code


def test_runs_that_tell_too_little_are_refused(ground: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing") == "not_a_run"
    run = tmp_path / "run"
    run.mkdir()
    log(run, dataclasses.replace(start(ground, run, kill=0), recorder=test_training_loop.Recorder()), ground)
    assert refused(run) == "not_started"
    shutil.copy(Run(run).config, Run(tmp_path).config)
    assert refused(tmp_path) == "damaged"
