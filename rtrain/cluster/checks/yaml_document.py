"""YAML documents with the line of each value.

A path is the tuple of keys and indices of a value. A value behind an alias has the line of its anchor.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rtrain.core.errors import ConfigError, Problem

YamlPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A parsed YAML document."""

    text: str
    """Text of the whole file."""
    value: Any
    lines: Mapping[YamlPath, int]
    """1-based line of each key or list element."""

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path; `default` if missing."""
        value = self.value
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return default
        return value

    def line(self, *path: str | int) -> int:
        """The line of a path, or of its innermost existing parent."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    def line_of_text(self, path: YamlPath, text: str) -> int:
        """The line of the first `text` at or after the line of `path`; the line of `path` if it is not found."""
        first_line = self.line(*path)
        for number, line in enumerate(self.text.splitlines()[first_line - 1 :], first_line):
            if text in line:
                return number
        return first_line

    def walk(self, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
        """Iterate over all values below a path, with their paths."""
        node = self.get(*path)
        entries: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in entries:
            yield (*path, key), value
            yield from self.walk((*path, key))


class InvalidYaml(Exception):
    """The text is invalid YAML; holds the reason and its line."""

    def __init__(self, reason: str, line: int):
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass
class _LineRecorder:
    loader: yaml.SafeLoader
    lines: dict[YamlPath, int] = field(default_factory=dict)

    def record(self, node: yaml.Node, path: YamlPath) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                # The merge key `<<` has no value of its own.
                is_merge_key = key.tag == "tag:yaml.org,2002:merge"
                name = key.value if is_merge_key else self.loader.construct_object(key, deep=True)
                self.lines[(*path, name)] = key.start_mark.line + 1
                self.record(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.lines[(*path, number)] = value.start_mark.line + 1
                self.record(value, (*path, number))


def parse_documents(text: str) -> list[Document]:
    """Parse the documents of a file; empty ones are skipped. Raises `InvalidYaml`."""
    loader, documents = None, []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node: Any = loader.get_node()
            recorder = _LineRecorder(loader)
            recorder.record(node, ())
            value = loader.construct_document(node)
            if value is not None:
                recorder.lines[()] = node.start_mark.line + 1
                documents.append(Document(text, value, recorder.lines))
    # RecursionError: an alias inside its own anchor. ValueError: an invalid date.
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InvalidYaml(str(getattr(error, "problem", None) or error), mark.line + 1 if mark else 1) from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


def require_number(value: object, name: str) -> float:
    """Require a number of an unchecked cluster file. Raises `ConfigError`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    fix = "write a number; run rtrain cluster lint"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is not a number", fix, code="wrong_type")])


def require_mapping(value: object, name: str) -> dict[Any, Any]:
    """Require a map of an unchecked cluster file; empty if missing. Raises `ConfigError`."""
    if value is None or isinstance(value, dict):
        return value or {}
    fix = f"write {name.rpartition('.')[2]}: {{NAME: VALUE}}; run rtrain cluster lint"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is no map", fix, code="wrong_type")])
