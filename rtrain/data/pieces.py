"""The data tasks of a token job, as rows of a Ray data set: each reads a file, or a part of a large file."""

from collections.abc import Iterator
from typing import Any

from rtrain.config import Recipe
from rtrain.data.formats import parts
from rtrain.data.formats.files import Piece
from rtrain.data.records import Source
from rtrain.tasks import base


def tasks(source: Source) -> list[dict[str, Any]]:
    """One task for each file, with the SHA-256 of the bytes that it should find."""
    numbered = enumerate(zip(source.pieces, source.sha256s, strict=True))
    whole = parts.WHOLE._asdict()
    return [{"number": number, "piece": list(piece), "sha256": sha256, **whole} for number, (piece, sha256) in numbered]


def read(task: dict[str, Any]) -> tuple[Piece, parts.Part]:
    """The file of a task, and the part of it that the task reads."""
    return Piece(*task["piece"]), parts.Part(*(task[name] for name in parts.Part._fields))


def is_cut(task: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a task's file is read in parts: it is large, and its rows do not depend on the rows before them.

    Blocks of packed text and copies of rows do depend on them. Borders of rows with escaped quotes are not looked for.
    """
    if base.get(recipe.task).packs or recipe.augment.active:
        return False
    piece, _ = read(task)
    return not piece.escape and parts.is_large(piece.uri, piece.format)


def cut(task: dict[str, Any], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The tasks for the parts of a file, or the task itself if the file is not cut."""
    if not is_cut(task, recipe):
        yield task
        return
    piece, _ = read(task)
    for part, sha256 in parts.survey(piece.uri, piece.format, task["sha256"], piece.delimiter):
        yield {**task, "sha256": sha256, **part._asdict()}
