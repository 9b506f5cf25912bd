"""Rows -> token store: its address, the Ray Data job that writes its shards, and the commit (`rtrain.data.stores`)."""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.config import Recipe
from rtrain.config.recipe import NEUTRAL_DATA, without_neutral
from rtrain.core import atomic_write, hub
from rtrain.core.errors import Problem, UserError
from rtrain.core.ragged import Head
from rtrain.data import row_reader, unlabeled
from rtrain.data.augment import paraphrase, rewriting, variants
from rtrain.data.sources import digests
from rtrain.data.splits import Splits
from rtrain.data.store import commit, merge, read_tasks, shards, store
from rtrain.data.store.shards import Job
from rtrain.tasks import base
from rtrain.tasks.encode import reading_of
from rtrain.tasks.labels import canonical_name

PAIR_SPECIALS = 4
"""Most tokens that a tokenizer puts round two texts: RoBERTa's four, BERT's three."""
Taught = Callable[[store.Store, Path, Callable[[Path], store.Store]], None]
"""Has a teacher answer the training rows of a store: of (the store, the folder of the model that its rows are tokenised
for, what makes the store of the same rows for another model)."""


def digest(recipe: Recipe, source: row_reader.Source, model: Path) -> str:
    """The store's address, 16 hex digits of a SHA-256.

    It is made from the rows, the tokenizer and the settings that shape the store, and from nothing else: runs that
    differ in other settings share the store. The teacher says which rows without labels are taken.
    """
    labelled, further = unlabeled.parted(source)
    own = _digest(recipe, labelled, model)
    if not further.pieces:
        return own
    rows = _digest_unlabelled(recipe, further, model, own)
    return _hashed(own, rows, recipe.distill.answers, recipe.distill.confidence)


def _digest_unlabelled(recipe: Recipe, further: row_reader.Source, model: Path, labelled: str) -> str:
    return _hashed(_digest(unlabeled.recipe_of(recipe), further, model), labelled)


def _hashed(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _digest(recipe: Recipe, source: row_reader.Source, model: Path) -> str:
    data = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test", "max_bad_rows"})
    settings = {"schema": store.SCHEMA_VERSION, "task": recipe.task, **without_neutral(data, NEUTRAL_DATA)}
    if (rule := base.get(recipe.task).rule_of_marks) > 1:
        settings["marks"] = rule
    if recipe.augment.active:
        models = [_model_digest(name) for name in (recipe.augment.paraphrase, recipe.augment.pivot) if name]
        settings["augment"] = {**recipe.augment.model_dump(mode="json"), "paraphrase": models, "pivot": None}
    made_of = source.digest(), digests.tokenizer_digest(model), json.dumps(settings, sort_keys=True)
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def _model_digest(name: str) -> str:
    """The SHA-256 of each file of a model folder, wherever it lies; a hub name stands for itself."""
    files = sorted(path for path in Path(name).glob("*") if path.suffix in (".json", ".safetensors", ".model"))
    return " ".join(digests.file_digest(str(path)) for path in files) or name


def problems(recipe: Recipe) -> list[Problem]:
    """Settings that shape the rows and that the recipe's task cannot follow."""
    task = base.get(recipe.task)
    found = variants.problems(recipe, task)
    if recipe.data.outside is not None and not task.finds_outside:
        reason = f"{task.name} does not tell rows that belong to none of its labels"
        found.append(Problem("data.outside", recipe.data.outside, reason, "remove it", code="unsupported"))
    if (outside := recipe.data.outside) and outside != canonical_name(outside):
        fix = f"write {canonical_name(outside)}"
        found.append(
            Problem("data.outside", outside, "rows have this label under another name", fix, code="wrong_form")
        )
    if isinstance(recipe.data.label, tuple) and task.output != "heads":
        reason = f"several columns, and {task.name} reads one: each combination would be a label of its own"
        fix = "name one, or add task=multi_head to have an answer for each"
        found.append(Problem("data.label", list(recipe.data.label), reason, fix, code="several_columns"))
    reading = reading_of(task, recipe.data)
    most = max(0, (reading.max_tokens - PAIR_SPECIALS) // 2 - 1)
    # A question has a fourth of a window at most, which leaves more than half of it to the context. A student reads its
    # rows as its teacher did.
    paired = recipe.data.text_pair is not None and not task.needs_pair
    if paired and reading.stride > most and recipe.distill.teacher is None:
        reason = "two long texts have half a window each, and neighbours would share all of it"
        found.append(Problem("data.stride", reading.stride, reason, f"write {most} or less", code="out_of_range"))
    if task.packs and reading.stride and recipe.distill.teacher is None:
        reason = "blocks of text share no tokens: by windows that do, a block would be cut before it is full"
        found.append(Problem("data.stride", reading.stride, reason, "write 0", code="out_of_range"))
    return found


def ensure(
    recipe: Recipe, source: row_reader.Source, model: Path, root: Path, taught: Taught | None = None
) -> tuple[store.Store, bool]:
    """The token store of a recipe under `root`, and whether it had to be made. Needs Ray only to make it.

    A student's has its teacher's answers: `taught` has them computed where they are not there yet. Raises `UserError`
    where the store is damaged or cannot be made.
    """
    source = source.beside(root)
    labelled, further = unlabeled.parted(source)
    final = root / ".tokens" / digest(recipe, source, model)
    if found := _finished(final, source, root):
        own, made = found, False
    elif further.pieces:
        return _joined(recipe, labelled, further, model, root, taught), True
    else:
        own, made = _made(recipe, source, model, final, root), True
    if taught and not further.pieces:
        taught(own, model, lambda other: ensure(recipe, labelled, other, root)[0])
    return own, made


def _joined(
    recipe: Recipe,
    labelled: row_reader.Source,
    further: row_reader.Source,
    model: Path,
    root: Path,
    taught: Taught | None,
) -> store.Store:
    """The store of labelled rows and of those of the others that the teacher is sure of."""
    own, _ = ensure(recipe, labelled, model, root, taught)
    alone, teacher = unlabeled.recipe_of(recipe), str(recipe.distill.answers)

    def rows(folder: Path) -> store.Store:
        digest_own = _digest(recipe, labelled, folder)
        final = root / ".tokens" / _digest_unlabelled(recipe, further, folder, digest_own)
        return _finished(final, further, root) or _made(alone, further, folder, final, root, own.manifest.head)

    others = rows(model)
    if taught:
        taught(others, model, rows)
    task = base.get(recipe.task)
    chosen = unlabeled.chosen(others, own, task, teacher, recipe.distill.confidence)
    left_out = {"unsure": chosen.unsure, "repeated": chosen.repeated}
    address = _hashed(own.manifest.digest, others.manifest.digest, teacher, recipe.distill.confidence)
    return merge.write(root / ".tokens" / address, own, others, chosen.positions, left_out, teacher)


def _finished(final: Path, source: row_reader.Source, root: Path) -> store.Store | None:
    if not final.is_dir():
        return None
    found = store.Store(final)
    found.check(size_only=True)
    atomic_write.sweep(final)
    digests.remember(root, source.hashed)
    return found


def _made(
    recipe: Recipe, source: row_reader.Source, model: Path, final: Path, root: Path, head: Head | None = None
) -> store.Store:
    # A folder without tokenizer and a model that cannot write are refused before any task starts.
    variants.noise_of(recipe.augment, shards.tokenizer_of(recipe, model))
    recipe = with_rewriters(recipe, root)
    writer = store.Writer(final)
    try:
        splits = Splits.of(recipe.data, source) if head is None else Splits(has_test=True, valid_share=0.0)
        job = Job(recipe, model, writer.folder, splits, head)
        made = commit.commit(job, source, writer, _run(job, source))
    except BaseException:
        writer.abandon()
        raise
    digests.remember(root, source.hashed)
    return made


def with_rewriters(recipe: Recipe, root: Path) -> Recipe:
    """The recipe with the folders of the models that rewrite texts, which every node reads, in place of hub names."""
    folders: dict[str, str] = {}
    for field in ("paraphrase", "pivot"):
        if name := getattr(recipe.augment, field):
            folders[field] = str(hub.model(name, root)) if hub.is_name(name) else name
            paraphrase.check(folders[field])
    return recipe.model_copy(update={"augment": recipe.augment.model_copy(update=folders)}) if folders else recipe


def _run(job: Job, source: row_reader.Source) -> list[dict[str, Any]]:
    """Write the shards with Ray Data, one task per file or part.

    Returns what `shards.write_piece` says of each shard, in source order.
    """
    import ray.data

    ray_internals.without_data_actors()
    tasks = read_tasks.tasks(source)
    if job.recipe.augment.paraphrase is not None:
        rewriting.run(tasks, partial(shards.texts_to_rewrite, job=job), job.recipe.augment, job.folder)
    if any(read_tasks.is_cut(task, job.recipe) for task in tasks):
        whole = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        tasks = whole.flat_map(partial(read_tasks.cut, recipe=job.recipe)).take_all()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    written = dataset.flat_map(partial(_write_piece, job=job)).take_all()
    if errors := [row for row in written if row["error"]]:
        raise UserError(errors[0]["error"], code=errors[0]["code"])
    return sorted(written, key=lambda row: str(row["shard"]))


def _write_piece(row: dict[str, Any], job: Job) -> Iterator[dict[str, Any]]:
    """`shards.write_piece` as a data task. An error that a user can mend is returned as a row: raised, it would carry
    Ray's traceback and advice."""
    try:
        yield from ({**written, "error": "", "code": ""} for written in shards.write_piece(row, job))
    except UserError as error:
        yield {"number": row["number"], "shard": "", "entry": None, "error": str(error), "code": error.code}
