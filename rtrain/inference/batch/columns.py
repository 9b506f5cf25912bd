"""The columns of the answers' table: those of the input as they are, the answer's beside them, and `reason`.

An answer's column whose name the input has already is called `NAME (answer)`. Arrow types say what a column holds:
those of Arrow and Parquet files are kept, csv holds text, and a column of JSON lines has the one type of its values.
Where these have several types, or are objects, a Parquet file holds them as text; csv holds lists as JSON too.
"""

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rtrain.core.errors import ConfigError, Problem
from rtrain.core.ragged import Head
from rtrain.data import row_reader
from rtrain.data.readers import tabular
from rtrain.data.readers.values import printable, string
from rtrain.data.sources.find import Piece
from rtrain.tasks.base import Column, Task
from rtrain.tasks.multi_head import heads

REASON = Column("reason", str, lambda reason: reason)
"""Why a row has no answer. The column is always there, empty where a row is answered."""

_SIMPLE = {str: pa.string(), float: pa.float64(), int: pa.int64(), bool: pa.bool_(), object: pa.string()}
_WORDS = pa.list_(pa.string())
_NOT_TEXT = {
    "tokens": _WORDS,
    "tags": _WORDS,
    "answers": pa.list_(pa.struct([("text", pa.string()), ("start", pa.int64())])),
}
"""Columns of CoNLL and SQuAD files that are no texts."""
EXACT = 2**53
"""The greatest integer up to which a float holds each one."""
DEEPEST = 8
_LARGE = pa.dictionary(pa.int64(), pa.int64())
"""Stands for integers of JSON beyond `EXACT`, such as ids: beside floats they are texts, else integers like others."""


@dataclass(frozen=True)
class Layout:
    """The table's columns in order: Arrow type by name."""

    given: dict[str, pa.DataType]
    """Those of the input."""
    added: dict[str, pa.DataType]
    """Those of the answers, then the reason."""
    renamed: dict[str, str]
    """The answers' columns whose names the input has already, and how they are called instead."""

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(list(zip(self.names, (*self.given.values(), *self.added.values()), strict=True)))

    @property
    def names(self) -> list[str]:
        """The columns' names as Arrow can hold them, each unlike the others."""
        found: list[str] = []
        for name in (*self.given, *self.added):
            valid, number = printable(name), 1
            while (chosen := valid if number == 1 else f"{valid} ({number})") in found:
                number += 1
            found.append(chosen)
        return found


def layout(given: Mapping[str, pa.DataType], answer: Sequence[Column]) -> Layout:
    """The columns `answer` and the reason behind those of the input."""
    taken, added, renamed = set(given), {}, {}
    for column in (*answer, REASON):
        name, number = column.name, 1
        while name in taken:
            name = f"{column.name} (answer{f' {number}' if number > 1 else ''})"
            number += 1
        if name != column.name:
            renamed[column.name] = name
        taken.add(name)
        added[name] = arrow_type(column.kind)
    return Layout(dict(given), added, renamed)


def score_columns(task: Task, head: Head) -> list[Column]:
    """A column for the score of each label; their values are of `scores_by_column`. Raises `ConfigError` for a task
    whose answers have no score for each label."""
    if task.output not in ("classes", "labels", "heads"):
        reason = f"answers of the task {task.name} have no score for each label"
        problem = Problem("--scores", None, reason, "leave it out: an answer has its own score", code="no_label_scores")
        raise ConfigError([problem])
    each = [(name, label) for name, own, _ in heads(head) for label in own] if task.output == "heads" else []
    names = [_score_name(name, label) for name, label in each or (("", label) for label in head.labels)]
    return [Column(name, float, operator.itemgetter(name)) for name in names]


def scores_by_column(answer: Any) -> dict[str, float]:
    """An answer with all labels, as values of `score_columns`."""
    parts = answer.items() if isinstance(answer, dict) else (("", answer),)
    return {_score_name(head, entry["label"]): entry["score"] for head, entries in parts for entry in entries}


def _score_name(head: str, label: str) -> str:
    return f"{head} score {label}".strip()


def arrow_type(kind: Any) -> pa.DataType:
    """The Arrow type of a kind of `Column`."""
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, arrow_type(inner)) for name, inner in kind.items()])
    return _SIMPLE[kind]


# -------------------------------------------------------------------------------------------------- types of the input


def of_file(piece: Piece) -> dict[str, pa.DataType]:
    """The columns and types of a file whose rows are alike: csv, tsv, CoNLL or SQuAD."""
    known = tabular.COLUMNS.get(piece.format, ())
    return {name: _NOT_TEXT.get(name, pa.string()) for name in known} or dict.fromkeys(
        row_reader.columns_of(piece), pa.string()
    )


def kind_of(value: Any, depth: int = 0) -> pa.DataType:
    """The type of a value of JSON; lists in more than `DEEPEST` lists are texts."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if abs(value) > EXACT:
            return _LARGE if -(2**63) <= value < 2**63 else pa.string()
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, list) and depth < DEEPEST:
        return pa.list_(functools.reduce(common, (kind_of(inner, depth + 1) for inner in value), pa.null()))
    return pa.null() if value is None else pa.string()


def common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds the values of both; text where nothing else does."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(common(one.value_type, other.value_type))
    if {one, other} == {pa.int64(), _LARGE}:
        return _LARGE
    if pa.types.is_integer(one) and pa.types.is_integer(other) and pa.uint64() not in (one, other):
        return pa.int64()
    if pa.types.is_floating(one) and pa.types.is_floating(other):
        return pa.float64()
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def settled(kind: pa.DataType) -> pa.DataType:
    """What holds nothing holds texts, and large numbers are numbers."""
    if kind == _LARGE:
        return pa.int64()
    if pa.types.is_list(kind):
        return pa.list_(settled(kind.value_type))
    return pa.string() if pa.types.is_null(kind) else kind


# -------------------------------------------------------------------------------------------------------------- values


def text(value: Any) -> str:
    """A value as it stands in csv, or in a column of texts: nothing for null, JSON for lists and objects."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return as_json(value) if isinstance(value, list | dict) else string(value)


def as_json(value: Any) -> str:
    """JSON with null for NaN and infinity at any depth: it has neither, and most readers stop at them. Arrow files
    often say by NaN that there is no value; Python's parser takes both, and 1e999 for infinity."""
    dump = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, default=string)
    try:
        return dump(value)
    except ValueError:
        return dump(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):  # a map of Arrow's is a list of pairs
        return [_finite(inner) for inner in value]
    return {name: _finite(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values as an Arrow array. What is no valid Unicode, which Arrow cannot hold, becomes a question mark."""
    values = [_as(kind, value) for value in values]
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_valid(value) for value in values], kind)


def _as(kind: pa.DataType, value: Any) -> Any:
    """A value as text where the column is one of texts, since others of its values are."""
    if pa.types.is_string(kind):
        return value if value is None or isinstance(value, str) else text(value)
    if pa.types.is_list(kind) and value is not None:
        return [_as(kind.value_type, inner) for inner in value]
    return value


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_valid(inner) for inner in value]
    return {name: _valid(inner) for name, inner in value.items()} if isinstance(value, dict) else value
