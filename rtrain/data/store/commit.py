"""The commit of a token store: the shards that data tasks have written -> labels, row ids, an index of each split.

All rows of a store are held in memory here, as columns of Arrow and numpy without their tokens: a Python string costs
60 bytes more per row.
"""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain.config import Recipe
from rtrain.core import row_filter
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import Head, RaggedArray
from rtrain.data import checks, row_reader, sources, splits
from rtrain.data.store import store
from rtrain.data.store.shards import (
    OUT_OF_SCOPE_CODE,
    QUARANTINED_CODE,
    SLICE_PREFIX,
    SPLIT_CODES,
    SPLIT_HASH,
    STRATUM,
    TokenizeJob,
    load_task_tokenizer,
)
from rtrain.tasks import base
from rtrain.tasks.encode import resolve_window_spec

Mask = npt.NDArray[np.bool_]


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
        unused = ["ids", "windows", "text", "pair"]
        shards = [store.map_table(folder / "shards" / name).drop_columns(unused) for name in names]
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
    recipe, names = job.recipe, [row["shard"] for row in shard_rows if row["shard"]]
    counts = {name: sum(row.get(name, 0) for row in shard_rows) for name in asdict(row_reader.ReadCounts())}
    selection = {name: rows for name, rows in counts.items() if rows}
    rows = _ShardRows.from_shards(writer.folder, names)
    if rows is None and selection.get("left_out"):
        reason = f"no row is selected; {selection['left_out']:,} are left out"
        fix = f"write another condition, such as {row_filter.EXAMPLE}, or null"
        raise ConfigError([Problem("data.where", recipe.data.where, reason, fix, code="no_rows")])
    if rows is None:
        problem = f"data.path: {recipe.data.path} has a header and no rows; add rows, one text and label each"
        raise UserError(problem, code="no_rows")
    if recipe.data.folds is not None:
        reassign_folds(job, rows)
    locate_row = checks.make_row_locator(source, names, rows.shard, rows.lines)
    is_bad = rows.split == QUARANTINED_CODE
    bad = checks.QuarantinedRows(np.flatnonzero(is_bad), filter_column(rows.table["reason"], is_bad).combine_chunks())
    # A file of unreadable rows has no labels either. Bad rows are checked first, so the message names the cause.
    checks.check_bad_row_share(recipe, bad, rows.num_source_rows, locate_row)
    checks.check_splits_not_empty(recipe, rows.count_by_split())

    task = base.get_task(recipe.task)
    # Copies are not counted: some rows have more copies than others, which would bias the label counts.
    in_training = (rows.split == SPLIT_CODES["train"]) & ~rows.is_copy
    labels = LabelCounts(filter_column(rows.table["label"], in_training))
    checks.check_separator(recipe, labels)
    head = job.head or _build_head(job, task, labels)
    if task.output == "labels":
        checks.check_target_size(len(rows.split), len(head.labels))
    original_split = rows.split.copy()
    targets = _build_targets(task, head, rows)
    unknown_label_rows = np.flatnonzero(rows.split != original_split)
    from_eval_file = np.array([source.files[number].role != "train" for number in rows.file_numbers])[rows.shard]
    label_column = rows.table["label"]
    bad = bad.merge(
        checks.quarantine_unknown_labels(unknown_label_rows, from_eval_file, label_column, locate_row, head.labels)
    )
    if recipe.data.split_column is not None:  # with a hash split, rows of rare labels outside training are not an error
        checks.check_bad_row_share(recipe, bad, rows.num_source_rows, locate_row)
    checks.write_quarantine(writer.folder, bad, locate_row)

    counts = rows.count_by_split()
    if "weight" in rows.table.column_names:
        checks.check_row_weights(recipe, rows.table["weight"].to_numpy()[rows.split == SPLIT_CODES["train"]])
    checks.check_splits_not_empty(recipe, counts)  # again, since rows with an unknown label were quarantined
    if recipe.data.out_of_scope_label is not None:
        labels = filter_column(rows.table["label"], rows.split == SPLIT_CODES["valid"]).to_pylist()
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
        | {f"shards/{row['shard']}": row["entry"] for row in shard_rows if row["shard"]},
        sources=hash_sources(recipe, source, job.model),
        facts=dict(head.facts),
        copies=int(rows.is_copy.sum()),
        out_of_scope_rows=int((rows.split == OUT_OF_SCOPE_CODE).sum()),
        selection=selection,
    )
    return writer.commit(manifest)


def reassign_folds(job: TokenizeJob, rows: _ShardRows) -> None:
    """Assign the fold of the job to the rows, whatever fold their shards were written for. Augmented copies belong to
    the training rows of one fold: their shards are not used for another."""
    if SPLIT_HASH not in rows.table.column_names:
        return
    hashes, strata = rows.table[SPLIT_HASH].to_pylist(), rows.table[STRATUM].to_pylist()
    labels, places = rows.table["label"].to_pylist(), np.flatnonzero(rows.split != QUARANTINED_CODE).tolist()
    fold_splits = job.splits
    if job.recipe.data.stratify is not None:
        survey = splits.RowSurvey.from_values((strata[place], hashes[place], None) for place in places)
        fold_splits = replace(fold_splits, strata=survey.stratify(fold_splits))
    for place in places:
        split = fold_splits.assign_by_hash("train", hashes[place], strata[place])
        is_out_of_scope = split == "train" and labels[place] == job.recipe.data.out_of_scope_label
        rows.split[place] = OUT_OF_SCOPE_CODE if is_out_of_scope else SPLIT_CODES[split]


def _build_targets(task: base.Task, head: Head, rows: _ShardRows) -> dict[str, list[RaggedArray]]:
    """The targets of each split's rows, shard by shard. Rows with a label that the head lacks become bad in
    `rows.split`."""
    targets_by_split: dict[str, list[RaggedArray]] = {name: [] for name in SPLIT_CODES}
    ends = np.cumsum([shard.num_rows for shard in rows.shards])
    for shard, codes in zip(rows.shards, np.split(rows.split, ends[:-1]), strict=True):  # the parts are views
        is_usable = codes < OUT_OF_SCOPE_CODE
        target_positions = to_ragged(shard["target_positions"]).take(np.flatnonzero(is_usable))
        targets = task.build_targets(filter_column(shard["label"], is_usable).to_pylist(), target_positions, head)
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
    row_ids = assign_row_ids(rows.table["content"].to_numpy())
    lengths = rows.table["length"].to_numpy()
    names = [source.files[number].uri.removeprefix("file://") for number in rows.file_numbers]
    index = {"row_id": row_ids, "shard": rows.shard, "offset": rows.offset, "length": lengths}
    if "weight" in rows.table.column_names:
        index["weight"] = rows.table["weight"].to_numpy()
    files: dict[str, FileEntry] = {}

    def write_file(name: str, columns_of_file: Mapping[str, Any]) -> None:
        files[name] = store.write_table(folder / name, pa.table(dict(columns_of_file)))

    for split, code in SPLIT_CODES.items():
        mask = rows.split == code
        positions = np.flatnonzero(mask)
        listed = {name: pa.array(values[positions]) for name, values in index.items()}
        target_column = store.make_list_column(concat_ragged(targets.pop(split)))
        write_file(f"index-{split}.arrow", {**listed, "targets": target_column})
        origins = {"source": encode_names(names, rows.shard[positions]), "line": pa.array(rows.lines[positions])}
        if "id" in rows.table.column_names:
            origins["id"] = filter_column(rows.table["id"], mask)
        for name in job.recipe.data.slices:
            column = f"{name}{store.SLICE_SUFFIX}" if name in store.ORIGIN_COLUMNS else name
            origins[column] = filter_column(rows.table[SLICE_PREFIX + name], mask)
        write_file(f"rows-{split}.arrow", origins)
        if split == "train" and "sampling_value" in rows.table.column_names:
            values = filter_column(rows.table["sampling_value"], mask).combine_chunks().dictionary_encode()
            write_file(store.SAMPLING_FILE, {"value": values})
        if split != "train" and "text_key" in rows.table.column_names:
            in_training_set = pa.array(_find_in_training_set(rows, mask))
            write_file(f"in-training-set-{split}.arrow", {"in_training_set": in_training_set})
    return files


def _find_in_training_set(rows: _ShardRows, mask: Mask) -> Mask:
    """Which rows of a split are training rows too."""
    column, start = rows.table["text_key"], 0

    def iter_training_keys() -> Iterator[splits.TextKeys]:
        nonlocal start
        for chunk in column.chunks:
            end = start + len(chunk)
            yield chunk.to_numpy()[rows.split[start:end] == SPLIT_CODES["train"]]
            start = end

    return splits.find_in_training_set(iter_training_keys(), filter_column(column, mask).to_numpy())


def hash_sources(recipe: Recipe, source: row_reader.DataSource, model: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file that a store is made from, by role and name.

    Two stores with different addresses are compared by it to name the changed file.
    """
    # The recipe's name for the model, not its folder, which differs between machines.
    tokenizer = f"tokenizer.json of {recipe.model.name}"
    files = {"tokenizer": {tokenizer: sources.hash_tokenizer(model)}}
    for source_file, sha256 in zip(source.files, source.sha256s, strict=True):
        files.setdefault(source_file.role, {})[source_file.uri.removeprefix("file://")] = sha256
    return files


# -------------------------------------------------------------------------------------------------------------- columns

BLOCK = 8192
"""Labels that are turned into Python strings at a time."""


class LabelCounts(Mapping[str, int]):
    """How often each label of a column occurs; labels come in the order of their first occurrence."""

    def __init__(self, labels: pa.ChunkedArray):
        counted = labels.cast(pa.large_string()).value_counts()  # large: all labels together may be over 2 GB
        self._labels, self._counts = counted.field("values"), counted.field("counts").to_numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self), BLOCK):
            yield from self._labels.slice(begin, BLOCK).to_pylist()

    def __getitem__(self, label: str) -> int:
        index = self._labels.index(label).as_py()
        if index < 0:
            raise KeyError(label)
        return int(self._counts[index])

    def items(self) -> ItemsView[str, int]:
        return _Items(self)

    def iter_items(self) -> Iterator[tuple[str, int]]:
        return zip(self, map(int, self._counts), strict=True)


class _Items(ItemsView[str, int]):
    """Items in the order of the labels. The default would search each label, at a cost of the square of their
    number."""

    _mapping: LabelCounts

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return self._mapping.iter_items()


def filter_column(column: pa.ChunkedArray, rows: Mask) -> pa.ChunkedArray:
    """The column's values at the marked rows. It filters chunk by chunk, since `take` would join all chunks into one,
    which can hold at most 2 GB."""
    return column.filter(pa.array(rows))


def to_ragged(column: pa.ChunkedArray) -> RaggedArray:
    """A shard's column of lists."""
    array = column.combine_chunks()
    ends = array.offsets.to_numpy()
    return RaggedArray(array.values.to_numpy(), np.diff(ends))


def concat_ragged(parts: Sequence[RaggedArray]) -> RaggedArray:
    """The rows of all parts, one after another; values are float32."""
    values = [np.empty(0, dtype=np.float32), *(part.values for part in parts)]
    counts = [np.empty(0, dtype=np.int32), *(part.counts for part in parts)]
    return RaggedArray(np.concatenate(values), np.concatenate(counts))


def encode_names(names: Sequence[str], numbers: npt.NDArray[np.integer[Any]]) -> pa.DictionaryArray:
    """The column of `names[number]` for each number; its dictionary holds the names that occur, each once."""
    unique_names = list(dict.fromkeys(names))
    number_by_name = {name: number for number, name in enumerate(unique_names)}
    name_numbers = np.array([number_by_name[name] for name in names], dtype=np.int32)
    used_numbers, codes = np.unique(name_numbers[numbers], return_inverse=True)
    used_names = pa.array([unique_names[number] for number in used_numbers], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), used_names)


ID_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Between the ids of two equal rows. It is odd, so that the map of occurrence numbers is one to one; the content hash
is already uniform."""


def assign_row_ids(content: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64-bit row ids from content hashes. Equal rows get distinct ids by their occurrence number, in source order."""
    order = np.argsort(content, kind="stable")
    ordered = content[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(ordered)]]))
    occurrence = np.empty(len(content), dtype=np.uint64)
    occurrence[order] = np.arange(len(ordered), dtype=np.uint64) - np.repeat(starts, counts).astype(np.uint64)
    return content + occurrence * ID_STEP


def find_first_occurrences(row_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each of these rows, the id of the first row with the same texts and label: undoes the count of
    `assign_row_ids`.

    If an occurrence in between is in another split, as with a split column, later occurrences count as other rows.
    """
    ids = np.sort(row_ids)
    previous_ids = ids - ID_STEP
    positions = np.minimum(np.searchsorted(ids, previous_ids), max(0, len(ids) - 1))
    first = np.where(ids[positions] == previous_ids, positions, np.arange(len(ids)))
    while not np.array_equal(first[first], first):  # each round doubles the distance: a thousand equal rows take ten
        first = first[first]
    first_ids: npt.NDArray[np.uint64] = ids[first][np.searchsorted(ids, row_ids)]
    return first_ids
