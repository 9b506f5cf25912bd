"""The token store: written rows are read back, in any order, and an incomplete store is never opened."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rtrain.core.errors import UserError
from rtrain.core.ragged import (
    EncodedRow,
    RaggedArray,
    TokenBatch,
    TokenWindow,
    collate,
    flat_indices,
    iter_batches,
    pad_batch,
)
from rtrain.data.store import store
from rtrain.data.store.store import Store, StoreManifest, StoreWriter
from tests.support.causes import caused_by

# Two shards of two rows. The split `train` takes both of the first and the second of the second; `valid` the other.
SHARDS = [[[5, 6, 7], [8]], [[9, 9], [10, 11, 12, 13]]]
# Length and second of each row's windows; the last row has two windows, and two targets.
WINDOWS = [[[3, 3], [1, 1]], [[2, 1], [3, 2, 1, 1]]]
TRAIN = {
    "row_id": [2**64 - 1, 4, 7],
    "shard": [0, 0, 1],
    "offset": [0, 1, 1],
    "length": [3, 1, 4],
    "targets": [[1], [0], [1, 0.5]],
}
VALID = {"row_id": [9], "shard": [1], "offset": [0], "length": [2], "targets": [[-1]]}
TYPES = {
    "row_id": pa.uint64(),
    "shard": pa.uint32(),
    "offset": pa.uint32(),
    "length": pa.int32(),
    "targets": pa.list_(pa.float32()),
}


NAMES = ("shards/000000-000000.arrow", "shards/000000-000001.arrow")


def fill(writer: StoreWriter) -> StoreManifest:
    """Write the files of a store; returns its manifest."""
    files = {}
    empty: dict[str, list[int]] = {name: [] for name in TYPES}
    for split, columns in (("train", TRAIN), ("valid", VALID), ("test", empty)):
        table = pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})
        files[f"index-{split}.arrow"] = store.write_table(writer.folder / f"index-{split}.arrow", table)
    for name, rows, windows in zip(NAMES, SHARDS, WINDOWS, strict=True):
        table = pa.table(
            {name: pa.array(part, pa.list_(pa.int32())) for name, part in (("ids", rows), ("windows", windows))}
        )
        files[name] = store.write_table(writer.folder / name, table)
    return StoreManifest(
        schema_version=store.SCHEMA_VERSION,
        digest="abc",
        rows={"train": 3, "valid": 1, "test": 0},
        labels=("né", "yes"),
        tokens={"train": 8, "valid": 2, "test": 0},
        truncated=0,
        quarantined=0,
        files=files,
        sources={"train": {"/data/né.csv": "12ab"}},
    )


def make(final: Path) -> Store:
    writer = StoreWriter(final)
    return writer.commit(fill(writer))


@pytest.fixture
def token_store(tmp_path: Path) -> Store:
    return make(tmp_path / "abc")


def test_rows_are_read_in_the_order_of_their_positions(token_store: Store) -> None:
    tokens = token_store.read_tokens("train", np.array([2, 0, 2, 1]))
    assert tokens.ids.tolist() == [10, 11, 12, 13, 5, 6, 7, 10, 11, 12, 13, 8]
    assert tokens.window_lengths.tolist() == [3, 1, 3, 3, 1, 1]
    assert tokens.pair_start.tolist() == [2, 1, 3, 2, 1, 1]
    assert tokens.windows_per_row.tolist() == [2, 1, 2, 1]
    assert tokens.row_lengths.tolist() == [4, 3, 4, 1]
    assert tokens.targets.tolist() == [1, 0.5, 1, 1, 0.5, 0]
    assert tokens.targets_per_row.tolist() == [2, 1, 2, 1]
    assert tokens.row_ids.tolist() == [7, 2**64 - 1, 7, 4]
    assert tokens.teacher_logits.shape == (4, 0)
    assert len(tokens) == 4
    assert token_store.read_tokens("valid", np.array([0])).ids.tolist() == [9, 9]
    assert token_store.read_tokens("valid", np.array([0])).targets.tolist() == [-1]


def test_no_positions_give_no_rows(token_store: Store) -> None:
    tokens = token_store.read_tokens("train", np.array([], dtype=np.int64))
    assert (len(tokens), tokens.ids.tolist(), tokens.teacher_logits.shape) == (0, [], (0, 0))


def test_an_empty_split_has_empty_columns(token_store: Store) -> None:
    assert token_store.num_rows("test") == 0
    assert all(len(token_store.column("test", name)) == 0 for name in TYPES if name != "targets")
    assert [len(part) for part in (token_store.targets("test"), token_store.targets("test").values)] == [0, 0]


def test_the_manifest_is_read_back_whole(token_store: Store) -> None:
    store = Store(token_store.folder).manifest
    assert store == token_store.manifest
    assert store.labels == ("né", "yes")
    assert store.shards == NAMES
    assert store.sources == {"train": {"/data/né.csv": "12ab"}}
    assert token_store.num_rows("train") == 3
    assert "né" in (token_store.folder / "manifest.json").read_text(encoding="utf-8")


def test_before_the_commit_there_is_no_store(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "abc")
    manifest = fill(writer)
    assert not (tmp_path / "abc").exists()
    assert writer.folder.parent == tmp_path
    assert writer.folder.name.startswith(".abc.")
    with pytest.raises(UserError, check=caused_by("unfinished_store")):
        Store(writer.folder)
    writer.commit(manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    names = {"manifest.json", "index-train.arrow", "index-valid.arrow", "index-test.arrow", "shards"}
    assert {path.name for path in (tmp_path / "abc").iterdir()} == names


def test_an_abandoned_store_leaves_nothing(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "abc")
    fill(writer)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_equal_stores_gives_way(tmp_path: Path) -> None:
    first, second = StoreWriter(tmp_path / "abc"), StoreWriter(tmp_path / "abc")
    assert first.folder != second.folder
    (first.folder / "mark").touch()
    first.commit(fill(first))
    assert second.commit(fill(second)).folder == tmp_path / "abc"
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    assert (tmp_path / "abc" / "mark").is_file()


def test_a_store_of_another_version_is_refused(token_store: Store) -> None:
    path = token_store.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": store.SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, check=caused_by("other_version")):
        Store(token_store.folder)


def test_a_teacher_that_did_not_answer_is_named(token_store: Store) -> None:
    with pytest.raises(UserError, check=caused_by("not_found")):
        token_store.open_teacher_logits("1234")
    answers = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(token_store.teacher_file("1234"), answers)
    assert np.array_equal(token_store.open_teacher_logits("1234"), answers)


# -------------------------------------------------------------------------------------------------------- large stores


def test_a_column_of_more_values_than_32_bits_can_count_is_read_back() -> None:
    """Its memory is asked for and not touched, but for the last rows."""
    counts = np.array([2**31 - 10, 20, 3, 0, 5], dtype=np.int32)
    values = np.zeros(int(counts.sum(dtype=np.int64)), dtype=np.uint8)
    values[-28:] = np.arange(1, 29)
    column = store.make_list_column(RaggedArray(values, counts))
    column.validate()
    assert pa.types.is_large_list(column.type)
    result = store.read_list_column(column, np.array([2, 4, 1, 3]))
    assert result.counts.tolist() == [3, 5, 20, 0]
    assert result.values.tolist() == [*range(21, 24), *range(24, 29), *range(1, 21)]
    everything = store.read_list_column(column)
    assert (len(everything.values), everything.counts.tolist()) == (len(values), counts.tolist())
    fewer = store.make_list_column(RaggedArray(values[: 2**31 - 10], counts[:1]))
    assert pa.types.is_list(fewer.type)  # stores of before are of these, and are read as ever


def test_a_store_with_offsets_of_64_bits_reads_like_any_other(token_store: Store, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "def")
    manifest = fill(writer)
    for name in ("index-train.arrow", NAMES[0]):
        table = store.map_table(writer.folder / name)
        columns = {
            column.name: values.cast(pa.large_list(values.type.value_type)) if pa.types.is_list(column.type) else values
            for column, values in zip(table.schema, table.columns, strict=True)
        }
        (writer.folder / name).unlink()
        manifest.files[name] = store.write_table(writer.folder / name, pa.table(columns))
    large, positions = writer.commit(manifest), np.array([2, 0, 2, 1])
    for name in TokenBatch.__dataclass_fields__.keys() - {"is_unlabeled", "row_weights"}:
        result, expected = (
            getattr(large.read_tokens("train", positions), name),
            getattr(token_store.read_tokens("train", positions), name),
        )
        assert (result.dtype, result.tolist()) == (expected.dtype, expected.tolist())
    assert large.targets("train").counts.tolist() == token_store.targets("train").counts.tolist() == [1, 1, 2]
    assert [token_store.num_targets(split) for split in store.SPLITS] == [4, 1, 0]
    assert large.num_targets("train") == 4


@pytest.fixture
def long(tmp_path: Path) -> Store:
    """A store of 300,000 training rows, an index alone, whose teacher answered each token: with its place."""
    writer, rows = StoreWriter(tmp_path / "long"), 300_000
    manifest = fill(writer)
    lengths = np.random.default_rng(0).integers(1, 9, rows).astype(np.int32)
    zeros = np.zeros(rows, dtype=np.uint32)
    index = {"row_id": zeros.astype(np.uint64), "shard": zeros, "offset": zeros, "length": lengths}
    columns = {name: pa.array(values) for name, values in index.items()}
    columns["targets"] = store.make_list_column(RaggedArray.from_matrix(np.zeros(rows, dtype=np.float32)))
    manifest.files["index-train.arrow"] = store.write_table(writer.folder / "index-train.arrow", pa.table(columns))
    token_store = writer.commit(replace(manifest, rows={"train": rows, "valid": 1, "test": 0}))
    np.save(token_store.teacher_file("1234"), np.arange(lengths.sum(), dtype=np.float32).reshape(-1, 1))
    return token_store


def test_answers_for_tokens_are_found_without_summing_up_all_rows(long: Store) -> None:
    lengths, random = long.column("train", "length"), np.random.default_rng(1)
    edges = [0, 255, 256, 257, len(lengths) - 1]
    for positions in (np.array(edges), random.integers(0, len(lengths), 500), np.array([], dtype=np.int64)):
        result = long.teacher_logits("1234", positions)
        assert result.ravel().tolist() == flat_indices(lengths, positions).tolist()
    tracemalloc.start()
    long.teacher_logits("1234", np.array(edges))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000  # one number for each row would be 2.4 MB


# ------------------------------------------------------------------------------------------------------------ padding


def test_rows_are_padded_to_the_longest() -> None:
    rows = collate([row([5, 6, 7], (3, 3)), row([8], (1, 1)), row([9, 10, 11, 12], (4, 2))])
    assert {name: value.tolist() for name, value in pad_batch(rows, 1).items()} == {
        "input_ids": [[5, 6, 7, 1], [8, 1, 1, 1], [9, 10, 11, 12]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]],  # padding has type 0, as transformers pads
    }
    assert {value.dtype.name for value in pad_batch(rows, 1).values()} == {"int64"}


def row(ids: list[int], *windows: tuple[int, int]) -> EncodedRow:
    return EncodedRow(ids, [TokenWindow(*window) for window in windows], False, [])


def test_rows_are_packed_one_after_another() -> None:
    rows = collate([row([5, 6], (2, 2)), row([]), row([7, 8, 9], (1, 1), (2, 0))])
    assert (rows.ids.tolist(), rows.window_lengths.tolist(), rows.pair_start.tolist()) == (
        [5, 6, 7, 8, 9],
        [2, 1, 2],
        [2, 1, 0],
    )
    assert (rows.windows_per_row.tolist(), len(rows), rows.row_ids.tolist()) == ([1, 0, 2], 3, [0, 1, 2])
    assert {array.dtype.name for array in (rows.ids, rows.window_lengths, rows.pair_start, rows.windows_per_row)} == {
        "int32"
    }
    assert len(collate([])) == 0


def test_rows_are_picked_with_all_that_is_theirs() -> None:
    rows = TokenBatch(
        ids=np.arange(10, 16, dtype=np.int32),
        window_lengths=np.array([1, 2, 1, 2], dtype=np.int32),
        pair_start=np.array([1, 0, 1, 2], dtype=np.int32),
        windows_per_row=np.array([1, 2, 1], dtype=np.int32),
        targets=np.array([1, 2, 3, 4], dtype=np.float32),
        targets_per_row=np.array([0, 3, 1], dtype=np.int32),
        row_ids=np.array([7, 8, 9], dtype=np.uint64),
        teacher_logits=np.arange(12, dtype=np.float32).reshape(6, 2),  # an answer for each token
    )
    result = rows.take([2, 1])
    assert (result.ids.tolist(), result.window_lengths.tolist(), result.pair_start.tolist()) == (
        [14, 15, 11, 12, 13],
        [2, 2, 1],
        [2, 0, 1],
    )
    assert (result.windows_per_row.tolist(), result.targets.tolist(), result.targets_per_row.tolist()) == (
        [1, 2],
        [4, 1, 2, 3],
        [1, 3],
    )
    assert (result.row_ids.tolist(), result.teacher_logits[:, 0].tolist()) == ([9, 8], [8, 10, 2, 4, 6])
    by_row = replace(rows, teacher_logits=np.arange(3, dtype=np.float32)[:, None])
    assert by_row.take([2, 1]).teacher_logits.tolist() == [[2], [1]]


def test_batches_hold_rows_and_tokens_within_their_limits() -> None:
    lengths = np.array([1, 1, 1, 2, 5, 9, 1], dtype=np.int32)
    results = [part.tolist() for part in iter_batches(lengths, np.arange(7), max_rows=3, max_tokens=5)]
    assert results == [[0, 1, 2], [3], [4], [5], [6]]  # the row of nine tokens is alone
    assert list(iter_batches(lengths, np.arange(0), 3, 5)) == []
