"""The token store: tokenised rows on the run's storage, addressed by what they were made from. Reading needs no Ray.

<root>/.tokens/<digest>/
    manifest.json               written last: its presence means complete; size and SHA-256 of indexes, rows and shards
    index-{train,valid,test}.arrow   one line per row: row_id, shard, offset, length (tokens), targets
    rows-{train,valid,test}.arrow    where each row came from (source, line), and its values of data.slices
    seen-{valid,test}.arrow          whether each row is a training row too
    shards/<piece>-<part>.arrow      tokens (ids; windows: length and second of each), what the index was made from, and
                                     the beginning of the texts of rows that are not trained on
    quarantine.parquet          bad rows: source, line, reason

A file is checked against its SHA-256 when a process first maps it, so that no row of a changed file is trained on. A
start reads the index (28 bytes a row) and the shards that it needs, never the whole store.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.manifest import Entry, entry, flaw
from rtrain.core.ragged import Floats, Head, Int32s, Ints, Ragged, Tokens, ranges

SCHEMA_VERSION = 4
SPLITS = ("train", "valid", "test")
MOST_VALUES = (1 << 31) - 1
"""Most values of a column of lists with offsets of 32 bits."""
SUMMED_ROWS = 256
"""Rows between two stored sums of tokens. For 10^8 rows these sums take 3 MB in every process; one for each row would
take 800 MB."""
SHARDS_OPEN = 1280
"""Shards that a process keeps mapped: those of two shuffle windows, each of 512 blocks that lie in one shard or two."""


PLACES = 5
"""How many rows a message names."""
ORIGINS, SLICED = ("source", "line", "id"), " (slice)"
"""Columns of `rows-*.arrow` that say where a row came from and how people call it, and what is added to the name of a
slice called so."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says of a store. `rows` and `tokens` count by split."""

    schema_version: int
    digest: str
    rows: dict[str, int]
    labels: tuple[str, ...]
    tokens: dict[str, int]
    truncated: int
    quarantined: int
    files: dict[str, Entry]
    """The files that training reads, by path in the folder: the indexes, then the shards in the order of their
    numbers."""
    sources: dict[str, dict[str, str]]
    """SHA-256 of the files that the store was made from, by role and name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Makes, with the labels, the `Head` of a model for these rows."""
    copies: int = 0
    """Training rows that augmentation has made."""
    left_out: int = 0
    """Training rows with the label `data.outside`, which are not trained on."""
    unlabelled: Mapping[str, int] = field(default_factory=dict)
    """Where training rows without a label come after those with one (`stores.joined`): `rows` counts them, and others
    were left out as `unsure`, `repeated` or `bad`."""

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
        self._shards = self.manifest.shards
        self._indexes: dict[str, pa.Table] = {}
        self._sound: set[str] = set()

    def rows(self, split: str) -> int:
        return self.manifest.rows[split]

    def labelled(self, split: str) -> int:
        """How many rows have a label; they are a split's first."""
        return self.rows(split) - (self.manifest.unlabelled.get("rows", 0) if split == "train" else 0)

    @property
    def given(self) -> int:
        """Rows with a label that the files hold: none that augmentation or a student's settings have added, and those
        that are not trained on too."""
        added = self.manifest.copies + self.manifest.unlabelled.get("rows", 0)
        return sum(self.manifest.rows.values()) - added + self.manifest.left_out

    def check(self, *, size_only: bool) -> None:
        """Raise `UserError` if a file was changed. With `size_only` no file is read: only missing files and changed
        sizes are found."""
        for name in self.manifest.files:
            self._check(name, size_only)

    def _check(self, name: str, size_only: bool = False) -> None:
        if wrong := flaw(self.folder / name, self.manifest.files[name], size_only=size_only):
            raise _damaged(self.folder, name, wrong)

    def _open(self, name: str) -> pa.Table:
        """Map a file. It is checked the first time only: shards are mapped by the thousand, and a hash reads a whole
        file."""
        if name not in self._sound:
            self._check(name)
            self._sound.add(name)
        return map_table(self.folder / name)

    def _index(self, split: str) -> pa.Table:
        if split not in self._indexes:
            self._indexes[split] = self._open(f"index-{split}.arrow")
        return self._indexes[split]

    def column(self, split: str, name: str) -> npt.NDArray[Any]:
        """A column of the index: `row_id` u64, `shard` u32, `offset` u32, `length` i32."""
        array = self._index(split)[name]
        return array.chunk(0).to_numpy(zero_copy_only=True) if array.num_chunks else np.empty(0, dtype=np.int64)

    def targets(self, split: str, positions: Ints | None = None) -> Ragged:
        """The targets of the rows at `positions` (None: of all rows with a label)."""
        array = self._index(split)["targets"]
        if not array.num_chunks:
            return Ragged(np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32))
        if positions is None and self.labelled(split) < self.rows(split):
            return ragged(array.chunk(0).slice(0, self.labelled(split)))
        return ragged(array.chunk(0), positions)

    def num_targets(self, split: str) -> int:
        """How many targets all rows have together; counted without reading them."""
        array = self._index(split)["targets"]
        return sum(chunk.offsets[-1].as_py() - chunk.offsets[0].as_py() for chunk in array.chunks)

    def origins(self, split: str) -> pa.Table:
        """Where each row came from, in index order: `source` (text), `line` (integer), with `data.id` `id` (text), a
        text column for each of `data.slices` (`slices` has these by their names)."""
        return self._open(f"rows-{split}.arrow")

    def slices(self, split: str) -> dict[str, pa.ChunkedArray]:
        """The rows' values of each of `data.slices`, in index order."""
        origins = self.origins(split)
        of = {f"{name}{SLICED}": name for name in ORIGINS}
        return {of.get(column, column): origins[column] for column in origins.column_names if column not in ORIGINS}

    def seen(self, split: str) -> npt.NDArray[np.bool_] | None:
        """Whether each held-out row is a training row too (`rtrain.data.contamination`); None where rows are blocks of
        text."""
        name = f"seen-{split}.arrow"
        if name not in self.manifest.files:
            return None
        column = self._open(name)["seen"]
        return column.to_numpy() if len(column) else np.empty(0, dtype=np.bool_)

    def keys(self, split: str) -> npt.NDArray[np.uint64]:
        """Hashes of the rows' texts as they are compared (`rtrain.data.contamination.key`), in index order; empty where
        rows are blocks of text."""
        shards, offsets = self.column(split, "shard"), self.column(split, "offset")
        found = np.empty(len(shards), dtype=np.uint64)
        for number in np.unique(shards).tolist():
            table, chosen = self._open(self._shards[number]), shards == number
            if "key" not in table.column_names:
                return np.empty(0, dtype=np.uint64)
            found[chosen] = table["key"].chunk(0).to_numpy()[offsets[chosen]]
        return found

    def truncated(self, split: str, positions: Ints) -> int:
        """How many of the rows at `positions` are longer than what was kept of them."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        found = 0
        for number in np.unique(shards).tolist():
            cut = self._open(self._shards[number])["truncated"].to_numpy(zero_copy_only=False)
            found += int(cut[offsets[shards == number]].sum())
        return found

    def texts(self, split: str, positions: Ints) -> list[tuple[str, str | None] | None]:
        """The first characters of the two texts of held-out rows, as they are written (`shards.KEPT_CHARACTERS`);
        None for a row that is trained on."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        return [self._kept(int(shard), int(offset)) for shard, offset in zip(shards, offsets, strict=True)]

    @lru_cache(maxsize=8)  # noqa: B019 - a store lives as long as its process
    def _written(self, number: int) -> pa.Table:
        return self._open(self._shards[number]).select(["text", "pair"])

    def _kept(self, shard: int, offset: int) -> tuple[str, str | None] | None:
        table = self._written(shard)
        text = table["text"][offset].as_py()
        return None if text is None else (text, table["pair"][offset].as_py())

    def places(self, split: str, positions: Ints) -> str:
        """Where rows come from, for a person: the first few by file and line."""
        rows = self.origins(split).take(sorted(positions)[:PLACES])
        found = [f"{row['source']}:{row['line']}" for row in rows.select(["source", "line"]).to_pylist()]
        more = len(positions) - len(found)
        return ", ".join(found) + (f" and {more} more rows" if more else "")

    @lru_cache(maxsize=SHARDS_OPEN)  # noqa: B019 - a store lives as long as its process
    def _shard(self, number: int) -> tuple[Int32s, Int32s, Int32s, Int32s]:
        """(tokens, offsets of each row's tokens, windows, offsets of each row's windows) of a shard.

        All four are views of the mapped file: copies of the offsets would take 130 KB for each open shard.
        """
        table = self._open(self._shards[number])
        ids, windows = table["ids"].chunk(0), table["windows"].chunk(0)
        return (*(part.to_numpy() for part in (ids.values, ids.offsets, windows.values, windows.offsets)),)

    def read(self, split: str, positions: Ints) -> Tokens:
        """The rows at `positions` of a split, in that order; without a teacher's outputs."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        parts: list[Int32s] = [np.empty(0, dtype=np.int32)]
        described: list[Int32s] = [np.empty(0, dtype=np.int32)]
        for shard, offset in zip(shards, offsets, strict=True):
            values, ends, windows, window_ends = self._shard(int(shard))
            parts.append(values[ends[offset] : ends[offset + 1]])
            described.append(windows[window_ends[offset] : window_ends[offset + 1]])
        lengths, second = np.concatenate(described).reshape(-1, 2).T
        targets = self.targets(split, positions)
        return Tokens(
            ids=np.concatenate(parts),
            lengths=np.ascontiguousarray(lengths),
            second=np.ascontiguousarray(second),
            windows=np.fromiter((len(row) // 2 for row in described[1:]), dtype=np.int32, count=len(positions)),
            targets=targets.values,
            counts=targets.counts,
            row_ids=self.column(split, "row_id")[positions],
            teacher=np.empty((len(positions), 0), dtype=np.float32),
            unlabelled=positions >= self.labelled(split) if self.labelled(split) < self.rows(split) else None,
        )

    def teacher_file(self, version: str) -> Path:
        """The file of a teacher's outputs for the training rows, in index order: [rows or tokens, outputs].

        It fits this store alone, since the store's digest pins the rows.
        """
        return self.folder / f"teacher-{version}.npy"

    def taught(self, version: str, positions: Ints) -> Floats:
        """The teacher's outputs for the training rows at `positions`: [rows or their tokens, outputs]."""
        answers = self.teacher(version)
        if len(answers) == self.rows("train"):
            return answers[positions]
        return answers[self.token_places(positions)]

    def token_places(self, positions: Ints) -> Ints:
        """Where the tokens of the training rows at `positions` stand among the tokens of all training rows, row after
        row."""
        lengths = self.column("train", "length")
        known, firsts = self._tokens_before[positions // SUMMED_ROWS], positions // SUMMED_ROWS * SUMMED_ROWS
        rest = [lengths[first:position].sum(dtype=np.int64) for first, position in zip(firsts, positions, strict=True)]
        return ranges(known + np.array(rest, dtype=np.int64), lengths[positions])

    @cached_property
    def _tokens_before(self) -> Ints:
        """How many tokens come before training rows 0, `SUMMED_ROWS`, 2 `SUMMED_ROWS`, and so on."""
        lengths = self.column("train", "length")
        whole = lengths[: len(lengths) // SUMMED_ROWS * SUMMED_ROWS].reshape(-1, SUMMED_ROWS)
        return np.concatenate([[0], np.cumsum(whole.sum(axis=1, dtype=np.int64))])

    @lru_cache(maxsize=4)  # noqa: B019 - as above
    def teacher(self, version: str) -> Floats:
        """All of a teacher's outputs (`teacher_file`), memory-mapped. Raises `UserError` if there are none."""
        try:
            found: Floats = np.load(self.teacher_file(version), mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise UserError(
                f"{self.folder} has no answers of teacher {version}; run `rtrain distill` on the teacher's run again",
                code="not_found",
            ) from None
        return found


@lru_cache(maxsize=8)
def open_store(folder: Path) -> Store:
    """The store of a folder, opened once per process, since a process runs hundreds of data tasks."""
    return Store(folder)


def _read_manifest(folder: Path) -> Manifest:
    try:
        document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.exists():
            raise UserError(
                f"the token store {folder} is gone: it was removed, or lies on the machine where the run was trained; "
                "a training on the same rows with the same settings makes it again",
                code="not_found",
            ) from None
        raise UserError(
            f"{folder} is no finished token store (no manifest.json); remove what is left of it, and train again",
            code="unfinished_store",
        ) from None
    except ValueError:
        raise _damaged(folder, "manifest.json", "is not readable") from None
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder} is of another version of rtrain; remove the folder and train again", code="other_version"
        )
    if document.pop("sha256", None) != _digest(document):
        raise _damaged(folder, "manifest.json", "does not match its SHA-256")
    document["labels"] = tuple(document["labels"])
    return Manifest(**document)


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own content: training reads labels and counts of rows from it."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _damaged(folder: Path, name: str, wrong: str) -> UserError:
    return UserError(
        f"{folder / name} {wrong}: the token store was changed after it was made. "
        f"Remove the folder {folder}; the next start makes it again from the source.",
        code="damaged_store",
    )


def map_table(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped."""
    with pa.memory_map(str(path)) as source:
        return pyarrow.ipc.open_file(source).read_all()


def lists(rows: Ragged) -> pa.ListArray | pa.LargeListArray:
    """A column of lists; with offsets of 64 bits if it has more than `MOST_VALUES` values."""
    large = rows.counts.sum(dtype=np.int64) > MOST_VALUES
    offsets = np.zeros(len(rows) + 1, dtype=np.int64 if large else np.int32)
    np.cumsum(rows.counts, dtype=offsets.dtype, out=offsets[1:])
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(pa.array(offsets), pa.array(rows.values))


def ragged(column: pa.ListArray | pa.LargeListArray, positions: Ints | None = None) -> Ragged:
    """The lists at `positions` (None: all) of a column that `lists` made."""
    ends, values = column.offsets.to_numpy(), column.values.to_numpy()
    if positions is None:
        return Ragged(values[ends[0] : ends[-1]], np.diff(ends).astype(np.int32, copy=False))
    starts = ends[positions].astype(np.int64)
    counts = (ends[positions + 1] - starts).astype(np.int32)
    return Ragged(values[ranges(starts, counts)], counts)


def write_table(path: Path, table: pa.Table) -> Entry:
    """Write a table as one uncompressed record batch, which a reader can map without copying. Returns the file's entry
    for a manifest."""
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return entry(path)


class Writer:
    """Makes a store in a draft folder beside its final name, and moves it there when it is complete.

    An interrupted job therefore leaves no half store.
    """

    def __init__(self, final: Path):
        atomic_write.sweep(final)
        self.final = final
        self._draft = atomic_write.Draft(final)
        self.folder = self._draft.folder
        (self.folder / "shards").mkdir()

    def commit(self, manifest: Manifest) -> Store:
        """Write the manifest and move the store to its final name; returns it, opened from there."""
        document = asdict(manifest)
        text = json.dumps({**document, "sha256": _digest(document)}, indent=1, ensure_ascii=False)
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")
        try:
            atomic_write.publish_folder(self.folder, self.final)
        except OSError:
            # Another run has made the same store meanwhile. Both hold the same rows, since the name is their digest.
            if not (self.final / "manifest.json").is_file():
                raise
            self.abandon()
        else:
            (self.final / atomic_write.LOCK).unlink()
            self._draft.release()
        return Store(self.final)

    def abandon(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._draft.release()
