"""Trim a model's vocabulary to the tokens of the training rows, before a run.

<root>/.vocabularies/<address>/     the trimmed model, a Transformers folder; the address is a digest of the full model
                                    and the rows

The rows are tokenized by the full tokenizer first (often into a store that a teacher's run has built), then by the
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

VOCABULARIES_FOLDER = ".vocabularies"
VOCABULARY_EVENT = "vocabulary"
UNLABELLED_SETTING = "compress.unlabeled_rows_path"
BLOCK_ROWS = 8192
"""Rows of a store that are read at a time."""


def trim_model(recipe: Recipe, source: row_reader.DataSource, weights: Path, root: Path) -> Path:
    """Return the folder of the model to train: `weights`, or its trimmed copy under `root` by `compress.vocabulary`.

    It is `weights` if every token is needed. Ray is needed only if the rows were not tokenized before.
    """
    if recipe.compress.vocabulary == "keep":
        return weights
    settings, extra_source = recipe.compress, open_unlabeled(recipe)
    max_size = [] if settings.max_vocab_size is None else [settings.max_vocab_size]
    address_parts = (
        builder.compute_digest(recipe, source, weights),
        settings.min_vocab_size,
        extra_source and extra_source.digest(),
        *max_size,
    )
    trimmed_folder = root / VOCABULARIES_FOLDER / vocab_trimming.cache_key(weights, *address_parts)
    if trimmed_folder.is_dir():
        return trimmed_folder
    labeled_source, unlabeled_source = unlabeled.split_source(source)
    store, _ = builder.build_or_open(recipe, labeled_source, weights, root)
    counts = count_ids(store) + count_text_ids(unlabeled_source, recipe, weights)
    if extra_source is not None:
        counts += count_text_ids(extra_source, recipe, weights)
    ids = choose_ids(recipe, weights, counts)
    return (
        weights
        if len(ids) == vocab_trimming.vocabulary_size(weights)
        else vocab_trimming.trim(weights, ids, trimmed_folder)
    )


def choose_ids(recipe: Recipe, folder: Path, counts: Mapping[int, int]) -> list[int]:
    """Return the ids of a model's vocabulary to keep by the `compress` settings. `counts`: frequency of each id."""
    settings = recipe.compress
    ids_by_frequency = vocab_trimming.sort_by_frequency(counts)
    return vocab_trimming.select_folder_ids(folder, ids_by_frequency, settings.min_vocab_size, settings.max_vocab_size)


def count_ids(store: Store, split: str = "train") -> Counter[int]:
    """Count each id in the rows of a split."""
    counts: Counter[int] = Counter()
    for block_start in range(0, store.num_rows(split), BLOCK_ROWS):
        positions = np.arange(block_start, min(block_start + BLOCK_ROWS, store.num_rows(split)), dtype=np.int64)
        ids, times = np.unique(store.read_tokens(split, positions).ids, return_counts=True)
        counts.update(dict(zip(ids.tolist(), times.tolist(), strict=True)))
    return counts


def open_unlabeled(recipe: Recipe) -> row_reader.DataSource | None:
    """Return the files of `compress.unlabeled_rows_path`. Raises `ConfigError` with all problems."""
    if recipe.compress.unlabeled_rows_path is None:
        return None
    return unlabeled.inspect_unlabeled(recipe.data, recipe.compress.unlabeled_rows_path, UNLABELLED_SETTING)


def count_text_ids(source: row_reader.DataSource, recipe: Recipe, weights: Path) -> Counter[int]:
    """Count each id in the full texts of unlabeled rows. Rows without a text are skipped."""
    tokenizer = load_tokenizer(weights, 1, parses_special_tokens=base.get_task(recipe.task).parses_special_tokens)
    tokenizer.no_truncation()
    data = unlabeled.without_labels(recipe.data, None)
    rows = (row for piece in source.files for row in row_reader.read_rows(piece, data) if row.reason is None)
    return vocab_trimming.count_tokens(tokenizer, (text for row in rows for text in (row.text, row.pair) if text))


def event_fields(recipe: Recipe, full_store: Store, store: Store, weights: Path) -> dict[str, Any]:
    """Return the fields of the `vocabulary` event: sizes, rows with changed tokens by split (`count_changed_rows`), and
    the model's folder. `full_store`: the labeled rows with all tokens."""
    trimmed_vocabulary = vocab_trimming.read_trimmed(weights)
    assert trimmed_vocabulary is not None  # by `trim_model`
    ids = vocab_trimming.original_ids(trimmed_vocabulary.kept_ids)
    changed_rows = {
        split: count_changed_rows(full_store, store, split, ids) for split in SPLITS if store.num_rows(split)
    }
    max_size = {} if recipe.compress.max_vocab_size is None else {"max_size": recipe.compress.max_vocab_size}
    sizes = {"size": len(ids), "original_size": trimmed_vocabulary.original_size}
    return {**sizes, "changed_rows": changed_rows, **max_size, "model": str(weights)}


def count_changed_rows(old_store: Store, new_store: Store, split: str, ids: Ints) -> int:
    """Count the rows of a split whose tokens differ in `new_store`. `ids` maps its ids to those of `old_store`.

    A packed block without a counterpart counts too.
    """
    old_row_ids, new_row_ids = (
        store.column(split, "row_id")[: store.num_labeled(split)] for store in (old_store, new_store)
    )
    _, old_positions, new_positions = np.intersect1d(old_row_ids, new_row_ids, assume_unique=True, return_indices=True)
    count = len(new_row_ids) - len(new_positions)
    for block_start in range(0, len(new_positions), BLOCK_ROWS):
        old_tokens = old_store.read_tokens(split, old_positions[block_start : block_start + BLOCK_ROWS])
        new_tokens = new_store.read_tokens(split, new_positions[block_start : block_start + BLOCK_ROWS])
        ends = [np.concatenate([[0], np.cumsum(tokens.row_lengths)]) for tokens in (old_tokens, new_tokens)]
        pairs = zip(np.split(old_tokens.ids, ends[0][1:-1]), np.split(ids[new_tokens.ids], ends[1][1:-1]), strict=True)
        count += sum(not np.array_equal(left, right) for left, right in pairs)
    return count


def vocabulary_lineage(run: Run) -> dict[str, Any]:
    """Return the vocabulary part of an artifact's lineage; empty if the vocabulary is not trimmed."""
    event = run.first_event(VOCABULARY_EVENT)
    names = ("size", "original_size", "changed_rows", "max_size")
    return {} if event is None else {VOCABULARY_EVENT: {name: event[name] for name in names if name in event}}
