"""Texts to tokens: how a task's rows are read, the tokenizer of a folder, and texts cut into windows.

Training rows and request texts use the same code: `Task.encode`, which calls `encode` here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.core.errors import ConfigError, Problem, UserError
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
    """The folder's fast tokenizer, cutting into windows of `max_tokens`, never padding. A private object: its settings
    are state. `parses_special_tokens`: the names of special tokens in a text are those tokens, and not text."""
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

    `by_type_ids`: a second text is marked only by tokenizers that give it its own type id; else by every tokenizer.
    """
    rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    encoded = []
    for row in tokenizer.encode_batch(rows):
        all_windows = [row, *row.overflowing]
        kept_windows = all_windows[:max_windows]
        encoded.append(
            EncodedRow(
                ids=[token for window in kept_windows for token in window.ids],
                windows=[
                    TokenWindow(len(window.ids), _find_pair_start(window, by_type_ids)) for window in kept_windows
                ],
                is_truncated=len(all_windows) > max_windows,
                spans=[span for window in kept_windows for span in window.offsets],
            )
        )
    return encoded


def _find_pair_start(window: "tokenizers.Encoding", by_type_ids: bool) -> int:
    """The position of the second text's first token."""
    types = window.type_ids
    if not by_type_ids and 1 not in types:
        types = [number or 0 for number in window.sequence_ids]
    return types.index(1) if 1 in types else len(types)
