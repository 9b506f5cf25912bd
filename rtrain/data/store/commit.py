"""The commit of a token store: the shards that data tasks have written -> labels, row ids, an index of each split.

All rows of a store are held at once here, as columns and without their tokens, which stay in the shards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain.config import Recipe
from rtrain.core.errors import UserError
from rtrain.core.manifest import Entry
from rtrain.core.ragged import Head, Ragged
from rtrain.data import checks, contamination, quarantine, row_reader
from rtrain.data.sources import digests
from rtrain.data.store import columns, store
from rtrain.data.store.shards import BAD, LEFT_OUT, SLICE, SPLIT_CODES, Job, tokenizer_of
from rtrain.tasks import base
from rtrain.tasks.encode import reading_of


@dataclass(frozen=True, eq=False)
class _Rows:
    """Every row of the shards, in the order of the source. The arrays have one value per row."""

    shards: list[pa.Table]
    """The shards' tables without their tokens."""
    table: pa.Table
    """All of `shards`, one after another."""
    shard: npt.NDArray[np.uint32]
    """Number of the row's shard."""
    offset: npt.NDArray[np.uint32]
    """Place of the row in its shard."""
    pieces: npt.NDArray[np.int64]
    """Number of the source's piece that each shard (not row) was made from."""
    split: npt.NDArray[np.uint8]
    """A code of `rtrain.data.store.shards`. `_targets` changes it to `BAD` for labels that training lacks."""

    @classmethod
    def read(cls, folder: Path, names: list[str]) -> "_Rows | None":
        """The rows of the named shards of a store's folder; None if there are none."""
        shards = [
            store.map_table(folder / "shards" / name).drop_columns(["ids", "windows", "text", "pair"]) for name in names
        ]
        table = pa.concat_tables(shards) if shards else None
        if table is None or table.num_rows == 0:
            return None
        sizes = [part.num_rows for part in shards]
        return cls(
            shards,
            table,
            np.repeat(np.arange(len(shards), dtype=np.uint32), sizes),
            np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes]),
            np.array([int(name.split("-")[0]) for name in names]),
            table["split"].to_numpy().copy(),
        )

    @cached_property
    def copy(self) -> npt.NDArray[np.bool_]:
        """Whether augmentation made the row."""
        return self.table["copy"].to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    @cached_property
    def lines(self) -> npt.NDArray[np.int64]:
        return self.table["line"].to_numpy()  # type: ignore[no-any-return]

    @property
    def given(self) -> int:
        """Rows that the user gave: all but the copies."""
        return len(self.split) - int(self.copy.sum())

    def counts(self) -> dict[str, int]:
        """Rows of each split."""
        return {name: int((self.split == code).sum()) for name, code in SPLIT_CODES.items()}


def commit(job: Job, source: row_reader.Source, writer: store.Writer, written: list[dict[str, Any]]) -> store.Store:
    """Number the labels, give each row its id, write the index of each split, and the manifest last.

    `written` is what `shards.write_piece` said of each shard, in source order. Raises `UserError` where too many rows
    are bad, a split lacks rows, or a file was changed while it was read.
    """
    checks.changed_files(source, written, writer.final.parent.parent)
    recipe, names = job.recipe, [row["shard"] for row in written]
    rows = _Rows.read(writer.folder, names)
    if rows is None:
        raise UserError(
            f"data.path: {recipe.data.path} has a header and no rows; add rows, one text and label each", code="no_rows"
        )
    where = quarantine.locator(source, names, rows.shard, rows.lines)
    is_bad = rows.split == BAD
    bad = quarantine.Bad(np.flatnonzero(is_bad), columns.chosen(rows.table["reason"], is_bad).combine_chunks())
    # A file of unreadable rows has no labels either. Bad rows are refused first, so that the message names the cause.
    quarantine.refuse_if_too_bad(recipe, bad, rows.given, where)
    checks.empty_splits(recipe, rows.counts())

    task = base.get(recipe.task)
    # Copies are not counted: some rows have more copies than others, and labels would seem more frequent than they are.
    trained_on = (rows.split == SPLIT_CODES["train"]) & ~rows.copy
    labels = columns.Counts(columns.chosen(rows.table["label"], trained_on))
    checks.unseparated_labels(recipe, labels)
    head = job.head or _head(job, task, labels)
    if task.output == "labels":
        checks.too_many_targets(len(rows.split), len(head.labels))
    before = rows.split.copy()
    targets = _targets(task, head, rows)
    unseen = np.flatnonzero(rows.split != before)
    from_own_file = np.array([source.pieces[number].role != "train" for number in rows.pieces])[rows.shard]
    bad = bad.plus(quarantine.unseen(unseen, from_own_file, rows.table["label"], where, head.labels))
    if recipe.data.split is not None:  # nothing is wrong with rows of rare labels that a hash has kept from training
        quarantine.refuse_if_too_bad(recipe, bad, rows.given, where)
    quarantine.write(writer.folder, bad, where)

    counts = rows.counts()
    checks.empty_splits(recipe, counts)  # again, since rows with an unknown label were set aside
    if recipe.data.outside is not None:
        labels = columns.chosen(rows.table["label"], rows.split == SPLIT_CODES["valid"]).to_pylist()
        checks.without_outside(recipe, counts["valid"], labels.count(recipe.data.outside))
    lengths = rows.table["length"].to_numpy()
    manifest = store.Manifest(
        schema_version=store.SCHEMA_VERSION,
        digest=writer.final.name,
        rows=counts,
        labels=head.labels,
        tokens={name: int(lengths[rows.split == code].sum()) for name, code in SPLIT_CODES.items()},
        truncated=int(rows.table["truncated"].to_numpy(zero_copy_only=False)[rows.split < LEFT_OUT].sum()),
        quarantined=len(bad.rows),
        files=_write_indexes(writer.folder, job, source, rows, targets)
        | {f"shards/{row['shard']}": row["entry"] for row in written},
        sources=origin(recipe, source, job.model),
        facts=dict(head.facts),
        copies=int(rows.copy.sum()),
        left_out=int((rows.split == LEFT_OUT).sum()),
    )
    return writer.commit(manifest)


def _targets(task: base.Task, head: Head, rows: _Rows) -> dict[str, list[Ragged]]:
    """The targets of each split's rows, shard by shard. Rows with a label that the head lacks become bad in `split`."""
    found: dict[str, list[Ragged]] = {name: [] for name in SPLIT_CODES}
    ends = np.cumsum([shard.num_rows for shard in rows.shards])
    for shard, codes in zip(rows.shards, np.split(rows.split, ends[:-1]), strict=True):  # the parts are views
        sound = codes < LEFT_OUT
        marks = columns.lists(shard["marks"]).take(np.flatnonzero(sound))
        targets = task.targets(columns.chosen(shard["label"], sound).to_pylist(), marks, head)
        codes[np.flatnonzero(sound)[targets.unknown]] = BAD
        for name, code in SPLIT_CODES.items():
            found[name].append(targets.values.take(np.flatnonzero(codes[sound] == code)))
    return found


def _head(job: Job, task: base.Task, counts: Mapping[str, int]) -> Head:
    """The task's head for labels that occur so often, and how texts are read in windows if they are.

    The facts travel with the model, since a server must cut texts as the training did.
    """
    head = task.head(counts, tokenizer_of(job.recipe, job.model))
    if job.recipe.data.outside is not None:
        head = Head(head.labels, {**head.facts, "outside": job.recipe.data.outside})
    reading = reading_of(task, job.recipe.data)
    if reading.max_windows == 1:
        return head
    windows = {"stride": reading.stride, "max_windows": reading.max_windows, "pooling": job.recipe.data.pooling}
    return Head(head.labels, {**head.facts, **windows})


def _write_indexes(
    folder: Path, job: Job, source: row_reader.Source, rows: _Rows, targets: dict[str, list[Ragged]]
) -> dict[str, Entry]:
    """Write the index and the origins of each split's rows; returns their manifest entries by file name.

    `targets` is emptied on the way: those of one split are let go before the next is joined.
    """
    row_ids = columns.identify(rows.table["content"].to_numpy())
    lengths = rows.table["length"].to_numpy()
    names = [source.pieces[number].uri.removeprefix("file://") for number in rows.pieces]
    index = {"row_id": row_ids, "shard": rows.shard, "offset": rows.offset, "length": lengths}
    files: dict[str, Entry] = {}

    def write(name: str, columns_of_file: Mapping[str, Any]) -> None:
        files[name] = store.write_table(folder / name, pa.table(dict(columns_of_file)))

    for split, code in SPLIT_CODES.items():
        mask = rows.split == code
        chosen = np.flatnonzero(mask)
        listed = {name: pa.array(values[chosen]) for name, values in index.items()}
        write(f"index-{split}.arrow", {**listed, "targets": store.lists(columns.joined(targets.pop(split)))})
        origins = {"source": columns.named(names, rows.shard[chosen]), "line": pa.array(rows.lines[chosen])}
        if "id" in rows.table.column_names:
            origins["id"] = columns.chosen(rows.table["id"], mask)
        slices = {
            f"{name}{store.SLICED}" if name in store.ORIGINS else name: columns.chosen(rows.table[SLICE + name], mask)
            for name in job.recipe.data.slices
        }
        write(f"rows-{split}.arrow", {**origins, **slices})
        if split != "train" and "key" in rows.table.column_names:
            write(f"seen-{split}.arrow", {"seen": pa.array(_seen(rows, mask))})
    return files


def _seen(rows: _Rows, mask: columns.Mask) -> columns.Mask:
    """Which rows of a split are training rows too."""
    column, start = rows.table["key"], 0

    def trained_on() -> Iterator[contamination.Keys]:
        nonlocal start
        for chunk in column.chunks:
            end = start + len(chunk)
            yield chunk.to_numpy()[rows.split[start:end] == SPLIT_CODES["train"]]
            start = end

    return contamination.seen(trained_on(), columns.chosen(column, mask).to_numpy())


def origin(recipe: Recipe, source: row_reader.Source, model: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file that a store is made from, by role and name.

    Two stores of different addresses show by it which file was changed.
    """
    # The recipe's name for the model, not its folder, which differs between machines.
    tokenizer = f"tokenizer.json of {recipe.model.name}"
    files = {"tokenizer": {tokenizer: digests.tokenizer_digest(model)}}
    for piece, sha256 in zip(source.pieces, source.sha256s, strict=True):
        files.setdefault(piece.role, {})[piece.uri.removeprefix("file://")] = sha256
    return files
