"""Portions answered on a Ray cluster: actors that hold the artefact, each of which reads the portions that it answers.

The files and the artefact must be where every node finds them. The answers come back to this process, which writes
them, so that the output may be a local file. A portion that dies with its node is answered by another actor.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.connection import session
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.inference.batch.chunks import Portion
from rtrain.inference.batch.pipeline import Answered, Answerer, Counts, Work, copies

THREADS = 2
"""CPUs of an actor, and threads of its engines. More actors would hold more copies of the model, fewer would leave
reading and writing to one thread for many cores."""
MOST_ACTORS = 256
"""There are as many as free CPUs hold, up to this."""


class Actor:
    """A call with a portion's fields returns its answers' bytes and counts."""

    def __init__(self, work: Work, threads: int):
        self._work, self._threads = work, threads
        self._answerer: Answerer | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """An error that a user can mend is returned: raised, it would carry Ray's traceback and advice."""
        try:
            if self._answerer is None:
                self._answerer = Answerer(self._work, copies(self._work.artifact, self._threads))
            found = self._answerer.answer(Portion(**{name: int(row[name]) for name in Portion._fields}))
        except UserError as error:
            return {"number": row["number"], "body": b"", **Counts(0, 0, 0)._asdict(), "error": str(error)}
        return {"number": found.number, "body": found.body, **found.counts._asdict(), "error": ""}


def on(config: Config, folder: Path) -> Callable[[Work, list[Portion]], Iterator[Answered]]:
    """How `files.to_file` has portions answered on the cluster of `config`, from inside `folder`."""

    def answers(work: Work, portions: list[Portion]) -> Iterator[Answered]:
        if portions:
            with session(config, folder):
                yield from on_cluster(work, portions)

    return answers


def on_cluster(work: Work, portions: list[Portion]) -> Iterator[Answered]:
    """The portions, in the order in which they are done. Needs a Ray session."""
    import ray.data

    ray_internals.without_data_actors()
    # A small machine keeps a CPU for Ray Data itself.
    cpus = int(sum(node.get("CPU", 0.0) for node in capacity.here()))
    threads = min(THREADS, max(1, cpus - 1))
    items = [portion._asdict() for portion in portions]
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=min(MOST_ACTORS, len(items)))
    actor: Any = Actor  # Ray's annotation leaves out classes
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map(
        actor, fn_constructor_args=(work, threads), num_cpus=threads, compute=pool
    )
    for row in dataset.iter_rows():
        if row["error"]:
            raise UserError(f"on a node of the cluster: {row['error']}", code="failed_on_node")
        yield Answered(row["number"], row["body"], Counts(row["answered"], row["empty"], row["bad"]))
