"""A student's store: the rows of a store with labels, then some of a store without, with a teacher's answers to both.

Nothing is tokenised or answered again: shards are linked, indexes and answers are taken by position.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from rtrain.core.manifest import Entry
from rtrain.core.ragged import Ints, Ragged
from rtrain.data.store import columns, store

PREFIX = "unlabelled-"
"""Begins the names of the shards of rows without labels."""


def write(
    final: Path, labelled: store.Store, rows: store.Store, chosen: Ints, left_out: dict[str, int], teacher: str
) -> store.Store:
    """The store `final`: all of `labelled`, then those at the positions `chosen` of the training rows of `rows`.

    `left_out` counts the others, by reason. Both stores have the answers of `teacher`.
    """
    writer = store.Writer(final)
    try:
        files = _linked(writer.folder, labelled, rows)
        known, further = labelled.manifest, rows.manifest
        files["index-train.arrow"] = store.write_table(
            writer.folder / "index-train.arrow", _index(labelled, rows, chosen, len(known.shards))
        )
        files["rows-train.arrow"] = store.write_table(
            writer.folder / "rows-train.arrow", _origins(labelled.origins("train"), rows.origins("train").take(chosen))
        )
        _answers(writer.folder / labelled.teacher_file(teacher).name, labelled, rows, chosen, teacher)
        tokens = int(rows.column("train", "length")[chosen].sum(dtype=np.int64))
        # Shards are numbered by their order here.
        shards = [*known.shards, *(_renamed(name) for name in further.shards)]
        first = [name for name in files if name not in shards]
        manifest = replace(
            known,
            digest=final.name,
            rows={**known.rows, "train": known.rows["train"] + len(chosen)},
            tokens={**known.tokens, "train": known.tokens["train"] + tokens},
            truncated=known.truncated + rows.truncated("train", chosen),
            files={name: files[name] for name in [*first, *shards]},
            sources={**known.sources, "unlabelled": further.sources.get("train", {})},
            unlabelled={"rows": len(chosen), **left_out, "bad": further.quarantined},
        )
        return writer.commit(manifest)
    except BaseException:
        writer.abandon()
        raise


def _renamed(name: str) -> str:
    return f"shards/{PREFIX}{name.removeprefix('shards/')}"


def _linked(folder: Path, labelled: store.Store, rows: store.Store) -> dict[str, Entry]:
    """Link the files that stay as they are; returns their manifest entries by name."""
    files = {}
    for name, entry in labelled.manifest.files.items():
        if not name.endswith("-train.arrow"):
            _link(labelled.folder / name, folder / name)
            files[name] = entry
    for path in labelled.folder.glob("quarantine*"):
        _link(path, folder / path.name)
    for name in rows.manifest.shards:
        _link(rows.folder / name, folder / _renamed(name))
        files[_renamed(name)] = rows.manifest.files[name]
    return files


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # storage without links
        shutil.copyfile(source, target)


def _index(labelled: store.Store, rows: store.Store, chosen: Ints, shards: int) -> pa.Table:
    found = {}
    for name in ("row_id", "shard", "offset", "length"):
        before, after = labelled.column("train", name), rows.column("train", name)[chosen]
        found[name] = pa.array(np.concatenate([before, after + (shards if name == "shard" else 0)], dtype=before.dtype))
    targets: list[Ragged] = [labelled.targets("train"), rows.targets("train", chosen)]
    return pa.table({**found, "targets": store.lists(columns.joined(targets))})


def _origins(labelled: pa.Table, rows: pa.Table) -> pa.Table:
    """Both tables, with empty slices of rows without labels."""
    for name in labelled.column_names[rows.num_columns :]:
        rows = rows.append_column(name, pa.array([""] * rows.num_rows, labelled.schema.field(name).type))
    return pa.concat_tables([labelled, rows]).unify_dictionaries()


def _answers(path: Path, labelled: store.Store, rows: store.Store, chosen: Ints, teacher: str) -> None:
    known, further = labelled.teacher(teacher), rows.taught(teacher, chosen)
    found = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=(len(known) + len(further), known.shape[1])
    )
    found[: len(known)], found[len(known) :] = known, further
    found.flush()
