"""Texts to tokens, and labels to names: how a task's rows are read, the same in training and in serving.

Training rows and request texts use the same code: `Task.encode`, which calls `encode` here. A label comes from a file,
so it may hold any JSON: numbers beyond float, lone surrogates, brackets a hundred thousand deep. An invalid label makes
its row bad and never ends the job.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from rtrain.core.ragged import EncodedRow, TokenWindow
from rtrain.tasks.base import Task

if TYPE_CHECKING:
    import tokenizers

    from rtrain.config import DataConfig


class WindowSpec(NamedTuple):
    """How a text becomes tokens, the same in training and in serving."""

    max_tokens: int
    """Most tokens of a window."""
    stride: int = 0
    """Tokens that adjacent windows share."""
    max_windows: int = 1
    """With 1, longer texts are truncated."""


def resolve_window_spec(task: Task, data: "DataConfig") -> WindowSpec:
    """How the rows of `data` are read by `task`."""
    if data.window is None and not task.uses_windows:
        return WindowSpec(data.max_tokens)
    return WindowSpec(data.window_tokens, data.stride, data.max_windows)


def load_tokenizer(
    folder: Path, max_tokens: int, stride: int = 0, *, parses_special_tokens: bool = False
) -> "tokenizers.Tokenizer":
    """The folder's fast tokenizer, cutting into windows of `max_tokens`, never padding. A new object per call, since
    truncation is stored in it. `parses_special_tokens`: the names of special tokens in a text are those tokens, and not
    text."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        reason = "no tokenizer.json in the folder"
        fix = "save the fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
        raise ConfigError([Problem("model.name", str(folder), reason, fix, code="no_tokenizer")])
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise UserError(f"{path} cannot be read as a tokenizer: {error}", code="unreadable") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens, stride=stride)
    tokenizer.encode_special_tokens = not parses_special_tokens
    return tokenizer


def encode(
    tokenizer: "tokenizers.Tokenizer",
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    max_windows: int = 1,
    *,
    by_type_ids: bool = True,
) -> list[EncodedRow]:
    """Texts, or pairs of texts, to tokens. The longer text of a pair is read in windows, each with the whole shorter
    text.

    `by_type_ids`: True: mark the second text only if the tokenizer gives it type id 1; False: always.
    """
    rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    encoded = []
    for row in tokenizer.encode_batch(rows):
        all_windows = [row, *row.overflowing]
        windows = all_windows[:max_windows]
        encoded.append(
            EncodedRow(
                ids=[token for window in windows for token in window.ids],
                windows=[TokenWindow(len(window.ids), _find_pair_start(window, by_type_ids)) for window in windows],
                is_truncated=len(all_windows) > max_windows,
                spans=[span for window in windows for span in window.offsets],
            )
        )
    return encoded


def _find_pair_start(window: "tokenizers.Encoding", by_type_ids: bool) -> int:
    """The position of the second text's first token."""
    types = window.type_ids
    if not by_type_ids and 1 not in types:
        types = [number or 0 for number in window.sequence_ids]
    return types.index(1) if 1 in types else len(types)


# --------------------------------------------------------------------------------------------------------------- labels

BOOLEAN_NAMES = {name: word for word in ("true", "false") for name in (word, word.title(), word.upper())}
"""The name of a truth value, by each spelling."""
_WHOLE_NUMBER = re.compile(r"(0|-?[1-9][0-9]*)\.0+")


class InvalidLabel(ValueError):
    """Why a label cannot be used, and what to write instead."""


def parse_json_label(label: str, example: str) -> Any:
    """The JSON value of a label. `example` shows a valid label in messages."""
    try:
        return json.loads(label)
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of thousands of digits
        raise InvalidLabel(
            f"the label {quote_value(label)} is not JSON; write {example}, with double quotes, as json.dumps does"
        ) from None


def to_label_text(value: Any, label: str, example: str) -> str:
    """Canonical text of `value`, an entry of the JSON `label`."""
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidLabel(f"the label {quote_value(label)} holds a value that is not a text; write {example}")
    text = canonical_name(str(value).strip())
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        reason = f"the label {quote_value(label)} holds half of a character; write it whole, in UTF-8"
        raise InvalidLabel(reason) from None
    return text


def parse_label_list(label: str, example: str) -> list[str]:
    """The texts of a JSON list, stripped like single labels."""
    values = parse_json_label(label, example)
    assert isinstance(values, list)  # the label begins with a bracket
    texts = [to_label_text(value, label, example) for value in values]
    if not all(texts):
        raise InvalidLabel(f"the label {quote_value(label)} holds an empty text; leave it out, as in {example}")
    return texts


def canonical_name(name: str) -> str:
    """A label's name independent of the program that wrote it: `true` for `True`, and `1` for `1.0`, as in JSON."""
    whole_number = _WHOLE_NUMBER.fullmatch(name)
    return whole_number[1] if whole_number else BOOLEAN_NAMES.get(name, name)


def sort_labels(names: Iterable[str]) -> list[str]:
    """Labels in the order of a model's outputs: whole numbers by their value, other labels by their text."""
    names = list(names)
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def validate_label(parse: Any, label: str) -> str | None:
    """Why `parse` cannot read a label, or None."""
    try:
        parse(label)
    except InvalidLabel as bad:
        return str(bad)
    return None
