"""The token store: tokenized rows on the run's storage, addressed by a digest of their inputs. Reading needs no Ray.

<root>/.tokens/<digest>/
    manifest.json               written last: its presence means complete; size and SHA-256 of indexes, rows and shards
    index-{train,valid,test}.arrow   one table row per row: row_id, shard, offset, length (tokens), targets
    rows-{train,valid,test}.arrow    origin of each row (source, line), and its values of data.slices
    sampling-train.arrow        values of the column of data.sampling
    in-training-set-{valid,test}.arrow  whether each row is a training row too
    shards/<file>-<part>.arrow       tokens (ids; windows: length and pair start of each), the columns of the index, and
                                     the beginning of the texts of evaluation rows
    quarantine.parquet          bad rows: source, line, reason

A file is checked against its SHA-256 when a process first maps it, so no row of a changed file is trained on. A
start reads the index (28 bytes a row) and the shards that it needs, never the whole store.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.manifest import FileEntry, compute_entry, find_file_problem
from rtrain.core.ragged import Floats, Head, Int32s, Ints, RaggedArray, TokenBatch, expand_ranges

SCHEMA_VERSION = 5
SPLITS = ("train", "valid", "test")
USED_IDS_FILE = "used-ids.npy"
MAX_LIST_VALUES = (1 << 31) - 1
"""Most values of a column of lists with offsets of 32 bits."""
ROWS_PER_TOKEN_SUM = 256
"""Rows between two stored sums of tokens. For 10^8 rows these sums take 3 MB in every process; one for each row would
take 800 MB."""
MAX_OPEN_SHARDS = 1280
"""Shards that a process keeps mapped: enough for two shuffle windows, each of 512 blocks in one or two shards."""


MAX_NAMED_ROWS = 5
"""Most rows that a message names."""
ORIGIN_COLUMNS, SLICE_SUFFIX = ("source", "line", "id"), " (slice)"
"""Columns of `rows-*.arrow` with the origin and the id of a row; and the suffix of a slice with one of these names."""


SAMPLING_FILE = "sampling-train.arrow"


class SamplingGroups(NamedTuple):
    """Training rows by their value of a column; values in alphabetic order."""

    values: tuple[str, ...]
    sizes: tuple[int, ...]
    """Rows of each value."""
    members: Ints
    """Positions of the rows, value after value."""


@dataclass(frozen=True)
class StoreManifest:
    """The contents of `manifest.json`. `rows` and `tokens` count by split."""

    schema_version: int
    digest: str
    rows: dict[str, int]
    labels: tuple[str, ...]
    tokens: dict[str, int]
    truncated: int
    quarantined: int
    files: dict[str, FileEntry]
    """The files that training reads, by path in the folder: the indexes, then the shards in the order of their
    numbers."""
    sources: dict[str, dict[str, str]]
    """SHA-256 of the source files, by role and name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the `Head` of a model for these rows."""
    copies: int = 0
    """Training rows made by augmentation."""
    out_of_scope_rows: int = 0
    """Training rows with the label `data.out_of_scope_label`, which are not trained on."""
    unlabeled: Mapping[str, int] = field(default_factory=dict)
    """Counts of unlabeled training rows, which come after the labeled ones (`rtrain.data.unlabeled`): `rows` are
    trained on; `low_confidence`, `duplicates` and `bad` are not. Empty without unlabeled rows."""
    selection: Mapping[str, int] = field(default_factory=dict)
    """Counts of rows that the settings of `data` have left out or changed (`row_reader.ReadCounts`), without zeros."""

    @property
    def head(self) -> Head:
        return Head(self.labels, self.facts)

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(name for name in self.files if name.startswith("shards/"))


class Store:
    """A finished token store. Opening reads the manifest; columns are memory-mapped when first used."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = _read_manifest(folder)
        self._shard_names = self.manifest.shards
        self._indexes: dict[str, pa.Table] = {}
        self._verified_files: set[str] = set()

    def num_rows(self, split: str) -> int:
        return self.manifest.rows[split]

    def num_labeled(self, split: str) -> int:
        """Number of labeled rows; they are a split's first rows."""
        return self.num_rows(split) - (self.manifest.unlabeled.get("rows", 0) if split == "train" else 0)

    @property
    def num_source_rows(self) -> int:
        """Labeled rows of the source files: out-of-scope rows included, augmented and unlabeled rows not."""
        added = self.manifest.copies + self.manifest.unlabeled.get("rows", 0)
        return sum(self.manifest.rows.values()) - added + self.manifest.out_of_scope_rows

    def check(self, *, size_only: bool) -> None:
        """Raise `UserError` if a file was changed. With `size_only` no file is read: only missing files and changed
        sizes are found."""
        for name in self.manifest.files:
            self._check_file(name, size_only)

    def _check_file(self, name: str, size_only: bool = False) -> None:
        if problem := find_file_problem(self.folder / name, self.manifest.files[name], size_only=size_only):
            raise _make_damaged_error(self.folder, name, problem)

    def _open_table(self, name: str) -> pa.Table:
        """Map a file. It is checked the first time only: shards are mapped by the thousand, and a hash reads a whole
        file."""
        if name not in self._verified_files:
            self._check_file(name)
            self._verified_files.add(name)
        return map_table(self.folder / name)

    def _open_index(self, split: str) -> pa.Table:
        if split not in self._indexes:
            self._indexes[split] = self._open_table(f"index-{split}.arrow")
        return self._indexes[split]

    def column(self, split: str, name: str) -> npt.NDArray[Any]:
        """A column of the index: `row_id` u64, `shard` u32, `offset` u32, `length` i32."""
        array = self._open_index(split)[name]
        return array.chunk(0).to_numpy(zero_copy_only=True) if array.num_chunks else np.empty(0, dtype=np.int64)

    def targets(self, split: str, positions: Ints | None = None) -> RaggedArray:
        """The targets of the rows at `positions` (None: all labeled rows)."""
        array = self._open_index(split)["targets"]
        if not array.num_chunks:
            return RaggedArray(np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32))
        if positions is None and self.num_labeled(split) < self.num_rows(split):
            return read_list_column(array.chunk(0).slice(0, self.num_labeled(split)))
        return read_list_column(array.chunk(0), positions)

    def row_weights(self, split: str, positions: Ints | None = None) -> npt.NDArray[np.float64] | None:
        """The weights of the rows at `positions` (None: all) by `data.weight_column`; None without that column."""
        if "weight" not in self._open_index(split).column_names:
            return None
        return self.column(split, "weight")[slice(None) if positions is None else positions]

    def read_targets(self, split: str, positions: Ints) -> TokenBatch:
        """The rows at `positions` without their tokens: targets, ids and weights."""
        targets, empty = self.targets(split, positions), np.empty(0, dtype=np.int32)
        ids, no_logits = self.column(split, "row_id")[positions], np.empty((len(positions), 0), dtype=np.float32)
        tokens = TokenBatch(empty, empty, empty, empty, targets.values, targets.counts, ids, no_logits)
        return replace(tokens, row_weights=self.row_weights(split, positions))

    @cached_property
    def sampling_groups(self) -> SamplingGroups:
        """The training rows by their value of the column of `data.sampling`, for stores with that column."""
        column = self._open_table(SAMPLING_FILE)["value"].combine_chunks()
        codes, names = column.indices.to_numpy(), column.dictionary.to_pylist()
        by_name = np.argsort(np.argsort(names, kind="stable"))[codes]
        members = np.argsort(by_name, kind="stable")
        return SamplingGroups(tuple(sorted(names)), tuple(np.bincount(by_name, minlength=len(names)).tolist()), members)

    def num_targets(self, split: str) -> int:
        """Number of targets of all rows; the targets are not read."""
        array = self._open_index(split)["targets"]
        return sum(chunk.offsets[-1].as_py() - chunk.offsets[0].as_py() for chunk in array.chunks)

    def origins(self, split: str) -> pa.Table:
        """The origin of each row, in index order: `source` (text), `line` (integer), with `data.id` `id` (text), a
        text column for each of `data.slices` (`slices` has these by their names)."""
        return self._open_table(f"rows-{split}.arrow")

    def slices(self, split: str) -> dict[str, pa.ChunkedArray]:
        """The rows' values of each of `data.slices`, in index order."""
        origins = self.origins(split)
        name_by_column = {f"{name}{SLICE_SUFFIX}": name for name in ORIGIN_COLUMNS}
        columns = [column for column in origins.column_names if column not in ORIGIN_COLUMNS]
        return {name_by_column.get(column, column): origins[column] for column in columns}

    def in_training_set(self, split: str) -> npt.NDArray[np.bool_] | None:
        """Whether each evaluation row is a training row too (`rtrain.data.splits`); None if rows are blocks of
        text."""
        name = f"in-training-set-{split}.arrow"
        if name not in self.manifest.files:
            return None
        column = self._open_table(name)["in_training_set"]
        return column.to_numpy() if len(column) else np.empty(0, dtype=np.bool_)

    def text_keys(self, split: str) -> npt.NDArray[np.uint64]:
        """Hashes of the rows' normalized texts (`rtrain.data.splits.compute_text_key`), in index order; empty if
        rows are blocks of text."""
        shards, offsets = self.column(split, "shard"), self.column(split, "offset")
        text_keys = np.empty(len(shards), dtype=np.uint64)
        for number in np.unique(shards).tolist():
            table, in_shard = self._open_table(self._shard_names[number]), shards == number
            if "text_key" not in table.column_names:
                return np.empty(0, dtype=np.uint64)
            text_keys[in_shard] = table["text_key"].chunk(0).to_numpy()[offsets[in_shard]]
        return text_keys

    def count_truncated(self, split: str, positions: Ints) -> int:
        """Number of rows at `positions` that were truncated."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        count = 0
        for number in np.unique(shards).tolist():
            cut = self._open_table(self._shard_names[number])["truncated"].to_numpy(zero_copy_only=False)
            count += int(cut[offsets[shards == number]].sum())
        return count

    def kept_texts(self, split: str, positions: Ints) -> list[tuple[str, str | None] | None]:
        """The first characters of the two texts of evaluation rows (`shards.MAX_KEPT_CHARACTERS`); None for a training
        row."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        return [self._read_texts(int(shard), int(offset)) for shard, offset in zip(shards, offsets, strict=True)]

    @lru_cache(maxsize=8)  # noqa: B019 - a store lives as long as its process
    def _open_texts(self, number: int) -> pa.Table:
        return self._open_table(self._shard_names[number]).select(["text", "pair"])

    def _read_texts(self, shard: int, offset: int) -> tuple[str, str | None] | None:
        table = self._open_texts(shard)
        text = table["text"][offset].as_py()
        return None if text is None else (text, table["pair"][offset].as_py())

    def describe_rows(self, split: str, positions: Ints) -> str:
        """The origin of the first few rows, as file and line, for messages."""
        rows = self.origins(split).take(sorted(positions)[:MAX_NAMED_ROWS])
        locations = [f"{row['source']}:{row['line']}" for row in rows.select(["source", "line"]).to_pylist()]
        num_more = len(positions) - len(locations)
        return ", ".join(locations) + (f" and {num_more} more rows" if num_more else "")

    @lru_cache(maxsize=MAX_OPEN_SHARDS)  # noqa: B019 - a store lives as long as its process
    def _open_shard(self, number: int) -> tuple[Int32s, Int32s, Int32s, Int32s]:
        """(tokens, offsets of each row's tokens, windows, offsets of each row's windows) of a shard.

        All four are views of the mapped file: copies of the offsets would take 130 KB for each open shard.
        """
        table = self._open_table(self._shard_names[number])
        ids, windows = table["ids"].chunk(0), table["windows"].chunk(0)
        return (*(part.to_numpy() for part in (ids.values, ids.offsets, windows.values, windows.offsets)),)

    def read_tokens(self, split: str, positions: Ints) -> TokenBatch:
        """The rows at `positions` of a split, in that order; without a teacher's outputs."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        parts: list[Int32s] = [np.empty(0, dtype=np.int32)]
        window_parts: list[Int32s] = [np.empty(0, dtype=np.int32)]
        for shard, offset in zip(shards, offsets, strict=True):
            values, ends, windows, window_ends = self._open_shard(int(shard))
            parts.append(values[ends[offset] : ends[offset + 1]])
            window_parts.append(windows[window_ends[offset] : window_ends[offset + 1]])
        lengths, pair_starts = np.concatenate(window_parts).reshape(-1, 2).T
        targets, num_labeled = self.targets(split, positions), self.num_labeled(split)
        return TokenBatch(
            ids=np.concatenate(parts),
            window_lengths=np.ascontiguousarray(lengths),
            pair_start=np.ascontiguousarray(pair_starts),
            windows_per_row=np.array([len(row) // 2 for row in window_parts[1:]], dtype=np.int32),
            targets=targets.values,
            targets_per_row=targets.counts,
            row_ids=self.column(split, "row_id")[positions],
            teacher_logits=np.empty((len(positions), 0), dtype=np.float32),
            is_unlabeled=positions >= num_labeled if num_labeled < self.num_rows(split) else None,
            row_weights=self.row_weights(split, positions),
        )

    def used_ids(self) -> Ints:
        """Token ids that occur in any row, ascending. The first call reads all shards and keeps the result beside
        them, in a file that is no part of the store."""
        path = self.folder / USED_IDS_FILE
        if path.is_file():
            return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
        is_used = np.zeros(0, dtype=np.bool_)
        for number in range(len(self._shard_names)):
            if len(values := self._open_shard(number)[0]):
                is_used = np.pad(is_used, (0, max(0, int(values.max()) + 1 - len(is_used))))
                is_used[values] = True
        ids = np.flatnonzero(is_used).astype(np.int64)
        with suppress(OSError), atomic_write.replace_file(path) as draft, draft.open("wb") as file:
            np.save(file, ids)  # storage that only the builder may write to: the next attempt reads the shards again
        return ids

    def teacher_file(self, version: str) -> Path:
        """The file of a teacher's logits for the training rows, in index order: [rows or tokens, outputs].

        It is valid for this store only: the store's digest pins the rows.
        """
        return self.folder / f"teacher-{version}.npy"

    def teacher_logits(self, version: str, positions: Ints) -> Floats:
        """The teacher's outputs for the training rows at `positions`: [rows or their tokens, outputs]."""
        logits = self.open_teacher_logits(version)
        if len(logits) == self.num_rows("train"):
            return logits[positions]
        return logits[self.token_offsets(positions)]

    def token_offsets(self, positions: Ints) -> Ints:
        """Indices of the tokens of the training rows at `positions` among the tokens of all training rows, row after
        row."""
        lengths = self.column("train", "length")
        blocks = positions // ROWS_PER_TOKEN_SUM
        sums_before, firsts = self._tokens_before[blocks], blocks * ROWS_PER_TOKEN_SUM
        rest = [lengths[first:position].sum(dtype=np.int64) for first, position in zip(firsts, positions, strict=True)]
        return expand_ranges(sums_before + np.array(rest, dtype=np.int64), lengths[positions])

    @cached_property
    def _tokens_before(self) -> Ints:
        """Number of tokens before training rows 0, `ROWS_PER_TOKEN_SUM`, 2 `ROWS_PER_TOKEN_SUM`, and so on."""
        lengths = self.column("train", "length")
        num_blocks = len(lengths) // ROWS_PER_TOKEN_SUM
        block_lengths = lengths[: num_blocks * ROWS_PER_TOKEN_SUM].reshape(-1, ROWS_PER_TOKEN_SUM)
        return np.concatenate([[0], np.cumsum(block_lengths.sum(axis=1, dtype=np.int64))])

    @lru_cache(maxsize=4)  # noqa: B019 - as above
    def open_teacher_logits(self, version: str) -> Floats:
        """All of a teacher's logits (`teacher_file`), memory-mapped. Raises `UserError` if the file is missing."""
        try:
            logits: Floats = np.load(self.teacher_file(version), mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise UserError(
                f"{self.folder} has no logits of teacher {version}; run `rtrain distill` on the teacher's run again",
                code="not_found",
            ) from None
        return logits


@lru_cache(maxsize=8)
def open_store(folder: Path) -> Store:
    """The store of a folder, opened once per process, since a process runs hundreds of data tasks."""
    return Store(folder)


def _read_manifest(folder: Path) -> StoreManifest:
    try:
        document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.exists():
            raise UserError(
                f"the token store {folder} is missing: it was removed, or is on the machine where the run was trained; "
                "training on the same rows with the same settings builds it again",
                code="not_found",
            ) from None
        raise UserError(
            f"{folder} is not a complete token store (no manifest.json); remove the folder and train again",
            code="unfinished_store",
        ) from None
    except ValueError:
        raise _make_damaged_error(folder, "manifest.json", "is not readable") from None
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder} was written by another version of rtrain; remove the folder and train again",
            code="other_version",
        )
    if document.pop("sha256", None) != _hash_document(document):
        raise _make_damaged_error(folder, "manifest.json", "does not match its SHA-256")
    document["labels"] = tuple(document["labels"])
    return StoreManifest(**document)


def _hash_document(document: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own content: training reads labels and counts of rows from it."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _make_damaged_error(folder: Path, name: str, problem: str) -> UserError:
    return UserError(
        f"{folder / name} {problem}: the token store was changed after it was built. "
        f"Remove the folder {folder}; the next start builds it again from the source.",
        code="damaged_store",
    )


def map_table(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped."""
    with pa.memory_map(str(path)) as source:
        return pyarrow.ipc.open_file(source).read_all()


def make_list_column(rows: RaggedArray) -> pa.ListArray | pa.LargeListArray:
    """A column of lists; its offsets have 64 bits if it has more than `MAX_LIST_VALUES` values."""
    large = rows.counts.sum(dtype=np.int64) > MAX_LIST_VALUES
    offsets = np.zeros(len(rows) + 1, dtype=np.int64 if large else np.int32)
    np.cumsum(rows.counts, dtype=offsets.dtype, out=offsets[1:])
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(pa.array(offsets), pa.array(rows.values))


def read_list_column(column: pa.ListArray | pa.LargeListArray, positions: Ints | None = None) -> RaggedArray:
    """The lists at `positions` (None: all) of a column that `make_list_column` made."""
    ends, values = column.offsets.to_numpy(), column.values.to_numpy()
    if positions is None:
        return RaggedArray(values[ends[0] : ends[-1]], np.diff(ends).astype(np.int32, copy=False))
    starts = ends[positions].astype(np.int64)
    counts = (ends[positions + 1] - starts).astype(np.int32)
    return RaggedArray(values[expand_ranges(starts, counts)], counts)


def write_table(path: Path, table: pa.Table) -> FileEntry:
    """Write a table as one uncompressed record batch, which a reader can map without copying. Returns the file's entry
    for a manifest."""
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return compute_entry(path)


class StoreWriter:
    """Writes a store in a draft folder, and renames it to its final name when it is complete.

    An interrupted job leaves no incomplete store.
    """

    def __init__(self, final: Path):
        atomic_write.remove_stale_drafts(final)
        self.final = final
        self._draft = atomic_write.Draft(final)
        self.folder = self._draft.folder
        (self.folder / "shards").mkdir()

    def commit(self, manifest: StoreManifest) -> Store:
        """Write the manifest and move the store to its final name; returns it, opened from there."""
        document = asdict(manifest)
        text = json.dumps({**document, "sha256": _hash_document(document)}, indent=1, ensure_ascii=False)
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")
        try:
            atomic_write.publish_folder(self.folder, self.final)
        except OSError:
            # Another run has built the same store meanwhile. Both hold the same rows, since the name is their digest.
            if not (self.final / "manifest.json").is_file():
                raise
            self.abandon()
        else:
            (self.final / atomic_write.LOCK_FILE).unlink()
            self._draft.release()
        return Store(self.final)

    def abandon(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._draft.release()
