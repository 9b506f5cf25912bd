"""The settings that select weights and decide for a label: forms and conflicts, all at once."""

from typing import Any

import pytest

from rtrain import config
from rtrain.config.selection import BestBy, parse_best_by
from rtrain.core.errors import ConfigError


def codes(overrides: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        config.load_config("intent", overrides)
    except ConfigError as error:
        return [(problem.field, problem.code) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("loss", BestBy("loss")),
        ("macro_f1", BestBy("macro_f1")),
        ("recall:P1", BestBy("recall", "P1")),
        ("precision:a: b=c", BestBy("precision", "a: b=c")),
        ("recall@precision:P1=0.9", BestBy("recall", "P1", 0.9)),
        ("precision@recall:intent/a=b=1", BestBy("precision", "intent/a=b", 1.0)),
    ],
)
def test_forms_of_best_by(text: str, parsed: BestBy) -> None:
    assert parse_best_by(text) == parsed
    assert codes({"train.best_by": text}) == []


@pytest.mark.parametrize("text", ["f1:P1", "recall:", "recall@precision:P1", "recall@precision:P1=2", "a=b", ""])
def test_other_forms_are_refused(text: str) -> None:
    assert codes({"train.best_by": text}) == [("train.best_by", "wrong_form")]


def test_one_point_is_a_list_of_one_and_is_read_from_the_command_line() -> None:
    name, value = config.parse_assignment("metrics.operating_point={label: P1, recall: 0.8}")
    [point] = config.load_config("intent", {name: value}).recipe.metrics.operating_point or ()
    assert (point.label, point.recall, point.precision) == ("P1", 0.8, None)
    name, value = config.parse_assignment("gate.min_recall={P1: 0.8}")
    assert config.load_config("intent", {name: value}).recipe.gate.min_recall == {"P1": 0.8}


def test_an_operating_point_and_a_floor_change_no_weights() -> None:
    settings = {"metrics.operating_point": {"label": "P1", "recall": 0.8}, "gate.min_recall": {"P1": 0.8}}
    changed = config.load_config("intent", settings).recipe
    assert changed.recipe_digest() == config.load_config("intent").recipe.recipe_digest()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"metrics.operating_point": "P1"}, [("metrics.operating_point", "wrong_type")]),
        (
            {"metrics.operating_point": {"label": "P1", "recall": 1.5}},
            [("metrics.operating_point.0.recall", "out_of_range")],
        ),
        ({"metrics.operating_point": {"label": "P1"}}, [("metrics.operating_point", "missing")]),
        (
            {"metrics.operating_point": {"label": "P1", "recall": 0.5, "precision": 0.5}},
            [("metrics.operating_point", "conflicting_settings")],
        ),
        (
            {"metrics.operating_point": [{"label": "a", "recall": 0.5}] * 2, "data.out_of_scope_label": "oos"},
            [("metrics.operating_point", "duplicate"), ("metrics.operating_point", "conflicting_settings")],
        ),
        ({"train.average_best": True}, [("train.keep_best", "out_of_range")]),
        (
            {"train.best_by": "loss", "train.patience": 2, "data.valid_share": 0},
            [("train.best_by", "conflicting_settings"), ("train.patience", "conflicting_settings")],
        ),
        ({"gate.min_recall": {"P1": 2}}, [("gate.min_recall.P1", "out_of_range")]),
    ],
)
def test_conflicts(overrides: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert codes(overrides) == expected
