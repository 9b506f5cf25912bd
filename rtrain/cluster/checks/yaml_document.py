"""A YAML file with the line of each of its values.

A place is the tuple of keys and indices that leads to a value. A value that stands in the file once and is taken over
by an alias has the line at which it stands.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rtrain.core.errors import ConfigError, Problem

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """One YAML document, read."""

    text: str
    """The whole file's."""
    value: Any
    lines: Mapping[Place, int]
    """Line, from 1, at which the key of an entry stands, or an element begins."""

    def get(self, *place: str | int, default: Any = None) -> Any:
        """The value at a place; `default` where there is none."""
        found = self.value
        for key in place:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return default
        return found

    def line(self, *place: str | int) -> int:
        """The line of a place, or of the innermost that exists around it."""
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)

    def within(self, place: Place, words: str) -> int:
        """The line of a text's first part `words`, from the line of `place` on; that line itself where it is not
        found there."""
        start = self.line(*place)
        for number, line in enumerate(self.text.splitlines()[start - 1 :], start):
            if words in line:
                return number
        return start

    def walk(self, place: Place = ()) -> Iterator[tuple[Place, Any]]:
        """Every value below a place, with its own place."""
        found = self.get(*place)
        entries: Any = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        for key, value in entries:
            yield (*place, key), value
            yield from self.walk((*place, key))


class Unreadable(Exception):
    """A text is no YAML. Holds what is wrong and its line."""

    def __init__(self, reason: str, line: int):
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass
class _Reading:
    loader: yaml.SafeLoader
    lines: dict[Place, int] = field(default_factory=dict)

    def take(self, node: yaml.Node, place: Place) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                # `<<`, which takes over another map's entries, has no value of its own.
                merged = key.tag == "tag:yaml.org,2002:merge"
                name = key.value if merged else self.loader.construct_object(key, deep=True)
                self.lines[(*place, name)] = key.start_mark.line + 1
                self.take(value, (*place, name))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.lines[(*place, number)] = value.start_mark.line + 1
                self.take(value, (*place, number))


def read(text: str) -> list[Document]:
    """The documents of a file; an empty one is left out. Raises `Unreadable`."""
    loader, found = None, []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node: Any = loader.get_node()
            reading = _Reading(loader)
            reading.take(node, ())
            value = loader.construct_document(node)
            if value is not None:
                reading.lines[()] = node.start_mark.line + 1
                found.append(Document(text, value, reading.lines))
    # RecursionError: an alias inside of its own anchor. ValueError: a date that the calendar has not.
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise Unreadable(str(getattr(error, "problem", None) or error), mark.line + 1 if mark else 1) from None
    finally:
        if loader is not None:
            loader.dispose()
    return found


def number(value: object, name: str) -> float:
    """A number of a cluster's file, which may be anything where nobody has looked at the file before. Raises
    `ConfigError`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    fix = "write a number; rtrain cluster lint says what else"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is no number", fix, code="wrong_type")])


def mapping(value: object, name: str) -> dict[Any, Any]:
    """A map of a cluster's file, as `number` has a number; an empty one where nothing is written. Raises
    `ConfigError`."""
    if value is None or isinstance(value, dict):
        return value or {}
    fix = f"write {name.rpartition('.')[2]}: {{NAME: VALUE}}; rtrain cluster lint says what else"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is no map", fix, code="wrong_type")])
