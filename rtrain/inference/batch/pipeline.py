"""Portions of rows -> the bytes of their answers, in a pipeline.

The engine is at one portion while the next is read and made tokens, and the one before is decoded and written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rtrain.config import Data
from rtrain.core import engines
from rtrain.core.ragged import Encoded, Floats
from rtrain.data.row_reader import Record, Source
from rtrain.inference import artifact as artifacts
from rtrain.inference.batch import formats
from rtrain.inference.batch.chunks import Chunk, Portion, Reader
from rtrain.inference.batch.columns import Layout, score_columns, scores_by_column
from rtrain.inference.batch.formats import Format
from rtrain.inference.predictor import BATCH_ROWS, Predictor, side_by_side
from rtrain.tasks.base import Column, Input, Task

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Work:
    """What is answered, by what, into which table: all that a process needs to answer a portion."""

    artifact: Path
    source: Source
    data: Data
    layout: Layout
    format: Format
    batch_rows: int = BATCH_ROWS
    scores: bool = False
    """Whether the score of each label has a column."""


class Counts(NamedTuple):
    """Rows of a portion, by what became of them."""

    answered: int
    empty: int
    """Their text is blank."""
    bad: int
    """They cannot be used for another reason."""

    @property
    def rows(self) -> int:
        return sum(self)


class Answered(NamedTuple):
    number: int
    """The portion's number."""
    body: bytes
    """The portion's rows and answers, as `writing.encode` has them."""
    counts: Counts


class _Prepared(NamedTuple):
    number: int
    chunk: Chunk
    asked: list[Input]
    """What is asked of the rows that have no reason against them."""
    encoded: list[Encoded]


class Answerer:
    """A loaded artefact that answers portions."""

    def __init__(self, work: Work, copies: Sequence[Predictor] | None = None):
        """`copies` of the artefact compute the batches of a portion side by side; None: one is loaded."""
        self._work = work
        self._copies = copies or [Predictor.load(work.artifact)]
        self._predictor = self._copies[0]
        self._reader = Reader(work.source, work.data)

    def answer(self, portion: Portion) -> Answered:
        """One portion, without a pipeline."""
        return self._written(self._computed(self._prepared(portion.number, self._reader.read(portion))))

    def each(self, portions: Iterable[Portion]) -> Iterator[Answered]:
        """The portions in order."""
        prepared = ahead(lambda portion: self._prepared(portion.number, self._reader.read(portion)), portions)
        yield from map(self._written, ahead(self._computed, prepared))
        self._reader.close()

    def _prepared(self, number: int, chunk: Chunk) -> _Prepared:
        chunk = replace(chunk, records=[with_flaw(record, self._predictor) for record in chunk.records])
        asked = [asked_of(record, self._predictor.task) for record in chunk.records if record.reason is None]
        return _Prepared(number, chunk, asked, self._predictor.encode(asked))

    def _computed(self, prepared: _Prepared) -> tuple[_Prepared, list[Floats]]:
        return prepared, side_by_side(self._copies, prepared.encoded, self._work.batch_rows)

    def _written(self, computed: tuple[_Prepared, list[Floats]]) -> Answered:
        (number, chunk, asked, encoded), outputs = computed
        task, head = self._predictor.task, self._predictor.head
        answers = task.decode(outputs, asked, encoded, head, {}) if asked else []
        added = beside(chunk, task.columns(head), answers)
        if self._work.scores:
            added += beside(chunk, score_columns(task, head), [scores_by_column(answer) for answer in answers])
        added.append(reasons(chunk))
        body = formats.encode(self._work.format, self._work.layout, chunk, added)
        return Answered(number, body, Counts(len(asked), chunk.empty, len(chunk.records) - len(asked) - chunk.empty))


MOST_COPIES = 4
"""More would hold the model in memory more often; on many cores each has several threads."""


def copies(artifact: Path, threads: int) -> list[Predictor]:
    """Copies of an artefact that share so many threads. Two int8 engines of one thread answer short texts 1.25 times as
    fast as one of two threads. A float model has one copy: torch has one number of threads for all of a process."""
    is_float = engines.get(artifacts.read(artifact, verify=False).engine).gradients
    count = 1 if is_float else min(MOST_COPIES, threads)
    return [Predictor.load(artifact, threads // count) for _ in range(count)]


def asked_of(record: Record, task: Task) -> Input:
    """What is asked of a row."""
    if record.pair is None:
        return record.text
    return dict(zip(task.fields, (record.text, record.pair), strict=True))


def with_flaw(record: Record, predictor: Predictor) -> Record:
    """The record; with the artefact's reason where it cannot be asked."""
    if record.reason is not None:
        return record
    flaw = predictor.flaw(asked_of(record, predictor.task))
    return record if flaw is None else record._replace(reason=f"it {flaw}")


def beside(chunk: Chunk, columns: Sequence[Column], answers: Sequence[Any]) -> list[list[Any]]:
    """The values of each of the answers' columns, None in rows without an answer. `answers`: of the rows without a
    reason."""
    has = [record.reason is None for record in chunk.records]
    found = []
    for column in columns:
        values = iter([column.value(answer) for answer in answers])
        found.append([next(values) if answered else None for answered in has])
    return found


def reasons(chunk: Chunk) -> list[str | None]:
    """Why rows have no answer, each with its place: a row that cannot be read has no columns to find it by."""
    return [
        None if record.reason is None else f"{chunk.unit} {record.line}: {record.reason}" for record in chunk.records
    ]


def ahead(work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """`work` of each item, in order, done in a thread of its own while the caller is at the one before."""
    with ThreadPoolExecutor(1) as thread:
        before = None
        for item in items:
            future = thread.submit(work, item)
            if before is not None:
                yield before.result()
            before = future
        if before is not None:
            yield before.result()
