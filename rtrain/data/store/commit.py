"""The commit of a token store: the shards that data tasks have written -> labels, row ids, an index of each split.

All rows of a store are held in memory here, as columns without their tokens.
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
from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import Head, RaggedArray
from rtrain.data import checks, contamination, quarantine, row_reader
from rtrain.data.sources import digests
from rtrain.data.store import columns, store
from rtrain.data.store.shards import (
    OUT_OF_SCOPE_CODE,
    QUARANTINED_CODE,
    SLICE_PREFIX,
    SPLIT_CODES,
    TokenizeJob,
    load_task_tokenizer,
)
from rtrain.tasks import base
from rtrain.tasks.encode import resolve_window_spec


@dataclass(frozen=True, eq=False)
class _ShardRows:
    """Every row of the shards, in the order of the source. The arrays have one value per row."""

    shards: list[pa.Table]
    """The shards' tables without their tokens."""
    table: pa.Table
    """All of `shards`, one after another."""
    shard: npt.NDArray[np.uint32]
    """Number of the row's shard."""
    offset: npt.NDArray[np.uint32]
    """Position of the row in its shard."""
    file_numbers: npt.NDArray[np.int64]
    """Number of the source file of each shard (not row)."""
    split: npt.NDArray[np.uint8]
    """A code of `rtrain.data.store.shards`. `_build_targets` changes it to `QUARANTINED_CODE` for labels that training
    lacks."""

    @classmethod
    def from_shards(cls, folder: Path, names: list[str]) -> "_ShardRows | None":
        """Read the rows of the named shards in a store's folder; None if the shards are empty."""
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
    def is_copy(self) -> npt.NDArray[np.bool_]:
        """Whether augmentation made the row."""
        return self.table["copy"].to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    @cached_property
    def lines(self) -> npt.NDArray[np.int64]:
        return self.table["line"].to_numpy()  # type: ignore[no-any-return]

    @property
    def num_source_rows(self) -> int:
        """Rows of the source: all except augmented copies."""
        return len(self.split) - int(self.is_copy.sum())

    def count_by_split(self) -> dict[str, int]:
        """Rows of each split."""
        return {name: int((self.split == code).sum()) for name, code in SPLIT_CODES.items()}


def commit_store(
    job: TokenizeJob, source: row_reader.DataSource, writer: store.StoreWriter, shard_rows: list[dict[str, Any]]
) -> store.Store:
    """Number the labels, give each row its id, write the index of each split, and the manifest last.

    `shard_rows` are the entries of `shards.write_shards`, in source order. Raises `UserError` if too many rows are bad,
    a split lacks rows, or a file was changed while it was read.
    """
    checks.check_files_unchanged(source, shard_rows, writer.final.parent.parent)
    recipe, names = job.recipe, [row["shard"] for row in shard_rows]
    rows = _ShardRows.from_shards(writer.folder, names)
    if rows is None:
        raise UserError(
            f"data.path: {recipe.data.path} has a header and no rows; add rows, one text and label each", code="no_rows"
        )
    locate_row = quarantine.make_row_locator(source, names, rows.shard, rows.lines)
    is_bad = rows.split == QUARANTINED_CODE
    bad = quarantine.QuarantinedRows(
        np.flatnonzero(is_bad), columns.filter_column(rows.table["reason"], is_bad).combine_chunks()
    )
    # A file of unreadable rows has no labels either. Bad rows are checked first, so the message names the cause.
    quarantine.check_bad_row_share(recipe, bad, rows.num_source_rows, locate_row)
    checks.check_splits_not_empty(recipe, rows.count_by_split())

    task = base.get_task(recipe.task)
    # Copies are not counted: some rows have more copies than others, which would bias the label counts.
    in_training = (rows.split == SPLIT_CODES["train"]) & ~rows.is_copy
    labels = columns.LabelCounts(columns.filter_column(rows.table["label"], in_training))
    checks.check_separator(recipe, labels)
    head = job.head or _build_head(job, task, labels)
    if task.output == "labels":
        checks.check_target_size(len(rows.split), len(head.labels))
    original_split = rows.split.copy()
    targets = _build_targets(task, head, rows)
    unknown_label_rows = np.flatnonzero(rows.split != original_split)
    from_eval_file = np.array([source.files[number].role != "train" for number in rows.file_numbers])[rows.shard]
    bad = bad.merge(
        quarantine.quarantine_unknown_labels(
            unknown_label_rows, from_eval_file, rows.table["label"], locate_row, head.labels
        )
    )
    if recipe.data.split_column is not None:  # with a hash split, rows of rare labels outside training are not an error
        quarantine.check_bad_row_share(recipe, bad, rows.num_source_rows, locate_row)
    quarantine.write_quarantine(writer.folder, bad, locate_row)

    counts = rows.count_by_split()
    checks.check_splits_not_empty(recipe, counts)  # again, since rows with an unknown label were quarantined
    if recipe.data.out_of_scope_label is not None:
        labels = columns.filter_column(rows.table["label"], rows.split == SPLIT_CODES["valid"]).to_pylist()
        checks.check_out_of_scope_rows(recipe, counts["valid"], labels.count(recipe.data.out_of_scope_label))
    lengths = rows.table["length"].to_numpy()
    manifest = store.StoreManifest(
        schema_version=store.SCHEMA_VERSION,
        digest=writer.final.name,
        rows=counts,
        labels=head.labels,
        tokens={name: int(lengths[rows.split == code].sum()) for name, code in SPLIT_CODES.items()},
        truncated=int(rows.table["truncated"].to_numpy(zero_copy_only=False)[rows.split < OUT_OF_SCOPE_CODE].sum()),
        quarantined=len(bad.rows),
        files=_write_indexes(writer.folder, job, source, rows, targets)
        | {f"shards/{row['shard']}": row["entry"] for row in shard_rows},
        sources=hash_sources(recipe, source, job.model),
        facts=dict(head.facts),
        copies=int(rows.is_copy.sum()),
        out_of_scope_rows=int((rows.split == OUT_OF_SCOPE_CODE).sum()),
    )
    return writer.commit(manifest)


def _build_targets(task: base.Task, head: Head, rows: _ShardRows) -> dict[str, list[RaggedArray]]:
    """The targets of each split's rows, shard by shard. Rows with a label that the head lacks become bad in
    `rows.split`."""
    targets_by_split: dict[str, list[RaggedArray]] = {name: [] for name in SPLIT_CODES}
    ends = np.cumsum([shard.num_rows for shard in rows.shards])
    for shard, codes in zip(rows.shards, np.split(rows.split, ends[:-1]), strict=True):  # the parts are views
        is_usable = codes < OUT_OF_SCOPE_CODE
        target_positions = columns.to_ragged(shard["target_positions"]).take(np.flatnonzero(is_usable))
        targets = task.build_targets(
            columns.filter_column(shard["label"], is_usable).to_pylist(), target_positions, head
        )
        codes[np.flatnonzero(is_usable)[targets.has_unknown_label]] = QUARANTINED_CODE
        for name, code in SPLIT_CODES.items():
            targets_by_split[name].append(targets.values.take(np.flatnonzero(codes[is_usable] == code)))
    return targets_by_split


def _build_head(job: TokenizeJob, task: base.Task, counts: Mapping[str, int]) -> Head:
    """The task's head for these label counts, with the window settings.

    The facts are saved with the model, since a server must cut texts as the training did.
    """
    head = task.build_head(counts, load_task_tokenizer(job.recipe, job.model))
    if job.recipe.data.out_of_scope_label is not None:
        head = Head(head.labels, {**head.facts, "out_of_scope_label": job.recipe.data.out_of_scope_label})
    window_spec = resolve_window_spec(task, job.recipe.data)
    if window_spec.max_windows == 1:
        return head
    windows = {"stride": window_spec.stride, "max_windows": window_spec.max_windows, "pooling": job.recipe.data.pooling}
    return Head(head.labels, {**head.facts, **windows})


def _write_indexes(
    folder: Path,
    job: TokenizeJob,
    source: row_reader.DataSource,
    rows: _ShardRows,
    targets: dict[str, list[RaggedArray]],
) -> dict[str, FileEntry]:
    """Write the index and the origins of each split's rows; returns their manifest entries by file name.

    `targets` is emptied: the arrays of one split are freed before the next is concatenated.
    """
    row_ids = columns.assign_row_ids(rows.table["content"].to_numpy())
    lengths = rows.table["length"].to_numpy()
    names = [source.files[number].uri.removeprefix("file://") for number in rows.file_numbers]
    index = {"row_id": row_ids, "shard": rows.shard, "offset": rows.offset, "length": lengths}
    files: dict[str, FileEntry] = {}

    def write_file(name: str, columns_of_file: Mapping[str, Any]) -> None:
        files[name] = store.write_table(folder / name, pa.table(dict(columns_of_file)))

    for split, code in SPLIT_CODES.items():
        mask = rows.split == code
        positions = np.flatnonzero(mask)
        listed = {name: pa.array(values[positions]) for name, values in index.items()}
        write_file(
            f"index-{split}.arrow",
            {**listed, "targets": store.make_list_column(columns.concat_ragged(targets.pop(split)))},
        )
        origins = {
            "source": columns.encode_names(names, rows.shard[positions]),
            "line": pa.array(rows.lines[positions]),
        }
        if "id" in rows.table.column_names:
            origins["id"] = columns.filter_column(rows.table["id"], mask)
        slices = {
            f"{name}{store.SLICE_SUFFIX}" if name in store.ORIGIN_COLUMNS else name: columns.filter_column(
                rows.table[SLICE_PREFIX + name], mask
            )
            for name in job.recipe.data.slices
        }
        write_file(f"rows-{split}.arrow", {**origins, **slices})
        if split != "train" and "text_key" in rows.table.column_names:
            write_file(
                f"in-training-set-{split}.arrow", {"in_training_set": pa.array(_find_in_training_set(rows, mask))}
            )
    return files


def _find_in_training_set(rows: _ShardRows, mask: columns.Mask) -> columns.Mask:
    """Which rows of a split are training rows too."""
    column, start = rows.table["text_key"], 0

    def iter_training_keys() -> Iterator[contamination.TextKeys]:
        nonlocal start
        for chunk in column.chunks:
            end = start + len(chunk)
            yield chunk.to_numpy()[rows.split[start:end] == SPLIT_CODES["train"]]
            start = end

    return contamination.find_in_training_set(iter_training_keys(), columns.filter_column(column, mask).to_numpy())


def hash_sources(recipe: Recipe, source: row_reader.DataSource, model: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file that a store is made from, by role and name.

    Two stores with different addresses are compared by it to name the changed file.
    """
    # The recipe's name for the model, not its folder, which differs between machines.
    tokenizer = f"tokenizer.json of {recipe.model.name}"
    files = {"tokenizer": {tokenizer: digests.hash_tokenizer(model)}}
    for source_file, sha256 in zip(source.files, source.sha256s, strict=True):
        files.setdefault(source_file.role, {})[source_file.uri.removeprefix("file://")] = sha256
    return files
