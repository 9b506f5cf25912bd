"""A fold's store as a view of the store of another fold (`data.folds`): the same shards, linked, with another split.

Nothing is read or tokenized again. A store with folds keeps the texts of all rows, since each is a test row once, and
the hash that decides a row's split. Augmented copies and blocks of packed text belong to the training rows of one fold:
these stores are built for each fold.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rtrain.config import Recipe
from rtrain.data import row_reader
from rtrain.data.splits import RowSurvey, Splits
from rtrain.data.store import commit, shards, store
from rtrain.data.unlabeled import link_or_copy


def build_view(
    recipe: Recipe, source: row_reader.DataSource, model: Path, final: Path, compute_address: Callable[[Recipe], str]
) -> store.Store | None:
    """Build the store `final` from the store of another fold beside it; None without one.

    `compute_address` gives the address of the store of a recipe.
    """
    fold_stores = _iter_fold_stores(recipe, final.parent, compute_address)
    if not shards.supports_fold_views(recipe) or (fold_store := next(fold_stores, None)) is None:
        return None
    writer = store.StoreWriter(final)
    try:
        # The commit surveys the rows of the shards, for strata.
        splits = Splits.from_config(recipe.data, source, RowSurvey.merge([]))
        job = shards.TokenizeJob(recipe, model, writer.folder, splits)
        return commit.commit_store(job, source, writer, _link_shards(fold_store, writer.folder))
    except BaseException:
        writer.abandon()
        raise


def _iter_fold_stores(recipe: Recipe, folder: Path, compute_address: Callable[[Recipe], str]) -> Iterator[store.Store]:
    """The finished stores of the other folds of the same rows and settings."""
    for fold in range(recipe.data.folds or 0):
        other_data = recipe.data.model_copy(update={"fold": fold})
        other_folder = folder / compute_address(recipe.model_copy(update={"data": other_data}))
        if fold != recipe.data.fold and (other_folder / "manifest.json").is_file():
            other_store = store.Store(other_folder)
            other_store.check(size_only=True)
            yield other_store


def _link_shards(fold_store: store.Store, folder: Path) -> list[dict[str, Any]]:
    """Link the shards into the draft of a store; returns the entries of `shards.write_shards`."""
    counts = asdict(row_reader.ReadCounts())
    entries: list[dict[str, Any]] = [
        {"number": 0, "shard": "", "entry": None, **counts, **fold_store.manifest.selection}
    ]
    for path in fold_store.manifest.shards:
        link_or_copy(fold_store.folder / path, folder / path)
        name = path.removeprefix("shards/")
        number = int(name.split("-")[0])
        entries.append({"number": number, "shard": name, "entry": fold_store.manifest.files[path], **counts})
    return entries
