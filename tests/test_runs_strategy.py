"""Layouts that the devices of a cluster do not allow are refused before rows are read."""

from pathlib import Path

import pytest

from rtrain import config as configuration
from rtrain.cluster import supply
from rtrain.config import Config
from rtrain.data import records
from rtrain.errors import ConfigError
from rtrain.network import device
from rtrain.runs import nodes, preparing
from tests.conftest import labelled_rows, write_rows
from tests.test_training_loop import make_ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategy")
    make_ground(folder)
    return folder


def shared_by_all(config: Config, source: records.Source, weights: Path, root: Path) -> tuple[records.Source, Path]:
    """Without asking nodes."""
    return source, weights


def test_to_spare_a_gpu_s_memory_is_refused_where_there_is_none(
    ground: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supply, "most", lambda kind, labels: 0 if kind == "gpu" else 8)
    monkeypatch.setattr(nodes, "share", shared_by_all)
    rows = write_rows(tmp_path / "rows.csv", labelled_rows(60))
    asked = {"model.name": str(ground / "encoder"), "data.path": str(rows), "train.shard": 3, "train.offload": True}
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "train.offload"):
        preparing.prepare(configuration.load("intent", asked), tmp_path / "run")
    assert not (tmp_path / ".tokens").exists()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_layout_that_does_not_fit_the_gpus_there_are_is_refused_before_rows_are_read(
    ground: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str
) -> None:
    monkeypatch.setattr(supply, "up", lambda: [supply.Host({"CPU": 16.0, "GPU": 3.0})])
    monkeypatch.setattr(supply, "may_start", lambda: supply.startable({}))
    monkeypatch.setattr(supply, "most", lambda kind, labels: 3)
    monkeypatch.setattr(device, "usable", lambda: True)
    monkeypatch.setattr(nodes, "share", shared_by_all)
    rows = write_rows(tmp_path / "rows.csv", labelled_rows(60))
    asked = {"model.name": str(ground / "encoder"), "data.path": str(rows), "train.workers": 4, f"train.{layout}": 2}
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == f"train.{layout}"):
        preparing.prepare(configuration.load("intent", asked), tmp_path / "run")
    assert not (tmp_path / ".tokens").exists()
