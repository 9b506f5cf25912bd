"""`train.strategy=auto`: resolved by the rows of the run and the nodes of the Ray cluster."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration
from rtrain.cluster import capacity
from rtrain.config import Config
from rtrain.core.errors import ConfigError
from rtrain.data import row_reader
from rtrain.data.store.store import Store
from rtrain.models import device
from rtrain.parallel import layout as parallel_layout
from rtrain.planning import memory_estimate
from rtrain.planning.memory_estimate import WorkerMemory
from rtrain.runs import nodes, prepare
from tests.conftest import labelled_rows, write_rows
from tests.unit.trainer.test_trainer import make_ground, recipe_of
from tune import search, study

GB = 1e9


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategy")
    make_ground(folder)
    return folder


def decided(
    ground: Path, monkeypatch: pytest.MonkeyPatch, node: Mapping[str, float], **train: Any
) -> tuple[Config, dict[str, Any] | None]:
    monkeypatch.setattr(capacity, "nodes_with_labels", lambda labels: [node])
    monkeypatch.setattr(capacity, "startable_node_types", lambda labels: {})
    config = replace(configuration.load_config("intent"), recipe=recipe_of(ground, workers=4, **train))
    store = Store(next((ground / ".tokens").iterdir()))
    return prepare.resolve_strategy(config, device.DeviceChoice("cpu", 4), store, ground / "encoder")


def test_what_fits_is_in_the_configuration_and_told(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, messages = decided(ground, monkeypatch, {"CPU": 4.0, "memory": 64 * GB}, strategy="auto")
    train = config.recipe.train
    assert (train.strategy, train.zero_stage, train.gradient_checkpointing) == ("manual", 0, False)
    assert messages is not None
    assert messages["settings"] == {"train.zero_stage": 0, "train.gradient_checkpointing": False}
    assert (messages["workers"], messages["limit_bytes"]) == (4, round(0.9 * 64 * GB))


def test_what_fits_nowhere_is_refused_and_so_is_what_nobody_knows(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "train.strategy"):
        decided(ground, monkeypatch, {"CPU": 4.0, "memory": 0.1 * GB}, strategy="auto")
    with pytest.raises(
        ConfigError, check=lambda error: [problem.code for problem in error.problems] == ["unknown_memory"]
    ):
        decided(ground, monkeypatch, {"CPU": 4.0}, strategy="auto")


def test_the_fewest_workers_and_all_of_them_have_room(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides: list[int] = []
    first = memory_estimate.first_fitting_layout

    def seen(
        needs: Iterable[tuple[parallel_layout.ParallelLayout, WorkerMemory]], capacity_: memory_estimate.MemoryLimit
    ) -> memory_estimate.LayoutChoice:
        overrides.append(capacity_.sharing_workers)
        return first(needs, capacity_)

    monkeypatch.setattr(memory_estimate, "first_fitting_layout", seen)
    node = {"CPU": 3.0, "memory": 64 * GB}
    _, messages = decided(ground, monkeypatch, node, strategy="auto", min_workers=2)
    assert messages is not None
    assert overrides == [2, 3, 3]  # 2 workers; 3, which fill the node; and 4, where 3 share it


def test_the_way_of_several_numbers_of_workers_has_room_for_each() -> None:
    single, many = parallel_layout.ParallelLayout(0, gradient_checkpointing=True), parallel_layout.ParallelLayout(3)
    assert parallel_layout.merge_layouts([single, many]) == parallel_layout.ParallelLayout(
        3, gradient_checkpointing=True
    )
    assert parallel_layout.merge_layouts([many]) == many
    assert parallel_layout.merge_layouts(
        [single, parallel_layout.ParallelLayout(tensor_parallel_size=2)]
    ) == parallel_layout.ParallelLayout(0, 2, True)


def test_settings_that_are_given_stay(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, messages = decided(ground, monkeypatch, {}, zero_stage=2)
    assert (config.recipe.train.zero_stage, messages) == (2, None)


@pytest.mark.parametrize("check", [search.check_search, study.check_study])
def test_trials_that_share_nodes_leave_nothing_open(check: Callable[[Config], None]) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "train.strategy"):
        check(configuration.load_config("intent", {"train.strategy": "auto"}))


def shared_by_all(
    config: Config, source: row_reader.DataSource, weights: Path, root: Path
) -> tuple[row_reader.DataSource, Path]:
    """Without asking nodes."""
    return source, weights


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_layout_that_does_not_fit_the_gpus_there_are_is_refused_before_rows_are_read(
    ground: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str
) -> None:
    monkeypatch.setattr(capacity, "live_nodes", lambda: [capacity.NodeSpec({"CPU": 16.0, "GPU": 3.0})])
    monkeypatch.setattr(capacity, "autoscaler_limits", lambda: capacity.parse_autoscaler_limits({}))
    monkeypatch.setattr(capacity, "max_accelerators", lambda kind, labels: 3)
    monkeypatch.setattr(device, "can_use_gpus", lambda: True)
    monkeypatch.setattr(nodes, "check_nodes", shared_by_all)
    rows = write_rows(tmp_path / "rows.csv", labelled_rows(60))
    overrides = {
        "model.name": str(ground / "encoder"),
        "data.path": str(rows),
        "train.workers": 4,
        f"train.{layout}": 2,
    }
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == f"train.{layout}"):
        prepare.prepare_run(configuration.load_config("intent", overrides), tmp_path / "run")
    assert not (tmp_path / ".tokens").exists()
