"""The rows of a step: each worker gets its part, all workers together every row, and the step is verified."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rtrain import config
from rtrain.core.ragged import TokenBatch
from rtrain.data import stream as data_stream
from rtrain.data.order import RowOrder, assign_micro_batches, hash_step_rows
from rtrain.data.store.store import Store
from rtrain.data.stream import IngestMismatch, StreamSpec, WorkerBatch, plan_worker_batch
from rtrain.parallel import gradient_noise
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder, make_store

GLOBAL_BATCH_SIZE = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    path = write_rows(folder / "rows.csv", labelled_rows(130))
    recipe = config.load_config("intent", {"data.path": str(path)}).recipe
    token_store = make_store(recipe, make_encoder(folder / "encoder"), folder)
    np.save(
        token_store.teacher_file("v1"), np.arange(token_store.num_rows("train") * 3, dtype=np.float32).reshape(-1, 3)
    )
    return token_store


@pytest.fixture(scope="module")
def order(store: Store) -> RowOrder:
    return RowOrder(store.manifest.digest, store.num_rows("train"), GLOBAL_BATCH_SIZE, epochs=2, seed=1)


def same(first: TokenBatch, second: TokenBatch) -> bool:
    names = TokenBatch.__dataclass_fields__
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def same_batch(first: WorkerBatch, second: WorkerBatch) -> bool:
    heads = [(step.step, step.first_row_id, step.digest, len(step.micro_batches)) for step in (first, second)]
    return heads[0] == heads[1] and all(map(same, first.micro_batches, second.micro_batches))


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("micro_batch", [1, 4, 50])
def test_the_workers_together_get_the_rows_of_the_order(
    store: Store, order: RowOrder, workers: int, micro_batch: int
) -> None:
    for number in range(order.num_steps):
        parts = [
            plan_worker_batch(store, StreamSpec(store.folder, order, workers, r, micro_batch), number)
            for r in range(workers)
        ]
        expected = store.column("train", "row_id")[order.positions(number)]
        results = [row for part in parts for tokens in part.micro_batches for row in tokens.row_ids.tolist()]
        assert sorted(results) == sorted(expected.tolist())
        assert {part.step for part in parts} == {number}
        assert {part.first_row_id for part in parts} == {int(expected[0])}
        assert {part.digest for part in parts} == {hash_step_rows(number, expected)}
        assert all(1 <= len(tokens) <= micro_batch for part in parts for tokens in part.micro_batches)


def test_resizing_in_mid_epoch_trains_each_row_once_per_epoch(store: Store) -> None:
    """Three epochs on 1, then 2, then 1 workers, counted by row id."""
    order = RowOrder(store.manifest.digest, store.num_rows("train"), GLOBAL_BATCH_SIZE, epochs=3, seed=1)
    assert order.rows % GLOBAL_BATCH_SIZE
    resizes = ((0, 4, 1), (4, order.steps_per_epoch * 2 + 1, 2), (order.steps_per_epoch * 2 + 1, order.num_steps, 1))
    ids = [
        row
        for start, stop, workers in resizes
        for number in range(start, stop)
        for rank in range(workers)
        for tokens in plan_worker_batch(store, StreamSpec(store.folder, order, workers, rank, 8), number).micro_batches
        for row in tokens.row_ids.tolist()
    ]
    assert Counter(ids) == dict.fromkeys(store.column("train", "row_id").tolist(), 3)


def test_a_pass_holds_the_tokens_of_its_rows(store: Store, order: RowOrder) -> None:
    step = plan_worker_batch(store, StreamSpec(store.folder, order, 2, 1, 4), 2)
    positions = order.positions(2)
    lengths = store.column("train", "length")[positions]
    expected = [store.read_tokens("train", positions[indices]) for indices in assign_micro_batches(lengths, 2, 1, 4)]
    assert len(expected) == 3  # 10 of the 20 rows, 4 a pass
    assert all(map(same, step.micro_batches, expected))
    assert not same(step.micro_batches[0], step.micro_batches[1])


def test_rows_go_to_the_workers_by_their_speeds_and_none_is_lost(store: Store, order: RowOrder) -> None:
    shares = [StreamSpec(store.folder, order, 2, rank, 4, worker_speeds=(1.0, 0.25)) for rank in range(2)]
    steps = [plan_worker_batch(store, share, 2) for share in shares]
    rows = [[int(row) for entry in step.micro_batches for row in entry.row_ids] for step in steps]
    assert sorted(rows[0] + rows[1]) == sorted(store.column("train", "row_id")[order.positions(2)].tolist())
    fast, slow = (sum(int(entry.window_lengths.sum()) for entry in step.micro_batches) for step in steps)
    assert 3 < fast / slow < 5.5
    assert steps[0].digest == steps[1].digest
    # The update that measures noise has rows at random, and so as many on both.
    measuring = [
        plan_worker_batch(store, replace(share, random_step_interval=gradient_noise.DEFAULT_INTERVAL), 4).micro_batches
        for share in shares
    ]
    assert [sum(map(len, micro_batches)) for micro_batches in measuring] == [8, 7]


@pytest.mark.parametrize(("every", "number", "sizes"), [(8, 4, [7, 8]), (0, 4, [15]), (8, 3, [20])])
def test_a_worker_that_is_alone_halves_the_updates_that_measure(
    store: Store, order: RowOrder, every: int, number: int, sizes: list[int]
) -> None:
    """The rows of either update have room in one pass."""
    share = StreamSpec(store.folder, order, 1, 0, None, random_step_interval=every)
    assert list(map(len, plan_worker_batch(store, share, number).micro_batches)) == sizes


def test_the_answers_of_the_teacher_go_with_their_rows(store: Store, order: RowOrder) -> None:
    share = StreamSpec(store.folder, order, 1, 0, 6, teacher_version="v1")
    position = {row: place for place, row in enumerate(store.column("train", "row_id").tolist())}
    for tokens in plan_worker_batch(store, share, 1).micro_batches:
        # Row n of the store was answered 3n, 3n + 1, 3n + 2.
        places = np.array([position[row] for row in tokens.row_ids.tolist()])
        assert np.array_equal(tokens.teacher_logits, 3 * places[:, None] + np.arange(3))
    without = plan_worker_batch(store, replace(share, teacher_version=None), 1).micro_batches
    assert {tokens.teacher_logits.shape[1] for tokens in without} == {0}


# --------------------------------------------------------------------------------------------------------- the stream


def through_arrow(share: StreamSpec, start: int, stop: int, blocks: int) -> list[pa.Table]:
    """The tables that a Ray Data stream gives to `decode_tables`: the steps in blocks, one per task."""
    return [
        data_stream.materialize_steps({"id": numbers}, spec=share, start=start)
        for numbers in np.array_split(np.arange(stop - start), blocks)
    ]


@pytest.mark.parametrize("teacher", [None, "v1"])
@pytest.mark.parametrize(("workers", "global_batch_size"), [(1, 20), (3, 20), (4, 2)])
def test_updates_pass_through_a_stream_unchanged(
    store: Store, teacher: str | None, workers: int, global_batch_size: int
) -> None:
    order = RowOrder(store.manifest.digest, store.num_rows("train"), global_batch_size, epochs=1, seed=1)
    for rank in range(workers):
        share = StreamSpec(store.folder, order, workers, rank, 4, teacher_version=teacher)
        tables = through_arrow(share, 1, order.num_steps, blocks=2)
        built_tables = list(data_stream.verify_batches(data_stream.decode_tables(tables), share, 1))
        expected = [plan_worker_batch(store, share, number) for number in range(1, order.num_steps)]
        assert len(built_tables) == len(expected) == order.num_steps - 1
        assert all(map(same_batch, built_tables, expected))


def test_another_update_than_the_expected_one_is_never_trained_on(store: Store, order: RowOrder) -> None:
    share = StreamSpec(store.folder, order, 1, 0, 4)
    shifted = [plan_worker_batch(store, share, number) for number in (0, 2)]
    stream = data_stream.verify_batches(shifted, share, 0)
    assert same_batch(next(stream), shifted[0])
    with pytest.raises(IngestMismatch):
        next(stream)
    other = plan_worker_batch(store, replace(share, order=replace(order, seed=2)), 0)  # the right number, another row
    with pytest.raises(IngestMismatch):
        next(data_stream.verify_batches([other], share, 0))
