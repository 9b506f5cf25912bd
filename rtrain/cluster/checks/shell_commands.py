"""Parse the shell commands of a cluster file."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from rtrain.cluster.checks.yaml_document import Document, YamlPath

SEPARATORS = "();&|"
"""Characters that end a simple command."""
HEAD_START, WORKER_START = "head_start_ray_commands", "worker_start_ray_commands"


@dataclass(frozen=True)
class Command:
    path: YamlPath
    text: str

    @property
    def is_head_only(self) -> bool:
        return str(self.path[0]).startswith("head_")

    @property
    def is_worker_only(self) -> bool:
        return str(self.path[0]).startswith("worker_") or self.path[0] == "available_node_types"


def iter_commands(document: Document) -> Iterator[Command]:
    """Iterate over all commands of a launcher file, in file order."""
    for path, value in document.walk():
        if isinstance(value, str) and len(path) > 1 and str(path[-2]).endswith("_commands"):
            yield Command(path, value)


@dataclass(frozen=True)
class RayStart:
    """A `ray start` in a command."""

    command: Command
    options: dict[str, str]
    """Options; the value of a flag is empty."""
    environment: dict[str, str]
    """Environment variables: exported before, or set for this command only."""


def iter_ray_starts(document: Document) -> Iterator[RayStart]:
    """Iterate over all `ray start` commands; a shell command may have several."""
    for command in iter_commands(document):
        exported = dict[str, str]()
        for words in split_commands(command.text):
            assignments = _parse_assignments(words)
            if words[:1] == ["export"]:
                exported |= assignments
            position = next(
                (n for n, word in enumerate(words[:-1]) if _is_ray_executable(word) and words[n + 1] == "start"), None
            )
            if position is not None:
                yield RayStart(
                    command, parse_options(words[position + 2 :]), exported | _parse_assignments(words[:position])
                )


def split_commands(text: str) -> list[list[str]]:
    """Split a shell command into simple commands and their words; quoted text is one word."""
    text = re.sub(r"(?m)^\s*#.*$", "", text.replace("\\\n", " ")).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(SEPARATORS):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:  # unbalanced quotes
        commands = [part.split() for part in re.split(r"[;&|\n]", text)]
    return [part for part in commands if part]


def _parse_assignments(words: list[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words if re.match(r"[A-Za-z_]\w*=", word))
    return {name: value for name, _, value in pairs}


def _is_ray_executable(word: str) -> bool:
    return word.rpartition("/")[2] == "ray"


def parse_options(words: list[str]) -> dict[str, str]:
    """Options of a command line, written `--name=value` or `--name value`."""
    options: dict[str, str] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            following = words[position + 1] if position + 1 < len(words) else "--"
            options[name] = value if has_value else "" if following.startswith("-") else following
    return options
