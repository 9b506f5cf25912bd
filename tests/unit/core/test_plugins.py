"""Plug-ins: how they are found and refused, what identifies them, and how they reach other processes."""

import importlib.metadata
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rtrain
from rtrain import config
from rtrain.config import Recipe
from rtrain.core import plugins
from rtrain.core.errors import ConfigError, UserError
from tests.support.adding import write_page
from tests.support.refusing import refused

LOSS = "import rtrain\n\n\n@rtrain.register_loss({name!r})\ndef loss(logits, targets):\n    return logits.sum(), 1\n"
TRACKER = "import rtrain\n\n\n@rtrain.register_tracker('lines')\nclass Lines: ...\n"
DOCUMENT = {"name": "x", "task": "classification"}


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    plugins.unload_plugins()


def write(path: Path, text: str = LOSS.format(name="mine")) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def parse(*addresses: str, **settings: object) -> Recipe:
    return config.parse_config({**DOCUMENT, "plugins": list(addresses)}, settings).recipe


# ---------------------------------------------------------------------------------------------------- found and refused


def test_a_file_is_loaded_once_and_its_names_are_settings(tmp_path: Path) -> None:
    recipe = parse(write(tmp_path / "my_ext.py"), **{"train.loss": "mine"})
    assert (recipe.plugins, recipe.train.loss) == (("my_ext",), "mine")
    assert plugins.list_names("loss") == ("mine",)
    assert parse("my_ext") == parse(str(tmp_path / "my_ext.py"))
    with refused("unknown_name", "train.loss"):
        parse("my_ext", **{"train.loss": "other"})
    plugins.unload_plugins()
    with refused("unknown_name", "train.loss"):
        parse(**{"train.loss": "mine"})


def test_all_plugins_that_cannot_be_loaded_are_refused_together(tmp_path: Path) -> None:
    files = {
        "json.py": ("", "wrong_name"),
        "my-ext.py": ("", "wrong_name"),
        "broken.py": ("import rtrain\n\nrtrain.unknown\n", "plugin_failed"),
        "wrong.py": ("import rtrain\n)\n", "plugin_failed"),
        "missing.py": (None, "not_found"),
    }
    addresses = [
        write(tmp_path / name, text) if text is not None else str(tmp_path / name) for name, (text, _) in files.items()
    ]
    with pytest.raises(ConfigError) as caught:
        parse(*addresses, "no_such_module_anywhere")
    assert [problem.code for problem in caught.value.problems] == [*(code for _, code in files.values()), "not_found"]
    assert f"{tmp_path / 'broken.py'}, line 3" in caught.value.problems[2].reason
    assert f"{tmp_path / 'wrong.py'}, line 2" in caught.value.problems[3].reason
    assert not plugins.list_names("loss")


def test_a_name_has_one_owner_that_is_a_module_and_not_rtrain(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first_ext.py"), write(tmp_path / "second_ext.py")
    with refused("already_registered", "plugins"):
        parse(first, second)
    with refused("already_registered", "plugins"):
        parse(write(tmp_path / "other" / "first_ext.py"), first)
    plugins.unload_plugins()
    with refused("already_registered", "plugins"):
        parse(write(tmp_path / "third_ext.py", LOSS.format(name="cross_entropy")))

    def loss() -> None: ...

    loss.__module__ = "__main__"
    with refused("not_a_module", "plugins"):
        rtrain.register_loss("cell")(loss)


def test_an_installed_module_is_imported_if_it_may_be_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "my_company" / "__init__.py", "")
    write(tmp_path / "my_company" / "rtrain_ext.py")
    write(tmp_path / "my_company" / "unrelated.py", "raise SystemExit('it was imported')\n")
    assert parse("my_company.rtrain_ext", **{"train.loss": "mine"}).plugins == ("my_company.rtrain_ext",)
    assert plugins.list_upload_paths() == [str(tmp_path / "my_company")]
    with refused("registers_nothing", "plugins"):
        parse("my_company.unrelated")
    assert "my_company.unrelated" not in sys.modules


def test_a_module_that_is_imported_as_any_other_is_the_plugin_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "imported_ext.py")
    __import__("imported_ext")
    assert parse(**{"train.loss": "mine"}).plugins == ("imported_ext",)
    assert parse().plugins == ()


def test_an_entry_point_is_found_by_the_names_that_a_recipe_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "entered_ext.py")
    package = tmp_path / "entered-1.0.dist-info"
    write(package / "METADATA", "Metadata-Version: 2.1\nName: entered\nVersion: 1.0\n")
    write(package / "entry_points.txt", "[rtrain.plugins]\nentered = entered_ext\n")
    assert importlib.metadata.entry_points(group=plugins.ENTRY_POINT_GROUP)
    assert parse().plugins == ()
    assert "entered_ext" not in sys.modules
    assert parse(**{"train.loss": "mine"}).plugins == ("entered_ext",)


def test_a_run_folder_executes_no_file(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    file = write(tmp_path / "evil_ext.py", f"import pathlib, rtrain\npathlib.Path({str(sentinel)!r}).touch()\n")
    (tmp_path / "config.yaml").write_text(f"name: x\ntask: classification\nplugins: [{file}]\n")
    with refused("plugin_path", "plugins"):
        config.load_config(str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("name: x\ntask: classification\nplugins: [evil_ext]\n")
    with refused("not_found", "plugins"):
        config.load_config(str(tmp_path / "config.yaml"))
    assert not sentinel.exists()
    (tmp_path / "recipe.yaml").write_text(f"name: x\ntask: classification\nplugins: [{file}]\n")
    assert config.load_config(str(tmp_path / "recipe.yaml")).recipe.plugins == ("evil_ext",)
    assert sentinel.exists()


# ------------------------------------------------------------------------------------------------------------- identity


def test_a_run_is_identified_by_plugins_that_may_change_its_weights(tmp_path: Path) -> None:
    plain = parse()
    assert not {"plugins", "functions", "loss"} & {*plain.weight_settings(), *plain.weight_settings()["train"]}
    tracker = parse(write(tmp_path / "tracker_ext.py", TRACKER))
    assert tracker.recipe_digest() == plain.recipe_digest()
    loss = parse(write(tmp_path / "loss_ext.py"))
    assert loss.recipe_digest() != plain.recipe_digest()
    first = loss.weight_settings()["plugins"]
    plugins.unload_plugins()
    write(tmp_path / "loss_ext.py", LOSS.format(name="mine") + "# edited\n")
    assert parse(str(tmp_path / "loss_ext.py")).weight_settings()["plugins"] != first
    assert [name.partition("@")[0] for name in first] == ["loss_ext"]


def test_the_digest_is_that_of_all_source_files_at_any_place(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        write(tmp_path / name / "__init__.py", "from . import losses\n")
        write(tmp_path / name / "losses.py")
        digests.append(plugins.hash_files(tmp_path / name / "__init__.py"))
    assert digests[0] == digests[1]
    write(tmp_path / "a" / "losses.py", "# none\n")
    assert plugins.hash_files(tmp_path / "a" / "__init__.py") != digests[0]


def test_another_process_loads_the_plugins_of_a_recipe_and_refuses_edited_ones(tmp_path: Path) -> None:
    recipe = parse(write(tmp_path / "my_ext.py"), **{"train.loss": "mine"})
    (tmp_path / "recipe.pickle").write_bytes(pickle.dumps(recipe))
    program = (
        "import pathlib, pickle; from rtrain.core import plugins; from rtrain.core.errors import UserError\n"
        "for _ in range(2):\n"
        "    try:\n"
        f"        recipe = pickle.loads(pathlib.Path({str(tmp_path / 'recipe.pickle')!r}).read_bytes())\n"
        "        print(recipe.recipe_digest(), *plugins.list_names('loss'))\n"
        "    except UserError as error:\n"
        "        print(error.problems[0].code)\n"
        "    plugins.unload_plugins()\n"
        f"    with open({str(tmp_path / 'my_ext.py')!r}, 'a') as file:\n        file.write('# edited')\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"{recipe.recipe_digest()} mine", "other_plugin"]


def test_the_processes_of_a_command_find_its_files_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse(write(tmp_path / "my_ext.py"))
    value = os.environ[plugins.ENVIRONMENT_VARIABLE]
    assert plugins.format_options() == ["--plugin", str(tmp_path / "my_ext.py")]
    plugins.unload_plugins()
    with refused("not_found", "plugins"):
        parse("my_ext")
    monkeypatch.setenv(plugins.ENVIRONMENT_VARIABLE, value)
    assert parse("my_ext", **{"train.loss": "mine"}).plugins == ("my_ext",)


def test_a_worker_prefers_the_copy_that_was_sent_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse(write(tmp_path / "my_ext.py"))
    [plugin] = plugins.describe_plugins(["my_ext"])
    plugins.unload_plugins()
    write(tmp_path / "sent" / "my_ext.py")
    monkeypatch.syspath_prepend(tmp_path / "sent")
    plugins.receive_plugins([plugin])
    assert sys.modules["my_ext"].__file__ == str(tmp_path / "sent" / "my_ext.py")
    assert plugins.list_names("loss") == ("mine",)


def test_a_folder_of_the_same_name_hides_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a run's, beside which workers start."""
    (tmp_path / "runs" / "my_ext").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "runs")
    source = write(tmp_path / "my_ext.py")
    assert parse(source).plugins == ("my_ext",)
    [plugin] = plugins.describe_plugins(["my_ext"])
    plugins.unload_plugins()
    plugins.receive_plugins([plugin])
    assert plugins.describe_plugins(["my_ext"]) == [plugin._replace(address=source)]


def test_a_process_that_is_reused_loads_an_edited_file_anew(tmp_path: Path) -> None:
    parse(write(tmp_path / "my_ext.py"))
    [plugin] = plugins.describe_plugins(["my_ext"])
    write(tmp_path / "my_ext.py", LOSS.format(name="other"))
    plugins.receive_plugins([plugin._replace(digest=plugins.hash_files(tmp_path / "my_ext.py"))])
    assert plugins.list_names("loss") == ("other",)


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_error_in_a_plugin_has_the_users_line_and_no_other_is_changed(tmp_path: Path) -> None:
    write_page(tmp_path)
    plugins.load_plugins([str(tmp_path / "other_ext.py")])
    line = next(
        number
        for number, text in enumerate((tmp_path / "other_ext.py").read_text().splitlines(), start=1)
        if "for number in range" in text
    )
    with pytest.raises(UserError) as caught, plugins.attribute_errors():
        list(plugins.find_value("source", "tickets")("tickets://2026/many"))
    assert caught.value.code == "plugin_failed"
    assert f"{tmp_path / 'other_ext.py'}, line {line}" in str(caught.value)
    with pytest.raises(ZeroDivisionError), plugins.attribute_errors():
        raise ZeroDivisionError
    with refused("mine"), plugins.attribute_errors():
        raise UserError("of the user's own", code="mine")
