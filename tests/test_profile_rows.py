"""What a profile measures: the rows that a sweep asks for, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import Config
from rtrain.core.errors import ConfigError, UserError
from rtrain.profiling import profile
from rtrain.profiling.cases import AS_IT_STANDS, Length, rows
from rtrain.report.live.phase_timer import Waited

LENGTH = Length(updates=10, warm_up=2)


def intent(**overrides: Any) -> Config:
    return config.load("intent", {"data.path": "rows.csv", "train.workers": 3, "train.micro_batch": 8, **overrides})


def test_without_a_sweep_there_is_the_recipe_as_it_stands() -> None:
    (found,) = rows(intent(), [], LENGTH)
    assert (found.name, found.settings, found.config.recipe.train.workers) == (AS_IT_STANDS, {}, 3)


def test_sweeps_are_combined_and_have_short_names() -> None:
    found = rows(intent(), ["workers=1,2", "precision=fp32,bf16", "optim.clip_norm=null"], LENGTH)
    assert [row.name for row in found] == [
        f"workers={workers} precision={precision} optim.clip_norm=None"
        for workers in (1, 2)
        for precision in ("fp32", "bf16")
    ]
    assert found[3].settings == {"train.workers": 2, "train.precision": "bf16", "optim.clip_norm": None}
    assert found[3].config.recipe.optim.clip_norm is None


def test_loader_and_precision_are_settings_too() -> None:
    assert [row.config.deploy.cluster.data_cpus for row in rows(intent(), ["loader=1,2,4"], LENGTH)] == [1, 2, 4]
    found = rows(intent(), ["precision=fp32,bf16"], LENGTH)
    assert [row.config.recipe.train.precision for row in found] == ["fp32", "bf16"]


def test_all_rows_have_the_updates_of_the_recipe_as_it_stands() -> None:
    given = intent(**{"train.aggregation_frequency": 2})
    found = rows(given, ["workers=1,2"], LENGTH)
    assert [row.config.recipe.rows_per_update for row in found] == [3 * 8 * 2] * 2
    frequencies = rows(given, ["train.aggregation_frequency=1,4"], LENGTH)
    assert [row.config.recipe.rows_per_update for row in frequencies] == [24, 96]
    assert [row.config.recipe.rows_per_update for row in rows(given, ["train.rows_per_update=9,7"], LENGTH)] == [9, 7]


def test_no_row_leaves_copies_under_the_name_that_rows_of_other_profiles_have() -> None:
    """The next profile would be refused: the storage holds a run of that name already."""
    found = rows(intent(**{"cluster.storage": "file:///copies"}), ["workers=1,2"], LENGTH)
    assert [row.config.deploy.cluster.storage for row in found] == [None, None]


def test_nothing_is_evaluated_and_no_training_ends_while_a_row_is_measured() -> None:
    for found in rows(intent(**{"train.epochs": 1, "train.evaluate_every": 2}), ["workers=1,2"], LENGTH):
        train = found.config.recipe.train
        assert train.epochs > LENGTH.until  # an epoch has an update at least
        assert train.evaluate_every is not None
        assert train.evaluate_every > LENGTH.until


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        (["workers"], [("--sweep", "missing")]),
        (["workers="], [("--sweep", "missing")]),
        (["workers=1,[2"], [("--sweep", "malformed")]),
        (["optim.lr=2024-13-45"], [("--sweep", "malformed")]),
        (["workers=1,1"], [("--sweep", "named_twice")]),
        (["workers=1", "train.workers=2"], [("--sweep", "named_twice")]),
        (["train.epochs=1,2"], [("--sweep", "conflicting_settings")]),
        (["train.evaluate_every=2"], [("--sweep", "conflicting_settings")]),
        (["cluster.storage=s3://copies"], [("--sweep", "conflicting_settings")]),
        (["workers=1,2,3,4,5,6", "train.micro_batch=1,2,3,4,5,6"], [("--sweep", "out_of_range")]),
        (
            ["workers", "precision=", "loader=1,1"],
            [("--sweep", code) for code in ("missing", "missing", "named_twice")],
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweeps: list[str], expected: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError) as error:
        rows(intent(), sweeps, LENGTH)
    assert [(problem.field, problem.code) for problem in error.value.problems] == expected


@pytest.mark.parametrize("name", ["train.wrokers", "train.workers"])
def test_a_value_that_a_setting_cannot_have_is_refused_by_the_setting_s_name(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        rows(intent(), [f"{name}=0,1"], LENGTH)
    assert {problem.field for problem in error.value.problems} == {name}


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(UserError) as error:
        profile.check([intent()], tmp_path / "used")
    assert error.value.code == "not_empty"


@pytest.mark.parametrize(("words", "field"), [(["--sweep", "workers"], "--sweep"), ([], "data.path")])
def test_the_verb_refuses_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        cli.app(["profile", "intent", "--data", "missing.csv", *words], standalone_mode=False, obj=Waited())
    assert [problem.field for problem in error.value.problems] == [field]
