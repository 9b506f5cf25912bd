"""A search over students: its default space, and what students cost to use."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import config
from rtrain.compress import student
from rtrain.core.errors import ConfigError
from tests.conftest import labelled_rows, write_rows
from tests.support.searches import make_search, settings
from tests.support.tiny import make_encoder
from tests.unit.tune.test_budget import started
from tune import search, students, trainable
from tune.space import LAYERS_SETTING

FRONT = {"tune.objective": "pareto", "tune.cost": "latency"}


def test_a_model_of_fewer_layers_has_fewer_bytes_and_is_answered_sooner(tmp_path: Path) -> None:
    small, large = (make_encoder(tmp_path / str(layers), layers=layers) for layers in (1, 12))
    assert students.measure_megabytes(small) == round((small / "model.safetensors").stat().st_size / 1e6, 3)
    assert students.measure_megabytes(small) < students.measure_megabytes(large)
    # 12 times the work, at the least of its times.
    assert 0 < students.measure_milliseconds(small) < students.measure_milliseconds(large)


def test_a_shape_is_measured_once_and_known_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    def measure(model: Path) -> float:
        measured.append(model)
        return float(len(measured))

    monkeypatch.setitem(students.MEASURES, "latency", measure)
    shapes = (("one", 1, 0), ("same", 1, 7), ("other", 2, 0))
    item, same, other = (make_encoder(tmp_path / name, layers=layers, seed=seed) for name, layers, seed in shapes)
    result = students.StudentCosts(tmp_path, "latency")
    assert [result.get(item), result.get(same), result.get(other)] == [1.0, 1.0, 2.0]
    assert students.StudentCosts(tmp_path, "latency").get(same) == 1.0
    assert measured == [item, other]
    assert sorted(json.loads((tmp_path / students.FILE_NAME).read_text()).values()) == [1.0, 2.0]


@pytest.mark.parametrize("layers", [[1, 2, 3], {"low": 1, "high": 3}], ids=["listed", "a range"])
def test_the_shapes_of_a_space_are_measured_before_the_slots_start(
    layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later measurement would run beside trainings, and be slower than trial 0's."""
    measured, space = list[str](), {"distill.layers": layers, "distill.temperature": [1.0, 2.0]}

    def config_for(task: trainable.SearchTask, point: Mapping[str, Any]) -> Any:
        name = str(make_encoder(tmp_path / f"{point['distill.layers']} layers", layers=point["distill.layers"]))
        return SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(name=name)))

    def measure(model: Path) -> float:
        measured.append(model.name)
        return float(len(measured))

    monkeypatch.setitem(students.MEASURES, "latency", measure)
    monkeypatch.setattr(trainable.SearchTask, "config_for", config_for)
    overrides: dict[str, Any] = {"distill.teacher": "a version", **FRONT, "tune.space": space}
    item = started(make_search(tmp_path, [0.5], ended=False), settings(tmp_path, 9, **overrides))
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


def depths(depth: int | None, **overrides: Any) -> list[int] | None:
    selection = config.load_config("intent", {"data.path": "rows.csv", **FRONT, **overrides})
    result = students.default_space(selection, depth)
    assert result.keys() - {LAYERS_SETTING} == students.STUDENT_SPACE.keys()
    return result.get(LAYERS_SETTING)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(6, [2, 3]), (12, [3, 4, 6]), (24, [3, 8, 12]), (4, [1, 2, 3]), (3, None), (2, None), (1, None), (None, None)],
)
def test_a_third_and_a_half_of_the_teacher_s_layers_beside_the_first_student_s_three(
    depth: int | None, expected: list[int] | None
) -> None:
    assert depths(depth) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"tune.objective": "score", "tune.cost": "training"},
        {"distill.layers": 2},
        {"distill.student": "minilm"},
    ],
)
def test_no_depth_is_searched_where_its_cost_does_not_count_or_the_user_has_chosen(overrides: dict[str, Any]) -> None:
    assert depths(6, **overrides) is None


def test_layers_are_counted_under_the_names_of_architectures(tmp_path: Path) -> None:
    for document, expected in (({"num_hidden_layers": 6}, 6), ({"n_layers": 4}, 4), ({"depth": 3}, None)):
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert student.count_layers(tmp_path) == expected
