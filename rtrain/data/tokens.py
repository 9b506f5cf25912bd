"""Rows -> token store: its address, the Ray Data job that writes its shards, and the commit (`rtrain.data.stores`)."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import drafts
from rtrain.config import Recipe
from rtrain.config.recipe import ADDED_TO_DATA
from rtrain.data import pieces, records
from rtrain.data.augment import paraphrase, rewriting, variants
from rtrain.data.formats import digests
from rtrain.data.splits import Splits
from rtrain.data.stores import commit, shards, store
from rtrain.data.stores.shards import Job
from rtrain.errors import Problem, UserError
from rtrain.tasks import base


def digest(recipe: Recipe, source: records.Source, model: Path) -> str:
    """The store's address, 16 hex digits of a SHA-256.

    It is made from the rows, the tokenizer and the settings that shape the store, and from nothing else: runs that
    differ in other settings share the store.
    """
    data = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test", "max_bad_rows"})
    # Stores from before a neutral setting existed have this digest.
    data = {name: value for name, value in data.items() if name not in ADDED_TO_DATA or value != ADDED_TO_DATA[name]}
    settings = {"schema": store.SCHEMA_VERSION, "task": recipe.task, **data}
    if recipe.augment.active:
        models = [_model_digest(name) for name in (recipe.augment.paraphrase, recipe.augment.pivot) if name]
        settings["augment"] = {**recipe.augment.model_dump(mode="json"), "paraphrase": models, "pivot": None}
    made_of = source.digest(), digests.file_digest(str(model / "tokenizer.json")), json.dumps(settings, sort_keys=True)
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
        found.append(Problem("data.outside", recipe.data.outside, reason, "remove it"))
    return found


def ensure(recipe: Recipe, source: records.Source, model: Path, root: Path) -> tuple[store.Store, bool]:
    """The token store of a recipe under `root`, and whether it had to be made. Needs Ray only to make it.

    Raises `UserError` where the store is damaged or cannot be made.
    """
    source = source.beside(root)
    final = root / ".tokens" / digest(recipe, source, model)
    if final.is_dir():
        found = store.Store(final)
        found.check(size_only=True)
        drafts.sweep(final)
        digests.remember(root, source.hashed)
        return found, False
    # A folder without tokenizer and a model that cannot write are refused before any task starts.
    variants.noise_of(recipe.augment, shards.tokenizer_of(recipe, model))
    for name in (recipe.augment.paraphrase, recipe.augment.pivot):
        if name:
            paraphrase.check(name)
    writer = store.Writer(final)
    try:
        job = Job(recipe, model, writer.folder, Splits.of(recipe.data, source))
        made = commit.commit(job, source, writer, _run(job, source))
    except BaseException:
        writer.abandon()
        raise
    digests.remember(root, source.hashed)
    return made, True


def _run(job: Job, source: records.Source) -> list[dict[str, Any]]:
    """Write the shards with Ray Data, one task per file or part.

    Returns what `shards.write_piece` says of each shard, in source order.
    """
    import ray.data

    tasks = pieces.tasks(source)
    if job.recipe.augment.paraphrase is not None:
        rewriting.run(tasks, partial(shards.texts_to_rewrite, job=job), job.recipe.augment, job.folder)
    if any(pieces.is_cut(task, job.recipe) for task in tasks):
        whole = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        tasks = whole.flat_map(partial(pieces.cut, recipe=job.recipe)).take_all()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    written = dataset.flat_map(partial(_write_piece, job=job)).take_all()
    if errors := [row["error"] for row in written if row["error"]]:
        raise UserError(errors[0])
    return sorted(written, key=lambda row: str(row["shard"]))


def _write_piece(row: dict[str, Any], job: Job) -> Iterator[dict[str, Any]]:
    """`shards.write_piece` as a data task. An error that a user can mend is returned as a row: raised, it would carry
    Ray's traceback and advice."""
    try:
        yield from ({**written, "error": ""} for written in shards.write_piece(row, job))
    except UserError as error:
        yield {"number": row["number"], "shard": "", "entry": None, "error": str(error)}
