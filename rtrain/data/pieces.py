"""What the tasks of a token job are given, as the rows of a Ray data set: a file each, or a part of a large one."""

from collections.abc import Iterator
from typing import Any

from rtrain.config import Recipe
from rtrain.data.formats import parts
from rtrain.data.records import Piece, Source
from rtrain.tasks import base


def tasks(source: Source) -> list[dict[str, Any]]:
    """One for each file, with the SHA-256 of what it is to read."""
    numbered = enumerate(zip(source.pieces, source.sha256s, strict=True))
    whole = parts.WHOLE._asdict()
    return [{"number": number, "piece": list(piece), "sha256": sha256, **whole} for number, (piece, sha256) in numbered]


def read(task: dict[str, Any]) -> tuple[Piece, parts.Part]:
    return Piece(*task["piece"]), parts.Part(*(task[name] for name in parts.Part._fields))


def is_cut(task: dict[str, Any], recipe: Recipe) -> bool:
    """Not where a row's place depends on the rows before it: among blocks of text, and among copies."""
    if base.get(recipe.task).packs or recipe.augment.active:
        return False
    piece, _ = read(task)
    return parts.is_large(piece.uri, piece.format)


def cut(task: dict[str, Any], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The task of a file as those of its parts."""
    if not is_cut(task, recipe):
        yield task
        return
    piece, _ = read(task)
    for part, sha256 in parts.survey(piece.uri, piece.format, task["sha256"]):
        yield {**task, "sha256": sha256, **part._asdict()}
