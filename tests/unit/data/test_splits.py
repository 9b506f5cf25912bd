"""Which rows are trained on, choose the weights, and are the test."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Recipe
from rtrain.config.recipe import NEUTRAL_DATA_SETTINGS
from rtrain.core.errors import ConfigError, UserError
from rtrain.data import row_reader, sources
from rtrain.data.row_reader import SourceRow
from rtrain.data.splits import Splits, hash_content
from rtrain.data.store import builder
from rtrain.data.store.store import SCHEMA_VERSION, Store
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_encoder, make_store

SINGLE = Splits(has_test=False, valid_share=0.1)
BESIDE_TEST = Splits(has_test=True, valid_share=0.1)
HASHES = [hash_content(SourceRow(1, f"text {number}", None, "a", None))[0] for number in range(20_000)]


@pytest.mark.parametrize(
    ("share", "split_without_test", "beside_test"),
    [
        (0.0, "train", "train"),
        (0.799, "train", "train"),
        (0.801, "valid", "train"),
        (0.899, "valid", "train"),
        (0.901, "test", "valid"),
        (0.9999, "test", "valid"),
    ],
)
def test_the_hash_of_the_text_chooses_the_split(share: float, split_without_test: str, beside_test: str) -> None:
    value = int(share * 2**64)
    assert SINGLE.assign_by_hash("train", value) == split_without_test
    assert BESIDE_TEST.assign_by_hash("train", value) == beside_test
    assert BESIDE_TEST.assign_by_hash("test", value) == "test"
    assert SINGLE.assign_by_hash("valid", value) == "valid"


def test_shares_are_near_80_10_10_and_90_10() -> None:
    for splits, shares in (
        (SINGLE, {"train": 0.8, "valid": 0.1, "test": 0.1}),
        (BESIDE_TEST, {"train": 0.9, "valid": 0.1}),
    ):
        results = [splits.assign_by_hash("train", value) for value in HASHES]
        assert set(results) == set(shares)
        for name, share in shares.items():
            # A share of 0.1 (or 0.8) of 20,000 has a deviation of 0.0021 (or 0.0028).
            assert results.count(name) / 20_000 == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize("has_test", [True, False])
@pytest.mark.parametrize("folds", [None, 5])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_another_part_validates_other_rows_and_moves_no_row_of_the_test(
    share: float, folds: int | None, has_test: bool
) -> None:
    parts = Splits(has_test, share, folds).num_validation_folds
    assert parts == {(0.1, True): 10, (0.1, False): 9, (0.3, True): 3, (0.3, False): 3}[share, has_test or bool(folds)]
    splits = [Splits(has_test, share, folds, validation_fold=part) for part in range(parts)]
    results = [[entry.assign_by_hash("train", value) for value in HASHES] for entry in splits]
    valid = [{value for value, split in zip(HASHES, names, strict=True) if split == "valid"} for names in results]
    tests = [{value for value, split in zip(HASHES, names, strict=True) if split == "test"} for names in results]
    assert sum(map(len, valid)) == len(set.union(*valid))
    assert all(entry == tests[0] for entry in tests)
    for rows in valid:
        assert len(rows) / (len(HASHES) - (len(tests[0]) if folds else 0)) == pytest.approx(share, abs=0.012)


def test_a_part_that_there_is_not_is_refused(tmp_path: Path, encoder: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", labelled_rows(300))
    assert rows_of(make_store(recipe_of(path, validation_fold=8), encoder, tmp_path))["valid"] > 0
    with pytest.raises(ConfigError, check=caused_by("out_of_range")):
        make_store(recipe_of(path, validation_fold=9), encoder, tmp_path)


def test_neutral_settings_are_no_part_of_a_store_s_address(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", labelled_rows(30))
    recipe = recipe_of(path)
    assert "validation_fold" not in recipe.weight_settings()["data"]
    model, source = make_encoder(tmp_path / "encoder"), row_reader.inspect_source(recipe.data)
    expected = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test", "max_bad_rows"})
    for name, value in NEUTRAL_DATA_SETTINGS.items():
        assert expected.pop(name) == value
    text = json.dumps({"schema": SCHEMA_VERSION, "task": recipe.task, **expected}, sort_keys=True)
    made_of = source.digest(), sources.hash_tokenizer(model), text
    assert builder.compute_digest(recipe, source, model) == hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    other = recipe_of(path, validation_fold=1)
    assert other.recipe_digest() != recipe.recipe_digest()
    assert builder.compute_digest(other, source, model) != builder.compute_digest(recipe, source, model)


def test_folds_are_disjoint_and_cover_all_rows_once() -> None:
    tests: list[set[int]] = []
    for fold in range(5):
        splits = Splits(False, 0.1, folds=5, fold=fold)
        results = {value: splits.assign_by_hash("train", value) for value in HASHES}
        tests.append({value for value, split in results.items() if split == "test"})
        valid = sum(split == "valid" for split in results.values())
        assert len(tests[-1]) / 20_000 == pytest.approx(0.2, abs=0.014)
        assert valid / (20_000 - len(tests[-1])) == pytest.approx(0.1, abs=0.012)
    assert set.union(*tests) == set(HASHES)
    assert sum(map(len, tests)) == len(set(HASHES))


def test_the_hash_is_over_all_texts_and_pinned() -> None:
    """A store made by a later version must split alike."""
    first = hash_content(SourceRow(1, "a", "b", "c", None))
    assert first == (11797832347080049151, 944102295022078880)
    assert hash_content(SourceRow(9, "a", "b", "c", None)) == first  # the line is no content
    assert hash_content(SourceRow(1, "a", "b", "d", None))[0] == first[0]
    other_values = [("a", "b", "d"), ("a", "bc", ""), ("ab", None, "c"), ("a", None, "c"), ("b", "a", "c")]
    keys = {hash_content(SourceRow(1, text, pair, label, None))[1] for text, pair, label in other_values}
    assert len(keys | {first[1]}) == 6


# --------------------------------------------------------------------------------------------------- files and columns


def recipe_of(path: Path, **overrides: Any) -> Recipe:
    dotted = {f"data.{name}": str(value) if isinstance(value, Path) else value for name, value in overrides.items()}
    return config.load_config("intent", {"data.path": str(path), **dotted}).recipe


def rows_of(store: Store) -> dict[str, int]:
    return {name: store.num_rows(name) for name in ("train", "valid", "test")}


def write_splits(path: Path, names: list[str]) -> Path:
    lines = [f"{text},{label},{name}" for (text, label), name in zip(labelled_rows(len(names)), names, strict=True)]
    path.write_text("\n".join(["text,label,part", *lines, ""]))
    return path


def test_a_validation_file_takes_no_training_row(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(60)
    paths = [
        write_rows(tmp_path / f"{name}.csv", part)
        for name, part in (("a", rows[:40]), ("b", rows[40:52]), ("c", rows[52:]))
    ]
    store = make_store(recipe_of(paths[0], valid=paths[1], test=paths[2]), encoder, tmp_path)
    assert rows_of(store) == {"train": 40, "valid": 12, "test": 8}


def test_a_column_names_the_splits_by_any_of_their_names(tmp_path: Path, encoder: Path) -> None:
    names = ["train", "Training", "TRAIN", "dev", "VALIDATION", "val", "test"] * 10
    store = make_store(recipe_of(write_splits(tmp_path / "rows.csv", names), split_column="part"), encoder, tmp_path)
    assert rows_of(store) == {"train": 30, "valid": 30, "test": 10}


def test_a_column_without_validation_rows_asks_what_to_do(tmp_path: Path, encoder: Path) -> None:
    path = write_splits(tmp_path / "rows.csv", ["train", "train", "train", "test"] * 20)
    with pytest.raises(UserError, check=caused_by("no_rows")):
        make_store(recipe_of(path, split_column="part"), encoder, tmp_path)
    assert rows_of(make_store(recipe_of(path, split_column="part", valid_share=0), encoder, tmp_path)) == {
        "train": 60,
        "valid": 0,
        "test": 20,
    }
    store = rows_of(make_store(recipe_of(path, split_column="part", valid_share=0.2), encoder, tmp_path))
    assert (store["train"] + store["valid"], store["test"]) == (60, 20)
    assert 0 < store["valid"] < 30


@pytest.mark.parametrize("names", [["train", "valid"], ["valid", "test"]])
def test_a_column_without_training_or_test_rows_is_refused(tmp_path: Path, encoder: Path, names: list[str]) -> None:
    with pytest.raises(UserError, check=caused_by("no_rows")):
        make_store(recipe_of(write_splits(tmp_path / "rows.csv", names * 20), split_column="part"), encoder, tmp_path)


def test_another_word_in_the_column_is_a_bad_row(tmp_path: Path) -> None:
    path = write_splits(tmp_path / "rows.csv", ["train", "holdout", ""])
    recipe = recipe_of(path, split_column="part")
    [file] = row_reader.inspect_source(recipe.data).files
    rows = list(row_reader.read_rows(file, recipe.data))
    assert [row.split for row in rows] == ["train", None, None]
    assert [row.reason is None for row in rows] == [True, False, False]


def test_settings_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for overrides, field in (
        ({"split_column": "part", "test": "t.csv"}, "data.split_column"),
        ({"folds": 5, "test": "t.csv"}, "data.folds"),
        ({"valid": "v.csv", "valid_share": 0.1}, "data.valid_share"),
        ({"folds": 5, "fold": 5}, "data.fold"),
        ({"fold": 1}, "data.fold"),
        ({"valid_share": 0, "out_of_scope_label": "oos"}, "data.valid_share"),
        ({"validation_fold": 1, "valid": "v.csv"}, "data.validation_fold"),
        ({"validation_fold": 1, "valid_share": 0}, "data.validation_fold"),
        ({"validation_fold": 1, "split_column": "part"}, "data.validation_fold"),
    ):
        with pytest.raises(ConfigError) as raised:
            recipe_of(path, **overrides)
        assert [problem.field for problem in raised.value.problems] == [field]
