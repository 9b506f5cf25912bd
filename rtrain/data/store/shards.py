"""A source file, or a part of it -> shards: rows are read, validated, split, augmented and tokenized. One data task
each.

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
from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import EncodedRow, Head, RaggedArray
from rtrain.data import contamination, packing, row_reader
from rtrain.data.augment import rewriting, variants
from rtrain.data.readers.values import replace_surrogates
from rtrain.data.sources import file_ranges
from rtrain.data.sources.find import SourceFile
from rtrain.data.splits import Splits, hash_content
from rtrain.data.store import read_tasks, store
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, resolve_window_spec

SHARD_ROWS = 8192
SPLIT_CODES = {name: code for code, name in enumerate(store.SPLITS)}
"""The code of each split in a shard's column `split`."""
EVAL_CODES = (SPLIT_CODES["valid"], SPLIT_CODES["test"])
QUARANTINED_CODE = 255
"""In that column: the row is bad, and is quarantined."""
OUT_OF_SCOPE_CODE = 254
"""In that column: a training row of the label `data.out_of_scope_label`, which is valid and is not trained on."""
MAX_KEPT_CHARACTERS = 2000
"""Most characters that are stored of each text of an evaluation row, for reports."""
SLICE_PREFIX = "slice:"
"""The shards' columns for `data.slices` begin with this."""


@dataclass(frozen=True)
class TokenizeJob:
    """Arguments of a data task that writes shards; serialized to each task, so it must be small."""

    recipe: Recipe
    model: Path
    """The folder with the tokenizer."""
    folder: Path
    """The draft of the store."""
    splits: Splits
    head: Head | None = None
    """The head of the labeled rows, if the source's rows are unlabeled (`rtrain.data.unlabeled`)."""


def write_shards(task_row: dict[str, Any], job: TokenizeJob) -> Iterator[dict[str, Any]]:
    """Write the shards of one of `read_tasks.plan_tasks`; yields the `number`, `shard` (name) and manifest `entry`
    of each.

    Shards are hashed here and not at the commit, since the data tasks run in parallel. A last entry without a name
    reports that the file's bytes differ from the digest in the store's address.
    """
    (source_file, part), hasher = read_tasks.parse_task(task_row), hashlib.sha256()
    try:
        for name, entry in _iter_shards(task_row["number"], source_file, part, job, hasher):
            yield {"number": task_row["number"], "shard": name, "entry": entry}
        actual_sha256 = hasher.hexdigest()
    except Exception:  # a file that is changed during reading can raise anything
        actual_sha256 = file_ranges.hash_part(source_file.uri, source_file.format, part)
        if actual_sha256 == task_row["sha256"]:
            raise
    if actual_sha256 != task_row["sha256"]:
        yield {"number": task_row["number"], "shard": "", "entry": FileEntry(size=0, sha256=actual_sha256)}


def _iter_shards(
    number: int, source_file: SourceFile, part: file_ranges.FilePart, job: TokenizeJob, hasher: "hashlib._Hash"
) -> Iterator[tuple[str, FileEntry]]:
    task = base.get_task(job.recipe.task)
    tokenizer = load_task_tokenizer(job.recipe, job.model)
    rows = row_reader.read_rows(source_file, job.recipe.data, part, hasher)
    if (head := job.head) is not None:
        rows = (row._replace(label=task.placeholder_label(row.text, head)) for row in rows)
    if task.packs_text:
        assign_split = partial(job.splits.assign_split, role=source_file.role)
        rows = packing.pack_documents(rows, tokenizer, job.recipe.data.window_tokens, assign_split)
    rewritten_texts = rewriting.read_rewritten(job.folder, number)
    stem = f"{number:06d}" if part == file_ranges.WHOLE_FILE else f"{number:06d}-{part.start:015d}"
    for shard_number in itertools.count():
        batch = list(itertools.islice(rows, SHARD_ROWS))
        if not batch:
            return
        name = f"{stem}-{shard_number:06d}.arrow"
        table = _encode_shard(batch, source_file.role, job, task, tokenizer, rewritten_texts)
        yield name, store.write_table(job.folder / "shards" / name, table)


def load_task_tokenizer(recipe: Recipe, model: Path) -> Any:
    """The tokenizer of a model folder, set to the windows of the recipe's task."""
    task = base.get_task(recipe.task)
    window_spec = resolve_window_spec(task, recipe.data)
    return load_tokenizer(
        model, window_spec.max_tokens, window_spec.stride, parses_special_tokens=task.parses_special_tokens
    )


_EMPTY_ENCODED = EncodedRow([], [], False, [])


class _ShardRow(NamedTuple):
    source_row: row_reader.SourceRow
    content: int
    """Hash of texts and label. A copy has the hash of its row's hash and its own number."""
    split: int
    """A code of `SPLIT_CODES`, `QUARANTINED_CODE` or `OUT_OF_SCOPE_CODE`."""
    is_copy: bool = False


def iter_texts_to_rewrite(task_row: dict[str, Any], job: TokenizeJob) -> Iterator[tuple[int, str]]:
    """(content hash, text) of each training row of a file."""
    source_file, task = SourceFile(*task_row["file"]), base.get_task(job.recipe.task)
    for source_row in row_reader.read_rows(source_file, job.recipe.data):
        shard_row = _assign_split(validate_source_row(source_row, task), source_file.role, job)
        if shard_row.split == SPLIT_CODES["train"]:
            yield shard_row.content, source_row.text


def _assign_split(source_row: row_reader.SourceRow, role: str, job: TokenizeJob) -> _ShardRow:
    """The row with its split; `role` is that of its file."""
    _, content_hash = hash_content(source_row)
    if source_row.reason is not None:
        return _ShardRow(source_row, content_hash, QUARANTINED_CODE)
    split = SPLIT_CODES[job.splits.assign_split(source_row, role)]
    is_out_of_scope = split == SPLIT_CODES["train"] and source_row.label == job.recipe.data.out_of_scope_label
    return _ShardRow(source_row, content_hash, OUT_OF_SCOPE_CODE if is_out_of_scope else split)


def _augment(
    rows: list[_ShardRow],
    role: str,
    job: TokenizeJob,
    task: base.Task,
    tokenizer: Any,
    rewritten_texts: dict[int, list[str]],
) -> list[_ShardRow]:
    """The rows of a batch, followed by the copies of its training rows.

    `rewritten_texts`: a model's variants of each text, by the content hash of its row.
    """
    settings = job.recipe.augment
    if not settings.is_active:
        return rows
    noise = variants.make_noise(settings, tokenizer)

    def is_allowed(copy: row_reader.SourceRow) -> bool:
        return (
            job.splits.assign_split(copy, role) == "train"
            and base.validate_task_row(task, copy.text, copy.pair, copy.label) is None
        )

    all_rows = list(rows)
    for row in rows:
        if row.split == SPLIT_CODES["train"]:
            texts = rewritten_texts.get(row.content, [])
            row_copies = variants.make_copies(
                row.source_row, row.content, settings, noise, task.augmentable, texts, is_allowed
            )
            all_rows += [_ShardRow(source_row, content, row.split, True) for source_row, content in row_copies]
    return all_rows


def _encode_shard(
    source_rows: list[row_reader.SourceRow],
    role: str,
    job: TokenizeJob,
    task: base.Task,
    tokenizer: Any,
    rewritten_texts: dict[int, list[str]],
) -> pa.Table:
    """A batch of rows of one file -> the table of a shard.

    Bad rows stay in the table, without tokens: the commit counts and quarantines them.
    """
    data = job.recipe.data
    rows = [_assign_split(validate_source_row(source_row, task), role, job) for source_row in source_rows]
    rows = _augment(rows, role, job, task, tokenizer, rewritten_texts)
    batch = [row.source_row for row in rows]
    originals, copies = (
        [row.source_row for row in rows if row.is_copy == is_copy and row.split != QUARANTINED_CODE]
        for is_copy in (False, True)
    )
    tokens = itertools.chain(
        _tokenize(originals, job, task, tokenizer), _tokenize(copies, job, task, tokenizer, is_copy=True)
    )
    encoded = [next(tokens) if source_row.reason is None else _EMPTY_ENCODED for source_row in batch]
    target_positions = [
        task.target_positions(source_row.text, source_row.pair, source_row.label, row)
        if source_row.reason is None
        else []
        for source_row, row in zip(batch, encoded, strict=True)
    ]
    extra_columns = {
        SLICE_PREFIX + name: pa.array([source_row.slices[index] if source_row.slices else "" for source_row in batch])
        for index, name in enumerate(data.slices)
    }
    if data.id is not None:
        extra_columns["id"] = pa.array([source_row.id for source_row in batch])
    if not task.packs_text:  # block borders depend on the texts before them, so equal texts give no equal blocks
        extra_columns["text_key"] = pa.array(
            [contamination.compute_text_key(source_row) for source_row in batch], pa.uint64()
        )
    keep_text = [row.split in EVAL_CODES for row in rows]
    return pa.table(
        {
            "ids": _make_list_column([row.ids for row in encoded]),
            "windows": _make_list_column([[number for window in row.windows for number in window] for row in encoded]),
            "target_positions": _make_list_column(target_positions),
            "length": pa.array([len(row.ids) for row in encoded], pa.int32()),
            "truncated": pa.array([row.is_truncated for row in encoded]),
            "content": pa.array([row.content for row in rows], pa.uint64()),
            "split": pa.array([row.split for row in rows], pa.uint8()),
            "copy": pa.array([row.is_copy for row in rows]),
            "label": pa.array([replace_surrogates(source_row.label) for source_row in batch]),
            "line": pa.array([source_row.line for source_row in batch], pa.int64()),
            "reason": pa.array([source_row.reason for source_row in batch], pa.string()),
            "text": _truncate_texts([source_row.text for source_row in batch], keep_text),
            "pair": _truncate_texts([source_row.pair for source_row in batch], keep_text),
            **extra_columns,
        }
    )


def _tokenize(
    rows: list[row_reader.SourceRow], job: TokenizeJob, task: base.Task, tokenizer: Any, *, is_copy: bool = False
) -> list[EncodedRow]:
    """The tokens of valid rows. Masks in copies (`augment.mask`) are the name of a special token in their texts."""
    data = job.recipe.data
    pairs = None if data.text_pair is None else [row.pair or "" for row in rows]
    original_setting = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = original_setting and not (is_copy and job.recipe.augment.mask)
    encoded = task.encode(tokenizer, [row.text for row in rows], pairs, resolve_window_spec(task, data).max_windows)
    tokenizer.encode_special_tokens = original_setting
    return encoded


def _truncate_texts(texts: Sequence[str | None], keep_text: Sequence[bool]) -> pa.Array:
    """The first characters of the texts to keep, verbatim; null for the others."""
    pairs = zip(texts, keep_text, strict=True)
    return pa.array(
        [replace_surrogates(text[:MAX_KEPT_CHARACTERS]) if keep and text is not None else None for text, keep in pairs],
        pa.string(),
    )


def validate_source_row(source_row: row_reader.SourceRow, task: base.Task) -> row_reader.SourceRow:
    """The row, with a reason if the task cannot use it."""
    if (
        source_row.reason is not None
        or (reason := base.validate_task_row(task, source_row.text, source_row.pair, source_row.label)) is None
    ):
        return source_row
    return source_row._replace(reason=reason)


def _make_list_column(rows: list[list[int]]) -> pa.ListArray:
    return store.make_list_column(RaggedArray.from_rows(rows, np.int32))
