"""A student's rows: labeled rows, and unlabeled rows that learn the teacher's outputs (`distill.unlabeled_rows_path`).

The unlabeled rows have a store of their own, so a teacher runs on them once for all students. A student's store has the
labeled rows first, then the unlabeled rows that the teacher is confident of, with the teacher's logits for both.
Nothing is tokenized or computed again: shards are linked, indexes and logits are selected by position.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain.config import AugmentConfig, DataConfig, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.manifest import FileEntry
from rtrain.core.ragged import Ints, RaggedArray
from rtrain.data import row_reader, sources
from rtrain.data.sources import SourceFile, file_suffix, has_format_suffix
from rtrain.data.store import commit, store
from rtrain.data.store.store import Store
from rtrain.tasks import base

SETTING = "distill.unlabeled_rows_path"
ROLE = "unlabeled"
"""Role of their files in a source."""
BLOCK = 8192
"""Rows whose teacher outputs are decoded at a time."""


class UnlabeledSelection(NamedTuple):
    """The unlabeled rows that are trained on, and counts of the others."""

    positions: Ints
    num_low_confidence: int
    """Rows below the teacher confidence `distill.confidence`."""
    num_duplicates: int
    """Rows with the text of a labeled row, of any split."""


def without_labels(data: DataConfig, path: str | None) -> DataConfig:
    """Settings to read the rows of `path`: as the labeled rows, without labels and without the columns of scores and
    splits."""
    columns = dict.fromkeys(("label", "separator", "group_column", "split_column", "out_of_scope_label", "id"))
    columns |= dict.fromkeys(("weight_column", "sampling", "where", "stratify", "split_time"))
    neutral: dict[str, Any] = {**columns, "slices": (), "labels": {}}
    splits = {"valid": None, "test": None, "folds": None, "fold": 0, "validation_fold": 0, "valid_share": 0.0}
    # A file keeps the format of the labeled rows if its suffix is the same or names no format: a .json can be a SQuAD
    # file, a .tsv can hold CoNLL sentences.
    has_own_format = path is not None and has_format_suffix(path) and file_suffix(path) != file_suffix(data.path or "")
    format = None if has_own_format else data.format
    return data.model_copy(update={**neutral, **splits, "path": path, "format": format})


def inspect_unlabeled(data: DataConfig, path: str, setting: str, root: Path | None = None) -> row_reader.DataSource:
    """Find the files of unlabeled rows. Raises `ConfigError` with every problem, each under the name `setting`."""
    try:
        data_source = row_reader.inspect_source(without_labels(data, path), root)
    except ConfigError as error:
        problems = [replace(problem, field=problem.field.replace("data.path", setting)) for problem in error.problems]
        raise ConfigError(problems) from None
    return replace(data_source, files=tuple(file for file in data_source.files if file.role == "train"))


def inspect_all_sources(recipe: Recipe, root: Path | None = None) -> row_reader.DataSource:
    """Find all files of a run's rows; a student's include `distill.unlabeled_rows_path` and its augmented copies.
    Raises `ConfigError`."""
    problems: list[Problem] = []
    data_source, unlabeled_files = row_reader.DataSource((), ()), list[SourceFile]()
    try:
        data_source = row_reader.inspect_source(recipe.data, root)
    except ConfigError as error:
        problems += error.problems
    names = ("unlabeled_rows_path", *(("augmented_rows_path",) if recipe.distill.augmented_copies else ()))
    for name in names if recipe.distill.teacher else ():
        if (path := getattr(recipe.distill, name)) is not None:
            try:
                unlabeled_files += inspect_unlabeled(recipe.data, path, f"distill.{name}", root).files
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return replace(data_source, files=data_source.files + tuple(file._replace(role=ROLE) for file in unlabeled_files))


def split_source(data_source: row_reader.DataSource) -> tuple[row_reader.DataSource, row_reader.DataSource]:
    """Split into the files of labeled rows and the files of unlabeled rows, the latter as training files."""
    if all(file.role != ROLE for file in data_source.files):
        return data_source, replace(data_source, files=())
    pairs = list(zip(data_source.files, data_source.file_digests, strict=True))
    labeled = [(file, digest) for file, digest in pairs if file.role != ROLE]
    unlabeled = [(file._replace(role="train"), digest) for file, digest in pairs if file.role == ROLE]
    return _with_files(labeled, data_source), _with_files(unlabeled, data_source)


def _with_files(
    pairs: list[tuple[SourceFile, sources.FileDigest]], data_source: row_reader.DataSource
) -> row_reader.DataSource:
    new_source = replace(data_source, files=tuple(file for file, _ in pairs))
    # Fills the cached property, which would hash the files again.
    vars(new_source)["file_digests"] = [digest for _, digest in pairs]
    return new_source


def make_unlabeled_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the store of unlabeled rows."""
    data = without_labels(recipe.data, recipe.distill.unlabeled_rows_path)
    return recipe.model_copy(update={"data": data, "augment": AugmentConfig()})


def select_rows(
    unlabeled_store: Store, labeled_store: Store, task: base.Task, teacher: str, confidence: float
) -> UnlabeledSelection:
    """Select the unlabeled rows to train on, by the outputs of `teacher`.

    Texts of labeled rows are excluded: training rows already have a label, and evaluation rows must stay unseen.
    """
    labeled_keys = np.concatenate([labeled_store.text_keys(split) for split in labeled_store.manifest.rows])
    positions = np.arange(unlabeled_store.num_rows("train"), dtype=np.int64)
    is_new = ~np.isin(unlabeled_store.text_keys("train"), labeled_keys)
    is_confident = np.ones(len(positions), dtype=np.bool_)
    for first in range(0, len(positions) if confidence > 0 else 0, BLOCK):
        block = positions[first : first + BLOCK]
        is_confident[block] = _compute_confidence(unlabeled_store, task, teacher, block) >= confidence
    is_selected = is_new & is_confident
    return UnlabeledSelection(positions[is_selected], int((is_new & ~is_confident).sum()), int((~is_new).sum()))


def _compute_confidence(
    unlabeled_store: Store, task: base.Task, teacher: str, positions: Ints
) -> npt.NDArray[np.float64]:
    """The teacher's confidence in each row, 0 to 1 (`Task.explain_rows`)."""
    tokens, head = unlabeled_store.read_tokens("train", positions), unlabeled_store.manifest.head
    logits = unlabeled_store.teacher_logits(teacher, positions)
    outputs = np.split(logits, np.cumsum(tokens.row_lengths)[:-1]) if task.is_token_level else logits
    return task.explain_rows(task.row_results(outputs, tokens, head), tokens.row_targets, head).score


# ----------------------------------------------------------------------------------------------------- the merged store

UNLABELED_PREFIX = "unlabeled-"
"""Prefix of the shards of unlabeled rows."""


def merge_stores(
    final: Path,
    labeled_store: store.Store,
    unlabeled_store: store.Store,
    positions: Ints,
    left_out: dict[str, int],
    teacher: str,
) -> store.Store:
    """Build the store `final`: all of `labeled_store`, then the training rows of `unlabeled_store` at `positions`.

    `left_out` counts the other rows, by reason. Both stores have the logits of `teacher`.
    """
    writer = store.StoreWriter(final)
    try:
        files = _link_files(writer.folder, labeled_store, unlabeled_store)
        labeled_manifest, unlabeled_manifest = labeled_store.manifest, unlabeled_store.manifest
        tables = {
            "index-train.arrow": _merge_index(labeled_store, unlabeled_store, positions, len(labeled_manifest.shards)),
            "rows-train.arrow": _merge_origins(
                labeled_store.origins("train"), unlabeled_store.origins("train").take(positions)
            ),
        }
        for name, table in tables.items():
            files[name] = store.write_table(writer.folder / name, table)
        logits_file = writer.folder / labeled_store.teacher_file(teacher).name
        _merge_teacher_logits(logits_file, labeled_store, unlabeled_store, positions, teacher)
        tokens = int(unlabeled_store.column("train", "length")[positions].sum(dtype=np.int64))
        # Shards are numbered by their order here.
        shards = [*labeled_manifest.shards, *(_prefix_shard_name(name) for name in unlabeled_manifest.shards)]
        first = [name for name in files if name not in shards]
        manifest = replace(
            labeled_manifest,
            digest=final.name,
            rows={**labeled_manifest.rows, "train": labeled_manifest.rows["train"] + len(positions)},
            tokens={**labeled_manifest.tokens, "train": labeled_manifest.tokens["train"] + tokens},
            truncated=labeled_manifest.truncated + unlabeled_store.count_truncated("train", positions),
            files={name: files[name] for name in [*first, *shards]},
            sources={**labeled_manifest.sources, "unlabeled": unlabeled_manifest.sources.get("train", {})},
            unlabeled={"rows": len(positions), **left_out, "bad": unlabeled_manifest.quarantined},
        )
        return writer.commit(manifest)
    except BaseException:
        writer.abandon()
        raise


def _prefix_shard_name(name: str) -> str:
    return f"shards/{UNLABELED_PREFIX}{name.removeprefix('shards/')}"


def _link_files(folder: Path, labeled_store: store.Store, unlabeled_store: store.Store) -> dict[str, FileEntry]:
    """Link the unchanged files; returns their manifest entries by name."""
    files = {}
    for name, entry in labeled_store.manifest.files.items():
        if not name.endswith("-train.arrow"):
            link_or_copy(labeled_store.folder / name, folder / name)
            files[name] = entry
    for path in labeled_store.folder.glob("quarantine*"):
        link_or_copy(path, folder / path.name)
    for name in unlabeled_store.manifest.shards:
        link_or_copy(unlabeled_store.folder / name, folder / _prefix_shard_name(name))
        files[_prefix_shard_name(name)] = unlabeled_store.manifest.files[name]
    return files


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # storage without links
        shutil.copyfile(source, target)


def _merge_index(labeled_store: store.Store, unlabeled_store: store.Store, positions: Ints, shards: int) -> pa.Table:
    index_columns = {}
    for name in ("row_id", "shard", "offset", "length"):
        labeled = labeled_store.column("train", name)
        added = unlabeled_store.column("train", name)[positions] + (shards if name == "shard" else 0)
        index_columns[name] = pa.array(np.concatenate([labeled, added], dtype=labeled.dtype))
    targets: list[RaggedArray] = [labeled_store.targets("train"), unlabeled_store.targets("train", positions)]
    return pa.table({**index_columns, "targets": store.make_list_column(commit.concat_ragged(targets))})


def _merge_origins(labeled_origins: pa.Table, unlabeled_origins: pa.Table) -> pa.Table:
    """Both tables, with empty slices for unlabeled rows."""
    for name in labeled_origins.column_names[unlabeled_origins.num_columns :]:
        unlabeled_origins = unlabeled_origins.append_column(
            name, pa.array([""] * unlabeled_origins.num_rows, labeled_origins.schema.field(name).type)
        )
    return pa.concat_tables([labeled_origins, unlabeled_origins]).unify_dictionaries()


def _merge_teacher_logits(
    path: Path, labeled_store: store.Store, unlabeled_store: store.Store, positions: Ints, teacher: str
) -> None:
    labeled, added = labeled_store.open_teacher_logits(teacher), unlabeled_store.teacher_logits(teacher, positions)
    shape = (len(labeled) + len(added), labeled.shape[1])
    merged = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    merged[: len(labeled)], merged[len(labeled) :] = labeled, added
    merged.flush()
