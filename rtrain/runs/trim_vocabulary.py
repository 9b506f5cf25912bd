"""A run on a smaller vocabulary: its model is cut to the pieces of its training rows, and its rows are read by that.

<root>/.vocabularies/<address>/     the trimmed model, a Transformers folder; the address is made from the whole model
                                    and the rows

The rows are first read by the whole tokenizer, into a token store that a teacher's run has made already, then by the
trimmed one.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.config import Recipe
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data import row_reader, unlabeled
from rtrain.data.store import builder
from rtrain.data.store.store import SPLITS, Store
from rtrain.models import vocab_trimming
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer

FOLDER = ".vocabularies"
EVENT = "vocabulary"
SETTING = "compress.unlabelled"
BLOCK = 8192
"""Rows of a store that are looked at a time."""


def trimmed(recipe: Recipe, source: row_reader.Source, weights: Path, root: Path) -> Path:
    """The folder of the model to train: `weights`, or its trimmed copy under `root` where `compress.vocabulary` says
    so. Needs Ray only where the rows were not read by the whole tokenizer before.

    Where every piece is needed, it is `weights` too.
    """
    if recipe.compress.vocabulary == "keep":
        return weights
    settings, more = recipe.compress, further(recipe)
    most = [] if settings.vocabulary_most is None else [settings.vocabulary_most]
    made_of = builder.digest(recipe, source, weights), settings.vocabulary_pieces, more and more.digest(), *most
    final = root / FOLDER / vocab_trimming.address(weights, *made_of)
    if final.is_dir():
        return final
    labelled, taught = unlabeled.parted(source)
    store, _ = builder.ensure(recipe, labelled, weights, root)
    counts = counted(store) + counted_by(taught, recipe, weights)
    if more is not None:
        counts += counted_by(more, recipe, weights)
    ids = chosen(recipe, weights, counts)
    return weights if len(ids) == vocab_trimming.size(weights) else vocab_trimming.trim(weights, ids, final)


def chosen(recipe: Recipe, folder: Path, counts: Mapping[int, int]) -> list[int]:
    """The ids of a model's vocabulary that stay by the settings `compress`; `counts`: how often rows use each."""
    settings = recipe.compress
    numbers = vocab_trimming.by_frequency(counts)
    return vocab_trimming.kept(folder, numbers, settings.vocabulary_pieces, settings.vocabulary_most)


def counted(store: Store, split: str = "train") -> Counter[int]:
    """How often each id occurs in the rows of a split."""
    found: Counter[int] = Counter()
    for first in range(0, store.rows(split), BLOCK):
        positions = np.arange(first, min(first + BLOCK, store.rows(split)), dtype=np.int64)
        ids, times = np.unique(store.read(split, positions).ids, return_counts=True)
        found.update(dict(zip(ids.tolist(), times.tolist(), strict=True)))
    return found


def further(recipe: Recipe) -> row_reader.Source | None:
    """The files of `compress.unlabelled`. Raises `ConfigError` with every problem found."""
    if recipe.compress.unlabelled is None:
        return None
    return unlabeled.inspect(recipe.data, recipe.compress.unlabelled, SETTING)


def counted_by(source: row_reader.Source, recipe: Recipe, weights: Path) -> Counter[int]:
    """How often each id occurs in the texts of rows without labels, read to their ends. Rows without a text are passed
    over."""
    tokenizer = load_tokenizer(weights, 1, reads_special=base.get(recipe.task).reads_special)
    tokenizer.no_truncation()
    data = unlabeled.without_labels(recipe.data, None)
    rows = (row for piece in source.pieces for row in row_reader.read(piece, data) if row.reason is None)
    return vocab_trimming.counted_by(tokenizer, (text for row in rows for text in (row.text, row.pair) if text))


def told(
    run: Run, recipe: Recipe, source: row_reader.Source, whole: Path, weights: Path, store: Store, root: Path
) -> dict[str, Any]:
    """What a run's log says of its vocabulary: `pieces` of `of`, and by split how many rows are read otherwise
    (`changed`); and where its model is. The rows are counted once for a run."""
    if known := lineage(run):
        return {**known[EVENT], "model": str(weights)}
    made = vocab_trimming.read(weights)
    assert made is not None  # by `trimmed`
    before, _ = builder.ensure(recipe, unlabeled.parted(source)[0], whole, root)
    ids = vocab_trimming.old_ids(made.kept)
    counted = {split: changed(before, store, split, ids) for split in SPLITS if store.rows(split)}
    most = {} if recipe.compress.vocabulary_most is None else {"most": recipe.compress.vocabulary_most}
    return {"pieces": len(ids), "of": made.of, "changed": counted, **most, "model": str(weights)}


def changed(before: Store, after: Store, split: str, ids: Ints) -> int:
    """How many rows of a split have other pieces in the store `after`, whose ids stand for `ids` of the other's.

    A block of packed text that has no counterpart is one of them.
    """
    known, positions = (store.column(split, "row_id")[: store.labelled(split)] for store in (before, after))
    _, old, new = np.intersect1d(known, positions, assume_unique=True, return_indices=True)
    count = len(positions) - len(new)
    for first in range(0, len(new), BLOCK):
        one, other = before.read(split, old[first : first + BLOCK]), after.read(split, new[first : first + BLOCK])
        ends = [np.concatenate([[0], np.cumsum(tokens.lengths_of_rows)]) for tokens in (one, other)]
        pairs = zip(np.split(one.ids, ends[0][1:-1]), np.split(ids[other.ids], ends[1][1:-1]), strict=True)
        count += sum(not np.array_equal(left, right) for left, right in pairs)
    return count


def lineage(run: Run) -> dict[str, Any]:
    """What an artefact says of its vocabulary: nothing where it is whole."""
    event = run.first(EVENT)
    names = ("pieces", "of", "changed", "most")
    return {} if event is None else {EVENT: {name: event[name] for name in names if name in event}}
