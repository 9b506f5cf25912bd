"""Pipeline: chunks of rows -> encoded predictions.

While the engine computes a chunk, the next one is read and tokenized, and the previous one is decoded and encoded.

"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rtrain.config import DataConfig
from rtrain.core import engines
from rtrain.core.ragged import EncodedRow, Floats
from rtrain.data.row_reader import DataSource, SourceRow
from rtrain.inference import artifact as artifacts
from rtrain.inference.batch import formats
from rtrain.inference.batch.chunks import Chunk, ChunkReader, ChunkRows
from rtrain.inference.batch.columns import OutputSchema, make_score_columns, scores_by_column
from rtrain.inference.batch.formats import Format
from rtrain.inference.predictor import DEFAULT_BATCH_SIZE, Predictor, compute_outputs_in_parallel
from rtrain.tasks.base import AnswerColumn, Input, Task

InputItem = TypeVar("InputItem")
OutputItem = TypeVar("OutputItem")


@dataclass(frozen=True)
class BatchPredictJob:
    """All that a process needs to predict a chunk."""

    artifact: Path
    source: DataSource
    data: DataConfig
    output_schema: OutputSchema
    format: Format
    batch_rows: int = DEFAULT_BATCH_SIZE
    with_label_scores: bool = False
    """Add a column for the score of each label."""


class AnswerCounts(NamedTuple):
    """Rows of a chunk by outcome."""

    answered: int
    empty: int
    """The text is blank."""
    unusable: int
    """The row is invalid for another reason."""

    @property
    def rows(self) -> int:
        return sum(self)


class AnsweredChunk(NamedTuple):
    number: int
    """Number of the chunk."""
    body: bytes
    """Rows and predictions (`formats.encode_chunk`)."""
    counts: AnswerCounts


class _EncodedChunk(NamedTuple):
    number: int
    chunk_rows: ChunkRows
    inputs: list[Input]
    """Inputs of the valid rows."""
    encoded: list[EncodedRow]


class ChunkAnswerer:
    """Predicts chunks with a loaded artifact."""

    def __init__(self, job: BatchPredictJob, copies: Sequence[Predictor] | None = None):
        """`copies` of the artifact (`load_copies`) compute the batches of a chunk in parallel; default: one copy."""
        self._job = job
        self._copies = copies or [Predictor.load(job.artifact)]
        self._predictor = self._copies[0]
        self._reader = ChunkReader(job.source, job.data)

    def answer(self, chunk: Chunk) -> AnsweredChunk:
        """Predict one chunk, without a pipeline."""
        return self._decode_and_write(self._compute(self._encode(chunk.number, self._reader.read(chunk))))

    def answer_all(self, chunks: Iterable[Chunk]) -> Iterator[AnsweredChunk]:
        """Predict the chunks in order."""
        encoded_chunks = prefetch(lambda chunk: self._encode(chunk.number, self._reader.read(chunk)), chunks)
        yield from map(self._decode_and_write, prefetch(self._compute, encoded_chunks))
        self._reader.close()

    def _encode(self, number: int, chunk_rows: ChunkRows) -> _EncodedChunk:
        chunk_rows = replace(
            chunk_rows, records=[with_input_problem(record, self._predictor) for record in chunk_rows.records]
        )
        inputs = [record_input(record, self._predictor.task) for record in chunk_rows.records if record.reason is None]
        return _EncodedChunk(number, chunk_rows, inputs, self._predictor.encode(inputs))

    def _compute(self, encoded_chunk: _EncodedChunk) -> tuple[_EncodedChunk, list[Floats]]:
        return encoded_chunk, compute_outputs_in_parallel(self._copies, encoded_chunk.encoded, self._job.batch_rows)

    def _decode_and_write(self, computed_chunk: tuple[_EncodedChunk, list[Floats]]) -> AnsweredChunk:
        (number, chunk_rows, inputs, encoded), outputs = computed_chunk
        task, head = self._predictor.task, self._predictor.head
        answers = task.decode(outputs, inputs, encoded, head, {}) if inputs else []
        answer_values = align_with_rows(chunk_rows, task.answer_columns(head), answers)
        if self._job.with_label_scores:
            answer_values += align_with_rows(
                chunk_rows, make_score_columns(task, head), [scores_by_column(answer) for answer in answers]
            )
        answer_values.append(missing_reasons(chunk_rows))
        body = formats.encode_chunk(self._job.format, self._job.output_schema, chunk_rows, answer_values)
        return AnsweredChunk(
            number,
            body,
            AnswerCounts(len(inputs), chunk_rows.empty, len(chunk_rows.records) - len(inputs) - chunk_rows.empty),
        )


MAX_COPIES = 4
"""Maximum copies of a model in memory; on many cores each has several threads."""


def load_copies(artifact: Path, threads: int) -> list[Predictor]:
    """Load copies of an artifact that share so many threads. Two int8 engines with one thread each predict short texts
    1.25 times as fast as one with two threads. A float model has one copy: torch has one thread pool per process."""
    is_float = engines.get_engine(artifacts.read_artifact(artifact, verify=False).engine).has_gradients
    count = 1 if is_float else min(MAX_COPIES, threads)
    return [Predictor.load(artifact, threads // count) for _ in range(count)]


def record_input(record: SourceRow, task: Task) -> Input:
    """Return the input of a row."""
    if record.pair is None:
        return record.text
    return dict(zip(task.fields, (record.text, record.pair), strict=True))


def with_input_problem(record: SourceRow, predictor: Predictor) -> SourceRow:
    """Return the record, with the artifact's reason if the input is invalid."""
    if record.reason is not None:
        return record
    problem = predictor.validate_input(record_input(record, predictor.task))
    return record if problem is None else record._replace(reason=f"it {problem}")


def align_with_rows(chunk_rows: ChunkRows, columns: Sequence[AnswerColumn], answers: Sequence[Any]) -> list[list[Any]]:
    """Return the values of each answer column, with None in invalid rows. `answers`: predictions of the valid rows."""
    is_answered = [record.reason is None for record in chunk_rows.records]
    values_by_column = []
    for column in columns:
        values = iter([column.value(answer) for answer in answers])
        values_by_column.append([next(values) if answered else None for answered in is_answered])
    return values_by_column


def missing_reasons(chunk_rows: ChunkRows) -> list[str | None]:
    """Return why rows have no prediction, with their line: an unreadable row has no columns to identify it."""
    return [
        None if record.reason is None else f"{chunk_rows.unit} {record.line}: {record.reason}"
        for record in chunk_rows.records
    ]


def prefetch(function: Callable[[InputItem], OutputItem], items: Iterable[InputItem]) -> Iterator[OutputItem]:
    """Apply `function` to each item in order, in a thread that is one item ahead of the caller."""
    with ThreadPoolExecutor(1) as thread:
        previous = None
        for item in items:
            future = thread.submit(function, item)
            if previous is not None:
                yield previous.result()
            previous = future
        if previous is not None:
            yield previous.result()
