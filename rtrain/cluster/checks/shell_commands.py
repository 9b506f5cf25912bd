"""The shell commands of a cluster's file: where they stand, and what of them the rules read."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from rtrain.cluster.checks.yaml_document import Document, Place

SEPARATORS = "();&|"
"""Characters that end a simple command."""
HEAD_START, WORKER_START = "head_start_ray_commands", "worker_start_ray_commands"


@dataclass(frozen=True)
class Command:
    place: Place
    text: str

    @property
    def on_head_alone(self) -> bool:
        return str(self.place[0]).startswith("head_")

    @property
    def on_workers_alone(self) -> bool:
        return str(self.place[0]).startswith("worker_") or self.place[0] == "available_node_types"


def commands(document: Document) -> Iterator[Command]:
    """Every command of a launcher's file, in the order of the file."""
    for place, value in document.walk():
        if isinstance(value, str) and len(place) > 1 and str(place[-2]).endswith("_commands"):
            yield Command(place, value)


@dataclass(frozen=True)
class Start:
    """A `ray start` in a command."""

    command: Command
    options: dict[str, str]
    """A flag has an empty value."""
    environment: dict[str, str]
    """The variables that it is given there: exported before, or written before it for itself alone."""


def starts(document: Document) -> Iterator[Start]:
    """Every `ray start` of the document; a command may have several."""
    for command in commands(document):
        exported = dict[str, str]()
        for listed in parts(command.text):
            own = _assigned(listed)
            if listed[:1] == ["export"]:
                exported |= own
            ray = next((n for n, word in enumerate(listed[:-1]) if _names_ray(word) and listed[n + 1] == "start"), None)
            if ray is not None:
                yield Start(command, options(listed[ray + 2 :]), exported | _assigned(listed[:ray]))


def parts(text: str) -> list[list[str]]:
    """The words of each simple command of a shell command; what is quoted is one word."""
    text = re.sub(r"(?m)^\s*#.*$", "", text.replace("\\\n", " ")).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(SEPARATORS):
                found.append([])
            else:
                found[-1].append(word)
    except ValueError:  # unbalanced quotes
        found = [part.split() for part in re.split(r"[;&|\n]", text)]
    return [part for part in found if part]


def _assigned(listed: list[str]) -> dict[str, str]:
    named = (word.partition("=") for word in listed if re.match(r"[A-Za-z_]\w*=", word))
    return {name: value for name, _, value in named}


def _names_ray(word: str) -> bool:
    return word.rpartition("/")[2] == "ray"


def options(listed: list[str]) -> dict[str, str]:
    """Options of a command line, written `--name=value` or `--name value`."""
    found: dict[str, str] = {}
    for place, word in enumerate(listed):
        if word.startswith("--"):
            name, given, value = word.partition("=")
            following = listed[place + 1] if place + 1 < len(listed) else "--"
            found[name] = value if given else "" if following.startswith("-") else following
    return found
