"""Pipeline: chunks of rows -> encoded predictions, in this process or by actors on a Ray cluster.

While the engine computes a chunk, the next one is read and tokenized, and the previous one is decoded and encoded.

"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rtrain.config import Config, DataConfig
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats
from rtrain.data.row_reader import DataSource, SourceRow
from rtrain.inference import artifact as artifacts
from rtrain.inference.batch import formats
from rtrain.inference.batch.chunks import Chunk, ChunkReader, ChunkRows
from rtrain.inference.batch.formats import Format, OutputSchema, make_score_columns, scores_by_column
from rtrain.inference.predictor import DEFAULT_BATCH_SIZE, Predictor, compute_outputs_in_parallel
from rtrain.inference.score import make_input
from rtrain.tasks.base import AnswerColumn, Input

InputItem = TypeVar("InputItem")
OutputItem = TypeVar("OutputItem")
MAX_COPIES = 4
"""Maximum copies of a model in memory; on many cores each has several threads."""
THREADS_PER_ACTOR = 2
"""CPUs of an actor, and threads of its engines. Fewer threads mean more copies of the model; more threads leave reading
and decoding to one thread for many cores."""
MAX_ACTORS = 256
"""Maximum number of actors; the free CPUs limit it too."""


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
        encoded_chunks = prefetch(lambda chunk: self._encode(chunk.number, self._reader.read(chunk)), chunks)
        yield from map(self._decode_and_write, prefetch(self._compute, encoded_chunks))
        self._reader.close()

    def _encode(self, number: int, chunk_rows: ChunkRows) -> _EncodedChunk:
        chunk_rows = replace(
            chunk_rows, records=[with_input_problem(record, self._predictor) for record in chunk_rows.records]
        )
        inputs = [make_input(self._predictor.task, record) for record in chunk_rows.records if record.reason is None]
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
        body = formats.encode_chunk(self._job.format, self._job.output_schema, chunk_rows.columns, answer_values)
        return AnsweredChunk(
            number,
            body,
            AnswerCounts(len(inputs), chunk_rows.empty, len(chunk_rows.records) - len(inputs) - chunk_rows.empty),
        )


def load_copies(artifact: Path, threads: int) -> list[Predictor]:
    """Load copies of an artifact that share so many threads. Two int8 engines with one thread each predict short texts
    1.25 times as fast as one with two threads. A float model has one copy: torch has one thread pool per process."""
    is_float = engines.get_engine(artifacts.read_artifact(artifact, verify=False).engine).has_gradients
    count = 1 if is_float else min(MAX_COPIES, threads)
    return [Predictor.load(artifact, threads // count) for _ in range(count)]


def with_input_problem(record: SourceRow, predictor: Predictor) -> SourceRow:
    """Return the record, with the artifact's reason if the input is invalid."""
    if record.reason is not None:
        return record
    problem = predictor.validate_input(make_input(predictor.task, record))
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


class AnswerActor:
    """Ray Data actor: fields of a chunk -> its encoded predictions and counts."""

    def __init__(self, job: BatchPredictJob, threads: int):
        self._job, self._threads = job, threads
        self._answerer: ChunkAnswerer | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A `UserError` is returned as text: raised, it would carry Ray's traceback and advice."""
        try:
            if self._answerer is None:
                self._answerer = ChunkAnswerer(self._job, load_copies(self._job.artifact, self._threads))
            answered_chunk = self._answerer.answer(Chunk(**{name: int(row[name]) for name in Chunk._fields}))
        except UserError as error:
            return {"number": row["number"], "body": b"", **AnswerCounts(0, 0, 0)._asdict(), "error": str(error)}
        return {
            "number": answered_chunk.number,
            "body": answered_chunk.body,
            **answered_chunk.counts._asdict(),
            "error": "",
        }


def make_cluster_answerer(
    config: Config, folder: Path
) -> Callable[[BatchPredictJob, list[Chunk]], Iterator[AnsweredChunk]]:
    """Return the function that predicts chunks on the cluster of `config`, for `predict_files.answer_to_file`.

    Every node must be able to read the files and the artifact. This process writes the predictions, so the output may
    be a local file. If a node is lost, another actor predicts its chunk.
    """
    from rtrain.cluster.connection import session

    def answer_chunks(job: BatchPredictJob, chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
        if chunks:
            with session(config, folder):
                yield from answer_on_cluster(job, chunks)

    return answer_chunks


def answer_on_cluster(job: BatchPredictJob, chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
    """Yield predicted chunks in the order of completion. Needs a Ray session."""
    import ray.data

    from rtrain import ray_internals
    from rtrain.cluster import capacity

    ray_internals.disable_data_actors()
    # One CPU is left for Ray Data itself.
    cpus = int(sum(node.get("CPU", 0.0) for node in capacity.nodes_with_labels()))
    threads = min(THREADS_PER_ACTOR, max(1, cpus - 1))
    items = [chunk._asdict() for chunk in chunks]
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=min(MAX_ACTORS, len(items)))
    actor_class: Any = AnswerActor  # Ray's annotation leaves out classes
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map(
        actor_class, fn_constructor_args=(job, threads), num_cpus=threads, compute=pool
    )
    for row in dataset.iter_rows():
        if row["error"]:
            raise UserError(f"on a node of the cluster: {row['error']}", code="failed_on_node")
        yield AnsweredChunk(row["number"], row["body"], AnswerCounts(row["answered"], row["empty"], row["unusable"]))
