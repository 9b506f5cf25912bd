"""The configuration: every problem at once with its cure, one identity for one training, and recipes that load."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain import config
from rtrain.config import Config, Recipe, loading
from rtrain.errors import ConfigError, Problem, UserError

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
        config.parse(document, overrides or {})
    return caught.value.problems


def recipe(**overrides: Any) -> Recipe:
    return config.parse(INTENT, {name.replace("__", "."): value for name, value in overrides.items()}).recipe


# ------------------------------------------------------------------------------------------------------------- recipes


def test_every_recipe_loads_and_is_described() -> None:
    names = config.recipe_names()
    assert names == RECIPES
    for name in names:
        made = config.load(name)
        assert made.recipe.name == name
        head = config.recipe_text(name).split("\nname:")[0].splitlines()
        assert len(head) >= 3
        assert all(line.startswith("#") for line in head)
        assert f"rtrain {'demo' if name == 'demo' else f'train {name}'}" in config.recipe_text(name)
        assert yaml.safe_load(config.to_yaml(made)) == config.to_document(made)
        assert made.recipe.train.precision == "auto"
        assert made.recipe.model.pooling == ("own" if name == "essay-published" else "auto")
    assert recipe().train.precision == "auto"


def test_the_control_of_an_adaptation_differs_in_its_frozen_encoder_alone() -> None:
    adapted, control = config.flat(config.load("domain-adapt")), config.flat(config.load("domain-adapt-head"))
    assert {name: control[name] for name in control if control[name] != adapted[name]} == {
        "name": "domain-adapt-head",
        "model.freeze": "encoder",
    }


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("intents")
    assert str(caught.value) == "recipe=intents: unknown; did you mean intent?"
    with pytest.raises(ConfigError, match=f"known: {', '.join(RECIPES)}"):
        config.load("zzz")


# ---------------------------------------------------------------------------------------------------------------- YAML


def test_a_configuration_survives_yaml(tmp_path: Any) -> None:
    made = config.load(
        "intent",
        {
            "data.path": "Größe/rows.csv",
            "optim.lr": 3.5e-5,
            "optim.clip_norm": None,
            "train.rows_per_update": 48,
            "tune.points": [{"optim.lr": 1e-6}],
            "tune.space": {"optim.lr": {"low": 1e-5, "high": 1e-3, "log": True}, "optim.clip_norm": [None, 1.0]},
            "serve.port": 0,
        },
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(made), encoding="utf-8")
    again = config.load(str(path))
    assert again == made
    assert again.recipe.identity() == made.recipe.identity()
    assert config.with_overrides(made, {}) == made
    assert "Größe" in config.to_yaml(made)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match="no such file; write a recipe's name or an existing file"):
        config.load(str(path))
    for text in ("a: [1", "train: {epochs: 2024-13-45}", "a: " + "[" * 5000):
        path.write_text(text)
        with pytest.raises(UserError, match="is not YAML"):
            config.load(str(path))
    path.write_text("- a\n- b\n")
    with pytest.raises(UserError, match="must hold a mapping of sections"):
        config.load(str(path))


def test_a_configuration_is_frozen() -> None:
    made = recipe()
    with pytest.raises(ValueError, match="frozen"):
        made.optim.lr = 1.0


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
        ("data.text=[a, b]", "data.text", "[a, b]"),
        ("data.separator=|", "data.separator", "|"),
        ("quantize.engine=1", "quantize.engine", "1"),
    ],
)
def test_an_assignment_is_a_name_and_a_yaml_value(text: str, name: str, value: object) -> None:
    assert config.parse_assignment(text) == (name, value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("optim.lr", "not an assignment"),
        ("=3", "not an assignment"),
        ("a=[", "the value is not YAML"),
        ("train.epochs=2024-13-45", "the value is not YAML"),
        (f"train.epochs={'[' * 5000}", "the value is not YAML"),
    ],
)
def test_what_is_no_assignment_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_assignment(text)
    assert [(problem.field, problem.value, problem.reason) for problem in caught.value.problems] == [
        ("--set", text, reason)
    ]


@pytest.mark.parametrize("field", ["data.slices", "report.trackers"])
def test_one_name_in_the_place_of_a_list_is_refused_with_the_list(field: str) -> None:
    [problem] = problems(INTENT, {field: "language"})
    assert str(problem) == f"{field}=language: no list; write {field}=[language]"


@pytest.mark.parametrize("value", ["a", " Text", "null", "", "'a", "a=b", "Comment #2", "Straße: 1", ["a", "b: c"]])
def test_an_assignment_that_is_printed_is_read_as_what_was_meant(value: str | list[str]) -> None:
    assert config.parse_assignment(config.assignment("data.label", value)) == ("data.label", value)


def test_a_section_that_stands_twice_is_refused_and_not_dropped(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("name: t\ntask: classification\ndata:\n  path: x.csv\ntrain: {seed: 3}\ndata:\n  text: body\n")
    with pytest.raises(ConfigError) as caught:
        config.load(str(file))
    assert str(caught.value).startswith("data: written twice, in the lines 3 and 6")
    file.write_text("name: t\ntask: classification\ndata: {path: x.csv, path: y.csv}\n")
    with pytest.raises(ConfigError, match="path: written twice, in the lines 3 and 3"):
        config.load(str(file))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_recipe_that_is_not_utf_8_is_refused(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes("name: Grüße\ntask: classification\n".encode(encoding))
    with pytest.raises(ConfigError, match="the file is not UTF-8; convert it"):
        config.load(str(file))


def test_a_number_that_yaml_takes_for_text_is_still_a_number() -> None:
    assert recipe(**dict([config.parse_assignment("optim.lr=3e-5")])).optim.lr == 3e-5


@pytest.mark.parametrize("name", ["train.workers", "optim.weight_decay"])
@pytest.mark.parametrize("value", [True, math.inf, math.nan])
def test_what_is_no_finite_number_is_refused_where_one_is_asked_for(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*: input should be a (finite |valid )?(number|integer)"):
        config.load("intent", {name: value})
    assert (
        config.load("intent", {"cluster.stall_s": 1e9, "train.gradient_checkpointing": True}).deploy.cluster.stall_s
        == 1e9
    )


def test_overrides_win_and_leave_the_rest() -> None:
    base = config.load("intent")
    made = config.with_overrides(base, {"optim.lr": 1e-5, "serve.port": 9})
    assert made.recipe == base.recipe.model_copy(update={"optim": base.recipe.optim.model_copy(update={"lr": 1e-5})})
    assert made.deploy.serve.port == 9
    assert base.recipe.optim.lr == 3e-4


def test_names_that_may_be_set() -> None:
    names = list(config.dotted_names())
    assert len(names) == len(set(names))
    assert {"name", "task", "data.path", "optim.lr", "train.workers", "serve.port", "tune.points"} <= set(names)
    assert "optim" not in names  # a section is no value


# ------------------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optim.lrr", "did you mean optim.lr"),
        ("lr", "distill.lr or optim.lr"),
        ("train.worker", "did you mean train.workers"),
        ("max_tokens", "data.max_tokens"),
        ("optim.epochs", "train.epochs"),
    ],
)
def test_an_unknown_setting_names_its_neighbours(name: str, fix: str) -> None:
    [problem] = problems(INTENT, {name: 1})
    assert (problem.field, problem.reason) == (name, "unknown")
    assert fix in problem.fix


def test_names_that_other_programs_use_are_answered_with_ours() -> None:
    assert len(loading.ELSEWHERE) >= 10
    assert set(loading.ELSEWHERE.values()) <= set(config.dotted_names())
    for name, ours in (("optim.learning_rate", "optim.lr"), ("train.max_length", "data.max_tokens")):
        [problem] = problems(INTENT, {name: 1})
        assert problem.fix == f"did you mean {ours}?"
    [problem] = problems(INTENT, {"num_train_epochs": 3})
    assert problem.fix == "did you mean train.epochs?"


def test_unknown_names_in_a_file_are_found_too() -> None:
    found = problems({**INTENT, "optimizer": {"lr": 1}, "train": {"epoch": 3}})
    assert [(problem.field, problem.reason) for problem in found] == [
        ("optimizer", "unknown"),
        ("train.epoch", "unknown"),
    ]
    assert "optim" in found[0].fix
    assert "train.epochs" in found[1].fix


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        {"task": "prophecy", "optim": {"lr": 2, "schedule": "steps"}, "train": {"workers": 0}},
        {"serve.port": 70000, "no.such": 1, "data.max_tokens": "many"},
    )
    assert [(problem.field, problem.value) for problem in found] == [
        ("no.such", None),
        ("name", None),
        ("task", "prophecy"),
        ("data.max_tokens", "many"),
        ("optim.lr", 2),
        ("optim.schedule", "steps"),
        ("train.workers", 0),
        ("serve.port", 70000),
    ]
    assert found[1].reason == "missing"
    assert found[4].reason == "input should be less than 1"
    assert all(problem.fix for problem in found)


@pytest.mark.parametrize(
    ("overrides", "field", "reason"),
    [
        (
            {"train.rows_per_update": 64, "train.aggregation_frequency": 2},
            "train.rows_per_update",
            "train.aggregation_frequency=2 sets it too",
        ),
        (
            {"train.rows_per_update": 3, "train.workers": 4},
            "train.rows_per_update",
            "fewer rows than the 4 workers that share them",
        ),
        (
            {"train.rows_per_update": 1, "train.workers": 8, "train.tensor": 2, "train.pipeline": 2},
            "train.rows_per_update",
            "fewer rows than the 2 replicas of 4 workers each that share them",
        ),
        ({"tune.objective": "time"}, "tune.target", "tune.objective=time needs a score to reach"),
        ({"serve.grpc_port": 8000}, "serve.grpc_port", "serve.port is that of HTTP"),
        ({"tune.money": 5}, "tune.price", "tune.money needs the price of a worker's hour"),
        ({"data.text_pair": "text"}, "data.text_pair", "the same column as data.text"),
        ({"data.label": "text"}, "data.label", "the same column as the text"),
        ({"data.text_pair": "label"}, "data.label", "the same column as the text"),
        (
            {"model.freeze": "encoder", "distill.teacher": "v1"},
            "model.freeze",
            "a student of fewer layers learns its teacher's answers in those layers",
        ),
        (
            {"optim.lr_scaling": "linear"},
            "optim.lr_rows",
            "optim.lr_scaling=linear asks at which rows_per_update optim.lr=0.0002 holds",
        ),
        (
            {"optim.beta2_scaling": "rows"},
            "optim.lr_rows",
            "optim.beta2_scaling=rows asks at which rows_per_update beta2=0.999 holds",
        ),
        (
            {"optim.lr_scaling": "sqrt", "optim.beta2_scaling": "rows"},
            "optim.lr_rows",
            "optim.lr_scaling=sqrt asks at which rows_per_update optim.lr=0.0002 holds and "
            "optim.beta2_scaling=rows asks at which rows_per_update beta2=0.999 holds",
        ),
        (
            {"optim.lr_scaling": "linear", "optim.lr_rows": 8, "optim.lr": 0.25, "train.rows_per_update": 32},
            "optim.lr",
            "scaled from 8 to 32 rows per update it is 1, not less than 1",
        ),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, Any], field: str, reason: str) -> None:
    [problem] = problems(INTENT, overrides)
    assert (problem.field, problem.reason) == (field, reason)


@pytest.mark.parametrize("layout", [{"train.tensor": 4}, {"train.pipeline": 2, "train.tensor": 2}])
def test_workers_of_one_replica_share_its_rows(layout: dict[str, Any]) -> None:
    overrides = {"train.rows_per_update": 1, "train.workers": 4, **layout}
    assert config.load("intent", overrides).recipe.train.replicas == 1


def test_several_contradictions_are_reported_together() -> None:
    found = problems(INTENT, {"tune.money": 5, "data.label": "text", "data.text_pair": "text"})
    assert [problem.field for problem in found] == ["data.text_pair", "data.label", "tune.price"]


@pytest.mark.parametrize("name", ["../../evil", "a/b", "a\\b", "", ".hidden", "a\nb"])
def test_a_recipe_s_name_leads_nowhere(name: str) -> None:
    """A run's folder begins with it."""
    assert [problem.field for problem in problems(INTENT, {"name": name})] == ["name"]


# ------------------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ({}, 2 * 8 * 4),
        ({"train.workers": 3, "train.micro_batch": 5}, 3 * 5 * 4),
        ({"train.aggregation_frequency": 1}, 2 * 8 * 1),
        ({"train.rows_per_update": 50, "train.workers": 4}, 50),
    ],
)
def test_rows_of_an_update(overrides: dict[str, Any], rows: int) -> None:
    assert config.parse(INTENT, overrides).recipe.rows_per_update == rows


def test_the_cure_of_a_scaling_without_its_rows_is_the_recipe_as_it_is() -> None:
    [problem] = problems(INTENT, {"optim.lr_scaling": "sqrt", "train.rows_per_update": 96})
    assert "(96 for this recipe as it is)" in problem.fix
    made = recipe(optim__lr_scaling="sqrt", optim__lr_rows=96, train__rows_per_update=96)
    assert made.peak_lr == made.optim.lr


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        ({}, 1.0),
        ({"optim.lr_rows": 1}, 1.0),  # switched off
        ({"optim.lr_scaling": "linear"}, 4.0),  # 2 workers x 8 rows x 4 passes = 64 = 4 x 16
        ({"optim.lr_scaling": "sqrt"}, 2.0),
        ({"optim.lr_scaling": "linear", "train.rows_per_update": 4}, 0.25),
        ({"optim.lr_scaling": "sqrt", "train.rows_per_update": 4}, 0.5),
        ({"optim.lr_scaling": "linear", "train.workers": 4}, 8.0),
        ({"optim.lr_scaling": "linear", "train.workers": 4, "train.rows_per_update": 64}, 4.0),
    ],
)
def test_the_peak_of_the_learning_rate_follows_the_rows_of_an_update(overrides: dict[str, Any], factor: float) -> None:
    assert config.parse(INTENT, {"optim.lr_rows": 16, **overrides}).recipe.peak_lr == 2e-4 * factor


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.workers": 4, "train.micro_batch": 4},
        {"train.workers": 1, "train.micro_batch": 16},
        {"train.micro_batch": 4, "train.aggregation_frequency": 8},
        {"train.rows_per_update": 64},
        {"train.rows_per_update": 64, "train.workers": 7, "train.micro_batch": 3},
        {"name": "other", "data.path": "rows.csv", "data.test": "test.csv", "data.max_bad_rows": 0.5},
        {"train.save_every": 2, "train.keep": 5, "train.log_every": 1},
        {"train.tokens_per_pass": 512},
        {"train.gradient_compression": "none", "train.shard": 1},
        {"serve.port": 1, "tune.trials": 9, "cluster.address": "auto"},
        {"quantize.calibration_rows": 3, "distill.layers": 2},
    ],
)
def test_speed_and_cadence_do_not_change_the_identity(overrides: dict[str, Any]) -> None:
    assert config.parse(INTENT, overrides).recipe.identity() == recipe().identity()


def test_what_changes_the_weights_changes_the_identity() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"optim.lr": 1e-4},
        {"optim.warmup": 0.2},
        {"optim.clip_norm": None},
        {"train.seed": 1},
        {"train.epochs": 4},
        {"train.precision": "bf16"},
        {"train.gradient_compression": "bf16"},
        {"train.rows_per_update": 32},
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
        {"optim.layer_decay": 0.9},
        {"optim.lr_scaling": "linear", "optim.lr_rows": 32},
        {"optim.lr_scaling": "sqrt", "optim.lr_rows": 32},
        {"optim.lr_scaling": "sqrt", "optim.lr_rows": 16},
        {"optim.beta2_scaling": "rows", "optim.lr_rows": 32},
        {"optim.beta2_scaling": "rows", "optim.lr_rows": 16},
        {"optim.beta2_scaling": "rows", "optim.lr_scaling": "sqrt", "optim.lr_rows": 16},
    ]
    identities = [config.parse(INTENT, change).recipe.identity() for change in changes]
    assert len(set(identities)) == len(changes) - 1
    assert identities[8] == identities[10]  # both are 32 rows an update
    assert all(len(identity) == 16 for identity in identities)


def test_rules_that_are_switched_off_are_no_part_of_the_identity() -> None:
    before = {"model.pooling": "own", "train.precision": "fp32"}
    off = {
        "optim.lr_scaling": "none",
        "optim.beta2_scaling": "none",
        "optim.lr_rows": 32,
        "optim.layer_decay": 1.0,
        "model.freeze": "none",
    }
    plain, switched_off = config.parse(INTENT, before).recipe, config.parse(INTENT, {**before, **off}).recipe
    assert switched_off.identity() == plain.identity()


def test_a_configuration_is_a_pair() -> None:
    made = config.load("intent")
    assert isinstance(made, Config)
    assert set(config.to_document(made)) == config.RECIPE_FIELDS | config.DEPLOY_FIELDS


def test_a_run_of_an_earlier_version_is_read_without_the_settings_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: intent\ntask: classification\ntrain: {packed: false, touched_rows: true, epochs: 7}\n")
    assert (
        config.load(str(path)).recipe.train
        == config.Recipe.model_validate({"name": "intent", "task": "classification", "train": {"epochs": 7}}).train
    )


@pytest.mark.parametrize(("before", "now"), [("true", 1), ("false", 0)])
def test_a_run_of_an_earlier_version_keeps_its_shares_of_the_optimizer(tmp_path: Path, before: str, now: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"name: intent\ntask: classification\ntrain: {{sharded_optimizer: {before}}}\n")
    assert config.load(str(path)).recipe.train.shard == now
    with pytest.raises(ConfigError, match=r"train\.sharded_optimizer.*of an earlier version.*write train\.shard=1"):
        config.load("intent", {"train.sharded_optimizer": True})


def test_a_run_of_an_earlier_version_is_read_and_a_recipe_with_its_search_is_told_what_to_write(tmp_path: Path) -> None:
    """Every config.yaml has all settings, those of a search too."""
    old = {"trials": 4, "points": [], "lr": [1e-4], "aggregation_frequency": [2], "budget": 0.5, "first_rung": 0.2}
    document = config.to_document(config.load("intent"))
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump({**document, "tune": {**old, "concurrent": 1}}))
    assert config.load(str(written)).deploy.tune == config.load("intent").deploy.tune
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({**document, "tune": {"lr": [1e-4], "budget": 0.5}}))
    with pytest.raises(ConfigError) as caught:
        config.load(str(mine))
    told = {problem.field: problem.fix for problem in caught.value.problems}
    assert told["tune.lr"] == "write tune.space, e.g. {optim.lr: [1.0e-4, 3.0e-4]}"
    assert told["tune.budget"] == "write tune.full_runs; every trial is trained to rungs"
