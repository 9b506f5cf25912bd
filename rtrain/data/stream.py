"""Token store + order -> one Ray Data stream of ready micro-batches per worker.

Each worker streams a range of step numbers, which data tasks map to that worker's micro-batches, in order. Ray's
`streaming_split` is not used: it distributes blocks by fill level, so the rows of a step would depend on the number of
workers, and with `equal=True` it drops the tail. A stream of step numbers can start anywhere: a resume at step s reads
the rows of s first and skips nothing. The stream runs in its worker, without a coordinator process.
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
from rtrain.core.ragged import Ints, TokenBatch
from rtrain.data.order import RowOrder, assign_micro_batches, hash_step_rows
from rtrain.data.store.store import Store, open_store
from rtrain.parallel import gradient_noise

if TYPE_CHECKING:
    import ray.data

STEPS_PER_TASK = 16
"""Steps that one data task prepares: enough to hide the task's overhead of a few milliseconds, and few enough for a
quick first batch."""
BLOCK_BYTES = 2 << 20
"""A task prepares fewer steps if their rows exceed this size. Ray holds about ten blocks beyond a stream's limit: 384
MB with blocks of 38 MB."""
STREAM_BYTES = 64 << 20
"""Object store memory that one worker's stream may fill ahead of its worker."""
SEGMENT_STEPS = 4096
"""Steps of one Ray data set. Ray makes all tasks of a data set before the first batch, which takes 90 s for a million
steps. A stream of many data sets starts at once, and pays 0.6 s between two of them."""


_COLUMNS = tuple(field.name for field in fields(TokenBatch))


class IngestMismatch(RuntimeError):
    """The stream gave another step than the expected one: a bug, or the store of another run. It must not be trained
    on."""


@dataclass(frozen=True)
class WorkerBatch:
    """One worker's part of a step."""

    step: int
    first_row_id: int
    """Id of the step's first row; it is the same on every worker."""
    digest: bytes
    """Digest of all row ids of the step, in order (`order.hash_step_rows`); it is the same on every worker."""
    micro_batches: tuple[TokenBatch, ...]
    """The worker's micro-batches; empty if the step has fewer rows than there are workers."""


@dataclass(frozen=True)
class StreamSpec:
    """The part of a run's rows that one worker's stream reads, and the limits of its micro-batches."""

    store: Path
    order: RowOrder
    workers: int
    rank: int
    micro_batch_size: int | None
    """Most rows of a micro-batch; None if only tokens limit it."""
    max_tokens_per_micro_batch: int | None = None
    teacher_version: str | None = None
    """Version of the teacher whose outputs are read with each row; None without a teacher."""
    task_cpus: float = 1.0
    """Logical CPUs that a data task reserves."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that data tasks may run on."""
    random_step_interval: int = 0
    """Every this many steps, rows are assigned to workers at random (`rtrain.parallel.gradient_noise`); 0: never."""
    worker_speeds: tuple[float, ...] = ()
    """Relative speeds of all workers, to balance the rows of the other steps; empty: equal tokens for each worker."""


def plan_worker_batch(store: Store, spec: StreamSpec, step: int) -> WorkerBatch:
    """The part of step `step` that belongs to the worker of `spec`. Reads the store, and is pure otherwise."""
    positions = spec.order.positions(step)
    row_ids = store.column("train", "row_id")[positions]
    lengths = store.column("train", "length")[positions]
    limits = (spec.micro_batch_size, spec.max_tokens_per_micro_batch)
    is_random = gradient_noise.has_random_rows(step, spec.random_step_interval)
    micro_batches = assign_micro_batches(
        lengths, spec.workers, spec.rank, *limits, is_random=is_random, worker_speeds=spec.worker_speeds
    )
    return WorkerBatch(
        step=step,
        first_row_id=int(row_ids[0]),
        digest=hash_step_rows(step, row_ids),
        micro_batches=tuple(_read_tokens(store, positions[indices], spec.teacher_version) for indices in micro_batches),
    )


def _read_tokens(store: Store, positions: Ints, teacher_version: str | None) -> TokenBatch:
    tokens = store.read_tokens("train", positions)
    if teacher_version is None:
        return tokens
    return replace(tokens, teacher_logits=store.teacher_logits(teacher_version, positions))


def stream_batches(spec: StreamSpec, start: int, stop: int) -> Iterator[WorkerBatch]:
    """A worker's part of steps `start` to `stop - 1`, read ahead by Ray Data tasks.

    Raises `IngestMismatch` if a step has other rows than the order says, and `UserError` if the store is damaged.
    """
    begins = range(start, stop, SEGMENT_STEPS)
    segments = (_make_dataset(spec, begin, min(begin + SEGMENT_STEPS, stop)) for begin in begins)
    tables = (dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4) for dataset in segments)
    yield from verify_batches(decode_tables(itertools.chain.from_iterable(tables)), spec, start)


def verify_batches(batches: Iterable[WorkerBatch], spec: StreamSpec, start: int) -> Iterator[WorkerBatch]:
    """The steps from `start` on, each compared with the order. Raises `IngestMismatch`."""
    row_ids = open_store(spec.store).column("train", "row_id")
    for step, batch in enumerate(batches, start=start):
        expected = row_ids[spec.order.positions(step)]
        if (batch.step, batch.digest) != (step, hash_step_rows(step, expected)):
            raise IngestMismatch(
                f"step {step} should start with row {int(expected[0]):016x}; the stream gave step "
                f"{batch.step} with row {batch.first_row_id:016x}, or other rows after it. The token store "
                f"{spec.store} does not belong to this run."
            )
        yield batch


def warm_up() -> None:
    """Run one Ray Data task in the background, while the worker still makes its model.

    Ray Data is then imported, in this process and in a data task's, when the stream begins. On two busy cores the first
    batch came after 0.4 s instead of 6 s, and a start as a whole took no longer.
    """

    def run_ignoring_errors() -> None:
        with contextlib.suppress(Exception):  # the stream fails likewise, and reports it
            run_one_task()

    threading.Thread(target=run_ignoring_errors, daemon=True).start()


def run_one_task() -> list[dict[str, Any]]:
    """Send one row through a data task that returns it unchanged."""
    import ray.data

    ray_internals.disable_data_actors()
    dataset = ray.data.range(1, override_num_blocks=1)
    return dataset.map_batches(_identity, batch_size=None, zero_copy_batch=True).take_all()


def _identity(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def _make_dataset(spec: StreamSpec, start: int, stop: int) -> "ray.data.Dataset":
    import ray.data

    ray_internals.disable_data_actors()
    ray_internals.limit_stream(spec.task_cpus)  # the run requests nodes for all its streams
    blocks = max(1, math.ceil((stop - start) / _steps_per_task(spec)))
    dataset = ray_internals.range_dataset(stop - start, blocks, spec.task_cpus).map_batches(
        partial(materialize_steps, spec=spec, start=start),
        batch_size=None,
        zero_copy_batch=True,
        num_cpus=spec.task_cpus,
    )
    # Ray ends a stream that is not read for some time. A worker does not read during a long evaluation.
    dataset.context.execution_no_progress_timeout_s = -1
    options = dataset.context.execution_options
    options.preserve_order = True
    options.label_selector = dict(spec.node_labels) or None
    options.resource_limits = ray.data.ExecutionResources(object_store_memory=STREAM_BYTES)
    return dataset


def _steps_per_task(spec: StreamSpec) -> int:
    store = open_store(spec.store)
    total_bytes = 4 * (store.manifest.tokens["train"] + store.num_targets("train"))
    if spec.teacher_version is not None:
        total_bytes += 4 * store.open_teacher_logits(spec.teacher_version).size
    row_bytes = total_bytes / max(1, store.num_rows("train")) + 24
    step_bytes = row_bytes * spec.order.global_batch_size / spec.workers
    return max(1, min(STEPS_PER_TASK, int(BLOCK_BYTES / step_bytes)))


def materialize_steps(batch: dict[str, Any], spec: StreamSpec, start: int) -> pa.Table:
    """The table rows of some steps; a single row with the error if the store is refused."""
    try:
        store = open_store(spec.store)
        batches = (plan_worker_batch(store, spec, start + int(number)) for number in batch["id"])
        lines = [line for worker_batch in batches for line in _to_table_rows(worker_batch)]
    except UserError as error:
        # The error is returned as data: if raised, it would reach the worker inside a Ray error.
        lines = [{"error": str(error), "code": error.code}]
    return pa.Table.from_pylist(lines, schema=_SCHEMA)


def _to_table_rows(batch: WorkerBatch) -> list[dict[str, Any]]:
    """One table row per micro-batch, or one empty row if this worker has no rows of the step."""
    common_columns = {"step": batch.step, "first_row_id": batch.first_row_id, "digest": batch.digest}
    lines = []
    for index, tokens in enumerate(batch.micro_batches):
        columns = {name: getattr(tokens, name) for name in _COLUMNS} | {"teacher_logits": tokens.teacher_logits.ravel()}
        outputs = tokens.teacher_logits.shape[1]
        lines.append({**common_columns, "last": index == len(batch.micro_batches) - 1, "outputs": outputs, **columns})
    absent_columns = dict.fromkeys(("is_unlabeled", "row_weights"))
    empty_columns = {name: np.empty(0, dtype=np.int32) for name in _COLUMNS if name not in absent_columns}
    return lines or [{**common_columns, "last": True, "outputs": 0, **absent_columns, **empty_columns}]


_SCHEMA = pa.schema(
    {
        "error": pa.string(),
        "code": pa.string(),
        "step": pa.int64(),
        "first_row_id": pa.uint64(),
        "digest": pa.binary(32),
        "last": pa.bool_(),
        "outputs": pa.int32(),
        "ids": pa.list_(pa.int32()),
        "window_lengths": pa.list_(pa.int32()),
        "pair_start": pa.list_(pa.int32()),
        "windows_per_row": pa.list_(pa.int32()),
        "targets": pa.list_(pa.float32()),
        "targets_per_row": pa.list_(pa.int32()),
        "row_ids": pa.list_(pa.uint64()),
        "teacher_logits": pa.list_(pa.float32()),
        "is_unlabeled": pa.list_(pa.bool_()),
        "row_weights": pa.list_(pa.float64()),
    }
)


def decode_tables(tables: Iterable[Any]) -> Iterator[WorkerBatch]:
    """The steps in the tables of `materialize_steps`. Raises `UserError` if a data task reported one."""
    micro_batches: list[TokenBatch] = []
    for table in tables:
        for line in range(table.num_rows):
            if error := table["error"][line].as_py():
                raise UserError(error, code=table["code"][line].as_py())
            columns: list[Any] = [table[name][line].values for name in _COLUMNS]
            arrays: list[Any] = [
                None if column is None else column.to_numpy(zero_copy_only=False) for column in columns
            ]
            tokens = TokenBatch(*arrays)
            if len(tokens):
                outputs = table["outputs"][line].as_py()
                shape = (-1, outputs) if outputs else (len(tokens), 0)
                micro_batches.append(replace(tokens, teacher_logits=tokens.teacher_logits.reshape(shape)))
            if table["last"][line].as_py():
                step, first_row_id, digest = (table[name][line].as_py() for name in ("step", "first_row_id", "digest"))
                yield WorkerBatch(step, first_row_id, digest, tuple(micro_batches))
                micro_batches = []
