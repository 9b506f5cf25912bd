"""The scores of an artefact on a file, and each row's answer beside the right one: the verb `evaluate --out`."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rtrain import artifact as artifacts, drafts, score
from rtrain.answers import columns, source, writing
from rtrain.answers.answering import beside, reasons
from rtrain.answers.folder import refuse_among_rows, refuse_existing
from rtrain.answers.source import Chunk
from rtrain.batch import Head
from rtrain.config import Data
from rtrain.data import records
from rtrain.errors import UserError
from rtrain.score import Measured
from rtrain.tasks import base
from rtrain.tasks.base import Column

TARGET = Column("target", str, lambda row: row)
"""The label as it was read, the one that counts as right; so it is called in a run's predictions too."""
RIGHT = Column("right", bool, lambda row: row)
"""Empty for tasks whose answers are nearer to the truth or farther from it, and for rows without an answer."""


def run(artifact: Path, data: Data, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """The report of `score.run`; the rows go to the file `out`, with their answers, labels and what is right."""
    format = writing.format_of(out)
    refuse_existing(out, overwrite)
    made = artifacts.read(artifact)
    answer = base.get(made.task).columns(Head(made.labels, made.facts))
    own = records.inspect(data)
    refuse_among_rows(own, data, out)
    found = score.measured(artifact, data)
    survey = source.survey(own, data)
    layout = columns.layout(survey.kinds, [*answer, TARGET, RIGHT])
    reader, values = source.Reader(own, data), _Values(found)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            paths = [Path(folder) / f"{portion.number:06d}" for portion in survey.portions]
            for path, portion in zip(paths, survey.portions, strict=True):
                chunk, added = values.of(reader.read(portion), answer)
                path.write_bytes(writing.encode(format, layout, chunk, added))
            whole = Path(folder) / "whole"
            with whole.open("wb") as file:
                writing.join(format, layout, paths, file)
            drafts.sync(whole)
            whole.replace(out)
            drafts.sync(out.parent)
            reader.close()
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another place with --out") from None
    return found.report


class _Values:
    """The values of the added columns, portion by portion in their order."""

    def __init__(self, found: Measured):
        self._rows, self._answers = iter(found.rows), iter(found.answers)
        self._right: Iterator[Any] | None = None if found.right is None else iter(found.right.tolist())

    def of(self, chunk: Chunk, answer: list[Column]) -> tuple[Chunk, list[list[Any]]]:
        rows = list(islice(self._rows, len(chunk.records)))
        assert [row.line for row in rows] == [record.line for record in chunk.records]
        chunk = replace(chunk, records=rows)
        has = [row.reason is None for row in rows]
        answers = list(islice(self._answers, sum(has)))
        right = [next(self._right) if one and self._right else None for one in has]
        targets = [row.label if one else None for row, one in zip(rows, has, strict=True)]
        return chunk, [*beside(chunk, answer, answers), targets, right, reasons(chunk)]
