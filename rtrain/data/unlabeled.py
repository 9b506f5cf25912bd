"""Unlabeled rows, for a student that learns its teacher's outputs for them (`distill.unlabeled_rows_path`).

They have a store of their own, so a teacher runs on them once for all students. A student's store has the labeled rows
first, then the unlabeled rows that the teacher is confident of (`rtrain.data.store.merge`).
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import AugmentConfig, DataConfig, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.ragged import Ints
from rtrain.data import row_reader
from rtrain.data.sources import digests
from rtrain.data.sources.find import SourceFile, has_format_suffix
from rtrain.data.sources.paths import file_suffix
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
    neutral = {**columns, "slices": ()}
    splits = {"valid": None, "test": None, "folds": None, "fold": 0, "validation_fold": 0, "valid_share": 0.0}
    # A file keeps the format of the labeled rows if its suffix is the same or names no format: a .json can be a SQuAD
    # file, a .tsv can hold CoNLL sentences.
    has_own_format = path is not None and has_format_suffix(path) and file_suffix(path) != file_suffix(data.path or "")
    return data.model_copy(
        update={**neutral, **splits, "path": path, "format": None if has_own_format else data.format}
    )


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
    names = (
        ("unlabeled_rows_path", "augmented_rows_path") if recipe.distill.augmented_copies else ("unlabeled_rows_path",)
    )
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
    return (
        _with_files([(file, digest) for file, digest in pairs if file.role != ROLE], data_source),
        _with_files(
            [(file._replace(role="train"), digest) for file, digest in pairs if file.role == ROLE], data_source
        ),
    )


def _with_files(
    pairs: list[tuple[SourceFile, digests.FileDigest]], data_source: row_reader.DataSource
) -> row_reader.DataSource:
    new_source = replace(data_source, files=tuple(file for file, _ in pairs))
    vars(new_source)["file_digests"] = [
        digest for _, digest in pairs
    ]  # fills the cached property, which would hash the files again
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
    if confidence > 0:
        is_confident = (
            np.concatenate(
                [_compute_confidence(unlabeled_store, task, teacher, part) for part in _split_blocks(positions)]
            )
            >= confidence
        )
    is_selected = is_new & is_confident
    return UnlabeledSelection(positions[is_selected], int((is_new & ~is_confident).sum()), int((~is_new).sum()))


def _split_blocks(positions: Ints) -> list[Ints]:
    return [positions[first : first + BLOCK] for first in range(0, len(positions), BLOCK)] or [positions]


def _compute_confidence(
    unlabeled_store: Store, task: base.Task, teacher: str, positions: Ints
) -> npt.NDArray[np.float64]:
    """The teacher's confidence in each row, 0 to 1 (`Task.explain_rows`)."""
    tokens, head, logits = (
        unlabeled_store.read_tokens("train", positions),
        unlabeled_store.manifest.head,
        unlabeled_store.teacher_logits(teacher, positions),
    )
    outputs = np.split(logits, np.cumsum(tokens.row_lengths)[:-1]) if task.is_token_level else logits
    return task.explain_rows(task.row_results(outputs, tokens, head), tokens.row_targets, head).score
