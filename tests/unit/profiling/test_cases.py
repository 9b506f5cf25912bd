"""Rows of a profile: expanded sweeps, and refusals before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import Config
from rtrain.core.errors import ConfigError, UserError
from rtrain.profiling import profile
from rtrain.profiling.profile import UNCHANGED_ROW, ProfileLength, expand_sweeps
from rtrain.report import PhaseTimer

LENGTH = ProfileLength(steps=10, warm_up_steps=2)


def intent(**overrides: Any) -> Config:
    return config.load_config(
        "intent", {"data.path": "rows.csv", "train.workers": 3, "train.micro_batch_size": 8, **overrides}
    )


def test_without_a_sweep_there_is_the_recipe_as_it_stands() -> None:
    (rows,) = expand_sweeps(intent(), [], LENGTH)
    assert (rows.name, rows.settings, rows.config.recipe.train.workers) == (UNCHANGED_ROW, {}, 3)


def test_sweeps_are_combined_and_have_short_names() -> None:
    cpus = [row.config.deploy.cluster.data_cpus for row in expand_sweeps(intent(), ["loader=1,2,4"], LENGTH)]
    assert cpus == [1, 2, 4]
    rows = expand_sweeps(intent(), ["workers=1,2", "precision=fp32,bf16", "optim.max_grad_norm=null"], LENGTH)
    assert [row.name for row in rows] == [
        f"workers={workers} precision={precision} optim.max_grad_norm=None"
        for workers in (1, 2)
        for precision in ("fp32", "bf16")
    ]
    assert rows[3].settings == {"train.workers": 2, "train.precision": "bf16", "optim.max_grad_norm": None}
    assert rows[3].config.recipe.optim.max_grad_norm is None


def test_all_rows_have_the_updates_of_the_recipe_as_it_stands() -> None:
    arguments = intent(**{"train.aggregation_frequency": 2})
    rows = expand_sweeps(arguments, ["workers=1,2"], LENGTH)
    assert [row.config.recipe.global_batch_size for row in rows] == [3 * 8 * 2] * 2
    frequencies = expand_sweeps(arguments, ["train.aggregation_frequency=1,4"], LENGTH)
    assert [row.config.recipe.global_batch_size for row in frequencies] == [24, 96]
    assert [
        row.config.recipe.global_batch_size for row in expand_sweeps(arguments, ["train.global_batch_size=9,7"], LENGTH)
    ] == [9, 7]


def test_nothing_is_evaluated_copied_or_ended_while_a_row_is_measured() -> None:
    """The next profile would be refused: the storage would hold a run of that name already."""
    config = intent(**{"train.epochs": 1, "train.evaluate_every": 2, "cluster.storage": "file:///copies"})
    for row in expand_sweeps(config, ["workers=1,2"], LENGTH):
        train = row.config.recipe.train
        assert train.epochs > LENGTH.total_steps  # an epoch has an update at least
        assert train.evaluate_every is not None
        assert train.evaluate_every > LENGTH.total_steps
        assert row.config.deploy.cluster.storage is None


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        (["workers"], [("--sweep", "missing")]),
        (["workers="], [("--sweep", "missing")]),
        (["workers=1,[2"], [("--sweep", "invalid_value")]),
        (["optim.lr=2024-13-45"], [("--sweep", "invalid_value")]),
        (["workers=1,1"], [("--sweep", "duplicate")]),
        (["workers=1", "train.workers=2"], [("--sweep", "duplicate")]),
        (["train.epochs=1,2"], [("--sweep", "conflicting_settings")]),
        (["train.evaluate_every=2"], [("--sweep", "conflicting_settings")]),
        (["cluster.storage=s3://copies"], [("--sweep", "conflicting_settings")]),
        (["workers=1,2,3,4,5,6", "train.micro_batch_size=1,2,3,4,5,6"], [("--sweep", "out_of_range")]),
        (["workers", "precision=", "loader=1,1"], [("--sweep", code) for code in ("missing", "missing", "duplicate")]),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweeps: list[str], expected: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError) as error:
        expand_sweeps(intent(), sweeps, LENGTH)
    assert [(problem.field, problem.code) for problem in error.value.problems] == expected


@pytest.mark.parametrize("name", ["train.wrokers", "train.workers"])
def test_a_value_that_a_setting_cannot_have_is_refused_by_the_setting_s_name(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand_sweeps(intent(), [f"{name}=0,1"], LENGTH)
    assert {problem.field for problem in error.value.problems} == {name}


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(UserError) as error:
        profile.check_profile([intent()], tmp_path / "used")
    assert error.value.code == "not_empty"


@pytest.mark.parametrize(("words", "field"), [(["--sweep", "workers"], "--sweep"), ([], "data.path")])
def test_the_verb_refuses_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        cli.app(["profile", "intent", "--data", "missing.csv", *words], standalone_mode=False, obj=PhaseTimer())
    assert [problem.field for problem in error.value.problems] == [field]
