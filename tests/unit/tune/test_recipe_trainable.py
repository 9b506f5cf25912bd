"""A trial of a user's own Tuner before Ray is asked: its settings, its share of the head node, and who may hide us."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration, ray_internals
from rtrain.core.errors import ConfigError, UserError
from tests.conftest import labelled_rows, write_rows
from tune import RecipeTrainable
from tune.trainable import SearchTask


def make_trainable(folder: Path, slots: int = 1) -> type[RecipeTrainable]:
    config = configuration.load_config("intent", {"data.path": str(write_rows(folder / "rows.csv", labelled_rows(9)))})
    search = SearchTask(configuration.to_document(config), config.explicit_settings, folder / "tuned", folder)

    class Trainable(RecipeTrainable):
        pass

    Trainable.task, Trainable.slots = search, slots
    return Trainable


def test_a_module_has_no_other_name() -> None:
    import tune

    with pytest.raises(AttributeError):
        tune.Tuner  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"optim.lr": 1e-3, "train.aggregation_frequency": 2}, []),
        (
            {"optim.rl": 1e-3, "data.path": "other.csv"},
            [("optim.rl", "unknown_setting"), ("data.path", "not_searchable")],
        ),
        ({"optim": {"lr": 1e-3}}, [("optim", "unknown_setting")]),
        ({"train.aggregation_frequency": 0, "optim.lr": -1.0}, None),  # by the fields
    ],
)
def test_settings_of_a_trial_are_checked_before_it_starts(
    tmp_path: Path, settings: dict[str, Any], problems: list[tuple[str, str]] | None
) -> None:
    trainable = make_trainable(tmp_path)
    if problems == []:
        assert trainable.default_resource_request(settings) is not None
        return
    with pytest.raises(ConfigError) as raised:
        trainable.default_resource_request(settings)
    told = [(problem.field, problem.code) for problem in raised.value.problems]
    assert told == problems if problems else {field for field, _ in told} == settings.keys()


@pytest.mark.parametrize("slots", [1, 2, 3, 9, 40, 90])
def test_so_many_trials_have_room_on_the_head_node_and_no_more(tmp_path: Path, slots: int) -> None:
    [bundle] = make_trainable(tmp_path, slots).default_resource_request({}).bundles
    share = bundle[ray_internals.HEAD_RESOURCE]
    assert slots * share < 1 < (slots + 1) * share
    assert 1 - slots * share >= 0.004  # for four searches of `rtrain tune` beside them


def test_the_class_without_a_recipe_is_refused() -> None:
    with pytest.raises(UserError) as raised:
        RecipeTrainable.default_resource_request({})
    assert raised.value.code == "no_recipe"


@pytest.mark.parametrize("name", ["tune.py", "serve.py"])
def test_a_file_that_hides_our_package_on_the_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("raise SystemExit('decoy')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        RecipeTrainable.for_recipe("intent", tmp_path / "tuned")
    assert raised.value.code == "shadowed_module"
    assert str(tmp_path / name) in str(raised.value)
    assert not (tmp_path / "tuned").exists()


def test_a_folder_named_tune_hides_nothing_and_all_settings_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tune").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = str(write_rows(tmp_path / "rows.csv", labelled_rows(9)))
    settings = {"data.path": rows, "data.valid_share": 0, "train.strategy": "auto"}
    with pytest.raises(ConfigError) as raised:
        RecipeTrainable.for_recipe("intent", "tuned", settings)
    assert {problem.field for problem in raised.value.problems} == {"data.valid_share", "train.strategy"}
    assert not (tmp_path / "tuned").exists()
