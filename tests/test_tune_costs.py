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
from tests.searches import make_search, settings
from tests.test_tune_budget import started
from tests.tiny import make_encoder
from tune import search, student_costs, trainable


def test_a_model_of_fewer_layers_has_fewer_bytes_and_is_answered_sooner(tmp_path: Path) -> None:
    small, large = (make_encoder(tmp_path / str(layers), layers=layers) for layers in (1, 24))
    assert student_costs.megabytes(small) == round((small / "model.safetensors").stat().st_size / 1e6, 3)
    assert student_costs.megabytes(small) < student_costs.megabytes(large)
    assert (
        0 < student_costs.milliseconds(small) < student_costs.milliseconds(large)
    )  # 24 times the work, at the least of its times


def test_a_shape_is_measured_once_and_known_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def measured(model: Path) -> float:
        asked.append(model)
        return float(len(asked))

    monkeypatch.setitem(student_costs.OF, "latency", measured)
    one, same, other = (
        make_encoder(tmp_path / name, layers=layers, seed=seed)
        for name, layers, seed in (("one", 1, 0), ("same", 1, 7), ("other", 2, 0))
    )
    found = student_costs.Costs(tmp_path, "latency")
    assert [found.of(one), found.of(same), found.of(other)] == [1.0, 1.0, 2.0]
    assert asked == [one, other]
    again = student_costs.Costs(tmp_path, "latency")
    assert (again.of(same), len(asked)) == (1.0, 2)
    assert sorted(json.loads((tmp_path / student_costs.NAME).read_text()).values()) == [1.0, 2.0]


@pytest.mark.parametrize("layers", [[1, 2, 3], {"low": 1, "high": 3}], ids=["listed", "a range"])
def test_the_shapes_of_a_space_are_measured_before_the_slots_start(
    layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is first asked for later would be measured beside trainings, and look slower than trial 0's."""
    measured, space = list[str](), {"distill.layers": layers, "distill.temperature": [1.0, 2.0]}
    asked: dict[str, Any] = {"tune.objective": "front", "tune.cost": "latency", "tune.space": space}

    def of(task: trainable.Task, point: Mapping[str, Any]) -> Any:
        layers = point["distill.layers"]
        name = str(make_encoder(tmp_path / f"{layers} layers", layers=layers))
        return SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(name=name)))

    def measure(model: Path) -> float:
        measured.append(model.name)
        return float(len(measured))

    monkeypatch.setitem(student_costs.OF, "latency", measure)
    monkeypatch.setattr(trainable.Task, "of", of)
    chosen = settings(tmp_path, 9, **{"distill.teacher": "a version", **asked})
    one = started(make_search(tmp_path, [0.5], ended=False), chosen)
    one.measure()
    assert measured == ["1 layers", "2 layers", "3 layers"]
    one.ask({"distill.layers": 2, "distill.temperature": 2.0}, "spread")
    assert (one.history.trials[-1].cost, len(measured)) == (2.0, 3)


def test_costs_of_use_are_refused_where_all_trials_have_one_model_or_nobody_looks_at_them(tmp_path: Path) -> None:
    data = {"data.path": str(write_rows(tmp_path / "rows.csv", labelled_rows(40)))}
    asked = config.load("intent", {**data, "tune.objective": "front", "tune.cost": "bytes"})
    with pytest.raises(ConfigError) as refused:
        search.check(asked)
    assert [(one.field, one.code) for one in refused.value.problems] == [("tune.cost", "not_students")]
    search.check(asked, students=True)
    with pytest.raises(ConfigError) as refused:
        config.load("intent", {**data, "tune.cost": "latency"})
    assert [one.field for one in refused.value.problems] == ["tune.cost"]
