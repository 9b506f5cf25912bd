"""Contents of a complete token store: every good row once; bad rows quarantined with file and line, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers

from rtrain.core.errors import ConfigError, UserError
from rtrain.data import quarantine as bad_rows, row_reader
from rtrain.data.row_reader import SourceRow
from rtrain.data.splits import hash_content
from rtrain.data.store.store import Store
from rtrain.tasks import multi_label
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import Row, labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_store
from tests.unit.data import test_builder
from tests.unit.data.test_builder import SINGLE, recipe_of, store_of

encoder = test_builder.encoder  # fixture


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
