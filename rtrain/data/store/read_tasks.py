"""The data tasks of a token job, as rows of a Ray data set: each reads a file, or a part of a large file."""

from collections.abc import Iterator
from typing import Any

from rtrain.config import Recipe
from rtrain.data.row_reader import DataSource
from rtrain.data.sources import file_ranges
from rtrain.data.sources.find import SourceFile
from rtrain.tasks import base


def plan_tasks(source: DataSource) -> list[dict[str, Any]]:
    """One task for each file, with the SHA-256 of the bytes that it should find."""
    numbered = enumerate(zip(source.files, source.sha256s, strict=True))
    whole_file = file_ranges.WHOLE_FILE._asdict()
    return [
        {"number": number, "file": list(file), "sha256": sha256, **whole_file} for number, (file, sha256) in numbered
    ]


def parse_task(task: dict[str, Any]) -> tuple[SourceFile, file_ranges.FilePart]:
    """The file of a task, and the part of it that the task reads."""
    return SourceFile(*task["file"]), file_ranges.FilePart(*(task[name] for name in file_ranges.FilePart._fields))


def should_split(task: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a task's file is read in parts: it is large, and its rows do not depend on the rows before them.

    Blocks of packed text and copies of rows depend on them. Files with escaped quotes are not split: row borders are
    not searched there.
    """
    if base.get_task(recipe.task).packs_text or recipe.augment.is_active:
        return False
    source_file, _ = parse_task(task)
    return not source_file.escape and file_ranges.is_large(source_file.uri, source_file.format)


def split_task(task: dict[str, Any], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The tasks for the parts of a file, or the task itself if the file is not cut."""
    if not should_split(task, recipe):
        yield task
        return
    source_file, _ = parse_task(task)
    for part, sha256 in file_ranges.split_file(
        source_file.uri, source_file.format, task["sha256"], source_file.delimiter
    ):
        yield {**task, "sha256": sha256, **part._asdict()}
