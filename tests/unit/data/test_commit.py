"""A complete token store: every good row once, bad rows quarantined or refused; and the columns of its commit."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import RaggedArray
from rtrain.data import checks as bad_rows, row_reader
from rtrain.data.row_reader import SourceRow
from rtrain.data.splits import Splits, hash_content
from rtrain.data.store import commit, shards, store
from rtrain.data.store.store import Store
from rtrain.tasks import multi_label
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import Row, labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_store, make_tokenizer
from tests.unit.data.test_builder import SINGLE, recipe_of, store_of


def quarantine(store: Store) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = pyarrow.parquet.read_table(store.folder / "quarantine.parquet").to_pylist()
    return result


def test_a_store_holds_every_row_once_with_its_label(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(300)
    store = store_of(tmp_path, rows, encoder)
    assert store.manifest.labels == ("login", "parcel", "refund")
    assert sum(store.manifest.rows.values()) == 300
    assert store.manifest.quarantined == store.manifest.truncated == 0
    tokenizer = load_tokenizer(encoder, 64)
    expected = {tuple(tokenizer.encode(text).ids): store.manifest.labels.index(label) for text, label in rows}
    results = {}
    for split in ("train", "valid", "test"):
        for row in range(store.num_rows(split)):
            first = store.read_tokens(split, np.array([row]))
            results[tuple(first.ids.tolist())] = int(first.targets[0])
        assert store.manifest.tokens[split] == int(store.column(split, "length").sum())
    assert len(expected) == 300
    assert results == expected


def test_a_slice_may_be_called_as_what_says_where_a_row_came_from(tmp_path: Path, encoder: Path) -> None:
    """Else it would stand in the place of file and line, and no slice would be made of it."""
    path = tmp_path / "rows.csv"
    lines = [f"{text},{label},shop {number % 2},{number % 3}" for number, (text, label) in enumerate(labelled_rows(90))]
    path.write_text("\n".join(["text,label,source,line", *lines]) + "\n")
    recipe = recipe_of(path, slices=["source", "line"])
    store = make_store(recipe, encoder, tmp_path)
    place = store.describe_rows("test", np.array([0])).rpartition(":")
    assert place[0] == str(path)
    overrides = lines[int(place[2]) - 2].split(",")
    assert {name: values[0].as_py() for name, values in store.slices("test").items()} == {
        "source": overrides[2],
        "line": overrides[3],
    }


def test_a_column_names_the_rows_for_people(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"{text},{label},T-{number}" for number, (text, label) in enumerate(labelled_rows(90))]
    path.write_text("\n".join(["text,label,id", *lines]) + "\n")
    for slices in ([], ["id"]):
        recipe = recipe_of(path, id="id", slices=slices)
        store = make_store(recipe, encoder, tmp_path)
        origins = store.origins("test").to_pylist()
        assert [row["id"] for row in origins] == [f"T-{row['line'] - 2}" for row in origins]
        assert list(store.slices("test")) == slices
        assert recipe.recipe_digest() == recipe_of(path, slices=slices).recipe_digest()
    with pytest.raises(ConfigError, check=caused_by("unknown_column")):
        row_reader.inspect_source(recipe_of(path, id="nothing").data)


def test_bad_rows_are_kept_in_quarantine_with_file_and_line(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    rows[10] = ("", "login")
    rows[50] = ("text", " ")
    store = store_of(tmp_path, rows, encoder)
    path = str(tmp_path / "rows.csv")
    assert [(row["source"], row["line"], bool(row["reason"])) for row in quarantine(store)] == [
        (path, 12, True),
        (path, 52, True),
    ]
    assert store.manifest.quarantined == 2
    assert sum(store.manifest.rows.values()) == 98


def test_the_commonest_reasons_are_told_with_a_place_each(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(400)
    for place in (10, 50, 90):
        rows[place] = (rows[place][0], " ")
    rows[20] = ("", "login")
    store = store_of(tmp_path, rows, encoder)
    path = tmp_path / "rows.csv"
    summaries = bad_rows.summarize_reasons(store.folder)
    assert [(entry["rows"], entry["location"]) for entry in summaries] == [(3, f"{path}:12"), (1, f"{path}:22")]
    assert bad_rows.summarize_reasons(tmp_path / "gone") == []


def test_bad_rows_do_not_change_the_others(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    clean = store_of(tmp_path / "clean", rows, encoder)
    mixed = store_of(tmp_path / "mixed", [*rows[:50], ("", "x"), *rows[50:]], encoder)
    assert clean.manifest.rows == mixed.manifest.rows
    assert clean.manifest.tokens == mixed.manifest.tokens
    for split in ("train", "valid", "test"):
        positions = np.arange(clean.num_rows(split))
        assert np.array_equal(clean.read_tokens(split, positions).ids, mixed.read_tokens(split, positions).ids)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], "no_rows"),
        ([(f"text {n}", "x") for n in range(60)], "one_label"),
        ([("hello", "ab"[n % 2]) for n in range(90)], "no_rows"),
        ([*labelled_rows(97), *[("", "x")] * 3], "too_many_bad_rows"),
        ([("", "x"), ("a", "")] * 20, "too_many_bad_rows"),
    ],
    ids=["header alone", "one label", "one text", "bad rows", "bad rows alone"],
)
def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, encoder: Path, rows: list[Row], code: str) -> None:
    with pytest.raises(UserError, check=caused_by(code)):
        store_of(tmp_path, rows, encoder)


def test_rows_that_are_all_set_aside_leave_none(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "latin1.csv"
    path.write_bytes(b"text,label\n" + "".join(f"café {n},été\n" for n in range(40)).encode("latin1"))
    with pytest.raises(UserError, check=caused_by("too_many_bad_rows")) as caught:
        make_store(recipe_of(path), encoder, tmp_path)
    assert f"{path}:2" in str(caught.value)
    with pytest.raises(UserError, check=caused_by("no_rows")):
        make_store(recipe_of(path, max_bad_rows=1), encoder, tmp_path)


def test_rows_without_a_validation_row_are_refused(tmp_path: Path, encoder: Path) -> None:
    rows = [row for row in labelled_rows(40) if SINGLE.assign_by_hash("train", hash_of(row)) == "train"]
    with pytest.raises(UserError, check=caused_by("too_few_rows")):
        store_of(tmp_path, rows, encoder)


@pytest.mark.parametrize("value", ["", "one contract"])
def test_rows_of_one_group_are_refused_with_the_column_that_holds_them_together(
    tmp_path: Path, encoder: Path, value: str
) -> None:
    """As of a SQuAD file without titles: more rows of that kind would not help."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label,doc\n" + "".join(f"{text},{label},{value}\n" for text, label in labelled_rows(90)))
    with pytest.raises(UserError, check=caused_by("too_few_rows")):
        make_store(recipe_of(path, group_column="doc"), encoder, tmp_path)


def hash_of(row: Row) -> int:
    return hash_content(SourceRow(1, row[0], None, row[1], None))[0]


def test_a_label_that_only_other_splits_have_is_set_aside(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    rare = next(n for n, row in enumerate(rows) if SINGLE.assign_by_hash("train", hash_of(row)) == "valid")
    rows[rare] = (rows[rare][0], "rare")
    store = store_of(tmp_path, rows, encoder)
    assert store.manifest.labels == ("login", "parcel", "refund")
    assert [row["line"] for row in quarantine(store)] == [rare + 2]
    assert sum(store.manifest.rows.values()) == 99
    assert min(store.targets(split).values.min() for split in ("train", "valid", "test")) == 0


def test_rare_labels_that_the_split_keeps_from_training_are_no_bad_rows_of_the_user(
    tmp_path: Path, encoder: Path
) -> None:
    rows = labelled_rows(160) + [(f"a single row {number}", f"single{number:02}") for number in range(60)]
    store = store_of(tmp_path, rows, encoder)
    results = {row["line"] for row in quarantine(store)}
    assert len(results) > 0.02 * len(rows)
    assert len(results) + sum(store.manifest.rows.values()) == len(rows)
    assert [reason["rows"] for reason in bad_rows.summarize_reasons(store.folder)] == [len(results)]


def test_a_test_file_with_a_label_of_its_own_is_refused(tmp_path: Path, encoder: Path) -> None:
    path = write_rows(tmp_path / "train.csv", labelled_rows(60))
    test = write_rows(tmp_path / "test.csv", [("a", "login"), ("b", "Login"), ("c", "Login")])
    with pytest.raises(UserError, check=caused_by("unknown_labels")) as caught:
        make_store(recipe_of(path, test=str(test)), encoder, tmp_path)
    assert [place in str(caught.value) for place in (f"{test}:2", f"{test}:3", f"{test}:4")] == [False, True, True]


@pytest.mark.parametrize(
    ("labels", "refused"), [(["a; b", "c"], True), (["a", "b"], False), (['["a; b"]', '["c"]'], False)]
)
def test_labels_that_may_be_several_need_a_separator(
    tmp_path: Path, encoder: Path, labels: list[str], refused: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = ({"text": f"text {n}", "label": labels[n % 2]} for n in range(60))
    path.write_text("\n".join(map(json.dumps, lines)))
    recipe = recipe_of(path).model_copy(update={"task": "multi_label"})
    if refused:
        with pytest.raises(UserError, check=caused_by("no_separator")):
            make_store(recipe, encoder, tmp_path)
        recipe = recipe_of(path, separator=";").model_copy(update={"task": "multi_label"})
        labels = ["a", "b", "c"]
    store = make_store(recipe, encoder, tmp_path)
    assert store.manifest.labels == tuple(
        sorted({name for label in labels for name in multi_label.parse_labels(label)})
    )


def test_rows_of_a_test_file_are_all_test_rows(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(150)
    path, test = write_rows(tmp_path / "train.csv", rows[:100]), write_rows(tmp_path / "test.csv", rows[100:])
    store = make_store(recipe_of(path, test=str(test)), encoder, tmp_path)
    assert store.manifest.rows["test"] == 50
    assert store.manifest.rows["train"] + store.manifest.rows["valid"] == 100
    assert 80 <= store.manifest.rows["train"] < 100


def test_texts_that_were_cut_are_counted(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    store = store_of(tmp_path, rows, encoder, max_tokens=32)
    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    long = sum(len(tokenizer.encode(text).ids) > 32 for text, _ in rows)
    assert 0 < long < 100
    assert store.manifest.truncated == long


def test_more_targets_than_memory_holds_are_refused_before_they_are_made(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = (
        {"text": text, "label": [label, f"tag {number}"]} for number, (text, label) in enumerate(labelled_rows(60))
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    recipe = recipe_of(path).model_copy(update={"task": "multi_label"})
    monkeypatch.setattr("rtrain.data.checks.MAX_TARGET_BYTES", 4 * 60 * 40)
    with pytest.raises(UserError, check=caused_by("too_large")):
        make_store(recipe, encoder, tmp_path)


LABELS = st.lists(st.sampled_from(["a", "", "é", '["x", "y"]', "b" * 300]))


@given(st.lists(LABELS, min_size=1))
@settings(deadline=None)
def test_counts_are_those_of_a_counter(chunks: list[list[str]]) -> None:
    expected = Counter(label for chunk in chunks for label in chunk)
    label_counts = commit.LabelCounts(pa.chunked_array([pa.array(chunk, pa.string()) for chunk in chunks]))
    assert list(label_counts.items()) == list(expected.items())  # in the same order
    assert (list(label_counts), list(label_counts.values()), len(label_counts)) == (
        list(expected),
        list(expected.values()),
        len(expected),
    )
    assert dict(label_counts) == expected
    assert "c" not in label_counts


def test_counts_of_more_labels_than_a_block() -> None:
    labels = [f"label {number}" for number in range(3 * commit.BLOCK + 5)]
    label_counts = commit.LabelCounts(pa.chunked_array([pa.array(labels), pa.array(labels[:7])]))
    assert dict(label_counts.items()) == Counter(labels + labels[:7])


@given(st.lists(st.integers(0, 3)))
@settings(deadline=None)
def test_names_by_number_are_a_dictionary_of_those_that_occur(numbers: list[int]) -> None:
    names = ["x", "y", "x", "z"]  # a file may be given twice
    result = commit.encode_names(names, np.array(numbers, dtype=np.int64))
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
