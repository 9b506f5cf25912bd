"""Held-out rows that are training rows too: found whatever their case, blanks and punctuation are."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st

from rtrain import config
from rtrain.config import Recipe
from rtrain.core.ragged import Ragged
from rtrain.core.run_folder import Run
from rtrain.data import contamination
from rtrain.data.row_reader import Record
from rtrain.data.store import shards
from rtrain.data.store.store import Store
from rtrain.report import summary
from rtrain.runs import predictions, prepare
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import write_rows
from tests.tiny import make_encoder, make_store

TEXTS = st.text(max_size=40)
LETTERS = st.text(st.characters(categories=("Ll", "Lu", "Lo", "Nd")), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_trifles_do_not_make_another_text(one: str, other: str) -> None:
    assert contamination.plain(one) == contamination.plain(other)


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_other_words_make_another_text(one: str, other: str) -> None:
    assert contamination.plain(one) != contamination.plain(other)


@given(st.lists(LETTERS, min_size=1, max_size=6), st.data())
def test_blanks_punctuation_and_the_form_of_characters_do_not_count(words: list[str], data: st.DataObject) -> None:
    between = st.text(st.sampled_from(" ,.;:!?-\t\n\u00a0\u3000"), min_size=1, max_size=3)
    text = data.draw(between) + "".join(word + data.draw(between) for word in words)
    form = data.draw(st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
    assert contamination.plain(unicodedata.normalize(form, text)) == contamination.plain(" ".join(words))  # type: ignore[arg-type]


def test_a_row_s_key_is_of_both_texts_and_takes_halves_of_characters() -> None:
    def key(text: str, pair: str | None = None, label: str = "x") -> int:
        return contamination.key(Record(2, text, pair, label, None))

    assert key("A b.", "C") == key("a b", "c", label="y")
    assert len({key("a b"), key("a", "b"), key("b", "a"), key("", "a b"), key("a\udc80 b")}) == 5


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=5), st.lists(st.integers(0, 30), max_size=20))
def test_rows_are_seen_where_a_block_holds_their_key(blocks: list[list[int]], keys: list[int]) -> None:
    found = contamination.seen((np.array(block, dtype=np.uint64) for block in blocks), np.array(keys, dtype=np.uint64))
    trained_on = {key for block in blocks for key in block}
    assert found.tolist() == [key in trained_on for key in keys]


# -------------------------------------------------------------------------------------------------------- in a store

TRAIN = [(f"Where is parcel number {place}, please?", "ab"[place % 2]) for place in range(40)]
TEST = [
    ("where is  parcel number 3 please", "b"),  # in training but for trifles
    ("Who opened the box? " + "It was ÖPEN. " * 300, "a"),
    (TRAIN[7][0], "a"),  # as it stands there, with another label
    ("URGENT: a lamp", "b"),
]


def recipe_of(folder: Path, test: list[tuple[str, str]] | None = None, **data: Any) -> Recipe:
    own = {"data.path": str(write_rows(folder / "rows.csv", TRAIN)), "data.valid_share": 0.1}
    if test is not None:
        own["data.test"] = str(write_rows(folder / "test.csv", test))
    return config.load("intent", {**own, "model.name": str(make_encoder(folder / "encoder")), **data}).recipe


def made(recipe: Recipe, folder: Path) -> Store:
    return make_store(recipe, Path(recipe.model.name), folder)


def test_rows_of_a_test_file_that_are_training_rows_are_found_and_named(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    found = made(recipe, tmp_path)
    trained_on = {TRAIN[line - 2][0] for line in found.origins("train")["line"].to_pylist()}
    wanted = [TRAIN[3][0] in trained_on, False, TRAIN[7][0] in trained_on, False]
    assert any(wanted)
    seen = found.seen("test")
    assert seen is not None
    assert seen.tolist() == wanted
    [event] = prepare.find_overlaps(found)
    assert (event["split"], event["rows"], event["seen"]) == ("test", 4, sum(wanted))
    lines = [line for line, hit in zip((2, 3, 4, 5), wanted, strict=True) if hit]
    assert found.places("test", np.flatnonzero(seen)) == ", ".join(f"{tmp_path / 'test.csv'}:{line}" for line in lines)


def test_rows_of_a_test_file_that_a_copy_equals_are_counted(tmp_path: Path) -> None:
    """A copy is made without a look at the other files; no copy equals a row that the hash has held out."""
    test = [(f"Where is number {place}, please?", "ab"[place % 2]) for place in range(40)]
    copied: dict[str, Any] = {"augment.copies": 20, "augment.drop": 0.2}
    seen = made(recipe_of(tmp_path, test, **copied), tmp_path).seen("test")
    assert seen is not None
    assert seen.any()
    by_hash = made(recipe_of(tmp_path, **copied), tmp_path)
    for split in ("valid", "test"):
        own = by_hash.seen(split)
        assert own is not None
        assert own.tolist() == [False] * by_hash.rows(split)


def test_the_scores_without_them_stand_beside_the_scores(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    found, task = made(recipe, tmp_path), base.get("classification")
    seen = found.seen("test")
    assert seen is not None
    assert seen.any()
    true = found.targets("test").values.astype(int)
    logits = np.where(np.eye(2)[np.where(seen, true, 1 - true)] > 0, 3.0, 0.0)  # right where it has seen the answer
    document = predictions.measured(found, "test", task, found.manifest.head, Ragged.even(logits))
    assert document["scores"]["accuracy"] == pytest.approx(seen.mean())
    assert document["unseen"]["scores"]["accuracy"] == 0.0
    assert (document["unseen"]["seen"], document["unseen"]["rows"]) == (seen.sum(), (~seen).sum())
    run = Run(tmp_path)
    run.append("overlap", split="test", rows=4, seen=int(seen.sum()), places="test.csv:2")
    run.append("unseen", split="test", **document["unseen"])
    kept = summary.summarise(run)["overlap"]
    assert kept == {"test": {"rows": 4, "seen": int(seen.sum()), "without": document["unseen"]["scores"]}}


# ------------------------------------------------------------------------------------------- texts as they are written


def written(found: Store, recipe: Recipe, path: Path, split: str = "test") -> list[dict[str, Any]]:
    task, rows = base.get(recipe.task), found.rows(split)
    tokenizer = load_tokenizer(Path(recipe.model.name), recipe.data.max_tokens)
    outcomes = Ragged.even(np.zeros((rows, len(found.manifest.labels))))
    predictions.write(path, split, found, task, found.manifest.head, outcomes, tokenizer)
    listed: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return listed


def test_texts_of_held_out_rows_are_kept_as_they_are_written(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TEST)
    found = made(recipe, tmp_path)
    texts = [row["text"] for row in written(found, recipe, tmp_path / "predictions.parquet")]
    assert texts == [text[: shards.KEPT_CHARACTERS] for text, _ in TEST]
    assert len(texts[1]) == shards.KEPT_CHARACTERS == predictions.TEXT_CHARACTERS
    # No text of rows that are trained on is kept: there may be a thousand times as many.
    assert found.texts("train", np.arange(found.rows("train"))) == [None] * found.rows("train")
    (tmp_path / "test.csv").unlink()  # what is gone since then does not matter
    assert [row["text"] for row in written(Store(found.folder), recipe, tmp_path / "again.parquet")] == texts


def test_both_texts_of_a_pair_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("text,reply,label\n" + "".join(f"Is it {n}?,NO: it is {n + 1},{'ab'[n % 2]}\n" for n in range(40)))
    own = {"data.path": str(path), "data.text_pair": "reply", "data.valid_share": 0.2}
    recipe = config.load("intent", {**own, "model.name": str(make_encoder(tmp_path / "encoder"))}).recipe
    found = made(recipe, tmp_path)
    rows = written(found, recipe, tmp_path / "predictions.parquet")
    assert rows
    assert all(row["text"] == f"Is it {row['line'] - 2}? NO: it is {row['line'] - 1}" for row in rows)
