"""Batch prediction on a Ray cluster: actors load the artifact, and read and predict chunks.

Every node must be able to read the files and the artifact. This process writes the predictions, so the output may be a
local file. If a node is lost, another actor predicts its chunk.

"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.connection import session
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.inference.batch.chunks import Chunk
from rtrain.inference.batch.pipeline import AnswerCounts, AnsweredChunk, BatchPredictJob, ChunkAnswerer, load_copies

THREADS_PER_ACTOR = 2
"""CPUs of an actor, and threads of its engines. Fewer threads mean more copies of the model; more threads leave reading
and decoding to one thread for many cores."""
MAX_ACTORS = 256
"""Maximum number of actors; the free CPUs limit it too."""


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
    """Return the function that predicts chunks on the cluster of `config`, for `predict_files.answer_to_file`."""

    def answer_chunks(job: BatchPredictJob, chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
        if chunks:
            with session(config, folder):
                yield from answer_on_cluster(job, chunks)

    return answer_chunks


def answer_on_cluster(job: BatchPredictJob, chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
    """Yield predicted chunks in the order of completion. Needs a Ray session."""
    import ray.data

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
