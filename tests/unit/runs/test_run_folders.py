"""Run folders: a used name is refused, resumed or numbered, and a resume keeps what made the weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rtrain import config
from rtrain.config import Config
from rtrain.config.data import OneOf
from rtrain.core import plugins
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.runs import prepare, run_folders


def instance(**overrides: Any) -> Config:
    return config.load_config("intent", {name.replace("__", "."): value for name, value in overrides.items()})


DECIDED = {"model__pooling": "mean"}


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with a run of the recipe: 2 workers, 64 rows per step, resolved pooling."""
    folder, opened = run_folders.choose_folder(tmp_path / "run", instance(**DECIDED), "refuse")
    run_folders.write_frozen_config(Run(folder), opened)
    return folder


# ------------------------------------------------------------------------------------------------------------- folders


def test_what_a_run_names_is_found_from_every_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job's processes are in other folders than its user was."""
    monkeypatch.chdir(tmp_path)
    for name in ("t5", "small"):
        (tmp_path / name).mkdir()
    models = {"augment__paraphrase": "./t5", "distill__student": "small"}
    result = run_folders.resolve_paths(instance(cluster__storage="backup", **models), tmp_path / "run")
    assert result.deploy.cluster.storage == str(tmp_path / "backup")
    assert result.recipe.augment.paraphrase == str(tmp_path / "t5")
    assert result.recipe.distill.student == str(tmp_path / "small")
    elsewhere = {"cluster__storage": "s3://bucket/runs", "distill__student": "prajjwal1/bert-tiny"}
    remaining = run_folders.resolve_paths(instance(**elsewhere), tmp_path / "run")
    assert (remaining.deploy.cluster.storage, remaining.recipe.distill.student) == tuple(elsewhere.values())


# ---------------------------------------------------------------------------------------------------------------- reuse


@pytest.mark.parametrize("reuse", ["refuse", "new"])
def test_a_free_name_is_taken(tmp_path: Path, reuse: run_folders.Reuse) -> None:
    folder, opened = run_folders.choose_folder(tmp_path / "deep" / "run", instance(), reuse)
    assert (folder, opened) == (tmp_path / "deep" / "run", instance())
    assert list(tmp_path.iterdir()) == []  # nothing is written before all is checked
    run_folders.write_frozen_config(Run(folder), opened)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "decisions.json"]


def test_a_used_name_is_refused_with_both_ways_out(used: Path) -> None:
    with pytest.raises(UserError, check=lambda error: error.code == "already_exists"):
        run_folders.choose_folder(used, instance(), "refuse")


def test_new_takes_the_next_free_number(used: Path) -> None:
    second, opened = run_folders.choose_folder(used, instance(optim__lr=1e-5), "new")
    run_folders.write_frozen_config(Run(second), opened)
    third, _ = run_folders.choose_folder(used, instance(), "new")
    assert [second.name, third.name] == ["run-2", "run-3"]
    assert opened == instance(optim__lr=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path != Run(folder).lock}


def test_what_is_refused_leaves_the_run_that_is_trained_as_it_was(used: Path) -> None:
    before = contents(used)
    with run_folders.lock(Run(used)):
        with pytest.raises(UserError, check=lambda error: error.code == "in_use"):
            prepare.prepare_run(instance(train__keep_checkpoints=7, **DECIDED), used, "resume")
        for reuse in get_args(run_folders.Reuse)[:2]:  # refuse and resume
            with (
                pytest.raises(UserError, check=lambda error: error.code == "in_use"),
                run_folders.lock_new_run(Run(used), reuse),
            ):
                pass
    assert contents(used) == before


def test_a_name_that_another_command_took_meanwhile_is_refused_or_numbered_on(tmp_path: Path) -> None:
    rates = (1e-4, 9e-4, 5e-4)
    selection = [run_folders.choose_folder(tmp_path / "run", instance(optim__lr=rate), "new") for rate in rates]
    assert [folder.name for folder, _ in selection] == ["run"] * 3
    with run_folders.lock_new_run(Run(selection[0][0]), "new") as first:  # it is not written yet
        run_folders.write_frozen_config(first, selection[0][1])
        with run_folders.lock_new_run(Run(selection[1][0]), "new") as second:
            run_folders.write_frozen_config(second, selection[1][1])
    with run_folders.lock_new_run(Run(selection[2][0]), "new") as third:
        run_folders.write_frozen_config(third, selection[2][1])
    with (
        pytest.raises(UserError, check=lambda error: error.code == "already_exists"),
        run_folders.lock_new_run(first, "refuse"),
    ):
        pass
    assert [run.name for run in (first, second, third)] == ["run", "run-2", "run-3"]
    assert tuple(run_folders.load_config(run.folder).recipe.optim.lr for run in (first, second, third)) == rates


def test_a_name_that_a_killed_command_has_claimed_is_free(tmp_path: Path) -> None:
    with run_folders.lock_new_run(Run(tmp_path / "run"), "refuse") as run:
        run.config.with_name(f".{run.config.name}.0123abcd").touch()
    assert run_folders.choose_folder(tmp_path / "run", instance(), "refuse")[0] == tmp_path / "run"


def test_a_folder_with_something_else_in_it_is_never_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    for reuse in get_args(run_folders.Reuse):
        with pytest.raises(UserError, check=lambda error: error.code == "not_empty"):
            run_folders.choose_folder(tmp_path, instance(), reuse)


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=lambda error: error.code == "not_a_run"):
        run_folders.choose_folder(tmp_path / "none", instance(), "resume")
    assert not (tmp_path / "none").exists()


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("pooling", ["own", "mean"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_what_is_left_open_is_as_the_run_has_it(tmp_path: Path, pooling: str, precision: str) -> None:
    """A run of an older recipe with another default resumes unchanged, by the recipe's name."""
    had = instance(model__pooling=pooling, train__precision=precision)
    run_folders.write_frozen_config(Run(tmp_path / "run"), had)
    _, opened = run_folders.choose_folder(
        tmp_path / "run", instance(model__pooling="auto", train__precision="auto"), "resume"
    )
    assert (opened.recipe.model.pooling, opened.recipe.train.precision) == (pooling, precision)
    assert opened.recipe.recipe_digest() == had.recipe.recipe_digest()


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_micro_batch_may_change_and_the_rows_of_an_update_stay(used: Path, workers: int) -> None:
    """The recipe with other workers would have another batch size: the run's was resolved once."""
    changed = instance(train__workers=workers, train__micro_batch_size=5, train__log_every=3, train__keep_checkpoints=5)
    _, opened = run_folders.choose_folder(used, changed, "resume")
    train = opened.recipe.train
    assert (train.workers, train.micro_batch_size, train.log_every, train.keep_checkpoints) == (workers, 5, 3, 5)
    assert (train.global_batch_size, train.aggregation_frequency) == (64, None)
    assert opened.recipe.recipe_digest() == instance(**DECIDED).recipe.recipe_digest()


def test_what_nobody_names_stays_the_run_s_own(tmp_path: Path) -> None:
    """Resumed by the recipe's name alone: the recipe's settings do not count as set by the user."""
    requested_settings = {
        "data.path": "s3://bucket/rows.csv",
        "optim.lr": 1e-5,
        "train.workers": 8,
        "train.keep_checkpoints": 5,
    }
    requested_settings |= {"train.log_every": 50, "train.evaluate_every": 7, "cluster.storage": "s3://bucket/runs"}
    requested_settings |= {"model.pooling": "mean"}
    frozen = run_folders.write_frozen_config(Run(tmp_path / "run"), config.load_config("intent", requested_settings))
    _, opened = run_folders.choose_folder(tmp_path / "run", instance(train__keep_checkpoints=3), "resume")
    assert opened == config.with_overrides(frozen, {"train.keep_checkpoints": 3})


def test_another_recipe_is_refused(used: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_folders.choose_folder(used, config.load_config("essay"), "resume")
    assert [problem.field for problem in caught.value.problems] == ["name", "task"]


BESIDE: dict[str, dict[str, Any]] = {
    "tune.cost": {"tune.objective": "pareto"},
    "report.mlflow_register": {"report.trackers": ["mlflow"]},
    "train.average_best": {"train.keep_best": 3},
    "data.fold": {"data.folds": 5},
    "data.query": {"data.path": "sqlite:///shop.db"},
    "data.split_time": {"data.valid": None, "data.test": None, "data.valid_share": None},
    "data.valid_share": {"data.valid": None},
    "data.validation_fold": {"data.valid": None},
    "serve.tls_cert": {"serve.tls_key": "key.pem"},
    "serve.tls_key": {"serve.tls_cert": "cert.pem"},
    "augment.copies": {"augment.typo": 0.1},
    "augment.typo": {"augment.copies": 1},
    "augment.swap": {"augment.copies": 1},
    "augment.drop": {"augment.copies": 1},
    "augment.mask": {"augment.copies": 1},
    "augment.back_translation_model": {"augment.paraphrase": "there"},
    "optim.lr_scaling": {"optim.lr_reference_batch_size": 32},
    "optim.beta2_scaling": {"optim.lr_reference_batch_size": 32},
    "train.aggregation_frequency": {"train.global_batch_size": None},
    "train.gpus_per_worker": {"train.workers": 1},
    "tune.max_cost": {"tune.worker_cost_per_hour": 0.04},
}
"""What some settings cannot be changed without."""


def literals(annotation: Any) -> list[Any]:
    """The values that a setting's type spells out."""
    return [match for part in get_args(annotation) for match in ([part] if isinstance(part, str) else literals(part))]


def rest(name: str, value: Any) -> Iterator[Any]:
    """Values of a setting other than `value`, of its type; some of them out of its bounds."""
    section, _, leaf = name.rpartition(".")
    model: Any = (
        config.Recipe if name in config.RECIPE_FIELDS or section in config.RECIPE_FIELDS else config.DeployConfig
    )
    field = (model.model_fields[section].annotation if section else model).model_fields[leaf]
    named_settings = [name for part in field.metadata if isinstance(part, OneOf) for name in part.names()]
    options = [
        literal
        for literal in [*literals(field.annotation), *named_settings]
        if not (name in run_folders.AUTO_SETTINGS and literal == "auto")
    ]
    yield from (option for option in options if option != value)
    yield from ([option] for option in options if [option] != value)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value + 1e-3, value / 2 or 0.1)
    yield from ([{"optim.lr": 1e-4}], [7], [0.5], ["other"], "other", ";", 2, 9, 0.25)
    yield from (
        {"optim.lr": [1e-4, 1e-3]},
        {"for": "this"},
        {"column": "lang"},
        {"column": "time"},
        "status = 'closed'",
        {"a": 0.5},
        {"label": "a", "recall": 0.5},
    )


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run that many tests read, and its configuration."""
    folder = tmp_path_factory.mktemp("frozen") / "run"
    return folder, run_folders.write_frozen_config(Run(folder), instance(train__global_batch_size=64, **DECIDED))


@pytest.fixture
def registered(tmp_path: Path) -> Iterator[None]:
    """Plug-ins with names for the settings that take these alone."""
    head = "import rtrain\n\n\n@rtrain.register_{}('other')\ndef part(): ...\n"
    (tmp_path / "other.py").write_text("".join(map(head.format, ("loss", "augmentation"))))
    (tmp_path / "other_tracker.py").write_text(head.format("tracker"))
    plugins.load_plugins([str(tmp_path / "other.py"), str(tmp_path / "other_tracker.py")])
    yield
    plugins.unload_plugins()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", sorted(set(config.iter_setting_names())))
def test_every_setting_is_taken_by_a_resume_or_refused_by_name(frozen: tuple[Path, Config], name: str) -> None:
    """Only settings that change the weights are refused; no setting is dropped."""
    folder, old = frozen
    for value in rest(name, config.flatten_config(old)[name]):
        requested_settings = {name: value, **BESIDE.get(name, {})}
        try:
            changed = config.with_overrides(old, requested_settings)
            new = config.load_config("intent", {"train.global_batch_size": 64, **requested_settings})
        except ConfigError:
            continue
        break
    else:
        raise AssertionError(f"{name} has no other value")
    assert config.flatten_config(changed)[name] != config.flatten_config(old)[name]
    if changed.recipe.recipe_digest() == old.recipe.recipe_digest() and name != "name":
        assert run_folders.choose_folder(folder, new, "resume")[1] == changed
        return
    with pytest.raises(ConfigError) as caught:
        run_folders.choose_folder(folder, new, "resume")
    resolved = "train.global_batch_size" if name == "train.aggregation_frequency" else name
    assert resolved in [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "field", "before", "after"),
    [
        ({"optim__lr": 1e-5}, "optim.lr", 3e-4, 1e-5),
        ({"train__seed": 3}, "train.seed", 0, 3),
        ({"train__epochs": 3}, "train.epochs", 5, 3),
        ({"data__text": "message"}, "data.text", "text", "message"),
        ({"model__name": "other"}, "model.name", "minilm", "other"),
        ({"model__pooling": "own"}, "model.pooling", "mean", "own"),
        ({"model__freeze": "encoder"}, "model.freeze", "none", "encoder"),
        ({"train__global_batch_size": 32}, "train.global_batch_size", 64, 32),
        ({"train__aggregation_frequency": 1}, "train.global_batch_size", 64, 16),
    ],
)
def test_what_would_change_the_weights_is_refused_by_name(
    used: Path, overrides: dict[str, Any], field: str, before: object, after: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_folders.choose_folder(used, instance(**overrides), "resume")
    [problem] = caught.value.problems
    assert (problem.field, problem.value) == (field, after)
    assert problem.code == "changed_setting"
    assert repr(before) in problem.reason


def edit(run: Path, name: str, value: object) -> None:
    document = yaml.safe_load((run / "config.yaml").read_text())
    config.set_setting(document, name, value)
    (run / "config.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.parametrize(
    ("name", "value"), [("optim.lr", 1e-5), ("train.epochs", 9), ("train.evaluate_every", 3), ("data.text", "message")]
)
@pytest.mark.parametrize("by_file", [False, True], ids=["by the recipe", "by config.yaml"])
def test_a_resume_with_an_edited_configuration_is_refused_by_name(
    used: Path, name: str, value: object, by_file: bool
) -> None:
    edit(used, name, value)
    repeat = config.load_config(str(used / "config.yaml")) if by_file else instance(**DECIDED)
    with pytest.raises(ConfigError) as caught:
        run_folders.choose_folder(used, repeat, "resume")
    assert [(problem.field, problem.value) for problem in caught.value.problems] == [(name, value)]
    edit(used, name, config.flatten_config(instance(**DECIDED))[name])
    run_folders.choose_folder(used, instance(**DECIDED), "resume")


@pytest.mark.parametrize(
    ("name", "value"), [("data.path", "/moved.csv"), ("data.max_bad_rows", 0.5), ("train.workers", 4)]
)
def test_an_edited_setting_that_changes_no_weight_is_taken(used: Path, name: str, value: object) -> None:
    edit(used, name, value)
    assert config.flatten_config(run_folders.choose_folder(used, instance(), "resume")[1])[name] == value


# --------------------------------------------------------------------------------------------------------------- freeze


def test_the_frozen_configuration_is_complete_and_replayable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    (tmp_path / "weights").mkdir()
    expected = instance(
        data__path="rows.csv", data__test="parts/*.csv", model__name="weights", train__aggregation_frequency=3
    )
    frozen = run_folders.write_frozen_config(Run(tmp_path), expected)
    assert config.load_config(str(tmp_path / "config.yaml")) == frozen
    recipe = frozen.recipe
    assert (recipe.train.global_batch_size, recipe.train.aggregation_frequency) == (2 * 8 * 3, None)
    assert (recipe.data.path, recipe.data.test) == (str(tmp_path / "rows.csv"), str(tmp_path / "parts" / "*.csv"))
    assert recipe.model.name == str(tmp_path / "weights")
    repeat = run_folders.write_frozen_config(Run(tmp_path), frozen)
    assert repeat == frozen


def test_a_worker_s_hour_is_priced_by_the_file_where_no_setting_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "prices.yaml"
    file.write_text("worker: {on_demand: 0.04}\nx9.large: {on_demand: 2}\n")
    requested_settings = {"cluster.prices": "prices.yaml", "tune.max_cost": 5}
    result = run_folders.resolve_paths(config.load_config("intent", requested_settings)).deploy
    assert (result.cluster.prices, result.tune.worker_cost_per_hour) == (str(file), 0.04)
    local_values = run_folders.resolve_paths(
        config.load_config("intent", {**requested_settings, "tune.worker_cost_per_hour": 0.1})
    ).deploy
    assert local_values.tune.worker_cost_per_hour == 0.1
    file.write_text("x9.large: {on_demand: 2}\n")
    with pytest.raises(ConfigError, check=lambda error: [problem.code for problem in error.problems] == ["no_price"]):
        run_folders.resolve_paths(config.load_config("intent", requested_settings))
    assert (
        run_folders.resolve_paths(
            config.load_config("intent", {"cluster.prices": "prices.yaml"})
        ).deploy.tune.worker_cost_per_hour
        is None
    )
    file.unlink()
    with pytest.raises(ConfigError):
        run_folders.resolve_paths(config.load_config("intent", requested_settings))
