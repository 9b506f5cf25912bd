"""README and docs: their commands are right, their links lead somewhere, and the page of settings is up to date.

A command stands alone on a line of a block that is fenced as ```sh. The comment behind it may begin with what it needs
(`NEEDS`); then it is parsed here and not run. Every other command is run by `test_docs_commands`.
"""

import argparse
import itertools
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
from serve import schema
from tests.test_imports import FLOORS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README_LINES = 130
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
SMALLER = {
    "make demo": "test_every_stage_ran_there_and_the_endpoint_answered",
    "make demo TORCH_INDEX": "test_torch_comes_from_the_named_index",
    "make test": "test_a_failed_installation_is_explained_and_tried_again",
    "rtrain distill": "test_its_trials_are_students_of_that_teacher_with_the_settings_asked_for",
    "rtrain drill": "test_a_drilled_run_ends_like_one_that_was_never_touched",
    "rtrain profile": "test_a_recipe_is_profiled_as_it_trains",
    "rtrain train": "test_it_searches_and_serves_beside_files_with_the_names_of_its_modules",
    "rtrain tune": "test_it_searches_and_serves_beside_files_with_the_names_of_its_modules",
    "rtrain verify": "test_every_layout_trains_the_same",
}
"""For each command that takes minutes, the test that does the same at a size of seconds."""


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
    config.load("intent" if recipe.endswith(".yaml") else recipe, overrides)
    if words[:2] == ["recipes", "show"]:
        config.recipe_text(given["name"])


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


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[0] == "install"
    for word in words[1:]:
        name, _, extras = word.rstrip("]").partition("[")
        assert name == project["name"]
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def check_ray(words: list[str]) -> None:
    """Ray knows the command and its options; what a job would run is a command of ours."""
    from ray.scripts.scripts import cli as ray

    command: Any = ray
    arguments, name = list(words), "ray"
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, f"ray knows no {name}"
        command = command.commands[name]
    if "--" in arguments:
        job = arguments[arguments.index("--") + 1 :]
        assert job[:3] == ["python", "-m", "rtrain"]
        check_rtrain(job[3:])
    command.make_context(name, arguments)


def check_docker(words: list[str]) -> None:
    """The image is built from a file that there is; what a container would run is a command of ours."""
    verb, *arguments = words
    if verb == "build":
        path = ROOT / arguments[arguments.index("-f") + 1]
        text = path.read_text(encoding="utf-8")
        declared = re.findall(r"^ARG (\w+)", text, re.M) + re.findall(r" AS (\w+)$", text, re.M)
        for option, name in itertools.pairwise(arguments):
            if option in ("--build-arg", "--target"):
                assert name.partition("=")[0] in declared, f"{path.name} knows no {name}"
        return
    assert verb == "run"
    [image] = [number for number, word in enumerate(arguments) if re.match(r"rtrain(:\w+)?$", word)]
    if job := arguments[image + 1 :]:
        check_rtrain(job)


def check_sbatch(words: list[str]) -> None:
    """The script is there; what it hands to `rtrain train` is understood."""
    [script] = [number for number, word in enumerate(words) if word.endswith(".sbatch")]
    assert (ROOT / words[script]).is_file()
    run, *arguments = words[script + 1 :]
    check_rtrain(["train", *arguments, "--out", run])


def check_curl(words: list[str]) -> None:
    schema.parse(schema.PredictRequest, words[words.index("-d") + 1].encode())


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one_that_there_is(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = command.words
    if program == "python":
        assert words[0] == "-m"
        check_program(words[1], words[2:], monkeypatch)
    elif program not in ("export", "tensorboard", "mlflow", "squeue"):
        checks = {
            **{"rtrain": check_rtrain, "make": check_make, "pip": check_pip, "ray": check_ray, "curl": check_curl},
            **{"docker": check_docker, "sbatch": check_sbatch},
        }
        checks[program](words)


@pytest.mark.parametrize("name", config.recipe_names())
def test_commands_in_a_recipe_s_comments_are_ones_that_there_are(name: str) -> None:
    found = re.findall(r"^#   rtrain (.*?)(?: {2,}.*)?$", config.recipe_text(name), re.M)
    assert found
    for text in found:
        check_rtrain(shlex.split(text))


def test_a_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    assert len(COMMANDS) >= 30
    assert [str(command) for command in COMMANDS if not command.need and command.words[0] not in RUN] == []


def test_commands_that_take_minutes_are_tested_at_a_smaller_size() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    slow = [command.text for command in COMMANDS if command.need in SLOW]
    assert [text for text in slow if not any(text.startswith(start) for start in SMALLER)] == []
    assert [start for start in SMALLER if not any(text.startswith(start) for text in slow)] == []
    assert [name for name in SMALLER.values() if f"def {name}(" not in tests] == []


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
    settings = set(config.dotted_names())
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
            assert (ROOT / name).exists(), name  # adding.md names files to be written: tests/test_adding.py reads it


def test_the_layout_names_every_room_its_modules_and_its_floor() -> None:
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    packages = [ROOT / name for name in ("rtrain", "serve", "tune")]
    rooms = [path.parent.relative_to(ROOT) for package in packages for path in package.rglob("__init__.py")]
    assert [str(room) for room in rooms if str(room) != "rtrain" and f"| `{room}/` |" not in text] == []
    for room, modules in re.findall(r"^\| `([\w/]+)/` \|.*\| ([^|]*) \|$", text, re.M):
        for module in re.findall(r"`(\w+)`", modules):
            assert (ROOT / room / f"{module}.py").is_file(), f"{room}/{module}"
    floors = [re.findall(r"`([\w.]+)`", line) for line in re.findall(r"^\| \d+ \| (.*) \|$", text, re.M)]
    assert [tuple(floor) for floor in floors] == list(FLOORS)


# ----------------------------------------------------------------------------------------------------------- settings


def test_the_page_of_settings_is_that_of_the_models() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference.text(), f"docs/settings.md is stale; write it anew: {reference.COMMAND}"
    assert set(re.findall(r"^\| `([\w.]+)` \|", page, re.M)) == set(config.dotted_names())


def test_every_setting_says_what_it_is() -> None:
    assert re.findall(r"^\| `([\w.]+)` .*\|  \|$", reference.text(), re.M) == []


def test_what_belongs_to_a_run_is_what_changes_its_identity() -> None:
    """Some settings of each kind with another value: the identity changes where the page says so."""
    active = {"augment.copies": 1, "augment.typo": 0.1, "optim.lr_scaling": "sqrt", "optim.lr_rows": 8}
    base = config.load("intent", {**active, "train.rows_per_update": 64})
    other: dict[str, Any] = {
        "data.max_tokens": 32,
        "data.path": "rows.csv",
        "data.max_bad_rows": 0.5,
        "train.evaluate_every": 7,
        "data.slices": ["x"],
        "augment.seed": 1,
        "model.freeze": "encoder",
        "optim.layer_decay": 0.5,
        "optim.lr_rows": 16,
        "train.rows_per_update": 32,
        "train.gradient_compression": "bf16",
        "train.shard": 1,
        "train.keep": 5,
        "train.transport": "stock",
        "quantize.calibration_rows": 8,
        "serve.port": 1,
        "cluster.max_crashes": 1,
    }
    for name, value in other.items():
        changed = config.with_overrides(base, {name: value}).recipe.identity() != base.recipe.identity()
        assert changed == (reference.owner(name) == "run"), name


def test_kinds_are_told_with_their_bounds() -> None:
    page = reference.text()
    for line in (
        "| `data.valid_share` | number (0 or more, 0.5 or less) or `null` | `null` | run |",
        '| `quantize.engine` | `openvino`, `onnxruntime` | `"openvino"` | int8 |',
        "| `tune.points` | list of mapping | `[]` | deploy |",
        '| `tune.space` | mapping of range or list | `{"optim.lr": {"low": 5e-05, "high": 0.001, "log": true}, ',
        "| `name` | string | required | rows |",
    ):
        assert line in page
