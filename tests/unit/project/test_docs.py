"""README and docs: their commands are right, their links lead somewhere, and the page of settings is up to date.

A command stands alone on a line of a block that is fenced as ```sh. The comment behind it may begin with what it needs
(`WORKER_RESOURCE`); then it is parsed here and not run. Every other command is run by `test_docs_commands`.
"""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import reference
from tests.support.root import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README_LINES = 110
SLOW = ("a minute", "minutes")
NEEDS = (
    *SLOW,
    "needs root",
    "needs a cluster",
    "needs a checkout",
    "needs a GPU",
    "needs Docker",
    "needs Slurm",
    "needs a package index",
    "needs a browser",
    "needs DATA",
    "needs a bucket",
    "needs a server",
    "needs other runs",
    "needs Ctrl-C",
)
RUN = ("rtrain", "curl", "export")
"""First words of the commands that `test_docs_commands` runs."""


@dataclass(frozen=True)
class Command:
    place: str
    text: str
    """Without its comment."""
    comment: str

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text) if word != "&"]

    @property
    def need(self) -> str:
        """What its comment says that it needs, or nothing."""
        return next((need for need in NEEDS if self.comment.startswith(need)), "")

    def __str__(self) -> str:
        return f"{self.place} {self.text}"


def commands(page: Path) -> list[Command]:
    """The commands of a page, in its order."""
    found, inside = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```sh"
        elif inside and line.strip():
            text, _, comment = line.partition(" # ")
            found.append(Command(f"{page.relative_to(ROOT)}:{number}", text.strip(), comment.strip()))
    return found


COMMANDS = [command for page in PAGES for command in commands(page)]


# ---------------------------------------------------------------------------------------------------------- commands


def check_rtrain(words: list[str]) -> None:
    """The verb, its options and its settings exist; nothing is run."""
    verb: Any = typer.main.get_command(cli.app)
    arguments, name = list(words), "rtrain"
    while hasattr(verb, "commands"):
        name, verb, arguments = verb.resolve_command(typer.Context(verb), arguments)
    given = verb.make_context(name, arguments).params
    overrides = dict(config.parse_assignment(text) for text in given.get("assignments") or ())
    recipe = given.get("recipe") or "intent"
    config.load_config("intent" if recipe.endswith(".yaml") else recipe, overrides)
    if words[:2] == ["recipes", "show"]:
        config.read_recipe_text(given["name"])


class _Parsed(Exception):
    pass


def check_program(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own argparse takes the arguments; the program ends there."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # another test may have imported the module before
        with pytest.raises(_Parsed):
            runpy.run_module(module, run_name="__main__")


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, assigned, _ = word.partition("=")
        assert re.search(rf"^{name} *\?=" if assigned else rf"^{name}:.*##", text, re.M), f"make knows no {name}"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one_that_there_is(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = command.words
    if program == "python":
        assert words[0] == "-m"
        check_program(words[1], words[2:], monkeypatch)
    elif program == "rtrain":
        check_rtrain(words)
    elif program == "make":
        check_make(words)


@pytest.mark.parametrize("name", config.list_recipe_names())
def test_commands_in_a_recipe_s_comments_are_ones_that_there_are(name: str) -> None:
    found = re.findall(r"^#   rtrain (.*?)(?: {2,}.*)?$", config.read_recipe_text(name), re.M)
    assert found
    for text in found:
        check_rtrain(shlex.split(text))


def test_a_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    assert len(COMMANDS) >= 30
    assert [str(command) for command in COMMANDS if not command.need and command.words[0] not in RUN] == []


# ------------------------------------------------------------------------------------------------- names in the text


def outside_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", outside_blocks(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", outside_blocks(page)):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.is_file(), target
        assert not anchor or anchor in anchors(found), target


def test_readme_leads_to_every_page() -> None:
    """By a link, or by a link of a page that it links."""
    met, ahead = set[Path](), [PAGES[0]]
    while ahead:
        page = ahead.pop()
        met.add(page)
        linked = re.findall(r"\]\(([^)#]+\.md)", page.read_text(encoding="utf-8"))
        ahead += {(page.parent / name).resolve() for name in linked} - met
    assert met == set(PAGES)
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= README_LINES


def named(page: Path) -> Iterator[str]:
    yield from re.findall(r"`([^`\n]+)`", outside_blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_verbs_and_files_that_are_named_exist(page: Path) -> None:
    settings = set(config.iter_setting_names())
    sections = {name.split(".")[0] for name in settings}
    verbs = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # it is a group
    for name in named(page):
        setting = re.match(r"([a-z]+)\.[a-z_]+(?==|$)", name)
        room = (ROOT / name.replace(".", "/")).is_dir()  # `tune` is a section and a package
        if setting and setting[1] in sections and not room and not re.search(r"\.(html|json|yaml|py)$", name):
            assert setting[0] in settings, name
        if name.startswith("rtrain "):
            assert name.split()[1] in verbs, name
        if page.name != "adding.md" and re.match(r"(rtrain|serve|tune|tests|benchmarks)/[\w/]*(\.py)?$", name):
            assert (ROOT / name).exists(), (
                name
            )  # adding.md names files to be written: tests/unit/project/test_adding.py reads it


def test_the_layout_names_every_package_its_modules_and_the_layers() -> None:
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    packages = [
        path.parent.relative_to(ROOT)
        for name in ("rtrain", "serve", "tune")
        for path in (ROOT / name).rglob("__init__.py")
    ]
    assert [str(package) for package in packages if str(package) != "rtrain" and f"| `{package}/` |" not in text] == []
    for package, modules in re.findall(r"^\| `([\w/]+)/` \|.*\| ([^|]*) \|$", text, re.M):
        for module in re.findall(r"`(\w+)`", modules):
            assert (ROOT / package / f"{module}.py").is_file(), f"{package}/{module}"
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    layers = [layer.replace(" :", "").split() for layer in contract["layers"][1:]]  # all but rtrain.__main__
    drawing = re.search(r"^## Layers$.*?^```\n(.*?)^```$", text, re.M | re.S)
    assert drawing
    assert [line.split() for line in drawing[1].splitlines()] == layers


# ----------------------------------------------------------------------------------------------------------- settings


def test_the_page_of_settings_is_that_of_the_models() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference.render_settings_page(), f"docs/settings.md is stale; write it anew: {reference.COMMAND}"
    assert set(re.findall(r"^\| `([\w.]+)` \|", page, re.M)) == set(config.iter_setting_names())


def test_what_belongs_to_a_run_is_what_changes_its_identity() -> None:
    """Some settings of each kind with another value: the identity changes where the page says so."""
    active = {"augment.copies": 1, "augment.typo": 0.1, "optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 8}
    base = config.load_config("intent", {**active, "train.global_batch_size": 64})
    other: dict[str, Any] = {
        "data.max_tokens": 32,
        "data.path": "rows.csv",
        "data.max_bad_rows": 0.5,
        "train.evaluate_every": 7,
        "data.slices": ["x"],
        "augment.seed": 1,
        "model.freeze": "encoder",
        "optim.layerwise_lr_decay": 0.5,
        "optim.lr_reference_batch_size": 16,
        "train.global_batch_size": 32,
        "train.gradient_compression": "bf16",
        "train.zero_stage": 1,
        "train.keep_checkpoints": 5,
        "quantize.calibration_rows": 8,
        "serve.port": 1,
        "cluster.max_failures": 1,
    }
    for name, value in other.items():
        changed = config.with_overrides(base, {name: value}).recipe.recipe_digest() != base.recipe.recipe_digest()
        assert changed == (reference.find_owner(name) == "run"), name
