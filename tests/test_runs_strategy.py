"""How a run whose strategy is left open comes to one: by its own rows, and by what Ray says of the nodes."""

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
from rtrain.planning import memory_fit
from rtrain.planning.memory_needs import Need
from rtrain.runs import choose_strategy, node_checks, prepare
from tests.conftest import labelled_rows, write_rows
from tests.test_training_loop import make_ground, recipe_of
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
    monkeypatch.setattr(capacity, "here", lambda labels: [node])
    monkeypatch.setattr(capacity, "types", lambda labels: {})
    config = replace(configuration.load("intent"), recipe=recipe_of(ground, workers=4, **train))
    store = Store(next((ground / ".tokens").iterdir()))
    return choose_strategy.decided(config, device.Choice("cpu", 4), store, ground / "encoder")


def test_what_fits_is_in_the_configuration_and_told(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, told = decided(ground, monkeypatch, {"CPU": 4.0, "memory": 64 * GB}, strategy="auto")
    train = config.recipe.train
    assert (train.strategy, train.shard, train.gradient_checkpointing) == ("manual", 0, False)
    assert told is not None
    assert told["settings"] == {"train.shard": 0, "train.gradient_checkpointing": False}
    assert (told["workers"], told["room"]) == (4, round(0.9 * 64 * GB))


def test_what_fits_nowhere_is_refused_and_so_is_what_nobody_knows(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "train.strategy"):
        decided(ground, monkeypatch, {"CPU": 4.0, "memory": 0.1 * GB}, strategy="auto")
    with pytest.raises(ConfigError, check=lambda error: [one.code for one in error.problems] == ["unknown_memory"]):
        decided(ground, monkeypatch, {"CPU": 4.0}, strategy="auto")


def test_the_fewest_workers_and_all_of_them_have_room(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    first = memory_fit.first

    def seen(needs: Iterable[tuple[parallel_layout.Way, Need]], room: memory_fit.Room) -> memory_fit.Choice:
        asked.append(room.workers)
        return first(needs, room)

    monkeypatch.setattr(memory_fit, "first", seen)
    node = {"CPU": 3.0, "memory": 64 * GB}
    _, told = decided(ground, monkeypatch, node, strategy="auto", min_workers=2)
    assert told is not None
    assert asked == [2, 3, 3]  # 2 workers; 3, which fill the node; and 4, of which 3 share it


def test_the_way_of_several_numbers_of_workers_has_room_for_each() -> None:
    alone, many = parallel_layout.Way(0, gradient_checkpointing=True), parallel_layout.Way(3)
    assert parallel_layout.joined([alone, many]) == parallel_layout.Way(3, gradient_checkpointing=True)
    assert parallel_layout.joined([many]) == many
    assert parallel_layout.joined([alone, parallel_layout.Way(tensor=2)]) == parallel_layout.Way(0, 2, True)


def test_settings_that_are_given_stay(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, told = decided(ground, monkeypatch, {}, shard=2)
    assert (config.recipe.train.shard, told) == (2, None)


@pytest.mark.parametrize("check", [search.check, study.check])
def test_trials_that_share_nodes_leave_nothing_open(check: Callable[[Config], None]) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "train.strategy"):
        check(configuration.load("intent", {"train.strategy": "auto"}))


def shared_by_all(
    config: Config, source: row_reader.Source, weights: Path, root: Path
) -> tuple[row_reader.Source, Path]:
    """Without asking nodes."""
    return source, weights


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_layout_that_does_not_fit_the_gpus_there_are_is_refused_before_rows_are_read(
    ground: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str
) -> None:
    monkeypatch.setattr(capacity, "up", lambda: [capacity.Host({"CPU": 16.0, "GPU": 3.0})])
    monkeypatch.setattr(capacity, "may_start", lambda: capacity.startable({}))
    monkeypatch.setattr(capacity, "most", lambda kind, labels: 3)
    monkeypatch.setattr(device, "usable", lambda: True)
    monkeypatch.setattr(node_checks, "share", shared_by_all)
    rows = write_rows(tmp_path / "rows.csv", labelled_rows(60))
    asked = {"model.name": str(ground / "encoder"), "data.path": str(rows), "train.workers": 4, f"train.{layout}": 2}
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == f"train.{layout}"):
        prepare.prepare(configuration.load("intent", asked), tmp_path / "run")
    assert not (tmp_path / ".tokens").exists()
