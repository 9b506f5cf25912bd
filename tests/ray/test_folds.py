"""`rtrain train --folds` on real Ray: each row is tested once, on one token store, by one worker group."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.runs import controller, folds, prepare
from rtrain.runs.store import scan
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_encoder

pytestmark = [pytest.mark.ray, pytest.mark.slow]
FOLDS, ROWS = 3, 96


def read_test_scores(run: Run) -> dict[str, Any]:
    scores = json.loads(run.summary.read_text())["metrics"]["test"]
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}


def test_folds_test_each_row_once_and_are_ordinary_runs(ray_session: Path) -> None:
    root = ray_session / "cross-validation"
    root.mkdir()
    settings = config.load_config(
        "intent",
        {
            **{"data.path": str(write_rows(root / "rows.csv", labelled_rows(ROWS))), "data.stratify": "label"},
            **{
                "data.folds": FOLDS,
                "data.labels": {"login": "access"},
                "model.name": str(make_encoder(root / "encoder")),
            },
            **{"train.epochs": 2, "train.workers": 1, "train.precision": "fp32", "optim.lr": 3e-3},
        },
    )
    settings, folder = folds.resolve_folds(settings, root / "cv", "refuse")
    source, _ = prepare.check_run(settings, root)
    events: list[dict[str, Any]] = []
    document = folds.train_folds(settings, folder, source, events.append)
    runs = [folds.get_fold_run(folder, fold) for fold in range(FOLDS)]

    predictions = pyarrow.parquet.read_table(folder / folds.PREDICTIONS_FILE).to_pylist()
    assert len(predictions) == len({row["row_id"] for row in predictions}) == document["rows"] == ROWS
    assert sorted(row["line"] for row in predictions) == list(range(2, ROWS + 2))
    assert {row["fold"] for row in predictions} == set(range(FOLDS))
    assert {row["target"] for row in predictions} == {"access", "parcel", "refund"}
    assert [read_test_scores(run) for run in runs] == document["fold_scores"]
    correct = sum(row["target"] == row["prediction"] for row in predictions)
    weighted = sum(
        fold["accuracy"] * sum(row["fold"] == number for row in predictions)
        for number, fold in enumerate(document["fold_scores"])
    )
    assert weighted == pytest.approx(correct)
    assert json.loads((folder / folds.SCORES_FILE).read_text()) == document

    stores = [Store(run.token_store) for run in runs if run.token_store]
    assert len({store.folder for store in stores}) == FOLDS
    for name in stores[0].manifest.shards:
        assert all((store.folder / name).samefile(stores[0].folder / name) for store in stores)
    assert len(list(Run(folder / folds.WORKERS_FOLDER).ray_storage.iterdir())) == 1  # one worker group
    assert [event["relabeled"] for run in runs for event in run.events("selected_rows")] == [ROWS // 3] * FOLDS
    assert sum(event["kind"] == "selected_rows" for event in events) == 1
    assert {info.status for info in scan.scan_folder(folder).runs} == {"finished"}

    # A fold that an interruption has cost is trained again, the others are not.
    trained_at = [run.last_event("trained") for run in runs[:2]]
    shutil.rmtree(runs[2].folder)
    with pytest.raises(UserError, check=caused_by("already_exists")):
        folds.resolve_folds(settings, folder, "refuse")
    resumed, _ = folds.resolve_folds(settings, folder, "resume")
    resumed_document = folds.train_folds(resumed, folder, source, events.append)
    assert resumed_document["scores"] == document["scores"]
    assert [Run(run.folder).last_event("trained") for run in runs[:2]] == trained_at
    changed = config.with_overrides(settings, {"data.folds": 4})
    with pytest.raises(ConfigError, check=caused_by("changed_setting")):
        folds.resolve_folds(changed, folder, "resume")

    # The same run without the command is the same run.
    (root / "single").mkdir()
    single_run = prepare.prepare_run(config.with_overrides(settings, {"data.fold": 1}), root / "single" / "run")
    summary = controller.fit(single_run, write_reports=False)
    assert summary["metrics"]["test"].items() >= read_test_scores(runs[1]).items()
    assert single_run.store.folder.name == stores[1].folder.name
