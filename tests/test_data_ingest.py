"""What a worker gets of an update: its own rows, all workers together every row, and a check that it is that update."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rtrain import config, ray_internals
from rtrain.batch import Tokens
from rtrain.data import ingest
from rtrain.data.ingest import IngestMismatch, Share, Update, plan_update
from rtrain.data.order import Order, deal, rows_digest
from rtrain.data.stores.store import Store
from rtrain.exchange import noise
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


def test_the_digest_does_not_depend_on_workers_or_micro_batch(store: Store, order: Order) -> None:
    digests = {
        plan_update(store, Share(store.folder, order, workers, 0, micro_batch), 3).digest
        for workers in (1, 2, 5)
        for micro_batch in (1, 8)
    }
    assert len(digests) == 1


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
    measuring = [plan_update(store, replace(share, measures=noise.RULE), 4).passes for share in shares]
    assert [sum(map(len, passes)) for passes in measuring] == [8, 7]


@pytest.mark.parametrize(("rule", "number", "sizes"), [(3, 4, [7, 8]), (2, 4, [15]), (0, 4, [15]), (3, 3, [20])])
def test_a_worker_that_is_alone_halves_the_updates_that_measure(
    store: Store, order: Order, rule: int, number: int, sizes: list[int]
) -> None:
    """The rows of either update have room in one pass; a run that an earlier version began goes on with such passes."""
    share = Share(store.folder, order, 1, 0, None, measures=rule)
    assert list(map(len, plan_update(store, share, number).passes)) == sizes


def test_a_worker_beyond_the_rows_gets_no_pass(store: Store) -> None:
    order = Order("digest", store.rows("train"), 2, epochs=1, seed=0)
    shares = [plan_update(store, Share(store.folder, order, 4, rank, 8), 0).passes for rank in range(4)]
    assert [len(passes) for passes in shares] == [1, 1, 0, 0]


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


def through_arrow(share: Share, start: int, stop: int, blocks: int) -> SimpleNamespace:
    """What a Ray Data stream hands to `_decoded`: the updates in blocks, each made by one task."""
    tables: list[pa.Table] = [
        ingest._materialise({"id": numbers}, share=share, start=start)
        for numbers in np.array_split(np.arange(stop - start), blocks)
    ]

    def iter_batches(**_: Any) -> Iterator[pa.Table]:
        return iter(tables)

    return SimpleNamespace(iter_batches=iter_batches)


@pytest.mark.parametrize("teacher", [None, "v1"])
@pytest.mark.parametrize(("workers", "rows_per_update"), [(1, 20), (3, 20), (4, 2)])
def test_updates_pass_through_a_stream_unchanged(
    store: Store, teacher: str | None, workers: int, rows_per_update: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(store.manifest.digest, store.rows("train"), rows_per_update, epochs=1, seed=1)
    monkeypatch.setattr(ingest, "_dataset", lambda share, start, stop: through_arrow(share, start, stop, blocks=2))
    for rank in range(workers):
        share = Share(store.folder, order, workers, rank, 4, teacher=teacher)
        found = list(ingest.stream(share, 1, order.updates))
        expected = [plan_update(store, share, number) for number in range(1, order.updates)]
        assert len(found) == len(expected) == order.updates - 1
        assert all(map(same_update, found, expected))


def test_a_stream_is_made_of_segments_one_after_another(
    store: Store, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray plans all tasks of a data set before its first batch: a run of a million updates must not wait for that."""
    made: list[tuple[int, int]] = []

    def segment(share: Share, start: int, stop: int) -> SimpleNamespace:
        made.append((start, stop))
        return through_arrow(share, start, stop, blocks=1)

    monkeypatch.setattr(ingest, "SEGMENT_UPDATES", 4)
    monkeypatch.setattr(ingest, "_dataset", segment)
    assert order.updates > 9
    stream = ingest.stream(Share(store.folder, order, 1, 0, 4), 1, 10)
    assert next(stream).number == 1
    assert made == [(1, 5)]
    assert [update.number for update in stream] == list(range(2, 10))
    assert made == [(1, 5), (5, 9), (9, 10)]


@pytest.mark.parametrize(
    ("rows_per_update", "workers", "most"), [(64, 2, 16), (1 << 15, 1, 3), (1 << 15, 4, 12), (1 << 20, 1, 1)]
)
def test_a_task_prepares_fewer_updates_where_they_are_large(
    store: Store, order: Order, rows_per_update: int, workers: int, most: int
) -> None:
    share = Share(store.folder, replace(order, rows_per_update=rows_per_update), workers, 0, 8)
    assert 1 <= ingest._updates_per_task(share) <= most
    assert ingest._updates_per_task(replace(share, teacher="v1")) <= ingest._updates_per_task(share)
    assert (ingest._updates_per_task(share) == ingest.UPDATES_PER_TASK) == (rows_per_update == 64)


def test_data_tasks_have_the_labels_that_are_asked_for(
    store: Store, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task is started: the plan of the data set has them."""
    monkeypatch.setattr(ray_internals, "stream_within", lambda cpus: None)
    for labels in ({"for": "data"}, {}):
        monkeypatch.setattr(ray_internals, "numbers", lambda *_: Planned())
        options = ingest._dataset(Share(store.folder, order, 1, 0, 4, labels=labels), 0, 2).context.execution_options
        assert options.label_selector == (labels or None)


class Planned:
    """A data set before it is read."""

    def __init__(self) -> None:
        import ray.data

        self.context = ray.data.DataContext()

    def map_batches(self, function: Any, **_: Any) -> "Planned":
        return self


def test_another_update_than_the_expected_one_is_never_trained_on(
    store: Store, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(store.folder, order, 1, 0, 4)
    shifted = [plan_update(store, share, number) for number in (0, 2)]
    monkeypatch.setattr(ingest, "_dataset", lambda *_: None)
    monkeypatch.setattr(ingest, "_decoded", lambda _: iter(shifted))
    stream = ingest.stream(share, 0, 2)
    assert same_update(next(stream), shifted[0])
    with pytest.raises(IngestMismatch, match=r"update 1 should start with row .* the stream gave update 2 with row"):
        next(stream)


def test_the_right_number_with_another_row_is_refused_too(
    store: Store, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(store.folder, order, 1, 0, 4)
    other = plan_update(store, replace(share, order=replace(order, seed=2)), 0)
    monkeypatch.setattr(ingest, "_dataset", lambda *_: None)
    monkeypatch.setattr(ingest, "_decoded", lambda _: iter([other]))
    with pytest.raises(IngestMismatch, match="does not belong to this run"):
        next(ingest.stream(share, 0, 1))
