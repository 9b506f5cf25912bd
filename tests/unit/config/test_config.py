"""The configuration: every problem at once with its cure, one identity for one training, and recipes that load."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain import config
from rtrain.config import Recipe
from rtrain.config.renamed import RENAMED
from rtrain.core.errors import ConfigError, Problem, UserError
from tests.support.causes import caused_by

RECIPES = [
    "aggregation-study",
    "contract-clauses",
    "demo",
    "domain-adapt",
    "domain-adapt-head",
    "entities",
    "essay",
    "essay-published",
    "intent",
    "squad",
    "summary",
]
INTENT: dict[str, Any] = {"name": "intent", "task": "classification"}


def problems(document: dict[str, Any], overrides: dict[str, Any] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        config.parse_config(document, overrides or {})
    return caught.value.problems


def codes(overrides: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem.field, problem.code) for problem in problems(INTENT, overrides)]


def recipe(**overrides: Any) -> Recipe:
    return config.parse_config(INTENT, {name.replace("__", "."): value for name, value in overrides.items()}).recipe


# ------------------------------------------------------------------------------------------------------------- recipes


def test_every_recipe_loads_and_is_described() -> None:
    names = config.list_recipe_names()
    assert names == RECIPES
    for name in names:
        made = config.load_config(name)
        assert made.recipe.name == name
        head = config.read_recipe_text(name).split("\nname:")[0].splitlines()
        assert len(head) >= 3
        assert all(line.startswith("#") for line in head)
        assert f"rtrain {'demo' if name == 'demo' else f'train {name}'}" in config.read_recipe_text(name)
        assert yaml.safe_load(config.to_yaml(made)) == config.to_document(made)
        assert made.recipe.train.precision == "auto"
        assert made.recipe.model.pooling == ("own" if name == "essay-published" else "auto")
    assert recipe().train.precision == "auto"


def test_the_control_of_an_adaptation_differs_in_its_frozen_encoder_alone() -> None:
    adapted, control = (
        config.flatten_config(config.load_config("domain-adapt")),
        config.flatten_config(config.load_config("domain-adapt-head")),
    )
    assert {name: control[name] for name in control if control[name] != adapted[name]} == {
        "name": "domain-adapt-head",
        "model.freeze": "encoder",
    }


# ---------------------------------------------------------------------------------------------------------------- YAML


def test_a_configuration_survives_yaml(tmp_path: Any) -> None:
    made = config.load_config(
        "intent",
        {
            "data.path": "Größe/rows.csv",
            "optim.lr": 3.5e-5,
            "optim.max_grad_norm": None,
            "train.global_batch_size": 48,
            "tune.points_to_evaluate": [{"optim.lr": 1e-6}],
            "tune.space": {"optim.lr": {"low": 1e-5, "high": 1e-3, "log": True}, "optim.max_grad_norm": [None, 1.0]},
            "serve.port": 0,
        },
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(made), encoding="utf-8")
    again = config.load_config(str(path))
    assert again == made
    assert again.recipe.recipe_digest() == made.recipe.recipe_digest()
    assert config.with_overrides(made, {}) == made
    assert "Größe" in config.to_yaml(made)


# ----------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("optim.lr=3e-5", "optim.lr", "3e-5"),  # YAML 1.1 wants a dot: text here, a number once pydantic reads it
        ("optim.lr=3.0e-5", "optim.lr", 3e-5),
        ("train.epochs=4", "train.epochs", 4),
        ("data.test=null", "data.test", None),
        ("data.path=a=b.csv", "data.path", "a=b.csv"),
        ("tune.lr=[0.1, 0.2]", "tune.lr", [0.1, 0.2]),
        ("data.text='yes'", "data.text", "yes"),
        ("data.text=", "data.text", None),
        (" data.text =x", "data.text", "x"),
        ("data.text=Comment #2", "data.text", "Comment #2"),
        ("data.text='Comment #2'  # a comment", "data.text", "Comment #2"),
        ("data.text=Body: text", "data.text", "Body: text"),
        ("data.text=[draft", "data.text", "[draft"),
        ("data.label=2024", "data.label", "2024"),
        ("data.label=2024-01-31", "data.label", "2024-01-31"),
        ("data.label=Yes", "data.label", "Yes"),
        ("data.label=[a, b]", "data.label", ["a", "b"]),
        ("data.label=[2023, 2024-01-31]", "data.label", ["2023", "2024-01-31"]),
        ("data.slices=[no, 'yes', 1.0]", "data.slices", ["no", "yes", "1.0"]),
        ("data.text=[a, b]", "data.text", ["a", "b"]),
        ("data.text_pair=[a, b]", "data.text_pair", "[a, b]"),
        ("data.separator=|", "data.separator", "|"),
        ("quantize.engine=1", "quantize.engine", "1"),
    ],
)
def test_an_assignment_is_a_name_and_a_yaml_value(text: str, name: str, value: object) -> None:
    assert config.parse_assignment(text) == (name, value)


@pytest.mark.parametrize("value", ["a", " Text", "null", "", "'a", "a=b", "Comment #2", "Straße: 1", ["a", "b: c"]])
def test_an_assignment_that_is_printed_is_read_as_what_was_meant(value: str | list[str]) -> None:
    assert config.parse_assignment(config.format_assignment("data.label", value)) == ("data.label", value)


def test_overrides_win_and_leave_the_rest() -> None:
    base = config.load_config("intent")
    made = config.with_overrides(base, {"optim.lr": 1e-5, "serve.port": 9})
    assert made.recipe == base.recipe.model_copy(update={"optim": base.recipe.optim.model_copy(update={"lr": 1e-5})})
    assert made.deploy.serve.port == 9
    assert base.recipe.optim.lr == 3e-4


def test_names_that_may_be_set() -> None:
    names = list(config.iter_setting_names())
    assert len(names) == len(set(names))
    assert {"name", "task", "data.path", "optim.lr", "train.workers", "serve.port", "tune.points_to_evaluate"} <= set(
        names
    )
    assert "optim" not in names  # a section is no value


# ------------------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optim.lrr", "optim.lr"),
        ("lr", "distill.lr or optim.lr"),
        ("train.worker", "train.workers"),
        ("optim.epochs", "train.epochs"),
        ("optim.learning_rate", "optim.lr"),  # as other programs call it
        ("num_train_epochs", "train.epochs"),
    ],
)
def test_an_unknown_setting_names_its_neighbours(name: str, fix: str) -> None:
    [problem] = problems(INTENT, {name: 1})
    assert (problem.field, problem.code) == (name, "unknown_setting")
    assert fix in problem.fix


@pytest.mark.parametrize(("former_name", "name"), RENAMED.items())
def test_a_former_name_is_refused_with_the_new_one(former_name: str, name: str) -> None:
    """By an override and in a file alike."""
    assert name in set(config.iter_setting_names())
    assert former_name not in set(config.iter_setting_names())
    section, _, leaf = former_name.partition(".")
    for found in (problems(INTENT, {former_name: 1}), problems({**INTENT, section: {leaf: 1}})):
        [problem] = found
        assert (problem.field, problem.code) == (former_name, "renamed_setting")
        assert name in problem.reason
        assert name in problem.fix


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        {"task": "prophecy", "optim": {"lr": 2, "schedule": "steps"}, "train": {"workers": 0, "epoch": 3}, "seed": 1},
        {
            "serve.port": 70000,
            "no.such": 1,
            "data.max_tokens": "many",
            "data.slices": "lang",
            "train.keep_checkpoints": True,
        },
    )
    assert [(problem.field, problem.value, problem.code) for problem in found] == [
        ("no.such", None, "unknown_setting"),
        ("seed", None, "unknown_setting"),
        ("name", None, "missing"),
        ("task", "prophecy", "unknown_name"),
        ("data.slices", "lang", "wrong_type"),
        ("data.max_tokens", "many", "wrong_type"),
        ("optim.lr", 2, "out_of_range"),
        ("optim.schedule", "steps", "unknown_name"),
        ("train.workers", 0, "out_of_range"),
        ("train.keep_checkpoints", True, "wrong_type"),
        ("train.epoch", None, "unknown_setting"),
        ("serve.port", 70000, "out_of_range"),
    ]
    assert all(problem.fix for problem in found)


@pytest.mark.parametrize("name", ["train.workers", "optim.weight_decay"])
@pytest.mark.parametrize("value", [True, math.inf, math.nan])
def test_what_is_no_finite_number_is_refused_where_one_is_asked_for(name: str, value: object) -> None:
    assert codes({name: value}) == [(name, "wrong_type")]


@pytest.mark.parametrize(
    ("overrides", "field", "code"),
    [
        (
            {"train.global_batch_size": 64, "train.aggregation_frequency": 2},
            "train.global_batch_size",
            "conflicting_settings",
        ),
        ({"train.global_batch_size": 3, "train.workers": 4}, "train.global_batch_size", "out_of_range"),
        (
            {
                "train.global_batch_size": 1,
                "train.workers": 8,
                "train.tensor_parallel_size": 2,
                "train.pipeline_parallel_size": 2,
            },
            *("train.global_batch_size", "out_of_range"),
        ),
        ({"tune.objective": "time_to_target"}, "tune.target", "missing"),
        ({"serve.grpc_port": 8000}, "serve.grpc_port", "conflicting_settings"),
        ({"tune.max_cost": 5}, "tune.worker_cost_per_hour", "missing"),
        ({"data.text_pair": "text"}, "data.text_pair", "same_column"),
        ({"data.label": "text"}, "data.label", "same_column"),
        ({"data.text_pair": "label"}, "data.label", "same_column"),
        ({"model.freeze": "encoder", "distill.teacher": "v1"}, "model.freeze", "conflicting_settings"),
        ({"optim.lr_scaling": "linear"}, "optim.lr_reference_batch_size", "missing"),
        ({"optim.beta2_scaling": "rows"}, "optim.lr_reference_batch_size", "missing"),
        ({"optim.lr_scaling": "sqrt", "optim.beta2_scaling": "rows"}, "optim.lr_reference_batch_size", "missing"),
        (
            {
                "optim.lr_scaling": "linear",
                "optim.lr_reference_batch_size": 8,
                "optim.lr": 0.25,
                "train.global_batch_size": 32,
            },
            *("optim.lr", "out_of_range"),
        ),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, Any], field: str, code: str) -> None:
    assert codes(overrides) == [(field, code)]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"a: [1", "unreadable"),
        (b"train: {epochs: 2024-13-45}", "unreadable"),
        (b"a: " + b"[" * 5000, "unreadable"),
        (b"- a\n- b\n", "wrong_type"),
        (b"name: t\ntask: classification\ntrain: {seed: 3}\ntrain: {epochs: 1}\n", "duplicate"),
        (b"name: t\ntask: classification\ndata: {path: x.csv, path: y.csv}\n", "duplicate"),
        ("name: Grüße\n".encode("latin-1"), "not_utf8"),
        ("name: Grüße\n".encode("utf-16"), "not_utf8"),
        (None, "not_found"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, check=caused_by(code)):
        config.load_config(str(path))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("optim.lr", "not_an_assignment"),
        ("=3", "not_an_assignment"),
        ("a=[", "unreadable"),
        ("train.epochs=2024-13-45", "unreadable"),
        (f"train.epochs={'[' * 5000}", "unreadable"),
    ],
)
def test_what_is_no_assignment_is_refused(text: str, code: str) -> None:
    with pytest.raises(ConfigError, check=caused_by(code)):
        config.parse_assignment(text)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, check=caused_by("unknown_name")) as caught:
        config.load_config("intents")
    assert "intent?" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    "layout", [{"train.tensor_parallel_size": 4}, {"train.pipeline_parallel_size": 2, "train.tensor_parallel_size": 2}]
)
def test_workers_of_one_replica_share_its_rows(layout: dict[str, Any]) -> None:
    overrides = {"train.global_batch_size": 1, "train.workers": 4, **layout}
    assert config.load_config("intent", overrides).recipe.train.num_replicas == 1


@pytest.mark.parametrize("name", ["../../evil", "a/b", "a\\b", "", ".hidden", "a\nb"])
def test_a_recipe_s_name_leads_nowhere(name: str) -> None:
    """A run's folder begins with it."""
    assert [problem.field for problem in problems(INTENT, {"name": name})] == ["name"]


# ------------------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ({}, 2 * 8 * 4),
        ({"train.workers": 3, "train.micro_batch_size": 5}, 3 * 5 * 4),
        ({"train.aggregation_frequency": 1}, 2 * 8 * 1),
        ({"train.global_batch_size": 50, "train.workers": 4}, 50),
    ],
)
def test_rows_of_an_update(overrides: dict[str, Any], rows: int) -> None:
    assert config.parse_config(INTENT, overrides).recipe.global_batch_size == rows


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        ({}, 1.0),
        ({"optim.lr_reference_batch_size": 1}, 1.0),  # switched off
        ({"optim.lr_scaling": "linear"}, 4.0),  # 2 workers x 8 rows x 4 passes = 64 = 4 x 16
        ({"optim.lr_scaling": "sqrt"}, 2.0),
        ({"optim.lr_scaling": "linear", "train.global_batch_size": 4}, 0.25),
        ({"optim.lr_scaling": "sqrt", "train.global_batch_size": 4}, 0.5),
        ({"optim.lr_scaling": "linear", "train.workers": 4}, 8.0),
        ({"optim.lr_scaling": "linear", "train.workers": 4, "train.global_batch_size": 64}, 4.0),
    ],
)
def test_the_peak_of_the_learning_rate_follows_the_rows_of_an_update(overrides: dict[str, Any], factor: float) -> None:
    assert (
        config.parse_config(INTENT, {"optim.lr_reference_batch_size": 16, **overrides}).recipe.peak_lr == 2e-4 * factor
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.workers": 4, "train.micro_batch_size": 4},
        {"train.workers": 1, "train.micro_batch_size": 16},
        {"train.micro_batch_size": 4, "train.aggregation_frequency": 8},
        {"train.global_batch_size": 64},
        {"train.global_batch_size": 64, "train.workers": 7, "train.micro_batch_size": 3},
        {"name": "other", "data.path": "rows.csv", "data.test": "test.csv", "data.max_bad_rows": 0.5},
        {"train.save_every": 2, "train.keep_checkpoints": 5, "train.log_every": 1},
        {"train.max_tokens_per_micro_batch": 512},
        {"train.gradient_compression": "none", "train.zero_stage": 1},
        {"serve.port": 1, "tune.trials": 9, "cluster.address": "auto"},
        {"quantize.calibration_rows": 3, "distill.layers": 2},
    ],
)
def test_speed_and_cadence_do_not_change_the_identity(overrides: dict[str, Any]) -> None:
    assert config.parse_config(INTENT, overrides).recipe.recipe_digest() == recipe().recipe_digest()


def test_what_changes_the_weights_changes_the_identity() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"optim.lr": 1e-4},
        {"optim.warmup": 0.2},
        {"optim.max_grad_norm": None},
        {"train.seed": 1},
        {"train.epochs": 4},
        {"train.precision": "bf16"},
        {"train.gradient_compression": "bf16"},
        {"train.global_batch_size": 32},
        {"train.workers": 4},  # without rows_per_update, twice the rows
        {"train.aggregation_frequency": 2},
        {"data.max_tokens": 32},
        {"model.name": "elsewhere"},
        {"model.freeze": "encoder"},
        {"model.pooling": "own"},
        {"model.pooling": "mean"},
        {"train.evaluate_every": 5},
        {"distill.teacher": "v1"},
        {"distill.teacher": "v1", "distill.alpha": 0.1},
        {"optim.name": "radam"},
        {"optim.schedule": "cosine"},
        {"optim.layerwise_lr_decay": 0.9},
        {"optim.lr_scaling": "linear", "optim.lr_reference_batch_size": 32},
        {"optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 32},
        {"optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 16},
        {"optim.beta2_scaling": "rows", "optim.lr_reference_batch_size": 32},
        {"optim.beta2_scaling": "rows", "optim.lr_reference_batch_size": 16},
        {"optim.beta2_scaling": "rows", "optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 16},
    ]
    identities = [config.parse_config(INTENT, change).recipe.recipe_digest() for change in changes]
    assert len(set(identities)) == len(changes) - 1
    assert identities[8] == identities[10]  # both are 32 rows an update
    assert all(len(identity) == 16 for identity in identities)


def test_rules_that_are_switched_off_are_no_part_of_the_identity() -> None:
    before = {"model.pooling": "own", "train.precision": "fp32"}
    off = {
        "optim.lr_scaling": "none",
        "optim.beta2_scaling": "none",
        "optim.lr_reference_batch_size": 32,
        "optim.layerwise_lr_decay": 1.0,
        "model.freeze": "none",
    }
    plain, switched_off = (
        config.parse_config(INTENT, before).recipe,
        config.parse_config(INTENT, {**before, **off}).recipe,
    )
    assert switched_off.recipe_digest() == plain.recipe_digest()
