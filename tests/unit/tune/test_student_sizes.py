"""Default depths in a search over students. Without Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.compress import student
from tune import students
from tune.space import LAYERS_SETTING

FRONT = {"tune.objective": "pareto", "tune.cost": "latency"}


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
