"""A piece of the source -> shards: its rows read, judged, split, copied and tokenised. One data task does one piece.

A shard is a table of up to `SHARD_ROWS` rows. The commit (`rtrain.data.store.commit`) makes a store of all shards.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rtrain.config import Recipe
from rtrain.core.manifest import Entry
from rtrain.core.ragged import Encoded, Head, Ragged
from rtrain.data import contamination, packing, row_reader
from rtrain.data.augment import rewriting, variants
from rtrain.data.readers.values import printable
from rtrain.data.sources import file_ranges
from rtrain.data.sources.find import Piece
from rtrain.data.splits import Splits, content_hashes
from rtrain.data.store import read_tasks, store
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, reading_of

SHARD_ROWS = 8192
SPLIT_CODES = {name: code for code, name in enumerate(store.SPLITS)}
"""The number of each split in a shard's column `split`."""
HELD_OUT = (SPLIT_CODES["valid"], SPLIT_CODES["test"])
BAD = 255
"""In that column: the row cannot be used, and goes into quarantine."""
LEFT_OUT = 254
"""In that column: a training row of the label `data.outside`, which is sound and is not trained on."""
KEPT_CHARACTERS = 2000
"""Most characters that are kept of each text of a row that is not trained on: for people, who read its answer."""
SLICE = "slice:"
"""The shards' columns for `data.slices` begin with this."""


@dataclass(frozen=True)
class Job:
    """What a data task needs to turn a piece into shards; it travels to the task, so it must be small."""

    recipe: Recipe
    model: Path
    """The folder that holds the tokenizer."""
    folder: Path
    """The draft of the store."""
    splits: Splits
    head: Head | None = None
    """The head of the labelled rows, where the piece's rows have no labels (`rtrain.data.unlabeled`)."""


def write_piece(row: dict[str, Any], job: Job) -> Iterator[dict[str, Any]]:
    """Write the shards of one of `pieces.tasks`; gives the `number`, `shard` (name) and manifest `entry` of each.

    Shards are hashed here and not at the commit, since the data tasks run in parallel. A last row without a name says
    that the bytes read are not those that the store's address is made from.
    """
    (piece, part), total = read_tasks.read(row), hashlib.sha256()
    try:
        for name, entry in _shards(row["number"], piece, part, job, total):
            yield {"number": row["number"], "shard": name, "entry": entry}
        found = total.hexdigest()
    except Exception:  # a file that is changed while it is read can raise anything
        found = file_ranges.sha256(piece.uri, piece.format, part)
        if found == row["sha256"]:
            raise
    if found != row["sha256"]:
        yield {"number": row["number"], "shard": "", "entry": Entry(size=0, sha256=found)}


def _shards(
    number: int, piece: Piece, part: file_ranges.Part, job: Job, total: "hashlib._Hash"
) -> Iterator[tuple[str, Entry]]:
    task = base.get(job.recipe.task)
    tokenizer = tokenizer_of(job.recipe, job.model)
    rows = row_reader.read(piece, job.recipe.data, part, total)
    if (head := job.head) is not None:
        rows = (row._replace(label=task.stand_in(row.text, head)) for row in rows)
    if task.packs:
        where = partial(job.splits.split, role=piece.role)
        rows = packing.packed(rows, tokenizer, job.recipe.data.window_tokens, where)
    rewritten = rewriting.read(job.folder, number)
    stem = f"{number:06d}" if part == file_ranges.WHOLE else f"{number:06d}-{part.start:015d}"
    for place in itertools.count():
        batch = list(itertools.islice(rows, SHARD_ROWS))
        if not batch:
            return
        name = f"{stem}-{place:06d}.arrow"
        table = _encode(batch, piece.role, job, task, tokenizer, rewritten)
        yield name, store.write_table(job.folder / "shards" / name, table)


def tokenizer_of(recipe: Recipe, model: Path) -> Any:
    """The tokenizer of a model folder, set to cut texts as the recipe's task reads them."""
    task = base.get(recipe.task)
    reading = reading_of(task, recipe.data)
    return load_tokenizer(model, reading.max_tokens, reading.stride, reads_special=task.reads_special)


_NOTHING = Encoded([], [], False, [])


class _Row(NamedTuple):
    record: row_reader.Record
    content: int
    """Hash of texts and label. A copy has the hash of its row's hash and its own number."""
    split: int
    """A code of `SPLIT_CODES`, `BAD` or `LEFT_OUT`."""
    copy: bool = False


def texts_to_rewrite(row: dict[str, Any], job: Job) -> Iterator[tuple[int, str]]:
    """(hash of the content, text) of each training row of a piece."""
    piece, task = Piece(*row["piece"]), base.get(job.recipe.task)
    for record in row_reader.read(piece, job.recipe.data):
        placed = _placed(judged(record, task), piece.role, job)
        if placed.split == SPLIT_CODES["train"]:
            yield placed.content, record.text


def _placed(record: row_reader.Record, role: str, job: Job) -> _Row:
    """The row with its split; `role` is that of its file."""
    _, whole = content_hashes(record)
    if record.reason is not None:
        return _Row(record, whole, BAD)
    split = SPLIT_CODES[job.splits.split(record, role)]
    left_out = split == SPLIT_CODES["train"] and record.label == job.recipe.data.outside
    return _Row(record, whole, LEFT_OUT if left_out else split)


def _augmented(
    rows: list[_Row], role: str, job: Job, task: base.Task, tokenizer: Any, rewritten: dict[int, list[str]]
) -> list[_Row]:
    """The rows of a batch, and behind them the copies of its training rows.

    `rewritten`: what a model has made of each text, by the hash of the row's content.
    """
    settings = job.recipe.augment
    if not settings.active:
        return rows
    noise = variants.noise_of(settings, tokenizer)

    def allowed(copy: row_reader.Record) -> bool:
        return job.splits.split(copy, role) == "train" and base.flaw_of(task, copy.text, copy.pair, copy.label) is None

    found = list(rows)
    for row in rows:
        if row.split == SPLIT_CODES["train"]:
            texts = rewritten.get(row.content, [])
            made = variants.copies(row.record, row.content, settings, noise, task.varies, texts, allowed)
            found += [_Row(record, content, row.split, True) for record, content in made]
    return found


def _encode(
    read: list[row_reader.Record], role: str, job: Job, task: base.Task, tokenizer: Any, rewritten: dict[int, list[str]]
) -> pa.Table:
    """A batch of records of one file -> the table of a shard.

    Bad rows stay in the table, without tokens: the commit counts them and moves them into quarantine.
    """
    data = job.recipe.data
    rows = [_placed(judged(record, task), role, job) for record in read]
    rows = _augmented(rows, role, job, task, tokenizer, rewritten)
    batch = [row.record for row in rows]
    originals, copies = (
        [row.record for row in rows if row.copy == made and row.split != BAD] for made in (False, True)
    )
    tokens = itertools.chain(
        _tokens(originals, job, task, tokenizer), _tokens(copies, job, task, tokenizer, is_copy=True)
    )
    encoded = [next(tokens) if record.reason is None else _NOTHING for record in batch]
    marks = [
        task.marks(record.text, record.pair, record.label, row) if record.reason is None else []
        for record, row in zip(batch, encoded, strict=True)
    ]
    further = {
        SLICE + name: pa.array([record.slices[place] if record.slices else "" for record in batch])
        for place, name in enumerate(data.slices)
    }
    if data.id is not None:
        further["id"] = pa.array([record.id for record in batch])
    if not task.packs:  # blocks of text are cut by the texts before them, and so repeat nothing as a whole
        further["key"] = pa.array([contamination.key(record) for record in batch], pa.uint64())
    kept = [row.split in HELD_OUT for row in rows]
    return pa.table(
        {
            "ids": _lists([row.ids for row in encoded]),
            "windows": _lists([[number for window in row.windows for number in window] for row in encoded]),
            "marks": _lists(marks),
            "length": pa.array([len(row.ids) for row in encoded], pa.int32()),
            "truncated": pa.array([row.truncated for row in encoded]),
            "content": pa.array([row.content for row in rows], pa.uint64()),
            "split": pa.array([row.split for row in rows], pa.uint8()),
            "copy": pa.array([row.copy for row in rows]),
            "label": pa.array([printable(record.label) for record in batch]),
            "line": pa.array([record.line for record in batch], pa.int64()),
            "reason": pa.array([record.reason for record in batch], pa.string()),
            "text": _kept([record.text for record in batch], kept),
            "pair": _kept([record.pair for record in batch], kept),
            **further,
        }
    )


def _tokens(
    rows: list[row_reader.Record], job: Job, task: base.Task, tokenizer: Any, *, is_copy: bool = False
) -> list[Encoded]:
    """The tokens of sound rows. The masks of copies (`augment.mask`) are names of a special token in their texts."""
    data = job.recipe.data
    pairs = None if data.text_pair is None else [row.pair or "" for row in rows]
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = before and not (is_copy and job.recipe.augment.mask)
    encoded = task.encode(tokenizer, [row.text for row in rows], pairs, reading_of(task, data).max_windows)
    tokenizer.encode_special_tokens = before
    return encoded


def _kept(texts: Sequence[str | None], kept: Sequence[bool]) -> pa.Array:
    """The first characters of the texts that are kept, as they are written; null for the others."""
    pairs = zip(texts, kept, strict=True)
    return pa.array(
        [printable(text[:KEPT_CHARACTERS]) if keep and text is not None else None for text, keep in pairs], pa.string()
    )


def judged(record: row_reader.Record, task: base.Task) -> row_reader.Record:
    """The record, with the reason if the task cannot use it."""
    if record.reason is not None or (flaw := base.flaw_of(task, record.text, record.pair, record.label)) is None:
        return record
    return record._replace(reason=flaw)


def _lists(rows: list[list[int]]) -> pa.ListArray:
    return store.lists(Ragged.of(rows, np.int32))
