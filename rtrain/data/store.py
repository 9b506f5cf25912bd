"""The token store: tokenised rows on the run storage, addressed by what made them. Read by every worker, without Ray.

<root>/.tokens/<digest>/
    manifest.json               written last: its presence means complete; size and SHA-256 of the next two
    index-{train,valid,test}.arrow   one line per row: row_id, shard, offset, length, target
    shards/<piece>-<part>.arrow      tokens (ids, second) and what the index was made from
    quarantine.parquet          bad rows: source, line, reason

A file is checked against its SHA-256 when a process first maps it: no row of a changed file is trained on, and a start
reads the index (28 bytes a row) and the shards that it needs, never the store as a whole.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from rtrain.data import drafts
from rtrain.errors import UserError
from rtrain.manifest import Entry, entry, flaw
from rtrain.tasks.base import Floats, Ints

SCHEMA_VERSION = 2
SPLITS = ("train", "valid", "test")
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Manifest:
    schema_version: int
    digest: str
    rows: dict[str, int]
    labels: tuple[str, ...]
    tokens: dict[str, int]
    truncated: int
    quarantined: int
    files: dict[str, Entry]
    """What training reads, by path in the folder: the indexes and, in the order of their numbers, the shards."""
    sources: dict[str, dict[str, str]]
    """SHA-256 of the files that it was made from: role, name, digest."""

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(name for name in self.files if name.startswith("shards/"))


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows without padding: `ids` are all rows' tokens one after another, `lengths` says where each ends."""

    ids: Int32s
    lengths: Int32s
    second: Int32s
    targets: Ints
    row_ids: npt.NDArray[np.uint64]
    teacher: Floats
    """A teacher's logits, [rows, outputs]; no columns where there is no teacher."""

    def __len__(self) -> int:
        return len(self.lengths)


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

    def check(self, *, size_only: bool) -> None:
        """Refuse a store that was changed; with `size_only`, one that shows it without a file being read."""
        for name in self.manifest.files:
            self._check(name, size_only)

    def _check(self, name: str, size_only: bool = False) -> None:
        if wrong := flaw(self.folder / name, self.manifest.files[name], size_only=size_only):
            raise _damaged(self.folder, name, wrong)

    def _open(self, name: str) -> pa.Table:
        """Map a file. Checked once: shards come and go by the thousand, and a hash reads the whole of one."""
        if name not in self._sound:
            self._check(name)
            self._sound.add(name)
        return _map(self.folder / name)

    def column(self, split: str, name: str) -> npt.NDArray[Any]:
        """A column of the index: `row_id` u64, `shard` u32, `offset` u32, `length` i32, `target` i64."""
        if split not in self._indexes:
            self._indexes[split] = self._open(f"index-{split}.arrow")
        array = self._indexes[split][name]
        return array.chunk(0).to_numpy(zero_copy_only=True) if array.num_chunks else np.empty(0, dtype=np.int64)

    # More shards than a window of the order has, also where small files make small shards.
    @lru_cache(maxsize=512)  # noqa: B019 - a store lives as long as its process
    def _shard(self, number: int) -> tuple[Int32s, npt.NDArray[np.int64], Int32s]:
        table = self._open(self._shards[number])
        ids = table["ids"].chunk(0)
        offsets = ids.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return ids.values.to_numpy(), offsets, table["second"].chunk(0).to_numpy()

    def read(self, split: str, positions: Ints) -> Tokens:
        """The rows at `positions`, in that order."""
        shards, offsets = self.column(split, "shard")[positions], self.column(split, "offset")[positions]
        parts: list[Int32s] = []
        second = np.empty(len(positions), dtype=np.int32)
        for place, (shard, offset) in enumerate(zip(shards, offsets, strict=True)):
            values, ends, seconds = self._shard(int(shard))
            parts.append(values[ends[offset] : ends[offset + 1]])
            second[place] = seconds[offset]
        return Tokens(
            ids=np.concatenate(parts) if parts else np.empty(0, dtype=np.int32),
            lengths=self.column(split, "length")[positions],
            second=second,
            targets=self.column(split, "target")[positions],
            row_ids=self.column(split, "row_id")[positions],
            teacher=np.empty((len(positions), 0), dtype=np.float32),
        )

    def teacher_file(self, version: str) -> Path:
        """Logits of the training rows, in index order, by that teacher. The store's digest pins the rows."""
        return self.folder / f"teacher-{version}.npy"

    @lru_cache(maxsize=4)  # noqa: B019 - as above
    def teacher(self, version: str) -> Floats:
        try:
            found: Floats = np.load(self.teacher_file(version), mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise UserError(
                f"{self.folder} has no answers of teacher {version}; run `rtrain distill` on the teacher's run again"
            ) from None
        return found


@lru_cache(maxsize=8)
def open_store(folder: Path) -> Store:
    """The store of a folder, opened once per process: data tasks come by the hundred."""
    return Store(folder)


def _read_manifest(folder: Path) -> Manifest:
    try:
        document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no finished token store (no manifest.json); remove what is left of it, and train again"
        ) from None
    except ValueError:
        raise _damaged(folder, "manifest.json", "is not readable") from None
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{folder} is of another version of rtrain; remove the folder and train again")
    if document.pop("sha256", None) != _digest(document):
        raise _damaged(folder, "manifest.json", "does not match its SHA-256")
    document["labels"] = tuple(document["labels"])
    return Manifest(**document)


def _digest(document: dict[str, Any]) -> str:
    """Of the manifest's own content: the labels and numbers of rows in it are trained on as well."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _damaged(folder: Path, name: str, wrong: str) -> UserError:
    return UserError(
        f"{folder / name} {wrong}: the token store was changed after it was made. "
        f"Remove the folder {folder}; the next start makes it again from the source."
    )


def _map(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pyarrow.ipc.open_file(source).read_all()


def write_table(path: Path, table: pa.Table) -> Entry:
    """One uncompressed record batch, so that a reader maps it without copying. Returns what a manifest says of it."""
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return entry(path)


class Writer:
    """Makes a store beside its final name and moves it there when complete: an interrupted job leaves no half store."""

    def __init__(self, final: Path):
        drafts.sweep(final)
        self.final = final
        self._draft = drafts.Draft(final)
        self.folder = self._draft.folder
        (self.folder / "shards").mkdir()

    def commit(self, manifest: Manifest) -> Store:
        document = asdict(manifest)
        text = json.dumps({**document, "sha256": _digest(document)}, indent=1, ensure_ascii=False)
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")
        try:
            self.folder.rename(self.final)
        except OSError:
            # Another run made the same store meanwhile; both hold the same rows, since the name is their digest.
            if not (self.final / "manifest.json").is_file():
                raise
            self.abandon()
        else:
            (self.final / drafts.LOCK).unlink()
            self._draft.release()
        return Store(self.final)

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._draft.release()


def padded(tokens: Tokens, pad_id: int) -> dict[str, npt.NDArray[Any]]:
    """The model's inputs, [rows, longest row]: input_ids, attention_mask, token_type_ids; all int64."""
    rows, width = len(tokens), int(tokens.lengths.max(initial=1))
    columns = np.arange(width)
    mask = columns[None, :] < tokens.lengths[:, None]
    ids = np.full((rows, width), pad_id, dtype=np.int64)
    ids[mask] = tokens.ids
    types = (columns[None, :] >= tokens.second[:, None]) & mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types.astype(np.int64)}


def pack(encoded: Sequence[tuple[list[int], int]]) -> tuple[Int32s, Int32s, Int32s]:
    """(ids, lengths, second) of encoded rows, in the form of `Tokens`."""
    lengths = np.fromiter((len(ids) for ids, _ in encoded), dtype=np.int32, count=len(encoded))
    second = np.fromiter((start for _, start in encoded), dtype=np.int32, count=len(encoded))
    ids = np.fromiter((token for ids, _ in encoded for token in ids), dtype=np.int32, count=int(lengths.sum()))
    return ids, lengths, second
