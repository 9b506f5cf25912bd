"""The shell commands of a cluster's file: where they stand, and what of them the rules read."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from rtrain.cluster.lint.document import Document, Place

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


def words(text: str) -> list[str]:
    """A command's words; those of one with unbalanced quotes are parted at spaces."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def starts(document: Document) -> Iterator[tuple[Command, dict[str, str]]]:
    """The commands that start Ray on a node, with their options: a flag has an empty value."""
    for command in commands(document):
        _, found, tail = command.text.partition("ray start")
        if found:
            # What follows in the same line of the shell is no option of `ray start`.
            listed = words(re.split(r"[;&|\n]", tail, maxsplit=1)[0])
            yield command, options(listed)


def options(listed: list[str]) -> dict[str, str]:
    """Options of a command line, written `--name=value` or `--name value`."""
    found: dict[str, str] = {}
    for place, word in enumerate(listed):
        if word.startswith("--"):
            name, given, value = word.partition("=")
            following = listed[place + 1] if place + 1 < len(listed) else "--"
            found[name] = value if given else "" if following.startswith("-") else following
    return found


def exported(text: str, name: str) -> str | None:
    """The value that a command gives a variable; None without."""
    found = re.search(rf"(?:^|[\s;&]){re.escape(name)}=(\"[^\"]*\"|'[^']*'|[^\s;&]*)", text)
    return found[1].strip("\"'") if found else None


@dataclass(frozen=True)
class Install:
    """A `pip install` in a command."""

    command: Command
    packages: tuple[str, ...]
    constrained: bool
    """Whether it names a file with versions (`-c`, `--constraint`, `-r`)."""


VALUED = ("-c", "--constraint", "-r", "--requirement", "-i", "--index-url", "--extra-index-url", "-t", "--target")


def installs(document: Document) -> Iterator[Install]:
    for command in commands(document):
        for _, tail in re.findall(r"(pip3?|uv pip)\s+install\s([^;&|\n]*)", command.text):
            listed = words(tail)
            packages, skip = [], False
            for word in listed:
                if not skip and not word.startswith("-"):
                    packages.append(word)
                skip = word in VALUED
            constrained = any(word.split("=")[0] in VALUED[:4] for word in listed)
            yield Install(command, tuple(packages), constrained)
