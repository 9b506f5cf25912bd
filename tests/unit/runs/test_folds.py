"""Scores of folds, and the settings that contradict them."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError, UserError
from rtrain.runs import folds
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by


def summary_of(**scores: Any) -> dict[str, Any]:
    return {"metrics": {"test": scores, "valid": {"accuracy": 0.0}}}


def test_scores_have_their_mean_and_spread() -> None:
    summaries = [summary_of(accuracy=0.5, f1=0.2, note="x"), summary_of(accuracy=0.7, f1=float("nan"), extra=1)]
    document = {"name": "intent", "folds": 2, "rows": 10, **folds.collect_scores(summaries)}
    accuracy = document["scores"]["accuracy"]
    assert accuracy["mean"] == pytest.approx(0.6)
    assert accuracy["std"] == pytest.approx(0.02**0.5)
    assert (accuracy["min"], accuracy["max"]) == (0.5, 0.7)
    assert document["scores"]["f1"] == {"mean": 0.2, "std": 0.0, "min": 0.2, "max": 0.2}
    assert list(document["scores"]) == ["accuracy", "f1"]
    page = folds.format_page(document)
    assert "| accuracy | 0.6000 | 0.1414 | 0.5000 | 0.7000 |" in page.splitlines()


def test_a_folder_in_use_is_refused_or_numbered(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", labelled_rows(9))
    settings = config.load_config("intent", {"data.path": str(path), "data.folds": 3})
    folder = tmp_path / "cv"
    assert folds.resolve_folds(settings, folder, "refuse") == (settings, folder)
    folder.mkdir()
    (folder / "other").touch()
    with pytest.raises(UserError, check=caused_by("already_exists")):
        folds.resolve_folds(settings, folder, "refuse")
    assert folds.resolve_folds(settings, folder, "new")[1] == tmp_path / "cv-2"
    with pytest.raises(ConfigError) as caught:
        folds.resolve_folds(config.with_overrides(settings, {"data.fold": 1}), folder, "new")
    assert [problem.field for problem in caught.value.problems] == ["data.fold"]
