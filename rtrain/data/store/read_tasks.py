"""The data tasks of a token job, as rows of a Ray data set: each reads a file, or a part of a large file."""

from collections.abc import Iterator
from typing import Any

from rtrain.config import Recipe
from rtrain.data.row_reader import Source
from rtrain.data.sources import file_ranges
from rtrain.data.sources.find import Piece
from rtrain.tasks import base


def tasks(source: Source) -> list[dict[str, Any]]:
    """One task for each file, with the SHA-256 of the bytes that it should find."""
    numbered = enumerate(zip(source.pieces, source.sha256s, strict=True))
    whole = file_ranges.WHOLE._asdict()
    return [{"number": number, "piece": list(piece), "sha256": sha256, **whole} for number, (piece, sha256) in numbered]


def read(task: dict[str, Any]) -> tuple[Piece, file_ranges.Part]:
    """The file of a task, and the part of it that the task reads."""
    return Piece(*task["piece"]), file_ranges.Part(*(task[name] for name in file_ranges.Part._fields))


def is_cut(task: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a task's file is read in parts: it is large, and its rows do not depend on the rows before them.

    Blocks of packed text and copies of rows do depend on them. Borders of rows with escaped quotes are not looked for.
    """
    if base.get(recipe.task).packs or recipe.augment.active:
        return False
    piece, _ = read(task)
    return not piece.escape and file_ranges.is_large(piece.uri, piece.format)


def cut(task: dict[str, Any], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The tasks for the parts of a file, or the task itself if the file is not cut."""
    if not is_cut(task, recipe):
        yield task
        return
    piece, _ = read(task)
    for part, sha256 in file_ranges.survey(piece.uri, piece.format, task["sha256"], piece.delimiter):
        yield {**task, "sha256": sha256, **part._asdict()}
