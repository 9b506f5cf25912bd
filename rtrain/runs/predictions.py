"""What a finished run leaves of its rows: predictions-<split>.parquet, and what scores-<split>.json is made from.

The parquet file has a line per row of the split, in index order: position (int64), row_id (uint64), source (string),
line (int64), tokens (int32), text (its first characters as they are written; decoded from the tokens where an older
store has not kept them), target, prediction (string, float or list of strings, by the kind of output), score (float64:
how sure the model is), loss (float64), and a string column for each slice.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rtrain import drafts
from rtrain.batch import Head, Ints, Ragged, Tokens
from rtrain.data.stores.store import Store
from rtrain.metrics import scores
from rtrain.tasks.base import Place, Task

if TYPE_CHECKING:
    import tokenizers

TEXT_CHARACTERS = 2000
"""Most characters of a row's text; the rest is left out."""
TEXT_ROWS = 1024
"""How many rows' texts are decoded at a time."""


def write(
    path: Path,
    split: str,
    store: Store,
    task: Task,
    head: Head,
    outcomes: Ragged,
    tokenizer: "tokenizers.Tokenizer",
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Write the rows of a split to `path`, whole or not at all.

    `outcomes` are those of all its rows, in index order. `alive` is called after every `TEXT_ROWS` rows.
    """
    described = task.describe(outcomes, store.targets(split), head)
    origins, lengths = store.origins(split), store.column(split, "length")
    columns: dict[str, Any] = {
        "position": pa.array(np.arange(len(lengths)), pa.int64()),
        "row_id": pa.array(store.column(split, "row_id"), pa.uint64()),
        "source": origins["source"].cast(pa.string()),
        "line": origins["line"],
        "tokens": pa.array(lengths, pa.int32()),
        "text": pa.array(_texts(store, split, tokenizer, alive), pa.string()),
        "target": _column(_in_words(described.target, store, split, task, tokenizer, alive)),
        "prediction": _column(_in_words(described.prediction, store, split, task, tokenizer, alive)),
        "score": pa.array(described.score, pa.float64(), from_pandas=True),
        "loss": pa.array(described.loss, pa.float64(), from_pandas=True),
    }
    for name, values in store.slices(split).items():
        columns[name if name not in columns else f"{name} (slice)"] = values
    with drafts.replacement(path) as draft:
        pyarrow.parquet.write_table(pa.table(columns), draft)


def measured(
    store: Store, split: str, task: Task, head: Head, outcomes: Ragged, alive: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The scores of the split, of its slices, and its tables; `alive` as in `rtrain.metrics.scores.measure`. Where rows
    of it are training rows too, also the scores without them."""
    columns = {name: values.to_pylist() for name, values in store.slices(split).items()}
    lengths = store.column(split, "length")
    targets, seen = store.targets(split), store.seen(split)
    document = scores.measure(task, head, split, outcomes, targets, lengths, columns, alive)
    if seen is not None and seen.any():
        document["unseen"] = scores.without(task, head, outcomes, targets, seen)
    return document


def _texts(store: Store, split: str, tokenizer: "tokenizers.Tokenizer", alive: Callable[[], None]) -> list[str]:
    """The rows' texts as they are written; those that the store has not kept, as their tokens spell them."""
    texts: list[str] = []
    total = store.rows(split)
    for start in range(0, total, TEXT_ROWS):
        positions = np.arange(start, min(start + TEXT_ROWS, total))
        written = store.texts(split, positions)
        spelt = iter(_spelt(store, split, positions[[one is None for one in written]], tokenizer))
        texts += [next(spelt) if one is None else " ".join(filter(None, one))[:TEXT_CHARACTERS] for one in written]
        alive()
    return texts


def _spelt(store: Store, split: str, positions: Ints, tokenizer: "tokenizers.Tokenizer") -> list[str]:
    if not len(positions):
        return []
    tokens = store.read(split, positions)
    rows = Ragged(tokens.ids, tokens.lengths_of_rows)
    # A token is a character at least, so the first ones hold all that is kept.
    decoded = tokenizer.decode_batch([row[:TEXT_CHARACTERS].tolist() for row in rows], skip_special_tokens=True)
    return [text[:TEXT_CHARACTERS] for text in decoded]


def _in_words(
    values: Sequence[Any],
    store: Store,
    split: str,
    task: Task,
    tokenizer: "tokenizers.Tokenizer",
    alive: Callable[[], None],
) -> list[Any]:
    """Slices of a row's tokens, and places in its windows, as their text."""
    found = list(values)
    for row, value in enumerate(found):
        if row % TEXT_ROWS == 0:
            alive()
        if not isinstance(value, slice | Place):
            continue
        tokens = store.read(split, np.array([row]))
        if isinstance(value, Place):
            begin = int(tokens.lengths[: value.window].sum())
            value = slice(begin + value.first, begin + value.last + 1)
        [texts] = store.texts(split, np.array([row]))
        found[row] = _written(texts, tokens, value, task, tokenizer) or tokenizer.decode(tokens.ids[value].tolist())
    return found


def _written(
    texts: tuple[str, str | None] | None, tokens: Tokens, places: slice, task: Task, tokenizer: "tokenizers.Tokenizer"
) -> str:
    """Some tokens of a row as they are written in its second text, or in its only one; empty where what is kept of the
    texts does not make all tokens of the row."""
    if texts is None:
        return ""
    text, pair = texts
    [again] = task.encode(tokenizer, [text], None if pair is None else [pair], len(tokens.lengths))
    if again.ids != tokens.ids.tolist():
        return ""
    source = text if pair is None else pair
    return source[again.spans[places.start][0] : again.spans[places.stop - 1][1]]


def _column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {list}:
        return pa.array(values, pa.list_(pa.string()))
    return pa.array(values, pa.float64() if kinds == {float} else pa.string())
