"""Arguments of a rehearsed command, rewritten for another run folder, and for jobs, whose working directory differs.

An argument is an option with its value, a setting (`--set name=value`), or a positional word.
"""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rtrain import config
from rtrain.cluster.jobs import job_names
from rtrain.core.errors import Problem

LOCAL_PATH_OPTIONS = ("--data", "--valid", "--test", "--model")
"""Options whose value may be a local file or folder."""
LOCAL_PATH_SETTINGS = (
    *("data.path", "data.valid", "data.test", "model.name", "augment.paraphrase", "augment.back_translation_model"),
    *("compress.unlabeled_rows_path", "distill.unlabeled_rows_path", "distill.student", "cluster.prices"),
)
"""Settings whose value may be a local file or folder."""
SETTING_OF_OPTION = {"--data": "data.path", "--valid": "data.valid", "--test": "data.test", "--model": "model.name"}
REHEARSAL_OPTIONS = ("--out", "--address", "cluster.address", "cluster.storage")
"""Options and settings that the rehearsal sets itself."""
DROPPED_FLAGS = ("--resume", "--new", "--json")
SET_OPTION = "--set"


@dataclass(frozen=True)
class CommandArgument:
    name: str
    """Name of an option (`--data`) or of a setting (`data.path`), or a positional word."""
    value: str | None = None

    @property
    def words(self) -> list[str]:
        if self.value is None:
            return [self.name]
        return [self.name, self.value] if self.name.startswith("-") else [SET_OPTION, f"{self.name}={self.value}"]


def parse_words(words: Sequence[str]) -> Iterator[CommandArgument]:
    remaining = iter(words)
    for word in remaining:
        name, has_value, value = word.partition("=")
        if not word.startswith("-") or word in job_names.VALUELESS_OPTIONS:
            yield CommandArgument(word)
            continue
        value = value if has_value else next(remaining, "")
        if name == SET_OPTION:
            name, _, value = value.partition("=")
        yield CommandArgument(name.strip(), value)


def join_words(arguments: Iterable[CommandArgument]) -> list[str]:
    return [part for word in arguments for part in word.words]


def rehearsal_command(words: Sequence[str], out: str, storage: str) -> list[str]:
    """The command for the run folder `out` with the rehearsal's settings: each step is logged, and remote copies go to
    `storage` if the user set one."""
    arguments = list(parse_words(words))
    user_arguments = [word for word in arguments if word.name not in (*REHEARSAL_OPTIONS, *DROPPED_FLAGS)]
    rehearsal_arguments = [CommandArgument("--out", out), CommandArgument("train.log_every", "1")]
    if any(word.name == "cluster.storage" for word in arguments):
        rehearsal_arguments.append(CommandArgument("cluster.storage", storage))
    return join_words([*user_arguments, *rehearsal_arguments])


def override_command(words: Sequence[str], model: str, *settings: str) -> list[str]:
    """The command with another model, and with these settings last."""
    other_arguments = [word for word in parse_words(words) if word.name not in ("--model", "model.name")]
    return [
        *join_words([*other_arguments, CommandArgument("--model", model)]),
        *(part for setting in settings for part in (SET_OPTION, setting)),
    ]


def count_workers(words: Sequence[str]) -> int:
    """How many workers the command trains with, by its words or its recipe."""
    values = [word.value or "" for word in parse_words(words) if word.name in ("--workers", "train.workers")]
    overrides = dict(config.parse_assignment(f"train.workers={value}") for value in values)
    return config.load_config(
        job_names.first_positional(words) or config.list_recipe_names()[0], overrides
    ).recipe.train.workers


def resolve_local_paths(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Resolve the local paths of a command, and report missing files.

    The settings of a recipe file are included, unless the command overrides them.
    """
    arguments, problems = list(parse_words(words)), list[Problem]()
    recipe = job_names.first_positional(words)
    assigned_names = {SETTING_OF_OPTION.get(word.name, word.name) for word in arguments}
    for index, word in enumerate(arguments):
        if word.name in (*LOCAL_PATH_OPTIONS, *LOCAL_PATH_SETTINGS) and word.value is not None:
            absolute_path = _absolute_path(word.value)
            if absolute_path is None and word.value.startswith(("/", "~", ".")):
                reason, fix = "is not on this machine", "rehearse with a local file; a few hundred rows are enough"
                problems.append(Problem("path", word.value, reason, fix, code="not_found"))
            arguments[index] = replace(word, value=absolute_path or word.value)
        elif word.value is None and word.name == recipe and Path(word.name).expanduser().is_file():
            path = Path(word.name).expanduser().absolute()
            arguments[index] = CommandArgument(str(path))
            arguments += [recipe_path for recipe_path in _recipe_paths(path) if recipe_path.name not in assigned_names]
    return join_words(arguments), problems


def _absolute_path(value: str) -> str | None:
    """Absolute path of a file, a folder or a glob; None for anything else, such as a URL or a hub name."""
    path = Path(value).expanduser()
    if "://" in value or not (path.exists() or glob.glob(str(path), recursive=True)):
        return None
    return str(path.absolute())


def _recipe_paths(path: Path) -> Iterator[CommandArgument]:
    """Settings of a recipe file with local paths; the training itself reports other errors in it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    for name in LOCAL_PATH_SETTINGS:
        section, _, key = name.partition(".")
        section_settings = document.get(section) if isinstance(document, dict) else None
        value = section_settings.get(key) if isinstance(section_settings, dict) else None
        if isinstance(value, str) and (absolute_path := _absolute_path(value)) is not None and absolute_path != value:
            yield CommandArgument(name, absolute_path)
