"""What a finished run leaves of its rows: predictions-<split>.parquet, and what scores-<split>.json is made from.

The parquet file has a line per row of the split, in index order: position (int64), row_id (uint64), source (string),
line (int64), tokens (int32), text (its first characters as they are written; decoded from the tokens where an older
store has not kept them), target, prediction (string, float or list of strings, by the kind of output), score (float64:
how sure the model is), loss (float64), with `data.id` id (string), and a string column for each slice.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rtrain.core import atomic_write
from rtrain.core.ragged import Head, Ints, Ragged, Tokens
from rtrain.data.store.store import Store
from rtrain.metrics import scores
from rtrain.report import baselines
from rtrain.tasks.base import Place, Task

if TYPE_CHECKING:
    import tokenizers

TEXT_CHARACTERS = 2000
"""Most characters of a row's text; the rest is left out."""
TEXT_ROWS = 1024
"""How many rows' texts are decoded at a time."""
COLLAPSED, FEWEST = 0.95, 10
"""Share of the rows with other targets that get the most frequent answer too, from which on a model is said to answer
one thing; and how many such rows there must be."""
COLLAPSED_SPREAD = 0.05
"""The same of numbers: the standard deviation of the answers over that of the targets."""


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
    if "id" in origins.column_names:
        columns["id"] = origins["id"]
    for name, values in store.slices(split).items():
        columns[name if name not in {*columns, "id"} else f"{name} (slice)"] = values
    with atomic_write.replacement(path) as draft:
        pyarrow.parquet.write_table(pa.table(columns), draft)


def measured(
    store: Store, split: str, task: Task, head: Head, outcomes: Ragged, alive: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The scores of the split, of its slices, and its tables; `alive` as in `rtrain.metrics.scores.measure`. Where rows
    of it are training rows too, also the scores without them; where baselines are scored on fewer rows, also those of
    these rows (`sample`); where almost all rows get one answer, which one (`collapsed`)."""
    columns = {name: values.to_pylist() for name, values in store.slices(split).items()}
    lengths = store.column(split, "length")
    targets, seen = store.targets(split), store.seen(split)
    document = scores.measure(task, head, split, outcomes, targets, lengths, columns, alive)
    if seen is not None and seen.any():
        document["unseen"] = scores.without(task, head, outcomes, targets, seen)
    described = task.describe(outcomes, targets, head)
    if collapsed := _collapsed(task, head, described.target, described.prediction):
        document["collapsed"] = collapsed
    if len(chosen := baselines.chosen_rows(store, split)) < store.rows(split):
        document["sample"] = scores.sampled(task, head, outcomes, targets, chosen)
    return document


def _collapsed(task: Task, head: Head, target: Sequence[Any], prediction: Sequence[Any]) -> list[dict[str, Any]]:
    """The one answer that almost all rows get, also those with another target: [{answer, rows: that get it, of: all,
    others: rows with another target, given: those of them that get it}], for each head of several; often none."""
    if task.output == "number":
        numbers, values = np.asarray(prediction, dtype=np.float64), np.asarray(target, dtype=np.float64)
        if len(values) < FEWEST or not numbers.std() < COLLAPSED_SPREAD * values.std():
            return []
        count = len(values)
        return [{"answer": f"{numbers.mean():.4g}", "rows": count, "of": count, "others": count, "given": count}]
    if task.output not in ("classes", "labels", "heads", "tags", "spans"):
        return []
    sides: list[tuple[str, list[Any], list[Any]]] = [("", list(target), list(prediction))]
    if task.output == "heads":
        names = [name for name, _ in head.facts["heads"]]
        sides = [
            (f"{name}=", [row[n] for row in target], [row[n] for row in prediction]) for n, name in enumerate(names)
        ]
    found = []
    for prefix, true, said in sides:
        # A head that a row lacks has no target in it.
        pairs = [(_key(a), _key(b)) for a, b in zip(true, said, strict=True) if task.output != "heads" or a]
        if not pairs:
            continue
        answer, rows = Counter(given for _, given in pairs).most_common(1)[0]
        others = [given == answer for wanted, given in pairs if wanted != answer]
        if len(others) >= FEWEST and np.mean(others) >= COLLAPSED:
            named = prefix + (", ".join(sorted(answer)) if isinstance(answer, frozenset) else str(answer))
            counts = {"rows": rows, "of": len(pairs), "others": len(others), "given": sum(others)}
            found.append({"answer": named or "nothing", **counts})
    return found


def _key(answer: Any) -> Any:
    """Answers that are alike have one: of several labels or tags, which ones there are; places are answers of their
    own."""
    return frozenset(answer) if isinstance(answer, list) else answer if isinstance(answer, str) else object()


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
