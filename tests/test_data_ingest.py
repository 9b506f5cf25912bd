"""What a worker gets of an update: its own rows, all workers together every row, and a check that it is that update."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rtrain import config
from rtrain.core.ragged import Tokens
from rtrain.data import stream as data_stream
from rtrain.data.order import Order, deal, rows_digest
from rtrain.data.store.store import Store
from rtrain.data.stream import IngestMismatch, Share, Update, plan_update
from rtrain.parallel import gradient_noise
from tests.conftest import labelled_rows, write_rows
from tests.tiny import make_encoder, make_store

ROWS_PER_UPDATE = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    path = write_rows(folder / "rows.csv", labelled_rows(130))
    recipe = config.load("intent", {"data.path": str(path)}).recipe
    made = make_store(recipe, make_encoder(folder / "encoder"), folder)
    np.save(made.teacher_file("v1"), np.arange(made.rows("train") * 3, dtype=np.float32).reshape(-1, 3))
    return made


@pytest.fixture(scope="module")
def order(store: Store) -> Order:
    return Order(store.manifest.digest, store.rows("train"), ROWS_PER_UPDATE, epochs=2, seed=1)


def same(first: Tokens, second: Tokens) -> bool:
    names = Tokens.__dataclass_fields__
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def same_update(first: Update, second: Update) -> bool:
    heads = [(update.number, update.first_row, update.digest, len(update.passes)) for update in (first, second)]
    return heads[0] == heads[1] and all(map(same, first.passes, second.passes))


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("micro_batch", [1, 4, 50])
def test_the_workers_together_get_the_rows_of_the_order(
    store: Store, order: Order, workers: int, micro_batch: int
) -> None:
    for number in range(order.updates):
        parts = [
            plan_update(store, Share(store.folder, order, workers, r, micro_batch), number) for r in range(workers)
        ]
        wanted = store.column("train", "row_id")[order.positions(number)]
        found = [row for part in parts for tokens in part.passes for row in tokens.row_ids.tolist()]
        assert sorted(found) == sorted(wanted.tolist())
        assert {part.number for part in parts} == {number}
        assert {part.first_row for part in parts} == {int(wanted[0])}
        assert {part.digest for part in parts} == {rows_digest(number, wanted)}
        assert all(1 <= len(tokens) <= micro_batch for part in parts for tokens in part.passes)


def test_resizing_in_mid_epoch_trains_each_row_once_per_epoch(store: Store) -> None:
    """Three epochs on 1, then 2, then 1 workers, counted by row id."""
    order = Order(store.manifest.digest, store.rows("train"), ROWS_PER_UPDATE, epochs=3, seed=1)
    assert order.rows % ROWS_PER_UPDATE
    resizes = ((0, 4, 1), (4, order.updates_per_epoch * 2 + 1, 2), (order.updates_per_epoch * 2 + 1, order.updates, 1))
    ids = [
        row
        for start, stop, workers in resizes
        for number in range(start, stop)
        for rank in range(workers)
        for tokens in plan_update(store, Share(store.folder, order, workers, rank, 8), number).passes
        for row in tokens.row_ids.tolist()
    ]
    assert Counter(ids) == dict.fromkeys(store.column("train", "row_id").tolist(), 3)


def test_a_pass_holds_the_tokens_of_its_rows(store: Store, order: Order) -> None:
    update = plan_update(store, Share(store.folder, order, 2, 1, 4), 2)
    positions = order.positions(2)
    lengths = store.column("train", "length")[positions]
    expected = [store.read("train", positions[chosen]) for chosen in deal(lengths, 2, 1, 4)]
    assert len(expected) == 3  # 10 of the 20 rows, 4 a pass
    assert all(map(same, update.passes, expected))
    assert not same(update.passes[0], update.passes[1])


def test_rows_go_to_the_workers_by_their_speeds_and_none_is_lost(store: Store, order: Order) -> None:
    shares = [Share(store.folder, order, 2, rank, 4, speeds=(1.0, 0.25)) for rank in range(2)]
    updates = [plan_update(store, share, 2) for share in shares]
    rows = [[int(row) for one in update.passes for row in one.row_ids] for update in updates]
    assert sorted(rows[0] + rows[1]) == sorted(store.column("train", "row_id")[order.positions(2)].tolist())
    fast, slow = (sum(int(one.lengths.sum()) for one in update.passes) for update in updates)
    assert 3 < fast / slow < 5.5
    assert updates[0].digest == updates[1].digest
    # The update that measures noise has rows at random, and so as many on both.
    measuring = [plan_update(store, replace(share, at_random=gradient_noise.EVERY), 4).passes for share in shares]
    assert [sum(map(len, passes)) for passes in measuring] == [8, 7]


@pytest.mark.parametrize(("every", "number", "sizes"), [(8, 4, [7, 8]), (0, 4, [15]), (8, 3, [20])])
def test_a_worker_that_is_alone_halves_the_updates_that_measure(
    store: Store, order: Order, every: int, number: int, sizes: list[int]
) -> None:
    """The rows of either update have room in one pass."""
    share = Share(store.folder, order, 1, 0, None, at_random=every)
    assert list(map(len, plan_update(store, share, number).passes)) == sizes


def test_the_answers_of_the_teacher_go_with_their_rows(store: Store, order: Order) -> None:
    share = Share(store.folder, order, 1, 0, 6, teacher="v1")
    position = {row: place for place, row in enumerate(store.column("train", "row_id").tolist())}
    for tokens in plan_update(store, share, 1).passes:
        # Row n of the store was answered 3n, 3n + 1, 3n + 2.
        places = np.array([position[row] for row in tokens.row_ids.tolist()])
        assert np.array_equal(tokens.teacher, 3 * places[:, None] + np.arange(3))
    without = plan_update(store, replace(share, teacher=None), 1).passes
    assert {tokens.teacher.shape[1] for tokens in without} == {0}


# --------------------------------------------------------------------------------------------------------- the stream


def through_arrow(share: Share, start: int, stop: int, blocks: int) -> list[pa.Table]:
    """What a Ray Data stream hands to `decoded`: the updates in blocks, each made by one task."""
    return [
        data_stream.materialise({"id": numbers}, share=share, start=start)
        for numbers in np.array_split(np.arange(stop - start), blocks)
    ]


@pytest.mark.parametrize("teacher", [None, "v1"])
@pytest.mark.parametrize(("workers", "rows_per_update"), [(1, 20), (3, 20), (4, 2)])
def test_updates_pass_through_a_stream_unchanged(
    store: Store, teacher: str | None, workers: int, rows_per_update: int
) -> None:
    order = Order(store.manifest.digest, store.rows("train"), rows_per_update, epochs=1, seed=1)
    for rank in range(workers):
        share = Share(store.folder, order, workers, rank, 4, teacher=teacher)
        tables = through_arrow(share, 1, order.updates, blocks=2)
        found = list(data_stream.verified(data_stream.decoded(tables), share, 1))
        expected = [plan_update(store, share, number) for number in range(1, order.updates)]
        assert len(found) == len(expected) == order.updates - 1
        assert all(map(same_update, found, expected))


def test_another_update_than_the_expected_one_is_never_trained_on(store: Store, order: Order) -> None:
    share = Share(store.folder, order, 1, 0, 4)
    shifted = [plan_update(store, share, number) for number in (0, 2)]
    stream = data_stream.verified(shifted, share, 0)
    assert same_update(next(stream), shifted[0])
    with pytest.raises(IngestMismatch):
        next(stream)
    other = plan_update(store, replace(share, order=replace(order, seed=2)), 0)  # the right number, another row
    with pytest.raises(IngestMismatch):
        next(data_stream.verified([other], share, 0))
