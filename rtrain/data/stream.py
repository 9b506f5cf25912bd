"""Token store + order -> one Ray Data stream of ready passes per worker.

Each worker streams its own share: a range of update numbers, mapped by data tasks to that worker's passes, in order.
Ray's `streaming_split` is not used: it deals blocks by fill level, so the rows of an update would depend on the number
of workers, and with `equal=True` it drops the tail. A stream of update numbers can also start anywhere: a resume at
update u reads the rows of u first and skips nothing. The stream runs in its worker, without a coordinator process.
"""

import contextlib
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rtrain import ray_internals
from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints, Tokens
from rtrain.data.order import Order, deal, rows_digest
from rtrain.data.store.store import Store, open_store
from rtrain.parallel import gradient_noise

if TYPE_CHECKING:
    import ray.data

UPDATES_PER_TASK = 16
"""Updates that one data task prepares: enough to hide the task's own few milliseconds, and few enough for a quick first
batch."""
BLOCK_BYTES = 2 << 20
"""A task prepares fewer updates if they would exceed so many bytes. Ray holds some ten blocks beyond a stream's limit,
which came to 384 MB with blocks of 38 MB."""
STREAM_BYTES = 64 << 20
"""Object store memory that one worker's stream may fill ahead of its worker."""
SEGMENT_UPDATES = 4096
"""Updates of one Ray data set. Ray makes all tasks of a data set before the first batch, which takes 90 s for a million
updates. A stream of many data sets starts at once, and pays 0.6 s between two of them."""


_COLUMNS = tuple(field.name for field in fields(Tokens))


class IngestMismatch(RuntimeError):
    """The stream gave another update than the expected one: a bug or a mixed-up store. It must not be trained on."""


@dataclass(frozen=True)
class Update:
    """One worker's part of an update."""

    number: int
    first_row: int
    """Id of the update's first row; it is the same on every worker."""
    digest: bytes
    """Digest of all row ids of the update, in order (`order.rows_digest`); it is the same on every worker."""
    passes: tuple[Tokens, ...]
    """The worker's passes. There may be none if the update has fewer rows than there are workers."""


@dataclass(frozen=True)
class Share:
    """The part of a run's rows that one worker's stream reads, and how it is cut into passes."""

    store: Path
    order: Order
    workers: int
    rank: int
    micro_batch: int | None
    """Rows of a pass at most; None if only tokens limit it."""
    tokens_per_pass: int | None = None
    teacher: str | None = None
    """Version of the teacher whose outputs go with each row; None without a teacher."""
    task_cpus: float = 1.0
    """Logical CPUs that a data task reserves."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those of the nodes that data tasks may run on."""
    at_random: int = 0
    """Of how many updates one has its rows dealt at random (`exchange.noise`); 0: none."""
    speeds: tuple[float, ...] = ()
    """Those of all workers, by which the rows of the other updates are dealt; none: equally many tokens for each."""


def plan_update(store: Store, share: Share, number: int) -> Update:
    """The part of update `number` that belongs to the share's worker. It reads the store and is pure otherwise."""
    positions = share.order.positions(number)
    row_ids = store.column("train", "row_id")[positions]
    lengths = store.column("train", "length")[positions]
    limits = (share.micro_batch, share.tokens_per_pass)
    at_random = gradient_noise.due(number, share.at_random)
    passes = deal(lengths, share.workers, share.rank, *limits, at_random=at_random, speeds=share.speeds)
    return Update(
        number=number,
        first_row=int(row_ids[0]),
        digest=rows_digest(number, row_ids),
        passes=tuple(_read(store, positions[chosen], share.teacher) for chosen in passes),
    )


def _read(store: Store, positions: Ints, teacher: str | None) -> Tokens:
    tokens = store.read("train", positions)
    return tokens if teacher is None else replace(tokens, teacher=store.taught(teacher, positions))


def stream(share: Share, start: int, stop: int) -> Iterator[Update]:
    """A worker's part of updates `start` to `stop - 1`, read ahead by Ray Data tasks.

    Raises `IngestMismatch` if an update has other rows than the order says, and `UserError` if the store is damaged.
    """
    segments = (
        _dataset(share, begin, min(begin + SEGMENT_UPDATES, stop)) for begin in range(start, stop, SEGMENT_UPDATES)
    )
    tables = (dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4) for dataset in segments)
    yield from verified(decoded(itertools.chain.from_iterable(tables)), share, start)


def verified(updates: Iterable[Update], share: Share, start: int) -> Iterator[Update]:
    """The updates from `start` on, each compared with the order. Raises `IngestMismatch`."""
    row_ids = open_store(share.store).column("train", "row_id")
    for number, update in enumerate(updates, start=start):
        expected = row_ids[share.order.positions(number)]
        if (update.number, update.digest) != (number, rows_digest(number, expected)):
            raise IngestMismatch(
                f"update {number} should start with row {int(expected[0]):016x}; the stream gave update "
                f"{update.number} with row {update.first_row:016x}, or other rows after it. The token store "
                f"{share.store} does not belong to this run."
            )
        yield update


def warm_up() -> None:
    """Run one Ray Data task in the background, while the worker still makes its model.

    Ray Data is then imported, in this process and in a data task's, when the stream begins. On two busy cores the first
    batch came after 0.4 s instead of 6 s, and a start as a whole took no longer.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):  # a failure here comes again in the stream, and is reported there
            one_task()

    threading.Thread(target=quietly, daemon=True).start()


def one_task() -> list[dict[str, Any]]:
    """Send one row through a data task that returns it unchanged."""
    import ray.data

    ray_internals.without_data_actors()
    dataset = ray.data.range(1, override_num_blocks=1)
    return dataset.map_batches(_as_it_is, batch_size=None, zero_copy_batch=True).take_all()


def _as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def _dataset(share: Share, start: int, stop: int) -> "ray.data.Dataset":
    import ray.data

    ray_internals.without_data_actors()
    ray_internals.stream_within(share.task_cpus)  # the run asks for nodes, for all its streams (`cluster.demand`)
    blocks = max(1, math.ceil((stop - start) / _updates_per_task(share)))
    dataset = ray_internals.numbers(stop - start, blocks, share.task_cpus).map_batches(
        partial(materialise, share=share, start=start),
        batch_size=None,
        zero_copy_batch=True,
        num_cpus=share.task_cpus,
    )
    # Ray ends a stream from which nothing is taken for some time. A worker takes nothing during a long evaluation.
    dataset.context.execution_no_progress_timeout_s = -1
    options = dataset.context.execution_options
    options.preserve_order = True
    options.label_selector = dict(share.labels) or None
    options.resource_limits = ray.data.ExecutionResources(object_store_memory=STREAM_BYTES)
    return dataset


def _updates_per_task(share: Share) -> int:
    store = open_store(share.store)
    total_bytes = 4 * (store.manifest.tokens["train"] + store.num_targets("train"))
    if share.teacher is not None:
        total_bytes += 4 * store.teacher(share.teacher).size
    row_bytes = total_bytes / max(1, store.rows("train")) + 24
    update_bytes = row_bytes * share.order.rows_per_update / share.workers
    return max(1, min(UPDATES_PER_TASK, int(BLOCK_BYTES / update_bytes)))


def materialise(batch: dict[str, Any], share: Share, start: int) -> pa.Table:
    """The lines of some updates as a table; a single line with the error if the store is refused."""
    try:
        store = open_store(share.store)
        lines = [line for number in batch["id"] for line in _lines(plan_update(store, share, start + int(number)))]
    except UserError as error:
        # The error goes as data: raised here, it would reach the worker as an error of Ray's, with ours in its
        # traceback.
        lines = [{"error": str(error), "code": error.code}]
    return pa.Table.from_pylist(lines, schema=_SCHEMA)


def _lines(update: Update) -> list[dict[str, Any]]:
    """One line per pass, or one empty line if this worker has no rows of the update."""
    head = {"update": update.number, "first_row": update.first_row, "digest": update.digest}
    lines = []
    for place, tokens in enumerate(update.passes):
        columns = {name: getattr(tokens, name) for name in _COLUMNS} | {"teacher": tokens.teacher.ravel()}
        outputs = tokens.teacher.shape[1]
        lines.append({**head, "last": place == len(update.passes) - 1, "outputs": outputs, **columns})
    nothing = {name: np.empty(0, dtype=np.int32) for name in _COLUMNS if name != "unlabelled"}
    return lines or [{**head, "last": True, "outputs": 0, "unlabelled": None, **nothing}]


_SCHEMA = pa.schema(
    {
        "error": pa.string(),
        "code": pa.string(),
        "update": pa.int64(),
        "first_row": pa.uint64(),
        "digest": pa.binary(32),
        "last": pa.bool_(),
        "outputs": pa.int32(),
        "ids": pa.list_(pa.int32()),
        "lengths": pa.list_(pa.int32()),
        "second": pa.list_(pa.int32()),
        "windows": pa.list_(pa.int32()),
        "targets": pa.list_(pa.float32()),
        "counts": pa.list_(pa.int32()),
        "row_ids": pa.list_(pa.uint64()),
        "teacher": pa.list_(pa.float32()),
        "unlabelled": pa.list_(pa.bool_()),
    }
)


def decoded(tables: Iterable[Any]) -> Iterator[Update]:
    """The updates of the tables that `materialise` makes. Raises `UserError` where a data task has met one."""
    passes: list[Tokens] = []
    for table in tables:
        for line in range(table.num_rows):
            if error := table["error"][line].as_py():
                raise UserError(error, code=table["code"][line].as_py())
            columns: list[Any] = [table[name][line].values for name in _COLUMNS]
            found: list[Any] = [None if one is None else one.to_numpy(zero_copy_only=False) for one in columns]
            tokens = Tokens(*found)
            if len(tokens):
                outputs = table["outputs"][line].as_py()
                nothing = np.empty((len(tokens), 0), dtype=np.float32)
                passes.append(replace(tokens, teacher=tokens.teacher.reshape(-1, outputs) if outputs else nothing))
            if table["last"][line].as_py():
                number, first_row, digest = (table[name][line].as_py() for name in ("update", "first_row", "digest"))
                yield Update(number, first_row, digest, tuple(passes))
                passes = []
