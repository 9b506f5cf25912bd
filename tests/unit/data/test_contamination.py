"""Held-out rows that are training rows too: found whatever their case, blanks and punctuation are."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import Recipe
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data import splits
from rtrain.data.row_reader import SourceRow
from rtrain.data.store import shards
from rtrain.data.store.store import Store
from rtrain.report import summary
from rtrain.runs import predictions, prepare
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import write_rows
from tests.support.tiny import make_encoder, make_store

TEXTS = st.text(max_size=40)
LETTERS = st.text(st.characters(categories=("Ll", "Lu", "Lo", "Nd")), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("URGENT: a  lamp!", "urgent : a lamp"),
        ("Größe\tM", "GRÖSSE M"),
        ("don't", "don\u2019t"),
        ("\ufb01ne, \uff46ull width", "fine full width"),
        ("cafe\u0301", "café"),
        ("co\u00adoperate", "cooperate"),
        ("a_b-c", "a b c"),
        ("Ⅷ", "viii"),
    ],
)
def test_trifles_do_not_make_another_text(first: str, other: str) -> None:
    assert splits.normalize_text(first) == splits.normalize_text(other)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("a lamp", "alamp"),
        ("C", "C++"),
        ("5", "-5 €"),
        ("👍", "👎"),
        ("!", "?"),  # nothing else is there
        ("...", ""),
        ("हिन्दी", "हन्द"),  # vowel signs are no letters, and still no trifle
        ("a b", "b a"),
    ],
)
def test_other_words_make_another_text(first: str, other: str) -> None:
    assert splits.normalize_text(first) != splits.normalize_text(other)


@settings(deadline=None, max_examples=40)
@given(st.lists(LETTERS, min_size=1, max_size=6), st.data())
def test_blanks_punctuation_and_the_form_of_characters_do_not_count(words: list[str], data: st.DataObject) -> None:
    between = st.text(st.sampled_from(" ,.;:!?-\t\n\u00a0\u3000"), min_size=1, max_size=3)
    text = data.draw(between) + "".join(word + data.draw(between) for word in words)
    form = data.draw(st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
    composed = unicodedata.normalize(form, text)  # type: ignore[arg-type]
    assert splits.normalize_text(composed) == splits.normalize_text(" ".join(words))


def test_a_row_s_key_is_of_both_texts_and_takes_halves_of_characters() -> None:
    def key(text: str, pair: str | None = None, label: str = "x") -> int:
        return splits.compute_text_key(SourceRow(2, text, pair, label, None))

    assert key("A b.", "C") == key("a b", "c", label="y")
    assert len({key("a b"), key("a", "b"), key("b", "a"), key("", "a b"), key("a\udc80 b")}) == 5


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=5), st.lists(st.integers(0, 30), max_size=20))
def test_rows_are_seen_where_a_block_holds_their_key(blocks: list[list[int]], keys: list[int]) -> None:
    result = splits.find_in_training_set(
        (np.array(block, dtype=np.uint64) for block in blocks), np.array(keys, dtype=np.uint64)
    )
    trained_on = {key for block in blocks for key in block}
    assert result.tolist() == [key in trained_on for key in keys]


# -------------------------------------------------------------------------------------------------------- in a store

TRAIN = [(f"Where is parcel number {place}, please?", "ab"[place % 2]) for place in range(40)]
TEST = [
    ("where is  parcel number 3 please", "b"),  # in training but for trifles
    ("Who opened the box? " + "It was ÖPEN. " * 300, "a"),
    (TRAIN[7][0], "a"),  # the same text with another label
    ("URGENT: a lamp", "b"),
]


def recipe_of(folder: Path, test: list[tuple[str, str]] | None = None, **data: Any) -> Recipe:
    overrides = {"data.path": str(write_rows(folder / "rows.csv", TRAIN)), "data.valid_share": 0.1}
    if test is not None:
        overrides["data.test"] = str(write_rows(folder / "test.csv", test))
    return config.load_config(
        "intent", {**overrides, "model.name": str(make_encoder(folder / "encoder")), **data}
    ).recipe


def build_store(recipe: Recipe, folder: Path) -> Store:
    return make_store(recipe, Path(recipe.model.name), folder)


def test_rows_of_a_test_file_that_are_training_rows_are_found_and_named(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    store = build_store(recipe, tmp_path)
    trained_on = {TRAIN[line - 2][0] for line in store.origins("train")["line"].to_pylist()}
    expected = [TRAIN[3][0] in trained_on, False, TRAIN[7][0] in trained_on, False]
    assert any(expected)
    seen = store.in_training_set("test")
    assert seen is not None
    assert seen.tolist() == expected
    [event] = prepare.find_overlaps(store)
    assert (event["split"], event["rows"], event["trained_rows"]) == ("test", 4, sum(expected))
    lines = [line for line, hit in zip((2, 3, 4, 5), expected, strict=True) if hit]
    assert store.describe_rows("test", np.flatnonzero(seen)) == ", ".join(
        f"{tmp_path / 'test.csv'}:{line}" for line in lines
    )


def test_rows_of_a_test_file_that_a_copy_equals_are_counted(tmp_path: Path) -> None:
    """A copy is made without a look at the other files; no copy equals a row that the hash has held out."""
    test = [(f"Where is number {place}, please?", "ab"[place % 2]) for place in range(40)]
    augmentation: dict[str, Any] = {"augment.copies": 20, "augment.drop": 0.2}
    seen = build_store(recipe_of(tmp_path, test, **augmentation), tmp_path).in_training_set("test")
    assert seen is not None
    assert seen.any()
    by_hash = build_store(recipe_of(tmp_path, **augmentation), tmp_path)
    for split in ("valid", "test"):
        subset = by_hash.in_training_set(split)
        assert subset is not None
        assert subset.tolist() == [False] * by_hash.num_rows(split)


def test_the_scores_without_them_stand_beside_the_scores(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    store, task = build_store(recipe, tmp_path), base.get_task("classification")
    seen = store.in_training_set("test")
    assert seen is not None
    assert seen.any()
    true = store.targets("test").values.astype(int)
    logits = np.where(np.eye(2)[np.where(seen, true, 1 - true)] > 0, 3.0, 0.0)  # right where it has seen the answer
    document = predictions.measure_scores(store, "test", task, store.manifest.head, RaggedArray.from_matrix(logits))
    assert document["scores"]["accuracy"] == pytest.approx(seen.mean())
    assert document["unseen"]["scores"]["accuracy"] == 0.0
    assert (document["unseen"]["in_training_set"], document["unseen"]["rows"]) == (seen.sum(), (~seen).sum())
    run = Run(tmp_path)
    run.append_event("overlap", split="test", rows=4, trained_rows=int(seen.sum()), row_places="test.csv:2")
    run.append_event("unseen", split="test", **document["unseen"])
    summaries = summary.summarize(run)["overlap"]
    assert summaries == {
        "test": {"rows": 4, "training_rows": int(seen.sum()), "scores_without": document["unseen"]["scores"]}
    }


# ------------------------------------------------------------------------------------------- verbatim texts


def written(store: Store, recipe: Recipe, path: Path, split: str = "test") -> list[dict[str, Any]]:
    task, rows = base.get_task(recipe.task), store.num_rows(split)
    tokenizer = load_tokenizer(Path(recipe.model.name), recipe.data.max_tokens)
    row_results = RaggedArray.from_matrix(np.zeros((rows, len(store.manifest.labels))))
    predictions.write_predictions(path, split, store, task, store.manifest.head, row_results, tokenizer)
    listed: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return listed


def test_texts_of_held_out_rows_are_kept_as_they_are_written(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    store = build_store(recipe, tmp_path)
    texts = [row["text"] for row in written(store, recipe, tmp_path / "predictions.parquet")]
    assert texts == [text[: shards.MAX_KEPT_CHARACTERS] for text, _ in TEST]
    assert len(texts[1]) == shards.MAX_KEPT_CHARACTERS == predictions.TEXT_CHARACTERS
    # No text of rows that are trained on is kept: there may be a thousand times as many.
    assert store.kept_texts("train", np.arange(store.num_rows("train"))) == [None] * store.num_rows("train")
    (tmp_path / "test.csv").unlink()  # the store needs no source files
    assert [row["text"] for row in written(Store(store.folder), recipe, tmp_path / "again.parquet")] == texts


def test_both_texts_of_a_pair_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("text,reply,label\n" + "".join(f"Is it {n}?,NO: it is {n + 1},{'ab'[n % 2]}\n" for n in range(40)))
    overrides = {"data.path": str(path), "data.text_pair": "reply", "data.valid_share": 0.2}
    recipe = config.load_config("intent", {**overrides, "model.name": str(make_encoder(tmp_path / "encoder"))}).recipe
    store = build_store(recipe, tmp_path)
    rows = written(store, recipe, tmp_path / "predictions.parquet")
    assert rows
    assert all(row["text"] == f"Is it {row['line'] - 2}? NO: it is {row['line'] - 1}" for row in rows)
