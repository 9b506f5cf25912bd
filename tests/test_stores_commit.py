"""What a token store holds once it is whole: every good row once; bad rows set aside with file and line, or refused."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers

from rtrain.data import quarantine as bad_rows, records
from rtrain.data.records import Record
from rtrain.data.splits import content_hashes
from rtrain.data.stores.store import Store
from rtrain.errors import ConfigError, UserError
from rtrain.report.live import said
from rtrain.tasks.encode import load_tokenizer
from tests import test_tokens
from tests.conftest import Row, labelled_rows, write_rows
from tests.test_tokens import ALONE, recipe_of, store_of
from tests.tiny import make_store

encoder = test_tokens.encoder  # fixture


def quarantine(made: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(made.folder / "quarantine.parquet").to_pylist()
    return found


def test_a_store_holds_every_row_once_with_its_label(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(300)
    made = store_of(tmp_path, rows, encoder)
    assert made.manifest.labels == ("login", "parcel", "refund")
    assert sum(made.manifest.rows.values()) == 300
    assert made.manifest.quarantined == made.manifest.truncated == 0
    tokenizer = load_tokenizer(encoder, 64)
    expected = {tuple(tokenizer.encode(text).ids): made.manifest.labels.index(label) for text, label in rows}
    found = {}
    for split in ("train", "valid", "test"):
        for row in range(made.rows(split)):
            one = made.read(split, np.array([row]))
            found[tuple(one.ids.tolist())] = int(one.targets[0])
        assert made.manifest.tokens[split] == int(made.column(split, "length").sum())
    assert len(expected) == 300
    assert found == expected


def test_a_slice_may_be_called_as_what_says_where_a_row_came_from(tmp_path: Path, encoder: Path) -> None:
    """Else it would stand in the place of file and line, and no slice would be made of it."""
    path = tmp_path / "rows.csv"
    lines = [f"{text},{label},shop {number % 2},{number % 3}" for number, (text, label) in enumerate(labelled_rows(90))]
    path.write_text("\n".join(["text,label,source,line", *lines]) + "\n")
    recipe = recipe_of(path, slices=["source", "line"])
    made = make_store(recipe, encoder, tmp_path)
    place = made.places("test", np.array([0])).rpartition(":")
    assert place[0] == str(path)
    given = lines[int(place[2]) - 2].split(",")
    assert {name: values[0].as_py() for name, values in made.slices("test").items()} == {
        "source": given[2],
        "line": given[3],
    }


def test_a_column_names_the_rows_for_people(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"{text},{label},T-{number}" for number, (text, label) in enumerate(labelled_rows(90))]
    path.write_text("\n".join(["text,label,id", *lines]) + "\n")
    for slices in ([], ["id"]):
        recipe = recipe_of(path, id="id", slices=slices)
        made = make_store(recipe, encoder, tmp_path)
        origins = made.origins("test").to_pylist()
        assert [row["id"] for row in origins] == [f"T-{row['line'] - 2}" for row in origins]
        assert list(made.slices("test")) == slices
        assert recipe.identity() == recipe_of(path, slices=slices).identity()
    with pytest.raises(ConfigError, match=r"data\.id"):
        records.inspect(recipe_of(path, id="nothing").data)


def test_bad_rows_are_kept_in_quarantine_with_file_and_line(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    rows[10] = ("", "login")
    rows[50] = ("text", " ")
    made = store_of(tmp_path, rows, encoder)
    path = str(tmp_path / "rows.csv")
    assert quarantine(made) == [
        {"source": path, "line": 12, "reason": "column 'text' is empty; write a text or remove the row"},
        {"source": path, "line": 52, "reason": "column 'label' is empty; write a label or remove the row"},
    ]
    assert made.manifest.quarantined == 2
    assert sum(made.manifest.rows.values()) == 98
    with (made.folder / "quarantine.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{**row, "line": str(row["line"])} for row in quarantine(made)]


def test_the_commonest_reasons_are_told_with_a_place_each(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(400)
    for place in (10, 50, 90):
        rows[place] = (rows[place][0], " ")
    rows[20] = ("", "login")
    made = store_of(tmp_path, rows, encoder)
    path = tmp_path / "rows.csv"
    found = bad_rows.commonest(made.folder)
    assert found == [
        {"reason": "column 'label' is empty; write a label or remove the row", "rows": 3, "place": f"{path}:12"},
        {"reason": "column 'text' is empty; write a text or remove the row", "rows": 1, "place": f"{path}:22"},
    ]
    event = {"kind": "bad_rows", "rows": 4, "reasons": found, "file": str(made.folder / bad_rows.FIRST)}
    assert said.of(event) == (
        f"set aside: 3 x column 'label' is empty; write a label or remove the row ({path}:12); "
        f"1 x column 'text' is empty; write a text or remove the row ({path}:22); "
        f"listed in {made.folder / 'quarantine.csv'}"
    )
    few = {**event, "rows": 9, "file": str(tmp_path / "gone.csv")}
    assert str(said.of(few)).endswith("; 5 for other reasons")


def test_no_list_of_bad_rows_where_there_are_none(tmp_path: Path, encoder: Path) -> None:
    made = store_of(tmp_path, labelled_rows(60), encoder)
    assert bad_rows.commonest(made.folder) == bad_rows.commonest(tmp_path / "gone") == []
    assert not (made.folder / bad_rows.FIRST).exists()


def test_bad_rows_do_not_change_the_others(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    clean = store_of(tmp_path / "clean", rows, encoder)
    mixed = store_of(tmp_path / "mixed", [*rows[:50], ("", "x"), *rows[50:]], encoder)
    assert clean.manifest.rows == mixed.manifest.rows
    assert clean.manifest.tokens == mixed.manifest.tokens
    for split in ("train", "valid", "test"):
        positions = np.arange(clean.rows(split))
        assert np.array_equal(clean.read(split, positions).ids, mixed.read(split, positions).ids)


def test_too_many_bad_rows_are_refused_with_their_lines(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    for number in (0, 1, 2):
        rows[number] = ("", "x")
    with pytest.raises(UserError) as caught:
        store_of(tmp_path, rows, encoder)
    path = tmp_path / "rows.csv"
    reason = "column 'text' is empty; write a text or remove the row"
    assert str(caught.value) == (
        "3 of 100 rows cannot be used (data.max_bad_rows=0.02):\n"
        f"  {path}:2: {reason}\n  {path}:3: {reason}\n  {path}:4: {reason}\n"
        "Mend these lines, or set them aside by --set data.max_bad_rows=0.031"
    )


def test_rows_that_are_all_bad_are_refused_as_such(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "latin1.csv"
    path.write_bytes(b"text,label\n" + "".join(f"café {n},été\n" for n in range(40)).encode("latin1"))
    with pytest.raises(UserError, match="40 of 40 rows cannot be used") as caught:
        make_store(recipe_of(path), encoder, tmp_path)
    assert "latin1.csv:2: column 'text' is not UTF-8; convert the file, e.g. iconv" in str(caught.value)
    assert "data.max_bad_rows=1" not in str(caught.value)
    assert str(caught.value).endswith(
        "\nWithout these lines no row is left: mend them, or name another column by data.text or data.label; "
        "the rows have 'text', 'label'"
    )
    with pytest.raises(UserError, match=r"every row was set aside \(data.max_bad_rows=1\), so that none is left"):
        make_store(recipe_of(path, max_bad_rows=1), encoder, tmp_path)


def test_rows_that_are_all_bad_for_several_reasons_are_to_be_mended(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(UserError, match=r"Without these lines no row is left: mend them$"):
        store_of(tmp_path, [("", "x"), ("a", "")] * 20, encoder)


def test_a_header_without_rows_is_refused(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(UserError, match="has a header and no rows; add rows, one text and label each"):
        store_of(tmp_path, [], encoder)


def test_one_label_alone_is_refused(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(UserError, match=r"the training rows have one class only \('x'\)"):
        store_of(tmp_path, [(f"text {n}", "x") for n in range(60)], encoder)


def test_rows_without_a_validation_row_are_refused(tmp_path: Path, encoder: Path) -> None:
    rows = [row for row in labelled_rows(40) if ALONE.at("train", hash_of(row)) == "train"]
    with pytest.raises(UserError, match=f"{len(rows)} training rows leave no validation row; give more rows"):
        store_of(tmp_path, rows, encoder)


@pytest.mark.parametrize("value", ["", "one contract"])
def test_rows_of_one_group_are_refused_with_the_column_that_holds_them_together(
    tmp_path: Path, encoder: Path, value: str
) -> None:
    """As of a SQuAD file without titles: more rows of that kind would not help."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label,doc\n" + "".join(f"{text},{label},{value}\n" for text, label in labelled_rows(90)))
    with pytest.raises(UserError, match=r"Rows with one value of the column 'doc', .*data\.split_by"):
        make_store(recipe_of(path, split_by="doc"), encoder, tmp_path)


def test_rows_of_one_text_are_refused_with_what_holds_them_together(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(UserError, match="Rows of one text are all in one split"):
        store_of(tmp_path, [("hello", "ab"[number % 2]) for number in range(90)], encoder)


def hash_of(row: Row) -> int:
    return content_hashes(Record(1, row[0], None, row[1], None))[0]


def test_a_label_that_only_other_splits_have_is_set_aside(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    rare = next(n for n, row in enumerate(rows) if ALONE.at("train", hash_of(row)) == "valid")
    rows[rare] = (rows[rare][0], "rare")
    made = store_of(tmp_path, rows, encoder)
    assert made.manifest.labels == ("login", "parcel", "refund")
    assert quarantine(made) == [
        {
            "source": str(tmp_path / "rows.csv"),
            "line": rare + 2,
            "reason": "label 'rare' occurs in no training row; add rows of it",
        }
    ]
    assert sum(made.manifest.rows.values()) == 99
    assert min(made.targets(split).values.min() for split in ("train", "valid", "test")) == 0


def test_rare_labels_that_the_split_keeps_from_training_are_no_bad_rows_of_the_user(
    tmp_path: Path, encoder: Path
) -> None:
    rows = labelled_rows(160) + [(f"a single row {number}", f"single{number:02}") for number in range(60)]
    made = store_of(tmp_path, rows, encoder)
    kept = {row["line"] for row in quarantine(made)}
    assert len(kept) > 0.02 * len(rows)
    assert len(kept) + sum(made.manifest.rows.values()) == len(rows)
    [reason] = bad_rows.commonest(made.folder)
    assert reason["rows"] == len(kept)
    assert all(name in reason["reason"] for name in (f"{len(kept)} labels", "'single"))


def test_a_test_file_with_a_label_of_its_own_is_refused(tmp_path: Path, encoder: Path) -> None:
    path = write_rows(tmp_path / "train.csv", labelled_rows(60))
    test = write_rows(tmp_path / "test.csv", [("a", "login"), ("b", "Login"), ("c", "Login")])
    with pytest.raises(UserError) as caught:
        make_store(recipe_of(path, test=str(test)), encoder, tmp_path)
    assert str(caught.value) == (
        f"data.label: 2 rows have a label that no training row has:\n  {test}:3: label 'Login'\n"
        f"  {test}:4: label 'Login'\nTraining rows have 'login', 'parcel', 'refund'. "
        "Add training rows of it, or correct these labels."
    )


def test_rows_of_a_test_file_are_all_test_rows(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(150)
    path, test = write_rows(tmp_path / "train.csv", rows[:100]), write_rows(tmp_path / "test.csv", rows[100:])
    made = make_store(recipe_of(path, test=str(test)), encoder, tmp_path)
    assert made.manifest.rows["test"] == 50
    assert made.manifest.rows["train"] + made.manifest.rows["valid"] == 100
    assert 80 <= made.manifest.rows["train"] < 100


def test_texts_that_were_cut_are_counted(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(100)
    made = store_of(tmp_path, rows, encoder, max_tokens=32)
    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    long = sum(len(tokenizer.encode(text).ids) > 32 for text, _ in rows)
    assert 0 < long < 100
    assert made.manifest.truncated == long


def test_more_targets_than_memory_holds_are_refused_before_they_are_made(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = (
        {"text": text, "label": [label, f"tag {number}"]} for number, (text, label) in enumerate(labelled_rows(60))
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    recipe = recipe_of(path).model_copy(update={"task": "multi_label"})
    monkeypatch.setattr("rtrain.data.refusals.TARGET_BYTES", 4 * 60 * 40)
    with pytest.raises(UserError, match="labels of 60 rows"):
        make_store(recipe, encoder, tmp_path)
