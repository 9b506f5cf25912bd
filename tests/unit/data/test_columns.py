"""Columns of all rows for the commit: the same results as with Python objects, without their memory."""

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.core.ragged import RaggedArray
from rtrain.data import row_reader
from rtrain.data.splits import Splits
from rtrain.data.store import columns, commit, shards, store
from tests.conftest import write_rows
from tests.support.tiny import make_tokenizer

LABELS = st.lists(st.sampled_from(["a", "", "é", '["x", "y"]', "b" * 300]))


@given(st.lists(LABELS, min_size=1))
@settings(deadline=None)
def test_counts_are_those_of_a_counter(chunks: list[list[str]]) -> None:
    expected = Counter(label for chunk in chunks for label in chunk)
    label_counts = columns.LabelCounts(pa.chunked_array([pa.array(chunk, pa.string()) for chunk in chunks]))
    assert list(label_counts.items()) == list(expected.items())  # in the same order
    assert (list(label_counts), list(label_counts.values()), len(label_counts)) == (
        list(expected),
        list(expected.values()),
        len(expected),
    )
    assert dict(label_counts) == expected
    assert "c" not in label_counts


def test_counts_of_more_labels_than_a_block() -> None:
    labels = [f"label {number}" for number in range(3 * columns.BLOCK + 5)]
    label_counts = columns.LabelCounts(pa.chunked_array([pa.array(labels), pa.array(labels[:7])]))
    assert dict(label_counts.items()) == Counter(labels + labels[:7])


@given(st.lists(st.integers(0, 3)))
@settings(deadline=None)
def test_names_by_number_are_a_dictionary_of_those_that_occur(numbers: list[int]) -> None:
    names = ["x", "y", "x", "z"]  # a file may be given twice
    result = columns.encode_names(names, np.array(numbers, dtype=np.int64))
    assert result.to_pylist() == [names[number] for number in numbers]
    assert sorted(result.dictionary.to_pylist()) == sorted({names[number] for number in numbers})
    assert result.type == pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize("distinct", [77, 10**9])
def test_the_commit_takes_a_fixed_number_of_bytes_a_row(tmp_path: Path, distinct: int) -> None:
    """Python's and numpy's memory at the peak has ids, places and targets, and never a string a row."""
    path = write_rows(tmp_path / ("long" * 20 + ".csv"), [("a", "b")])
    make_tokenizer(tmp_path / "encoder")
    recipe = config.load_config("intent", {"data.path": str(path), "data.label": "label"}).recipe
    if distinct > 77:
        recipe = recipe.model_copy(update={"task": "span_qa"})
    source = row_reader.inspect_source(recipe.data)
    writer = store.StoreWriter(tmp_path / ".tokens" / "0123456789abcdef")
    job = shards.TokenizeJob(recipe, tmp_path / "encoder", writer.folder, Splits.from_config(recipe.data, source))
    written, rows = [], 2000
    for number in range(40):
        first = number * rows
        answers = [f'[{{"text": "{"x" * 60}{k}", "start": 0}}]' for k in range(first, first + rows)]
        labels = answers if distinct > 77 else [f"the intent of number {k % distinct}" for k in range(rows)]
        columns_of_shard = {
            "ids": lists(rows, 3),
            "windows": lists(rows, 2),
            "target_positions": lists(rows, 2 if distinct > 77 else 0),
            "length": pa.array(np.full(rows, 3, dtype=np.int32)),
            "truncated": pa.array(np.zeros(rows, dtype=np.bool_)),
            "content": pa.array(np.arange(first, first + rows, dtype=np.uint64)),
            "split": pa.array((np.arange(rows) % 10 // 8 * (1 + np.arange(rows) % 2)).astype(np.uint8)),
            "copy": pa.array(np.zeros(rows, dtype=np.bool_)),
            "label": pa.array(labels),
            "line": pa.array(np.arange(first + 2, first + 2 + rows)),
            "reason": pa.nulls(rows, pa.string()),
            "text": pa.nulls(rows, pa.string()),
            "pair": pa.nulls(rows, pa.string()),
            "text_key": pa.array(np.arange(first, first + rows, dtype=np.uint64) % 70_001),
        }
        name = f"000000-{number:06d}.arrow"
        entry = store.write_table(writer.folder / "shards" / name, pa.table(columns_of_shard))
        written.append({"number": 0, "shard": name, "entry": entry})
    tracemalloc.start()
    try:
        token_store = commit.commit_store(job, source, writer, written)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert token_store.manifest.rows == {"train": 64_000, "valid": 8_000, "test": 8_000}
    assert peak / 80_000 < 120
    results = [token_store.in_training_set(split) for split in ("valid", "test")]
    assert all(seen is not None and seen.any() for seen in results)


def lists(rows: int, width: int) -> pa.ListArray:
    return store.make_list_column(
        RaggedArray(np.zeros(rows * width, dtype=np.int32), np.full(rows, width, dtype=np.int32))
    )
