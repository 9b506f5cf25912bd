"""What students cost to use: measured once for each shape, and told to the search."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from tests.conftest import labelled_rows, write_rows
from tests.support.searches import make_search, settings
from tests.support.tiny import make_encoder
from tests.unit.tune.test_budget import started
from tune import search, student_costs, trainable


def test_a_model_of_fewer_layers_has_fewer_bytes_and_is_answered_sooner(tmp_path: Path) -> None:
    small, large = (make_encoder(tmp_path / str(layers), layers=layers) for layers in (1, 24))
    assert student_costs.measure_megabytes(small) == round((small / "model.safetensors").stat().st_size / 1e6, 3)
    assert student_costs.measure_megabytes(small) < student_costs.measure_megabytes(large)
    assert (
        0 < student_costs.measure_milliseconds(small) < student_costs.measure_milliseconds(large)
    )  # 24 times the work, at the least of its times


def test_a_shape_is_measured_once_and_known_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides: list[Path] = []

    def measured(model: Path) -> float:
        overrides.append(model)
        return float(len(overrides))

    monkeypatch.setitem(student_costs.MEASURES, "latency", measured)
    item, same, other = (
        make_encoder(tmp_path / name, layers=layers, seed=seed)
        for name, layers, seed in (("one", 1, 0), ("same", 1, 7), ("other", 2, 0))
    )
    result = student_costs.StudentCosts(tmp_path, "latency")
    assert [result.get(item), result.get(same), result.get(other)] == [1.0, 1.0, 2.0]
    assert overrides == [item, other]
    second = student_costs.StudentCosts(tmp_path, "latency")
    assert (second.get(same), len(overrides)) == (1.0, 2)
    assert sorted(json.loads((tmp_path / student_costs.FILE_NAME).read_text()).values()) == [1.0, 2.0]


@pytest.mark.parametrize("layers", [[1, 2, 3], {"low": 1, "high": 3}], ids=["listed", "a range"])
def test_the_shapes_of_a_space_are_measured_before_the_slots_start(
    layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later measurement would run beside trainings, and be slower than trial 0's."""
    measured, space = list[str](), {"distill.layers": layers, "distill.temperature": [1.0, 2.0]}
    overrides: dict[str, Any] = {"tune.objective": "pareto", "tune.cost": "latency", "tune.space": space}

    def config_for(task: trainable.SearchTask, point: Mapping[str, Any]) -> Any:
        layers = point["distill.layers"]
        name = str(make_encoder(tmp_path / f"{layers} layers", layers=layers))
        return SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(name=name)))

    def measure(model: Path) -> float:
        measured.append(model.name)
        return float(len(measured))

    monkeypatch.setitem(student_costs.MEASURES, "latency", measure)
    monkeypatch.setattr(trainable.SearchTask, "config_for", config_for)
    selection = settings(tmp_path, 9, **{"distill.teacher": "a version", **overrides})
    item = started(make_search(tmp_path, [0.5], ended=False), selection)
    item.measure_costs()
    assert measured == ["1 layers", "2 layers", "3 layers"]
    item.create_trial({"distill.layers": 2, "distill.temperature": 2.0}, "spread")
    assert (item.history.trials[-1].cost, len(measured)) == (2.0, 3)


def test_costs_of_use_are_refused_where_all_trials_have_one_model_or_nobody_looks_at_them(tmp_path: Path) -> None:
    data = {"data.path": str(write_rows(tmp_path / "rows.csv", labelled_rows(40)))}
    overrides = config.load_config("intent", {**data, "tune.objective": "pareto", "tune.cost": "bytes"})
    with pytest.raises(ConfigError) as refused:
        search.check_search(overrides)
    assert [(problem.field, problem.code) for problem in refused.value.problems] == [("tune.cost", "not_students")]
    search.check_search(overrides, students=True)
    with pytest.raises(ConfigError) as refused:
        config.load_config("intent", {**data, "tune.cost": "latency"})
    assert [problem.field for problem in refused.value.problems] == ["tune.cost"]
