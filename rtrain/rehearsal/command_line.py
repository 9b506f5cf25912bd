"""The words of a rehearsed command: made for another folder, and for jobs, which begin elsewhere than their user.

A word is an option with its value, a setting (`--set name=value`), or a word alone.
"""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rtrain import config
from rtrain.cluster.jobs import job_names
from rtrain.core.errors import Problem

LOCAL = ("--data", "--valid", "--test", "--model")
"""Options whose value may be a file or folder of the machine from which a job is asked for."""
SETTINGS = (
    *("data.path", "data.valid", "data.test", "model.name", "augment.paraphrase", "augment.pivot"),
    *("compress.unlabelled", "distill.unlabelled", "distill.student", "cluster.prices"),
)
"""Settings of which the same is true."""
SHORT = {"--data": "data.path", "--valid": "data.valid", "--test": "data.test", "--model": "model.name"}
OWN = ("--out", "--address", "cluster.address", "cluster.storage")
"""What a rehearsal says itself."""
FLAGS = ("--resume", "--new", "--json")
SET = "--set"


@dataclass(frozen=True)
class Word:
    name: str
    """An option's (`--data`), a setting's (`data.path`), or a word alone."""
    value: str | None = None

    @property
    def text(self) -> list[str]:
        if self.value is None:
            return [self.name]
        return [self.name, self.value] if self.name.startswith("-") else [SET, f"{self.name}={self.value}"]


def parsed(words: Sequence[str]) -> Iterator[Word]:
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        if not word.startswith("-") or word in job_names.FLAGS:
            yield Word(word)
            continue
        value = value if given else next(left, "")
        if name == SET:
            name, _, value = value.partition("=")
        yield Word(name.strip(), value)


def joined(words: Iterable[Word]) -> list[str]:
    return [part for word in words for part in word.text]


def of(words: Sequence[str], out: str, storage: str) -> list[str]:
    """A command's words, for the run folder `out` and with what a rehearsal adds: each update is logged, and a
    copy goes to `storage` where it would have gone to a storage of the user's."""
    found = list(parsed(words))
    kept = [word for word in found if word.name not in (*OWN, *FLAGS)]
    added = [Word("--out", out), Word("train.log_every", "1")]
    if any(word.name == "cluster.storage" for word in found):
        added.append(Word("cluster.storage", storage))
    return joined([*kept, *added])


def changed(words: Sequence[str], model: str, *settings: str) -> list[str]:
    """The words with another model, and with these settings behind all others."""
    kept = [word for word in parsed(words) if word.name not in ("--model", "model.name")]
    return [*joined([*kept, Word("--model", model)]), *(part for one in settings for part in (SET, one))]


def workers(words: Sequence[str]) -> int:
    """How many workers the command trains with, by its words or its recipe."""
    said = [word.value or "" for word in parsed(words) if word.name in ("--workers", "train.workers")]
    asked = dict(config.parse_assignment(f"train.workers={value}") for value in said)
    return config.load(job_names.given(words) or config.recipe_names()[0], asked).recipe.train.workers


def of_this_machine(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The words with the whole paths of what they name on this machine, and what of it is not there.

    A recipe's file is among it, and what it names in its turn: that is said by settings, unless the words do.
    """
    found, problems = list(parsed(words)), list[Problem]()
    recipe = job_names.given(words)
    said = {SHORT.get(word.name, word.name) for word in found}
    for place, word in enumerate(found):
        if word.name in (*LOCAL, *SETTINGS) and word.value is not None:
            whole = _whole(word.value)
            if whole is None and word.value.startswith(("/", "~", ".")):
                reason, fix = "is not on this machine", "rehearse with a file that is: some hundred rows do"
                problems.append(Problem("path", word.value, reason, fix, code="not_found"))
            found[place] = replace(word, value=whole or word.value)
        elif word.value is None and word.name == recipe and Path(word.name).expanduser().is_file():
            path = Path(word.name).expanduser().absolute()
            found[place] = Word(str(path))
            found += [one for one in _in_recipe(path) if one.name not in said]
    return joined(found), problems


def _whole(value: str) -> str | None:
    """The whole path of a file, a folder or a pattern of files; None for what is none here, as an address or a name."""
    path = Path(value).expanduser()
    if "://" in value or not (path.exists() or glob.glob(str(path), recursive=True)):
        return None
    return str(path.absolute())


def _in_recipe(path: Path) -> Iterator[Word]:
    """Settings of a recipe's file that name something on this machine; what is wrong in it, the training will say."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    for name in SETTINGS:
        section, _, key = name.partition(".")
        part = document.get(section) if isinstance(document, dict) else None
        value = part.get(key) if isinstance(part, dict) else None
        if isinstance(value, str) and (whole := _whole(value)) is not None and whole != value:
            yield Word(name, whole)
