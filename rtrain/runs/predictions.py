"""Predictions of a finished run: predictions-<split>.parquet, and the document of scores-<split>.json.

The parquet file has a line per row of the split, in index order: position (int64), row_id (uint64), source (string),
line (int64), tokens (int32), text (its first characters; decoded from the tokens if the store has no texts), target,
prediction (string, float or list of strings, by the kind of output), score (float64: confidence), loss (float64), with
`data.id` id (string), and a string column for each slice.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rtrain.core import atomic_write
from rtrain.core.ragged import Head, Ints, RaggedArray, TokenBatch
from rtrain.data.store.store import Store
from rtrain.metrics import scores
from rtrain.metrics.collapse import find_collapsed_answers
from rtrain.report import baselines
from rtrain.tasks.base import Task, TokenSpan

if TYPE_CHECKING:
    import tokenizers

TEXT_CHARACTERS = 2000
"""Maximum characters of a row's text."""
TEXT_ROWS = 1024
"""Rows whose texts are decoded at a time."""


def write_predictions(
    path: Path,
    split: str,
    store: Store,
    task: Task,
    head: Head,
    row_results: RaggedArray,
    tokenizer: "tokenizers.Tokenizer",
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Write the rows of a split to `path`, atomically.

    Args:
        row_results: results of all rows of the split, in index order.
        heartbeat: called after every `TEXT_ROWS` rows.
    """
    row_reports = task.explain_rows(row_results, store.targets(split), head)
    origins, lengths = store.origins(split), store.column(split, "length")
    columns: dict[str, Any] = {
        "position": pa.array(np.arange(len(lengths)), pa.int64()),
        "row_id": pa.array(store.column(split, "row_id"), pa.uint64()),
        "source": origins["source"].cast(pa.string()),
        "line": origins["line"],
        "tokens": pa.array(lengths, pa.int32()),
        "text": pa.array(_read_texts(store, split, tokenizer, heartbeat), pa.string()),
        "target": _to_arrow(_tokens_to_text(row_reports.target, store, split, task, tokenizer, heartbeat)),
        "prediction": _to_arrow(_tokens_to_text(row_reports.prediction, store, split, task, tokenizer, heartbeat)),
        "score": pa.array(row_reports.score, pa.float64(), from_pandas=True),
        "loss": pa.array(row_reports.loss, pa.float64(), from_pandas=True),
    }
    if "id" in origins.column_names:
        columns["id"] = origins["id"]
    for name, values in store.slices(split).items():
        columns[name if name not in {*columns, "id"} else f"{name} (slice)"] = values
    with atomic_write.replace_file(path) as draft:
        pyarrow.parquet.write_table(pa.table(columns), draft)


def measure_scores(
    store: Store,
    split: str,
    task: Task,
    head: Head,
    row_results: RaggedArray,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the scores of the split and of its slices, and its tables.

    Further keys: `unseen`, the scores without rows that are training rows too; `sample`, the scores on the rows of the
    baselines, if these are fewer; `collapsed`, the answer of almost all rows. `heartbeat` as in
    `rtrain.metrics.scores.measure_split`.
    """
    columns = {name: values.to_pylist() for name, values in store.slices(split).items()}
    lengths = store.column(split, "length")
    targets, in_training_set = store.targets(split), store.in_training_set(split)
    document = scores.measure_split(task, head, split, row_results, targets, lengths, columns, heartbeat)
    if in_training_set is not None and in_training_set.any():
        document["unseen"] = scores.score_unseen_rows(task, head, row_results, targets, in_training_set)
    row_reports = task.explain_rows(row_results, targets, head)
    if collapsed_answers := find_collapsed_answers(task.output, head, row_reports.target, row_reports.prediction):
        document["collapsed"] = collapsed_answers
    if len(sampled_rows := baselines.choose_rows(store, split)) < store.num_rows(split):
        document["sample"] = scores.score_sampled_rows(task, head, row_results, targets, sampled_rows)
    return document


def _read_texts(
    store: Store, split: str, tokenizer: "tokenizers.Tokenizer", heartbeat: Callable[[], None]
) -> list[str]:
    """Return the rows' texts; decoded from tokens if the store has not kept them."""
    texts: list[str] = []
    total = store.num_rows(split)
    for start in range(0, total, TEXT_ROWS):
        positions = np.arange(start, min(start + TEXT_ROWS, total))
        kept_texts = store.kept_texts(split, positions)
        decoded_texts = iter(_decode_texts(store, split, positions[[text is None for text in kept_texts]], tokenizer))
        texts += [
            next(decoded_texts) if text is None else " ".join(filter(None, text))[:TEXT_CHARACTERS]
            for text in kept_texts
        ]
        heartbeat()
    return texts


def _decode_texts(store: Store, split: str, positions: Ints, tokenizer: "tokenizers.Tokenizer") -> list[str]:
    if not len(positions):
        return []
    tokens = store.read_tokens(split, positions)
    rows = RaggedArray(tokens.ids, tokens.row_lengths)
    # A token has at least one character.
    texts = tokenizer.decode_batch([row[:TEXT_CHARACTERS].tolist() for row in rows], skip_special_tokens=True)
    return [text[:TEXT_CHARACTERS] for text in texts]


def _tokens_to_text(
    values: Sequence[Any],
    store: Store,
    split: str,
    task: Task,
    tokenizer: "tokenizers.Tokenizer",
    heartbeat: Callable[[], None],
) -> list[Any]:
    """Replace slices of a row's tokens and spans in its windows by their text."""
    results = list(values)
    for row, value in enumerate(results):
        if row % TEXT_ROWS == 0:
            heartbeat()
        if not isinstance(value, slice | TokenSpan):
            continue
        tokens = store.read_tokens(split, np.array([row]))
        if isinstance(value, TokenSpan):
            window_start = int(tokens.window_lengths[: value.window].sum())
            value = slice(window_start + value.first, window_start + value.last + 1)
        [texts] = store.kept_texts(split, np.array([row]))
        results[row] = _source_text(texts, tokens, value, task, tokenizer) or tokenizer.decode(
            tokens.ids[value].tolist()
        )
    return results


def _source_text(
    texts: tuple[str, str | None] | None,
    tokens: TokenBatch,
    token_slice: slice,
    task: Task,
    tokenizer: "tokenizers.Tokenizer",
) -> str:
    """Return the source text of a slice of a row's tokens, in its second text or its only one; empty if the kept texts
    do not encode to the row's tokens."""
    if texts is None:
        return ""
    text, pair = texts
    [encoded] = task.encode(tokenizer, [text], None if pair is None else [pair], len(tokens.window_lengths))
    if encoded.ids != tokens.ids.tolist():
        return ""
    source = text if pair is None else pair
    return source[encoded.spans[token_slice.start][0] : encoded.spans[token_slice.stop - 1][1]]


def _to_arrow(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {list}:
        return pa.array(values, pa.list_(pa.string()))
    return pa.array(values, pa.float64() if kinds == {float} else pa.string())
