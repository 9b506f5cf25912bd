"""Keywords of the functions: accepted settings, refusals; and the options of the command line."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import rtrain
from rtrain import config
from rtrain.api import keywords
from rtrain.cli import app as cli
from rtrain.core.errors import ConfigError
from tests.support.root import ROOT

VERBS = ("train", "tune", "distill", "quantize", "evaluate", "gate", "compare", "serve")
NOT_IN_PYTHON = {
    "as_json",  # a result has `document`
    "assignments",  # `settings` and keywords
    "plugin",  # the setting `plugins`, and the functions register_*
    # These act on an endpoint of another process, print, or end only with the process.
    *("update", "rollback", "model_name", "shadow", "is_standalone", "print_config"),
}
SAME_THING = {"baseline_argument": "baseline"}
"""Parameter of a function by its name on the command line."""


@pytest.mark.parametrize(
    ("verb", "keyword", "setting"),
    [
        ("train", "epochs", "train.epochs"),
        ("train", "lr", "optim.lr"),
        ("train", "seed", "train.seed"),
        ("train", "label", "data.label"),
        ("train", "model", "model.name"),
        ("train", "data", "data.path"),
        ("tune", "trials", "tune.trials"),
        ("tune", "space", "tune.space"),
        ("tune", "lr", "optim.lr"),
        ("distill", "lr", "distill.lr"),
        ("distill", "epochs", "distill.epochs"),
        ("distill", "seed", "train.seed"),
        ("gate", "max_score_drop", "gate.max_score_drop"),
        ("serve", "port", "serve.port"),
        ("serve", "precision", "serve.precision"),
    ],
)
def test_a_keyword_is_the_one_setting_of_its_name(verb: str, keyword: str, setting: str) -> None:
    assert keywords.find_settings(verb, keyword) == [setting]
    overrides, problems = keywords.resolve_settings(verb, None, {keyword: 1})
    assert (overrides, problems) == ({setting: 1}, [])


def test_every_setting_has_a_keyword_or_is_refused_as_ambiguous() -> None:
    names = list(config.iter_setting_names())
    leaves = [name.rpartition(".")[2] for name in names]
    for name, leaf in zip(names, leaves, strict=True):
        resolved = keywords.find_settings("train", leaf)
        if leaves.count(leaf) == 1 and leaf not in keywords.SETTINGS_BY_OPTION:
            assert resolved == [name]


def test_settings_win_over_keywords_and_none_is_left_out() -> None:
    overrides, _ = keywords.resolve_settings("train", {"train.epochs": 5}, {"epochs": 3, "label": None, "lr": 1e-3})
    assert overrides == {"train.epochs": 5, "optim.lr": 1e-3}


def test_a_path_is_text() -> None:
    assert keywords.resolve_settings("train", None, {"model": Path("a") / "b"})[0] == {"model.name": "a/b"}


@pytest.mark.parametrize(
    ("keyword", "code", "suggestions"),
    [
        ("pooling", "ambiguous_setting", ("data.pooling", "model.pooling")),
        ("epocs", "unknown_setting", ("epochs",)),
        ("learning_rate", "unknown_setting", ("optim.lr",)),
        ("num_train_epochs", "unknown_setting", ("train.epochs",)),
    ],
)
def test_an_ambiguous_or_unknown_keyword_is_refused_with_suggestions(
    keyword: str, code: str, suggestions: tuple[str, ...]
) -> None:
    _, [problem] = keywords.resolve_settings("train", None, {keyword: 1})
    assert (problem.field, problem.code) == (keyword, code)
    assert all(suggestion in problem.fix for suggestion in suggestions)


def test_all_problems_of_a_call_are_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        rtrain.train("intent", data=object(), epocs=3, pooling="mean", lr="fast", settings={"train.epoch": 1})
    assert {problem.field for problem in caught.value.problems} == {
        *("data.path", "epocs", "pooling", "optim.lr", "train.epoch")
    }
    assert list(tmp_path.iterdir()) == []


def test_ranges_and_choices_are_a_search_space() -> None:
    space = {"optim.lr": rtrain.loguniform(1e-5, 1e-3), "optim.warmup": rtrain.uniform(0, 0.2)}
    overrides, _ = keywords.resolve_settings("tune", None, {"space": {**space, "train.aggregation_frequency": [1, 2]}})
    resolved = config.load_config("intent", overrides).deploy.tune.space
    assert resolved["optim.lr"] == config.Range(low=1e-5, high=1e-3, log=True)
    assert resolved["optim.warmup"] == config.Range(low=0, high=0.2)
    assert resolved["train.aggregation_frequency"] == (1, 2)


# ------------------------------------------------------------------------------------------- the command line's options


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_accepts_every_option_of_its_verb(verb: str) -> None:
    command = typer.main.get_command(cli.app).commands[verb]  # type: ignore[attr-defined]  # it is a group
    parameters = inspect.signature(getattr(rtrain, verb)).parameters
    has_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {SAME_THING.get(option.name, option.name) for option in command.params} - NOT_IN_PYTHON
    options -= {"artifact", "candidate"} if next(iter(parameters)) in ("artifact", "candidate") else set()
    for option in options - parameters.keys():
        assert has_keywords, option
        assert option in ("resume", "new") or len(keywords.find_settings(verb, option)) == 1, option


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_has_no_option_that_its_verb_lacks(verb: str) -> None:
    command = typer.main.get_command(cli.app).commands[verb]  # type: ignore[attr-defined]  # it is a group
    options = {SAME_THING.get(option.name, option.name) for option in command.params}
    shared = {"settings", "on_event", "options"}  # --set, the progress line, and all keywords
    assert inspect.signature(getattr(rtrain, verb)).parameters.keys() - options - shared == set()


@pytest.mark.parametrize("verb", [*VERBS, "load"])
def test_a_function_has_few_parameters_and_a_description(verb: str) -> None:
    function = getattr(rtrain, verb)
    assert len(inspect.signature(function).parameters) <= 6
    assert inspect.getdoc(function)


def test_importing_the_functions_loads_neither_ray_nor_torch() -> None:
    names = [*VERBS, "load", "loguniform", "uniform"]
    script = (
        f"import sys, rtrain; assert all(callable(getattr(rtrain, name)) for name in {names!r}); "
        "print(sorted({'torch', 'ray', 'transformers', 'pyarrow', 'pandas', 'openvino'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_attribute_is_one_and_the_functions_are_listed() -> None:
    with pytest.raises(AttributeError):
        rtrain.trian  # noqa: B018
    assert {*VERBS, "load"} <= {*dir(rtrain)}
