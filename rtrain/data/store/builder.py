"""Rows -> token store: its address, the Ray Data job that writes its shards, and the commit
(`rtrain.data.store.commit`)."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.config import Recipe
from rtrain.config.recipe import NEUTRAL_AUGMENT_SETTINGS, NEUTRAL_DATA_SETTINGS, drop_neutral
from rtrain.core import atomic_write, hub, plugins
from rtrain.core.errors import Problem, UserError
from rtrain.core.ragged import Head
from rtrain.data import augment, paraphrase, row_reader, sources, unlabeled
from rtrain.data.splits import RowSurvey, Splits
from rtrain.data.store import commit, fold_view, shards, store
from rtrain.data.store.shards import TokenizeJob
from rtrain.tasks import base
from rtrain.tasks.encode import canonical_name, resolve_window_spec

MAX_PAIR_SPECIAL_TOKENS = 4
"""Most special tokens of two texts: four with RoBERTa, three with BERT."""
TeacherPass = Callable[[store.Store, Path, Callable[[Path], store.Store]], None]
"""Computes a teacher's logits for the training rows of a store. Arguments: the store, the folder of the model whose
tokenizer it uses, and a function that builds the store of the same rows for another model."""


def compute_digest(recipe: Recipe, source: row_reader.DataSource, model: Path) -> str:
    """The store's address, 16 hex digits of a SHA-256.

    It depends on the rows, the tokenizer and the settings that shape the store only: runs that differ in other settings
    share the store. The teacher selects the unlabeled rows.
    """
    labeled_source, unlabeled_source = unlabeled.split_source(source)
    labeled_digest = _compute_source_digest(recipe, labeled_source, model)
    if not unlabeled_source.files:
        return labeled_digest
    unlabeled_digest = _compute_unlabeled_digest(recipe, unlabeled_source, model, labeled_digest)
    return _hash_parts(labeled_digest, unlabeled_digest, recipe.distill.teacher_logits_key, recipe.distill.confidence)


def _compute_unlabeled_digest(
    recipe: Recipe, unlabeled_source: row_reader.DataSource, model: Path, labeled_digest: str
) -> str:
    unlabeled_recipe = unlabeled.make_unlabeled_recipe(recipe)
    return _hash_parts(_compute_source_digest(unlabeled_recipe, unlabeled_source, model), labeled_digest)


def _hash_parts(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _compute_source_digest(recipe: Recipe, source: row_reader.DataSource, model: Path) -> str:
    data = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test", "max_bad_rows"})
    if recipe.data.sampling is not None:  # the temperature changes no row
        data["sampling"] = recipe.data.sampling.column
    settings = {"schema": store.SCHEMA_VERSION, "task": recipe.task, **drop_neutral(data, NEUTRAL_DATA_SETTINGS)}
    if (rule := base.get_task(recipe.task).target_rule_version) > 1:
        settings["target_rule_version"] = rule
    if recipe.augment.is_active:
        names = (recipe.augment.paraphrase, recipe.augment.back_translation_model)
        models = {"paraphrase": [_hash_model(name) for name in names if name], "back_translation_model": None}
        augment_settings = drop_neutral(recipe.augment.model_dump(mode="json"), NEUTRAL_AUGMENT_SETTINGS)
        settings["augment"] = {**augment_settings, **models}
    augmentations = plugins.owner_digests("augmentation", *recipe.augment.functions)
    if digests := plugins.owner_digests("task", recipe.task) | augmentations:
        settings["plugins"] = digests
    parts = source.digest(), sources.hash_tokenizer(model), json.dumps(settings, sort_keys=True)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _hash_model(name: str) -> str:
    """The SHA-256 of each file of a model folder, at any location; or the hub name."""
    files = sorted(path for path in Path(name).glob("*") if path.suffix in (".json", ".safetensors", ".model"))
    return " ".join(sources.hash_file(str(path)) for path in files) or name


def find_problems(recipe: Recipe) -> list[Problem]:
    """Problems of settings that shape the rows and that the recipe's task does not support."""
    task = base.get_task(recipe.task)
    return [
        *augment.find_problems(recipe, task),
        *_find_label_problems(recipe, task),
        *_find_text_problems(recipe, task),
        *_find_window_problems(recipe, task),
    ]


def _find_label_problems(recipe: Recipe, task: base.Task) -> Iterator[Problem]:
    setting, label = "data.out_of_scope_label", recipe.data.out_of_scope_label
    if label is not None and not task.supports_out_of_scope:
        reason = f"{task.name} does not support out-of-scope rows"
        yield Problem(setting, label, reason, "remove it", code="unsupported")
    if label is not None and label != canonical_name(label):
        reason, fix = "rows have this label in its canonical form", f"write {canonical_name(label)}"
        yield Problem(setting, label, reason, fix, code="not_canonical")
    if isinstance(recipe.data.label, tuple) and task.output != "heads":
        reason = f"several columns, and {task.name} reads one: each combination would be a label"
        fix = "name one, or add task=multi_head to have an answer for each"
        yield Problem("data.label", list(recipe.data.label), reason, fix, code="several_columns")


def _find_text_problems(recipe: Recipe, task: base.Task) -> Iterator[Problem]:
    """Settings that change the texts to which a label's positions refer."""
    data, refers_to_words = recipe.data, task.output in ("tags", "summary")
    settings = (
        ("text", len(data.text_columns) > 1 and list(data.text_columns), refers_to_words),
        ("features", list(data.features), refers_to_words),
        ("strip_html", data.strip_html, refers_to_words or task.output == "spans"),
    )
    for setting, value, is_unsupported in settings:
        if value and is_unsupported:
            reason, fix = f"the labels of {task.name} refer to positions in the texts", "prepare the texts beforehand"
            yield Problem(f"data.{setting}", value, reason, fix, code="unsupported")


def _find_window_problems(recipe: Recipe, task: base.Task) -> Iterator[Problem]:
    if recipe.distill.teacher is not None:  # a student uses the windows of its teacher
        return
    spec = resolve_window_spec(task, recipe.data)
    # A question takes a fourth of a window at most, which leaves more than half of it to the context.
    max_stride = max(0, (spec.max_tokens - MAX_PAIR_SPECIAL_TOKENS) // 2 - 1)
    if recipe.data.text_pair is not None and not task.needs_pair and spec.stride > max_stride:
        reason = "two long texts have half a window each, and adjacent windows would share all of it"
        yield Problem("data.stride", spec.stride, reason, f"write {max_stride} or less", code="out_of_range")
    if task.packs_text and spec.stride:
        reason = "blocks of text share no tokens: overlapping windows would cut a block before it is full"
        yield Problem("data.stride", spec.stride, reason, "write 0", code="out_of_range")


def build_or_open(
    recipe: Recipe, source: row_reader.DataSource, model: Path, root: Path, teacher_pass: TeacherPass | None = None
) -> tuple[store.Store, bool]:
    """Open the token store of a recipe under `root`, or build it, which needs Ray. Returns it and whether it was built.

    A student's store has its teacher's logits: `teacher_pass` computes missing ones. Raises `UserError` if the store is
    damaged or cannot be built.
    """
    source = source.with_cached_digests(root)
    labeled_source, unlabeled_source = unlabeled.split_source(source)
    final = root / ".tokens" / compute_digest(recipe, source, model)
    finished_store = _open_finished(final, source, root)
    if unlabeled_source.files:
        if finished_store:
            return finished_store, False
        return _build_merged_store(recipe, labeled_source, unlabeled_source, model, root, teacher_pass), True
    token_store = finished_store or _build_store(recipe, source, model, final, root)
    if teacher_pass:
        teacher_pass(token_store, model, lambda other: build_or_open(recipe, labeled_source, other, root)[0])
    return token_store, finished_store is None


def _build_merged_store(
    recipe: Recipe,
    labeled_source: row_reader.DataSource,
    unlabeled_source: row_reader.DataSource,
    model: Path,
    root: Path,
    teacher_pass: TeacherPass | None,
) -> store.Store:
    """Build the store of labeled rows and of the unlabeled rows that the teacher is confident of."""
    labeled_store, _ = build_or_open(recipe, labeled_source, model, root, teacher_pass)
    unlabeled_recipe, teacher = unlabeled.make_unlabeled_recipe(recipe), str(recipe.distill.teacher_logits_key)

    def build_unlabeled_store(folder: Path) -> store.Store:
        labeled_digest = _compute_source_digest(recipe, labeled_source, folder)
        final = root / ".tokens" / _compute_unlabeled_digest(recipe, unlabeled_source, folder, labeled_digest)
        return _open_finished(final, unlabeled_source, root) or _build_store(
            unlabeled_recipe, unlabeled_source, folder, final, root, labeled_store.manifest.head
        )

    unlabeled_store = build_unlabeled_store(model)
    if teacher_pass:
        teacher_pass(unlabeled_store, model, build_unlabeled_store)
    task = base.get_task(recipe.task)
    selection = unlabeled.select_rows(unlabeled_store, labeled_store, task, teacher, recipe.distill.confidence)
    left_out = {"low_confidence": selection.num_low_confidence, "duplicates": selection.num_duplicates}
    digests = (labeled_store.manifest.digest, unlabeled_store.manifest.digest)
    final = root / ".tokens" / _hash_parts(*digests, teacher, recipe.distill.confidence)
    return unlabeled.merge_stores(final, labeled_store, unlabeled_store, selection.positions, left_out, teacher)


def _open_finished(final: Path, source: row_reader.DataSource, root: Path) -> store.Store | None:
    if not final.is_dir():
        return None
    finished_store = store.Store(final)
    finished_store.check(size_only=True)
    atomic_write.remove_stale_drafts(final)
    sources.update_cache(root, source.file_digests)
    return finished_store


def _build_store(
    recipe: Recipe, source: row_reader.DataSource, model: Path, final: Path, root: Path, head: Head | None = None
) -> store.Store:
    if head is None:

        def compute_address(other_recipe: Recipe) -> str:
            return compute_digest(other_recipe, source, model)

        if view := fold_view.build_view(recipe, source, model, final, compute_address):
            return view
    # A folder without a tokenizer, and a rewriting model that cannot generate, raise before any task starts.
    augment.make_noise(recipe.augment, shards.load_task_tokenizer(recipe, model))
    recipe = resolve_rewriters(recipe, root)
    writer = store.StoreWriter(final)
    try:
        # The commit surveys the rows of folds.
        survey = RowSurvey.merge([]) if shards.supports_fold_views(recipe) else None
        splits = Splits(has_test=True, valid_share=0.0)
        if head is None:
            splits = Splits.from_config(recipe.data, source, survey)
        job = TokenizeJob(recipe, model, writer.folder, splits, head)
        built_store = commit.commit_store(job, source, writer, run_tasks(job, source))
    except BaseException:
        writer.abandon()
        raise
    sources.update_cache(root, source.file_digests)
    return built_store


def resolve_rewriters(recipe: Recipe, root: Path) -> Recipe:
    """The recipe with folders of the rewriting models, which every node reads, in place of hub names."""
    folders: dict[str, str] = {}
    for field in ("paraphrase", "back_translation_model"):
        if name := getattr(recipe.augment, field):
            folders[field] = str(hub.fetch_model(name, root)) if hub.is_hub_name(name) else name
            paraphrase.check_model(folders[field])
    return recipe.model_copy(update={"augment": recipe.augment.model_copy(update=folders)}) if folders else recipe


def run_tasks(job: TokenizeJob, source: row_reader.DataSource) -> list[dict[str, Any]]:
    """Write the shards with Ray Data, one task per file or part.

    Returns the entries of `shards.write_shards`, in source order.
    """
    import ray.data

    ray_internals.disable_data_actors()
    tasks = shards.plan_tasks(source)
    if job.recipe.augment.paraphrase is not None:
        paraphrase.rewrite_texts(tasks, partial(shards.iter_texts_to_rewrite, job=job), job.recipe.augment, job.folder)
    if any(shards.should_split(task, job.recipe) for task in tasks):
        task_dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        tasks = task_dataset.flat_map(partial(shards.split_task, recipe=job.recipe)).take_all()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    shard_rows = dataset.flat_map(partial(_write_shards, job=job)).take_all()
    if errors := [row for row in shard_rows if row["error"]]:
        raise UserError(errors[0]["error"], code=errors[0]["code"])
    return sorted(shard_rows, key=lambda row: str(row["shard"]))


def _write_shards(task_row: dict[str, Any], job: TokenizeJob) -> Iterator[dict[str, Any]]:
    """`shards.write_shards` as a data task. A `UserError` is returned as a row: if raised, it would carry Ray's
    traceback and advice."""
    try:
        with plugins.attribute_errors():
            yield from ({**written, "error": "", "code": ""} for written in shards.write_shards(task_row, job))
    except UserError as error:
        no_counts = asdict(row_reader.ReadCounts())
        no_shard = {"number": task_row["number"], "shard": "", "entry": None, **no_counts}
        yield {**no_shard, "error": str(error), "code": error.code}
