"""Rows without labels, for a student that learns its teacher's answers to them (`distill.unlabelled`).

They are stored by themselves, so that a teacher answers them once for all students. A student's store has the labelled
rows first, then those of the others that the teacher is sure of (`rtrain.data.store.merge`).
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import Augment, Data, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.ragged import Ints
from rtrain.data import row_reader
from rtrain.data.sources import digests
from rtrain.data.sources.find import Piece, tells_format
from rtrain.data.sources.paths import suffix
from rtrain.data.store.store import Store
from rtrain.tasks import base

SETTING = "distill.unlabelled"
ROLE = "unlabelled"
"""Role of their files in a source."""
BLOCK = 8192
"""Rows whose answers are looked at at a time."""


class Chosen(NamedTuple):
    """Which of the rows without labels are trained on."""

    positions: Ints
    unsure: int
    """Rows left out since the teacher is less sure of them than `distill.confidence`."""
    repeated: int
    """Rows left out since their texts are those of a labelled row, of any split."""


def without_labels(data: Data, path: str | None) -> Data:
    """How the rows of `path` are read: as others, but for labels and for what only scores and splits need."""
    columns = dict.fromkeys(("label", "separator", "split_by", "split", "outside", "id"))
    neutral = {**columns, "slices": ()}
    splits = {"valid": None, "test": None, "folds": None, "fold": 0, "valid_part": 0, "valid_share": 0.0}
    # A name that tells no format is read as the labelled rows are, and one that ends as theirs does: a .json may be one
    # of SQuAD's, a .tsv one of sentences with a word in each line.
    told = path is not None and tells_format(path) and suffix(path) != suffix(data.path or "")
    return data.model_copy(update={**neutral, **splits, "path": path, "format": None if told else data.format})


def inspect(data: Data, path: str, setting: str, root: Path | None = None) -> row_reader.Source:
    """The files of rows without labels. Raises `ConfigError` with every problem found, which name `setting`."""
    try:
        found = row_reader.inspect(without_labels(data, path), root)
    except ConfigError as error:
        problems = [replace(one, field=one.field.replace("data.path", setting)) for one in error.problems]
        raise ConfigError(problems) from None
    return replace(found, pieces=tuple(piece for piece in found.pieces if piece.role == "train"))


def source(recipe: Recipe, root: Path | None = None) -> row_reader.Source:
    """All files of a run's rows; of a student's, those of `distill.unlabelled` and of its copies too. Raises
    `ConfigError`."""
    problems: list[Problem] = []
    found, further = row_reader.Source((), ()), list[Piece]()
    try:
        found = row_reader.inspect(recipe.data, root)
    except ConfigError as error:
        problems += error.problems
    names = ("unlabelled", "copied") if recipe.distill.copies else ("unlabelled",)
    for name in names if recipe.distill.teacher else ():
        if (path := getattr(recipe.distill, name)) is not None:
            try:
                further += inspect(recipe.data, path, f"distill.{name}", root).pieces
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return replace(found, pieces=found.pieces + tuple(piece._replace(role=ROLE) for piece in further))


def parted(given: row_reader.Source) -> tuple[row_reader.Source, row_reader.Source]:
    """The files of the labelled rows, and those of the others as training files."""
    if all(piece.role != ROLE for piece in given.pieces):
        return given, replace(given, pieces=())
    pairs = list(zip(given.pieces, given.hashed, strict=True))
    return (
        _of([(piece, digest) for piece, digest in pairs if piece.role != ROLE], given),
        _of([(piece._replace(role="train"), digest) for piece, digest in pairs if piece.role == ROLE], given),
    )


def _of(pairs: list[tuple[Piece, digests.Digest]], given: row_reader.Source) -> row_reader.Source:
    made = replace(given, pieces=tuple(piece for piece, _ in pairs))
    vars(made)["hashed"] = [digest for _, digest in pairs]  # what the cached property would read the files for again
    return made


def recipe_of(recipe: Recipe) -> Recipe:
    """By which the rows without labels are stored."""
    data = without_labels(recipe.data, recipe.distill.unlabelled)
    return recipe.model_copy(update={"data": data, "augment": Augment()})


def chosen(rows: Store, labelled: Store, task: base.Task, teacher: str, confidence: float) -> Chosen:
    """The rows of a store without labels that are trained on, by its `teacher`'s answers.

    Left out are texts that a labelled row has: of training rows the label is known, and a held-out row says less of a
    student that has learned its answer.
    """
    known = np.concatenate([labelled.keys(split) for split in labelled.manifest.rows])
    every = np.arange(rows.rows("train"), dtype=np.int64)
    fresh = ~np.isin(rows.keys("train"), known)
    sure = np.ones(len(every), dtype=np.bool_)
    if confidence > 0:
        sure = np.concatenate([_sure(rows, task, teacher, part) for part in _blocks(every)]) >= confidence
    taken = fresh & sure
    return Chosen(every[taken], int((fresh & ~sure).sum()), int((~fresh).sum()))


def _blocks(positions: Ints) -> list[Ints]:
    return [positions[first : first + BLOCK] for first in range(0, len(positions), BLOCK)] or [positions]


def _sure(rows: Store, task: base.Task, teacher: str, positions: Ints) -> npt.NDArray[np.float64]:
    """How sure the teacher is of each row, 0 to 1, as `Task.describe` has it."""
    tokens, head, answers = rows.read("train", positions), rows.manifest.head, rows.taught(teacher, positions)
    outputs = np.split(answers, np.cumsum(tokens.lengths_of_rows)[:-1]) if task.by_token else answers
    return task.describe(task.outcomes(outputs, tokens, head), tokens.labelled, head).score
