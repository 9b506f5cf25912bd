"""Texts to tokens: how a task's rows are read, the tokenizer of a folder, and texts cut into windows.

A row of training and a text of a request take the same way: `Task.encode`, which calls `encode` here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Encoded, Window
from rtrain.tasks.base import Task

if TYPE_CHECKING:
    import tokenizers

    from rtrain.config import Data


class Reading(NamedTuple):
    """How a text becomes tokens, the same in training and in serving."""

    max_tokens: int
    """Most tokens of a window."""
    stride: int = 0
    """Tokens that neighbouring windows share."""
    max_windows: int = 1
    """With 1, what does not fit is cut."""


def reading_of(task: Task, data: "Data") -> Reading:
    """How the rows of `data` are read by `task`."""
    if data.window is None and not task.never_cuts:
        return Reading(data.max_tokens)
    return Reading(data.window_tokens, data.stride, data.max_windows)


def load_tokenizer(
    folder: Path, max_tokens: int, stride: int = 0, *, reads_special: bool = False
) -> "tokenizers.Tokenizer":
    """The folder's fast tokenizer, cutting into windows of `max_tokens`, never padding. A private object: its settings
    are state. `reads_special`: the names of special tokens in a text are those tokens, and not text."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            [
                Problem(
                    "model.name",
                    str(folder),
                    "no tokenizer.json in the folder",
                    "save the fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
                    code="no_tokenizer",
                )
            ]
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise UserError(f"{path} cannot be read as a tokenizer: {error}", code="unreadable") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens, stride=stride)
    tokenizer.encode_special_tokens = not reads_special
    return tokenizer


def encode(
    tokenizer: "tokenizers.Tokenizer",
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    max_windows: int = 1,
    *,
    by_type_ids: bool = True,
) -> list[Encoded]:
    """Texts, or pairs of texts, to tokens. The longer text of a pair is read in windows, beside the other whole.

    `by_type_ids`: a second text is marked only by tokenizers that give it a type of its own; else by every tokenizer.
    """
    rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    encoded = []
    for row in tokenizer.encode_batch(rows):
        every = [row, *row.overflowing]
        kept = every[:max_windows]
        encoded.append(
            Encoded(
                ids=[token for window in kept for token in window.ids],
                windows=[Window(len(window.ids), _second(window, by_type_ids)) for window in kept],
                truncated=len(every) > max_windows,
                spans=[span for window in kept for span in window.offsets],
            )
        )
    return encoded


def _second(window: "tokenizers.Encoding", by_type_ids: bool) -> int:
    """The place of the second text's first token."""
    types = window.type_ids
    if not by_type_ids and 1 not in types:
        types = [number or 0 for number in window.sequence_ids]
    return types.index(1) if 1 in types else len(types)
