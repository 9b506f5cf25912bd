"""A student's store: the rows of a labeled store, then some of an unlabeled store, with a teacher's logits for both.

Nothing is tokenized or computed again: shards are linked, indexes and logits are selected by position.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import Ints, RaggedArray
from rtrain.data.store import columns, store

UNLABELED_PREFIX = "unlabeled-"
"""Prefix of the shards of unlabeled rows."""


def merge_stores(
    final: Path,
    labeled_store: store.Store,
    unlabeled_store: store.Store,
    positions: Ints,
    left_out: dict[str, int],
    teacher: str,
) -> store.Store:
    """Build the store `final`: all of `labeled_store`, then the training rows of `unlabeled_store` at `positions`.

    `left_out` counts the other rows, by reason. Both stores have the logits of `teacher`.
    """
    writer = store.StoreWriter(final)
    try:
        files = _link_files(writer.folder, labeled_store, unlabeled_store)
        labeled_manifest, unlabeled_manifest = labeled_store.manifest, unlabeled_store.manifest
        files["index-train.arrow"] = store.write_table(
            writer.folder / "index-train.arrow",
            _merge_index(labeled_store, unlabeled_store, positions, len(labeled_manifest.shards)),
        )
        files["rows-train.arrow"] = store.write_table(
            writer.folder / "rows-train.arrow",
            _merge_origins(labeled_store.origins("train"), unlabeled_store.origins("train").take(positions)),
        )
        _merge_teacher_logits(
            writer.folder / labeled_store.teacher_file(teacher).name, labeled_store, unlabeled_store, positions, teacher
        )
        tokens = int(unlabeled_store.column("train", "length")[positions].sum(dtype=np.int64))
        # Shards are numbered by their order here.
        shards = [*labeled_manifest.shards, *(_prefix_shard_name(name) for name in unlabeled_manifest.shards)]
        first = [name for name in files if name not in shards]
        manifest = replace(
            labeled_manifest,
            digest=final.name,
            rows={**labeled_manifest.rows, "train": labeled_manifest.rows["train"] + len(positions)},
            tokens={**labeled_manifest.tokens, "train": labeled_manifest.tokens["train"] + tokens},
            truncated=labeled_manifest.truncated + unlabeled_store.count_truncated("train", positions),
            files={name: files[name] for name in [*first, *shards]},
            sources={**labeled_manifest.sources, "unlabeled": unlabeled_manifest.sources.get("train", {})},
            unlabeled={"rows": len(positions), **left_out, "bad": unlabeled_manifest.quarantined},
        )
        return writer.commit(manifest)
    except BaseException:
        writer.abandon()
        raise


def _prefix_shard_name(name: str) -> str:
    return f"shards/{UNLABELED_PREFIX}{name.removeprefix('shards/')}"


def _link_files(folder: Path, labeled_store: store.Store, unlabeled_store: store.Store) -> dict[str, FileEntry]:
    """Link the unchanged files; returns their manifest entries by name."""
    files = {}
    for name, entry in labeled_store.manifest.files.items():
        if not name.endswith("-train.arrow"):
            _link_or_copy(labeled_store.folder / name, folder / name)
            files[name] = entry
    for path in labeled_store.folder.glob("quarantine*"):
        _link_or_copy(path, folder / path.name)
    for name in unlabeled_store.manifest.shards:
        _link_or_copy(unlabeled_store.folder / name, folder / _prefix_shard_name(name))
        files[_prefix_shard_name(name)] = unlabeled_store.manifest.files[name]
    return files


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # storage without links
        shutil.copyfile(source, target)


def _merge_index(labeled_store: store.Store, unlabeled_store: store.Store, positions: Ints, shards: int) -> pa.Table:
    index_columns = {}
    for name in ("row_id", "shard", "offset", "length"):
        labeled_values, unlabeled_values = (
            labeled_store.column("train", name),
            unlabeled_store.column("train", name)[positions],
        )
        index_columns[name] = pa.array(
            np.concatenate(
                [labeled_values, unlabeled_values + (shards if name == "shard" else 0)], dtype=labeled_values.dtype
            )
        )
    targets: list[RaggedArray] = [labeled_store.targets("train"), unlabeled_store.targets("train", positions)]
    return pa.table({**index_columns, "targets": store.make_list_column(columns.concat_ragged(targets))})


def _merge_origins(labeled_origins: pa.Table, unlabeled_origins: pa.Table) -> pa.Table:
    """Both tables, with empty slices for unlabeled rows."""
    for name in labeled_origins.column_names[unlabeled_origins.num_columns :]:
        unlabeled_origins = unlabeled_origins.append_column(
            name, pa.array([""] * unlabeled_origins.num_rows, labeled_origins.schema.field(name).type)
        )
    return pa.concat_tables([labeled_origins, unlabeled_origins]).unify_dictionaries()


def _merge_teacher_logits(
    path: Path, labeled_store: store.Store, unlabeled_store: store.Store, positions: Ints, teacher: str
) -> None:
    labeled_logits, unlabeled_logits = (
        labeled_store.open_teacher_logits(teacher),
        unlabeled_store.teacher_logits(teacher, positions),
    )
    merged_logits = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=(len(labeled_logits) + len(unlabeled_logits), labeled_logits.shape[1])
    )
    merged_logits[: len(labeled_logits)], merged_logits[len(labeled_logits) :] = labeled_logits, unlabeled_logits
    merged_logits.flush()
