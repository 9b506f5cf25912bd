"""Rows -> token store: one Ray Data job that reads, checks, splits, tokenises and writes; then one commit."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain import drafts
from rtrain.batch import Encoded, Head, Ragged
from rtrain.config import Recipe
from rtrain.data import columns, packing, pieces, quarantine, records, refusals, store
from rtrain.data.augment import paraphrase, rewriting, variants
from rtrain.data.formats import digests, parts
from rtrain.data.formats.values import printable
from rtrain.data.splits import Splits, content_hashes
from rtrain.errors import Problem, UserError
from rtrain.manifest import Entry
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, reading_of

SHARD_ROWS = 8192
_SPLIT = {name: code for code, name in enumerate(store.SPLITS)}
_BAD = 255
_LEFT_OUT = 254
"""Training rows of the label `data.outside`: sound, and not trained on."""
SLICE = "slice:"
"""Before the name of a column of `data.slices`, in the shards."""


@dataclass(frozen=True)
class Job:
    """What one task needs to turn a piece into shards."""

    recipe: Recipe
    model: Path
    folder: Path
    splits: Splits


def digest(recipe: Recipe, source: records.Source, model: Path) -> str:
    """Address of the store: the rows, the tokenizer and the settings that shape it, and nothing else."""
    data = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test", "max_bad_rows"})
    if recipe.data.outside is None:
        del data["outside"]
    settings = {"schema": store.SCHEMA_VERSION, "task": recipe.task, **data}
    if recipe.augment.active:
        models = [_model_digest(name) for name in (recipe.augment.paraphrase, recipe.augment.pivot) if name]
        settings["augment"] = {**recipe.augment.model_dump(mode="json"), "paraphrase": models, "pivot": None}
    made_of = source.digest(), digests.file_digest(str(model / "tokenizer.json")), json.dumps(settings, sort_keys=True)
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def _model_digest(name: str) -> str:
    """Of a folder's files, wherever it lies; a hub name stands for itself."""
    files = sorted(path for path in Path(name).glob("*") if path.suffix in (".json", ".safetensors", ".model"))
    return " ".join(digests.file_digest(str(path)) for path in files) or name


def problems(recipe: Recipe) -> list[Problem]:
    """What of the settings that shape the rows the recipe's task cannot do."""
    task = base.get(recipe.task)
    found = variants.problems(recipe, task)
    if recipe.data.outside is not None and not task.finds_outside:
        reason = f"{task.name} does not tell rows that belong to none of its labels"
        found.append(Problem("data.outside", recipe.data.outside, reason, "remove it"))
    return found


def origin(recipe: Recipe, source: records.Source, model: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file that is in the digest, by role and name: it tells which one made the digest another."""
    # By the name that the recipe gives it: the folder of a packaged or downloaded model differs between machines.
    tokenizer = f"tokenizer.json of {recipe.model.name}"
    files = {"tokenizer": {tokenizer: digests.file_digest(str(model / "tokenizer.json"))}}
    for piece, sha256 in zip(source.pieces, source.sha256s, strict=True):
        files.setdefault(piece.role, {})[piece.uri.removeprefix("file://")] = sha256
    return files


def ensure(recipe: Recipe, source: records.Source, model: Path, root: Path) -> tuple[store.Store, bool]:
    """The token store of a recipe under `root`, and whether it had to be made. Needs Ray only to make it."""
    source = source.beside(root)
    final = root / ".tokens" / digest(recipe, source, model)
    if final.is_dir():
        found = store.Store(final)
        found.check(size_only=True)
        drafts.sweep(final)
        digests.remember(root, source.hashed)
        return found, False
    # Refused here, not inside a task: a folder without tokenizer, a model that cannot write.
    variants.noise_of(recipe.augment, _tokenizer(recipe, model))
    for name in (recipe.augment.paraphrase, recipe.augment.pivot):
        if name:
            paraphrase.check(name)
    writer = store.Writer(final)
    try:
        job = Job(recipe, model, writer.folder, Splits.of(recipe.data, source))
        made = _commit(job, source, writer, _run(job, source))
    except BaseException:
        writer.abandon()
        raise
    digests.remember(root, source.hashed)
    return made, True


def _run(job: Job, source: records.Source) -> list[dict[str, Any]]:
    """Write the shards with Ray Data, a task per file or part; what `_write_piece` says of each, in source order."""
    import ray.data

    tasks = pieces.tasks(source)
    if job.recipe.augment.paraphrase is not None:
        rewriting.run(tasks, partial(texts_to_rewrite, job=job), job.recipe.augment, job.folder)
    if any(pieces.is_cut(task, job.recipe) for task in tasks):
        whole = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        tasks = whole.flat_map(partial(pieces.cut, recipe=job.recipe)).take_all()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).flat_map(partial(_told, job=job))
    written = dataset.take_all()
    if errors := [row["error"] for row in written if row["error"]]:
        raise UserError(errors[0])
    return sorted(written, key=lambda row: str(row["shard"]))


def _told(row: dict[str, Any], job: Job) -> Iterator[dict[str, Any]]:
    """`_write_piece`; what a user can mend comes as data, since Ray would add a traceback and advice of its own."""
    try:
        yield from ({**written, "error": ""} for written in _write_piece(row, job))
    except UserError as error:
        yield {"number": row["number"], "shard": "", "entry": None, "error": str(error)}


def _write_piece(row: dict[str, Any], job: Job) -> Iterator[dict[str, Any]]:
    """Name and manifest entry of each shard once it is written; hashed here, since the tasks run in parallel.

    A last one without a name where the rows were read from other bytes than the store's address is made from.
    """
    (piece, part), total = pieces.read(row), hashlib.sha256()
    try:
        for name, entry in _shards(row["number"], piece, part, job, total):
            yield {"number": row["number"], "shard": name, "entry": entry}
        found = total.hexdigest()
    except Exception:  # whatever comes of a file that is half written
        found = parts.sha256(piece.uri, piece.format, part)
        if found == row["sha256"]:
            raise
    if found != row["sha256"]:
        yield {"number": row["number"], "shard": "", "entry": Entry(size=0, sha256=found)}


def _shards(
    number: int, piece: records.Piece, part: parts.Part, job: Job, total: "hashlib._Hash"
) -> Iterator[tuple[str, Entry]]:
    task = base.get(job.recipe.task)
    tokenizer = _tokenizer(job.recipe, job.model)
    rows = records.read(piece, job.recipe.data, part, total)
    if task.packs:
        where = partial(job.splits.split, role=piece.role)
        rows = packing.packed(rows, tokenizer, job.recipe.data.window_tokens, where)
    rewritten = rewriting.read(job.folder, number)
    stem = f"{number:06d}" if part == parts.WHOLE else f"{number:06d}-{part.start:015d}"
    for place in itertools.count():
        batch = list(itertools.islice(rows, SHARD_ROWS))
        if not batch:
            return
        name = f"{stem}-{place:06d}.arrow"
        table = _encode(batch, piece.role, job, task, tokenizer, rewritten)
        yield name, store.write_table(job.folder / "shards" / name, table)


def _tokenizer(recipe: Recipe, model: Path) -> Any:
    reading = reading_of(base.get(recipe.task), recipe.data)
    return load_tokenizer(model, reading.max_tokens, reading.stride)


NOTHING = Encoded([], [], False, [])


class _Row(NamedTuple):
    record: records.Record
    content: int
    """Hash of texts and label; of a copy, of its row's and its number."""
    split: int
    copy: bool = False


def texts_to_rewrite(row: dict[str, Any], job: Job) -> Iterator[tuple[int, str]]:
    """(hash of the content, text) of the training rows of a piece."""
    piece, task = records.Piece(*row["piece"]), base.get(job.recipe.task)
    for record in records.read(piece, job.recipe.data):
        placed = _placed(_judged(record, task), piece.role, job)
        if placed.split == _SPLIT["train"]:
            yield placed.content, record.text


def _placed(record: records.Record, role: str, job: Job) -> _Row:
    _, whole = content_hashes(record)
    if record.reason is not None:
        return _Row(record, whole, _BAD)
    split = _SPLIT[job.splits.split(record, role)]
    left_out = split == _SPLIT["train"] and record.label == job.recipe.data.outside
    return _Row(record, whole, _LEFT_OUT if left_out else split)


def _augmented(
    rows: list[_Row], role: str, job: Job, task: base.Task, tokenizer: Any, rewritten: dict[int, list[str]]
) -> list[_Row]:
    """With the copies of training rows, behind all rows of the batch."""
    settings = job.recipe.augment
    if not settings.active:
        return rows
    noise = variants.noise_of(settings, tokenizer)

    def allowed(copy: records.Record) -> bool:
        return job.splits.split(copy, role) == "train" and task.flaw(copy.text, copy.pair, copy.label) is None

    found = list(rows)
    for row in rows:
        if row.split == _SPLIT["train"]:
            texts = rewritten.get(row.content, [])
            made = variants.copies(row.record, row.content, settings, noise, task.varies, texts, allowed)
            found += [_Row(record, content, row.split, True) for record, content in made]
    return found


def _encode(
    read: list[records.Record], role: str, job: Job, task: base.Task, tokenizer: Any, rewritten: dict[int, list[str]]
) -> pa.Table:
    """Bad rows stay in the table, without tokens: the commit counts them and moves them into quarantine."""
    data = job.recipe.data
    rows = [_placed(_judged(record, task), role, job) for record in read]
    rows = _augmented(rows, role, job, task, tokenizer, rewritten)
    batch = [row.record for row in rows]
    good = [record for record in batch if record.reason is None]
    pairs = None if data.text_pair is None else [record.pair or "" for record in good]
    most = reading_of(task, data).max_windows
    tokens = iter(task.encode(tokenizer, [record.text for record in good], pairs, most))
    encoded = [next(tokens) if record.reason is None else NOTHING for record in batch]
    marks = [
        task.marks(record.text, record.pair, record.label, row) if record.reason is None else []
        for record, row in zip(batch, encoded, strict=True)
    ]
    slices = {
        SLICE + name: pa.array([printable(record.slices[place]) if record.slices else "" for record in batch])
        for place, name in enumerate(data.slices)
    }
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
            **slices,
        }
    )


def _judged(record: records.Record, task: base.Task) -> records.Record:
    """With the reason why the task cannot use it, where there is one."""
    if record.reason is not None or (flaw := task.flaw(record.text, record.pair, record.label)) is None:
        return record
    return record._replace(reason=flaw)


def _lists(rows: list[list[int]]) -> pa.ListArray:
    return store.lists(Ragged.of(rows, np.int32))


# ------------------------------------------------------------------------------------------------------- the commit


def _commit(job: Job, source: records.Source, writer: store.Writer, shards: list[dict[str, Any]]) -> store.Store:
    """Number the labels, give each row its id, write the index of each split, and the manifest last."""
    refusals.changed_files(source, shards, writer.final.parent.parent)
    recipe, names_of_shards = job.recipe, [row["shard"] for row in shards]
    tables = [
        store.map_table(writer.folder / "shards" / name).drop_columns(["ids", "windows"]) for name in names_of_shards
    ]
    table = pa.concat_tables(tables) if tables else None
    if table is None or table.num_rows == 0:
        raise UserError(f"data.path: {recipe.data.path} has a header and no rows; add rows, one text and label each")
    sizes = [part.num_rows for part in tables]
    shard = np.repeat(np.arange(len(tables), dtype=np.uint32), sizes)
    offset = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes])
    split = table["split"].to_numpy().copy()
    copy = table["copy"].to_numpy(zero_copy_only=False)
    originals = table.num_rows - int(copy.sum())
    labels, lines = table["label"], table["line"].to_numpy()

    is_bad = split == _BAD
    bad = quarantine.Bad(np.flatnonzero(is_bad), columns.chosen(table["reason"], is_bad).combine_chunks())
    where = quarantine.locator(source, names_of_shards, shard, lines)
    # Before the labels: a file of which no row can be read has none, and that is not what is wrong with it.
    quarantine.refuse_if_too_bad(recipe, bad, originals, where)

    refusals.empty_splits(recipe, {name: int((split == code).sum()) for name, code in _SPLIT.items()})

    task = base.get(recipe.task)
    # Of the rows as they were given: some have more copies than others.
    head = _head(job, task, columns.Counts(columns.chosen(labels, (split == _SPLIT["train"]) & ~copy)))
    before = split.copy()
    targets = _targets(task, head, tables, split)

    unseen = np.flatnonzero(split != before)
    numbers = [int(name.split("-")[0]) for name in names_of_shards]
    given = np.array([source.pieces[number].role != "train" for number in numbers])[shard]
    bad = bad.plus(quarantine.unseen(unseen, given, labels, where))
    quarantine.refuse_if_too_bad(recipe, bad, originals, where)
    quarantine.write(writer.folder, bad, where)

    row_ids = columns.identify(table["content"].to_numpy())
    lengths = table["length"].to_numpy()
    names = [source.pieces[number].uri.removeprefix("file://") for number in numbers]
    rows, tokens, files = {}, {}, {}
    for name, code in _SPLIT.items():
        mask = split == code
        chosen = np.flatnonzero(mask)
        rows[name], tokens[name] = len(chosen), int(lengths[chosen].sum())
        index = {"row_id": row_ids, "shard": shard, "offset": offset, "length": lengths}
        table_of_split = pa.table(
            {key: pa.array(value[chosen]) for key, value in index.items()}
            | {"targets": store.lists(columns.joined(targets.pop(name)))}
        )
        files[f"index-{name}.arrow"] = store.write_table(writer.folder / f"index-{name}.arrow", table_of_split)
        origins = {"source": columns.named(names, shard[chosen]), "line": pa.array(lines[chosen])}
        origins |= {slice: columns.chosen(table[SLICE + slice], mask) for slice in recipe.data.slices}
        files[f"rows-{name}.arrow"] = store.write_table(writer.folder / f"rows-{name}.arrow", pa.table(origins))
    refusals.empty_splits(recipe, rows)  # again: rows with an unknown label are none
    if recipe.data.outside is not None:
        named = columns.chosen(labels, split == _SPLIT["valid"]).to_pylist().count(recipe.data.outside)
        refusals.without_outside(recipe, rows["valid"], named)
    manifest = store.Manifest(
        schema_version=store.SCHEMA_VERSION,
        digest=writer.final.name,
        rows=rows,
        labels=head.labels,
        tokens=tokens,
        truncated=int(table["truncated"].to_numpy(zero_copy_only=False)[split < _LEFT_OUT].sum()),
        quarantined=len(bad.rows),
        files=files | {f"shards/{row['shard']}": row["entry"] for row in shards},
        sources=origin(recipe, source, job.model),
        facts=dict(head.facts),
        copies=int(copy.sum()),
        left_out=int((split == _LEFT_OUT).sum()),
    )
    return writer.commit(manifest)


def _targets(
    task: base.Task, head: Head, shards: list[pa.Table], split: npt.NDArray[np.uint8]
) -> dict[str, list[Ragged]]:
    """Of each split's rows, shard by shard. Marks the rows with a label that the head has not as bad in `split`."""
    found: dict[str, list[Ragged]] = {name: [] for name in _SPLIT}
    ends = np.cumsum([shard.num_rows for shard in shards])
    for shard, places in zip(shards, np.split(split, ends[:-1]), strict=True):  # views
        sound = places < _LEFT_OUT
        marks = columns.lists(shard["marks"]).take(np.flatnonzero(sound))
        targets = task.targets(columns.chosen(shard["label"], sound).to_pylist(), marks, head)
        places[np.flatnonzero(sound)[targets.unknown]] = _BAD
        for name, code in _SPLIT.items():
            found[name].append(targets.values.take(np.flatnonzero(places[sound] == code)))
    return found


def _head(job: Job, task: base.Task, counts: Mapping[str, int]) -> Head:
    """The task's own, with how texts are read where that is in windows: who answers must read them alike."""
    head = task.head(counts, _tokenizer(job.recipe, job.model))
    if job.recipe.data.outside is not None:
        head = Head(head.labels, {**head.facts, "outside": job.recipe.data.outside})
    reading = reading_of(task, job.recipe.data)
    if reading.max_windows == 1:
        return head
    windows = {"stride": reading.stride, "max_windows": reading.max_windows, "pooling": job.recipe.data.pooling}
    return Head(head.labels, {**head.facts, **windows})
