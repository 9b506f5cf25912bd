"""A source file, or a part of it -> shards: rows are read, packed, validated, split, augmented and tokenized. One data
task each.

A shard is a table of up to `SHARD_ROWS` rows. The commit (`rtrain.data.store.commit`) makes a store of all shards.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rtrain.config import Recipe
from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import EncodedRow, Head, RaggedArray
from rtrain.data import augment, file_ranges, paraphrase, row_reader
from rtrain.data.readers.tabular import replace_surrogates
from rtrain.data.row_reader import DataSource, SourceRow
from rtrain.data.sources import SourceFile
from rtrain.data.splits import Splits, compute_text_key, hash_content
from rtrain.data.store import store
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
SPLIT_HASH, STRATUM = "split_hash", "stratum"
"""The shards' columns with `data.folds`: hash and stratum of a row, which decide its split."""


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
    of each, and counts of rows (`row_reader.ReadCounts`).

    Shards are hashed here and not at the commit, since the data tasks run in parallel. A last entry without a name
    reports that the file's bytes differ from the digest in the store's address.
    """
    (source_file, part), hasher = parse_task(task_row), hashlib.sha256()
    number, counts, no_counts = task_row["number"], row_reader.ReadCounts(), asdict(row_reader.ReadCounts())
    try:
        for name, entry in _iter_shards(task_row, job, hasher, counts):
            yield {"number": number, "shard": name, "entry": entry, **no_counts}
        if counts != row_reader.ReadCounts():
            yield {"number": number, "shard": "", "entry": None, **asdict(counts)}
        actual_sha256 = hasher.hexdigest()
    except Exception:  # a file that is changed during reading can raise anything
        actual_sha256 = file_ranges.hash_part(source_file.uri, source_file.format, part)
        if actual_sha256 == task_row["sha256"]:
            raise
    if actual_sha256 != task_row["sha256"]:
        yield {"number": number, "shard": "", "entry": FileEntry(size=0, sha256=actual_sha256), **no_counts}


def _iter_shards(
    task_row: dict[str, Any], job: TokenizeJob, hasher: "hashlib._Hash", counts: row_reader.ReadCounts
) -> Iterator[tuple[str, FileEntry]]:
    number, (source_file, part) = task_row["number"], parse_task(task_row)
    encoder = _FileEncoder(job, source_file.role, paraphrase.read_rewritten(job.folder, number))
    task = encoder.task
    rows = row_reader.read_rows(source_file, job.recipe.data, part, hasher, counts)
    if (head := job.head) is not None:
        rows = (row._replace(label=task.placeholder_label(row.text, head)) for row in rows)
    if task.packs_text:
        assign_split = partial(job.splits.assign_split, role=source_file.role)
        rows = pack_documents(rows, encoder.tokenizer, job.recipe.data.window_tokens, assign_split)
    stem = f"{number:06d}" if part == file_ranges.WHOLE_FILE else f"{number:06d}-{part.start:015d}"
    for shard_number in itertools.count():
        batch = list(itertools.islice(rows, SHARD_ROWS))
        if not batch:
            return
        name = f"{stem}-{shard_number:06d}.arrow"
        yield name, store.write_table(job.folder / "shards" / name, encoder.encode_shard(batch))


def iter_texts_to_rewrite(task_row: dict[str, Any], job: TokenizeJob) -> Iterator[tuple[int, str]]:
    """(content hash, text) of each training row of a file."""
    source_file = SourceFile(*task_row["file"])
    encoder = _FileEncoder(job, source_file.role)
    for source_row in row_reader.read_rows(source_file, job.recipe.data):
        shard_row = encoder.assign_split(source_row)
        if shard_row.split == SPLIT_CODES["train"]:
            yield shard_row.content, source_row.text


def load_task_tokenizer(recipe: Recipe, model: Path) -> Any:
    """The tokenizer of a model folder, set to the windows of the recipe's task."""
    task = base.get_task(recipe.task)
    window_spec = resolve_window_spec(task, recipe.data)
    limits = (window_spec.max_tokens, window_spec.stride)
    return load_tokenizer(model, *limits, parses_special_tokens=task.parses_special_tokens)


class _ShardRow(NamedTuple):
    source_row: row_reader.SourceRow
    content: int
    """Hash of texts and label. A copy has the hash of its row's hash and its own number."""
    split: int
    """A code of `SPLIT_CODES`, `QUARANTINED_CODE` or `OUT_OF_SCOPE_CODE`."""
    is_copy: bool = False


class _FileEncoder:
    """Makes the tables of the shards of one file."""

    def __init__(self, job: TokenizeJob, role: str, rewritten_texts: Mapping[int, list[str]] = MappingProxyType({})):
        """`role` is that of the file; `rewritten_texts`: a model's variants of each text, by its row's content hash."""
        self.task = base.get_task(job.recipe.task)
        self._job = job
        self._role = role
        self._rewritten_texts = rewritten_texts

    @cached_property
    def tokenizer(self) -> Any:
        return load_task_tokenizer(self._job.recipe, self._job.model)

    def assign_split(self, source_row: row_reader.SourceRow) -> _ShardRow:
        """The checked row with its split."""
        source_row = validate_source_row(source_row, self.task)
        _, content_hash = hash_content(source_row)
        if source_row.reason is not None:
            return _ShardRow(source_row, content_hash, QUARANTINED_CODE)
        split = SPLIT_CODES[self._job.splits.assign_split(source_row, self._role)]
        if split == SPLIT_CODES["train"] and source_row.label == self._job.recipe.data.out_of_scope_label:
            split = OUT_OF_SCOPE_CODE
        return _ShardRow(source_row, content_hash, split)

    def encode_shard(self, source_rows: list[row_reader.SourceRow]) -> pa.Table:
        """A batch of rows -> the table of a shard.

        Bad rows stay in the table, without tokens: the commit counts and quarantines them.
        """
        data = self._job.recipe.data
        rows = self._augment([self.assign_split(source_row) for source_row in source_rows])
        batch = [row.source_row for row in rows]
        originals, copies = (
            [row.source_row for row in rows if row.is_copy == is_copy and row.split != QUARANTINED_CODE]
            for is_copy in (False, True)
        )
        tokens = itertools.chain(self._tokenize(originals), self._tokenize(copies, is_copy=True))
        encoded, target_positions = [], []
        for row in batch:
            is_good = row.reason is None
            encoded.append(next(tokens) if is_good else EncodedRow([], [], False, []))
            positions = self.task.target_positions(row.text, row.pair, row.label, encoded[-1]) if is_good else []
            target_positions.append(positions)
        extra_columns = {
            SLICE_PREFIX + name: pa.array([row.slices[index] if row.slices else "" for row in batch])
            for index, name in enumerate(data.slices)
        }
        if data.weight_column is not None:
            extra_columns["weight"] = pa.array([row.weight for row in batch], pa.float64())
        if data.sampling is not None:
            extra_columns["sampling_value"] = pa.array([row.sampling_value for row in batch])
        if data.id is not None:
            extra_columns["id"] = pa.array([row.id for row in batch])
        if not self.task.packs_text:  # block borders depend on the texts before: equal texts give no equal blocks
            extra_columns["text_key"] = pa.array([compute_text_key(row) for row in batch], pa.uint64())
        keeps_folds = supports_fold_views(self._job.recipe)
        if keeps_folds:
            extra_columns[SPLIT_HASH] = pa.array([hash_content(row)[0] for row in batch], pa.uint64())
            extra_columns[STRATUM] = pa.array([replace_surrogates(row.stratum or "") for row in batch])
        keep_text = [keeps_folds or row.split in EVAL_CODES for row in rows]
        return pa.table(
            {
                "ids": _make_list_column([row.ids for row in encoded]),
                "windows": _make_list_column([list(itertools.chain(*row.windows)) for row in encoded]),
                "target_positions": _make_list_column(target_positions),
                "length": pa.array([len(row.ids) for row in encoded], pa.int32()),
                "truncated": pa.array([row.is_truncated for row in encoded]),
                "content": pa.array([row.content for row in rows], pa.uint64()),
                "split": pa.array([row.split for row in rows], pa.uint8()),
                "copy": pa.array([row.is_copy for row in rows]),
                "label": pa.array([replace_surrogates(row.label) for row in batch]),
                "line": pa.array([row.line for row in batch], pa.int64()),
                "reason": pa.array([row.reason for row in batch], pa.string()),
                "text": _truncate_texts([row.text for row in batch], keep_text),
                "pair": _truncate_texts([row.pair for row in batch], keep_text),
                **extra_columns,
            }
        )

    def _augment(self, rows: list[_ShardRow]) -> list[_ShardRow]:
        """The rows of a batch, followed by the copies of its training rows."""
        settings = self._job.recipe.augment
        if not settings.is_active:
            return rows
        noise = augment.make_noise(settings, self.tokenizer)
        maker = augment.CopyMaker(settings, noise, self.task.augmentable, self._is_training_row)
        all_rows = list(rows)
        for row in rows:
            if row.split == SPLIT_CODES["train"]:
                copies = maker.make_copies(row.source_row, row.content, self._rewritten_texts.get(row.content, ()))
                all_rows += [_ShardRow(copy, content, row.split, True) for copy, content in copies]
        return all_rows

    def _is_training_row(self, row: row_reader.SourceRow) -> bool:
        split = self._job.splits.assign_split(row, self._role)
        return split == "train" and base.validate_task_row(self.task, row.text, row.pair, row.label) is None

    def _tokenize(self, rows: list[row_reader.SourceRow], *, is_copy: bool = False) -> list[EncodedRow]:
        """The tokens of valid rows. Masks in copies (`augment.mask`) are the name of a special token in their texts."""
        recipe, tokenizer = self._job.recipe, self.tokenizer
        pairs = None if recipe.data.text_pair is None else [row.pair or "" for row in rows]
        max_windows = resolve_window_spec(self.task, recipe.data).max_windows
        original_setting = tokenizer.encode_special_tokens
        tokenizer.encode_special_tokens = original_setting and not (is_copy and recipe.augment.mask)
        encoded = self.task.encode(tokenizer, [row.text for row in rows], pairs, max_windows)
        tokenizer.encode_special_tokens = original_setting
        return encoded


def supports_fold_views(recipe: Recipe) -> bool:
    """Whether another fold may be a view of the same shards (`rtrain.data.store.fold_view`)."""
    return recipe.data.folds is not None and not (recipe.augment.is_active or base.get_task(recipe.task).packs_text)


def _truncate_texts(texts: Sequence[str | None], keep_text: Sequence[bool]) -> pa.Array:
    """The first characters of the texts to keep, verbatim; null for the others."""
    pairs = zip(texts, keep_text, strict=True)
    return pa.array(
        [replace_surrogates(text[:MAX_KEPT_CHARACTERS]) if keep and text is not None else None for text, keep in pairs],
        pa.string(),
    )


def validate_source_row(source_row: row_reader.SourceRow, task: base.Task) -> row_reader.SourceRow:
    """The row, with a reason if the task cannot use it."""
    if source_row.reason is not None:
        return source_row
    return source_row._replace(reason=base.validate_task_row(task, source_row.text, source_row.pair, source_row.label))


def _make_list_column(rows: list[list[int]]) -> pa.ListArray:
    return store.make_list_column(RaggedArray.from_rows(rows, np.int32))


# --------------------------------------------------------- the data tasks: each reads a file, or a part of a large file


def plan_tasks(source: DataSource) -> list[dict[str, Any]]:
    """One task for each file, with the SHA-256 of the bytes that it should find."""
    pairs, whole_file = zip(source.files, source.sha256s, strict=True), file_ranges.WHOLE_FILE._asdict()
    rows = [{"file": list(file), "sha256": sha256, **whole_file} for file, sha256 in pairs]
    return [{"number": number, **row} for number, row in enumerate(rows)]


def parse_task(task: dict[str, Any]) -> tuple[SourceFile, file_ranges.FilePart]:
    """The file of a task, and the part of it that the task reads."""
    return SourceFile(*task["file"]), file_ranges.FilePart(*(task[name] for name in file_ranges.FilePart._fields))


def should_split(task: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a task's file is read in parts: it is large, and its rows do not depend on the rows before them.

    Blocks of packed text and copies of rows depend on them. Files with escaped quotes are not split: row borders are
    not searched there.
    """
    if base.get_task(recipe.task).packs_text or recipe.augment.is_active:
        return False
    source_file, _ = parse_task(task)
    return not source_file.escape and file_ranges.is_large(source_file.uri, source_file.format)


def split_task(task: dict[str, Any], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The tasks for the parts of a file, or the task itself if the file is not cut."""
    if not should_split(task, recipe):
        yield task
        return
    source_file, _ = parse_task(task)
    for part, sha256 in file_ranges.split_file(
        source_file.uri, source_file.format, task["sha256"], source_file.delimiter
    ):
        yield {**task, "sha256": sha256, **part._asdict()}


# -------------------------------------------------------------------------------------------------- documents to blocks

SPECIAL_TOKENS = 2
"""Tokens that the tokenizer adds at the beginning and the end of a block."""
SEPARATOR = "\n\n"


def pack_documents(
    rows: Iterable[SourceRow], tokenizer: Any, max_tokens: int, split_of: Callable[[SourceRow], str]
) -> Iterator[SourceRow]:
    """Blocks of at most `max_tokens` tokens, in order; bad rows are passed through.

    A block takes its line and its `group` from its first document, so it has that document's split.
    """
    open_blocks: dict[str, tuple[SourceRow, int]] = {}  # by split: the block being filled, and its tokens
    block_capacity = max_tokens - SPECIAL_TOKENS
    for row in rows:
        if row.reason is not None:
            yield row
            continue
        split = split_of(row)
        group = row.text if row.group is None else row.group
        parts = split_document(row.text, tokenizer, block_capacity)
        if not parts:
            yield row._replace(reason="the model reads no token of it; write a text or remove the row")
        for text, tokens in parts:
            if split in open_blocks:
                block, filled = open_blocks[split]
                if filled + tokens <= block_capacity:
                    open_blocks[split] = block._replace(text=block.text + SEPARATOR + text), filled + tokens
                    continue
                yield block
            open_blocks[split] = row._replace(text=text, pair=None, group=group), tokens
    for block, _ in open_blocks.values():
        yield block


def split_document(text: str, tokenizer: Any, max_tokens: int) -> list[tuple[str, int]]:
    """Consecutive parts of a text of at most `max_tokens` tokens, cut where a word begins: (text, number of tokens) of
    each."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    # The tokenizer cuts into windows that overlap by `stride`, which is 0 here.
    spans = [span for window in [encoding, *encoding.overflowing] for span in window.offsets]
    parts, first = [], 0
    while first < len(spans):
        last = min(first + max_tokens, len(spans))
        if last < len(spans):
            # Cut at the beginning of a word. A word longer than half a block is cut inside.
            cuts = range(last, first + max_tokens // 2, -1)
            last = next((cut for cut in cuts if _is_word_start(text, spans[cut][0])), last)
        end = spans[last][0] if last < len(spans) else len(text)
        part = text[spans[first][0] if first else 0 : end].strip()
        if part:
            parts.append((part, last - first))
        first = last
    return parts


def _is_word_start(text: str, position: int) -> bool:
    return position == 0 or text[position - 1].isspace() or text[position].isspace()
