"""The token store: what is written is read back, in any order, and nothing half-written is ever opened."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rtrain.data import store
from rtrain.data.store import Manifest, Store, Tokens, Writer, pack, padded
from rtrain.errors import UserError

# Two shards of two rows. The split `train` takes both of the first and the second of the second; `valid` the other.
SHARDS = [[[5, 6, 7], [8]], [[9, 9], [10, 11, 12, 13]]]
SECONDS = [[3, 1], [1, 2]]
TRAIN = {"row_id": [2**64 - 1, 4, 7], "shard": [0, 0, 1], "offset": [0, 1, 1], "length": [3, 1, 4], "target": [1, 0, 1]}
VALID = {"row_id": [9], "shard": [1], "offset": [0], "length": [2], "target": [-1]}
TYPES = {"row_id": pa.uint64(), "shard": pa.uint32(), "offset": pa.uint32(), "length": pa.int32(), "target": pa.int64()}


NAMES = ("shards/000000-000000.arrow", "shards/000000-000001.arrow")


def fill(writer: Writer) -> Manifest:
    """Write the files of a store; returns its manifest."""
    files = {}
    empty: dict[str, list[int]] = {name: [] for name in TYPES}
    for split, columns in (("train", TRAIN), ("valid", VALID), ("test", empty)):
        table = pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})
        files[f"index-{split}.arrow"] = store.write_table(writer.folder / f"index-{split}.arrow", table)
    for name, rows, seconds in zip(NAMES, SHARDS, SECONDS, strict=True):
        table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32())), "second": pa.array(seconds, pa.int32())})
        files[name] = store.write_table(writer.folder / name, table)
    return Manifest(
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
    writer = Writer(final)
    return writer.commit(fill(writer))


@pytest.fixture
def made(tmp_path: Path) -> Store:
    return make(tmp_path / "abc")


def test_rows_are_read_in_the_order_of_their_positions(made: Store) -> None:
    tokens = made.read("train", np.array([2, 0, 2, 1]))
    assert tokens.ids.tolist() == [10, 11, 12, 13, 5, 6, 7, 10, 11, 12, 13, 8]
    assert tokens.lengths.tolist() == [4, 3, 4, 1]
    assert tokens.second.tolist() == [2, 3, 2, 1]
    assert tokens.targets.tolist() == [1, 1, 1, 0]
    assert tokens.row_ids.tolist() == [7, 2**64 - 1, 7, 4]
    assert tokens.teacher.shape == (4, 0)
    assert len(tokens) == 4
    assert made.read("valid", np.array([0])).ids.tolist() == [9, 9]
    assert made.read("valid", np.array([0])).targets.tolist() == [-1]


def test_types_of_what_is_read(made: Store) -> None:
    tokens = made.read("train", np.array([0]))
    types = {name: getattr(tokens, name).dtype.name for name in Tokens.__dataclass_fields__}
    assert types == {
        "ids": "int32",
        "lengths": "int32",
        "second": "int32",
        "targets": "int64",
        "row_ids": "uint64",
        "teacher": "float32",
    }


def test_no_positions_give_no_rows(made: Store) -> None:
    tokens = made.read("train", np.array([], dtype=np.int64))
    assert (len(tokens), tokens.ids.tolist(), tokens.teacher.shape) == (0, [], (0, 0))


def test_an_empty_split_has_empty_columns(made: Store) -> None:
    assert made.rows("test") == 0
    assert all(len(made.column("test", name)) == 0 for name in TYPES)


def test_the_manifest_is_read_back_whole(made: Store) -> None:
    found = Store(made.folder).manifest
    assert found == made.manifest
    assert found.labels == ("né", "yes")
    assert found.shards == NAMES
    assert found.sources == {"train": {"/data/né.csv": "12ab"}}
    assert made.rows("train") == 3
    assert "né" in (made.folder / "manifest.json").read_text(encoding="utf-8")


def test_before_the_commit_there_is_no_store(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "abc")
    manifest = fill(writer)
    assert not (tmp_path / "abc").exists()
    assert writer.folder.parent == tmp_path
    assert writer.folder.name.startswith(".abc.")
    with pytest.raises(
        UserError, match=r"is no finished token store \(no manifest\.json\); remove what is left of it, and train again"
    ):
        Store(writer.folder)
    writer.commit(manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    names = {"manifest.json", "index-train.arrow", "index-valid.arrow", "index-test.arrow", "shards"}
    assert {path.name for path in (tmp_path / "abc").iterdir()} == names


def test_an_abandoned_store_leaves_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "abc")
    fill(writer)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_equal_stores_gives_way(tmp_path: Path) -> None:
    first, second = Writer(tmp_path / "abc"), Writer(tmp_path / "abc")
    assert first.folder != second.folder
    (first.folder / "mark").touch()
    first.commit(fill(first))
    assert second.commit(fill(second)).folder == tmp_path / "abc"
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    assert (tmp_path / "abc" / "mark").is_file()


def test_a_folder_in_the_way_that_is_no_store_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "abc" / "something").mkdir(parents=True)
    with pytest.raises(OSError, match="abc"):
        make(tmp_path / "abc")
    assert (tmp_path / "abc" / "something").is_dir()


def test_a_store_of_another_version_is_refused(made: Store) -> None:
    path = made.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": store.SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, match="of another version of rtrain; remove the folder and train again"):
        Store(made.folder)


def test_a_teacher_that_did_not_answer_is_named(made: Store) -> None:
    with pytest.raises(UserError, match="has no answers of teacher 1234; run `rtrain distill`"):
        made.teacher("1234")
    answers = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(made.teacher_file("1234"), answers)
    assert np.array_equal(made.teacher("1234"), answers)


def test_pickled_answers_of_a_teacher_are_not_read(made: Store) -> None:
    np.save(made.teacher_file("1234"), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"Array can't be memory-mapped"):
        made.teacher("1234")


def test_a_table_is_written_as_one_batch(tmp_path: Path) -> None:
    chunked = pa.concat_tables([pa.table({"n": [1, 2]}), pa.table({"n": [3]})])
    store.write_table(tmp_path / "a.arrow", chunked)
    read = store._map(tmp_path / "a.arrow")
    assert read["n"].num_chunks == 1
    assert read["n"].to_pylist() == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ padding


def test_rows_are_padded_to_the_longest() -> None:
    ids, lengths, second = pack([([5, 6, 7], 3), ([8], 1), ([9, 10, 11, 12], 2)])
    nothing = np.zeros(3, dtype=np.int64)
    inputs = padded(Tokens(ids, lengths, second, nothing, nothing.astype(np.uint64), np.empty((3, 0), np.float32)), 1)
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input_ids": [[5, 6, 7, 1], [8, 1, 1, 1], [9, 10, 11, 12]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]],  # padding has type 0, as transformers pads
    }
    assert {value.dtype.name for value in inputs.values()} == {"int64"}


def test_rows_are_packed_one_after_another() -> None:
    ids, lengths, second = pack([([5, 6], 2), ([], 0), ([7], 1)])
    assert (ids.tolist(), lengths.tolist(), second.tolist()) == ([5, 6, 7], [2, 0, 1], [2, 0, 1])
    assert {array.dtype.name for array in (ids, lengths, second)} == {"int32"}
    assert [len(array) for array in pack([])] == [0, 0, 0]
