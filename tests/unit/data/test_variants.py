"""Copies of training rows in the token store: only there, the same again, with ids and places of their own."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import AugmentConfig, Recipe
from rtrain.core.errors import ConfigError
from rtrain.data import augment, paraphrase, row_reader
from rtrain.data.augment import TextNoise
from rtrain.data.row_reader import SourceRow
from rtrain.data.splits import Splits
from rtrain.data.store import builder, shards
from rtrain.data.store.store import Store
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_store, make_tokenizer

NOISE: dict[str, Any] = {"copies": 2, "typo": 0.2, "swap": 0.1, "drop": 0.1}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", labelled_rows(120))


@pytest.fixture(scope="module")
def plain(path: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(recipe_of(path), encoder, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def noisy(path: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(recipe_of(path, **NOISE), encoder, tmp_path_factory.mktemp("noisy"))


def recipe_of(path: Path, name: str = "intent", **augment: Any) -> Recipe:
    return config.load_config(
        name, {"data.path": str(path), **{f"augment.{key}": value for key, value in augment.items()}}
    ).recipe


def texts(store: Store, encoder: Path, split: str) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    return [
        tokenizer.decode(store.read_tokens(split, np.array([row])).ids.tolist(), skip_special_tokens=False)
        for row in range(store.num_rows(split))
    ]


def test_only_training_rows_have_copies(plain: Store, noisy: Store, encoder: Path) -> None:
    for split in ("valid", "test"):
        assert texts(noisy, encoder, split) == texts(plain, encoder, split)
        assert noisy.column(split, "row_id").tolist() == plain.column(split, "row_id").tolist()
    assert noisy.manifest.copies == noisy.num_rows("train") - plain.num_rows("train")
    assert 1.9 * plain.num_rows("train") < noisy.manifest.copies <= 2 * plain.num_rows("train")
    assert plain.manifest.copies == 0


def test_copies_are_rows_of_their_own_beside_their_originals(plain: Store, noisy: Store, encoder: Path) -> None:
    ids = noisy.column("train", "row_id").tolist()
    assert len(set(ids)) == len(ids) == noisy.num_rows("train")
    assert set(plain.column("train", "row_id").tolist()) < set(ids)
    assert noisy.manifest.head == plain.manifest.head
    label_of = dict(
        zip(plain.origins("train")["line"].to_pylist(), plain.targets("train").values.tolist(), strict=True)
    )
    origins = zip(noisy.origins("train")["line"].to_pylist(), noisy.targets("train").values.tolist(), strict=True)
    assert all(label_of[line] == label for line, label in origins)
    held_out = {*texts(plain, encoder, "valid"), *texts(plain, encoder, "test")}
    assert not held_out & set(texts(noisy, encoder, "train"))


def test_the_same_settings_make_the_same_bytes_and_another_seed_other_rows(
    path: Path, encoder: Path, noisy: Store, tmp_path: Path
) -> None:
    second_result = make_store(recipe_of(path, **NOISE), encoder, tmp_path / "again")
    assert (second_result.folder.name, second_result.manifest.files) == (noisy.folder.name, noisy.manifest.files)
    other = make_store(recipe_of(path, **NOISE, seed=1), encoder, tmp_path / "other")
    assert other.folder.name != noisy.folder.name
    assert set(texts(other, encoder, "train")) != set(texts(noisy, encoder, "train"))
    assert other.column("test", "row_id").tolist() == noisy.column("test", "row_id").tolist()


def test_augmentation_is_part_of_a_run_s_identity_where_there_is_any(path: Path, encoder: Path) -> None:
    plain, source = recipe_of(path), row_reader.inspect_source(recipe_of(path).data)
    some = [recipe_of(path, **NOISE), recipe_of(path, **NOISE, seed=1), recipe_of(path, **{**NOISE, "copies": 3})]
    for address in (Recipe.recipe_digest, lambda recipe: builder.compute_digest(recipe, source, encoder)):
        assert len({address(recipe) for recipe in (plain, *some)}) == 4
        assert address(recipe_of(path, seed=5)) == address(plain)  # a seed of nothing


def test_tags_keep_their_words(tmp_path: Path, encoder: Path) -> None:
    lines = []
    for number in range(60):
        lines += [f"parcel{'x' * number} B-thing", "was O", "late O", "today O", ""]
    (tmp_path / "rows.conll").write_text("\n".join(lines))
    store = make_store(recipe_of(tmp_path / "rows.conll", "entities", copies=2, typo=0.5, mask=0.2), encoder, tmp_path)
    assert store.manifest.copies > 60
    assert {tuple(row[row >= 0].tolist()) for row in store.targets("train")} == {(1, 0, 0, 0)}
    assert any("[MASK]" in text for text in texts(store, encoder, "train"))


@pytest.mark.parametrize(
    ("augment", "code"),
    [
        ({"copies": 1}, "conflicting_settings"),
        ({"typo": 0.1}, "conflicting_settings"),
        ({"copies": 1, "typo": 0.6, "drop": 0.6}, "out_of_range"),
        ({"back_translation_model": "a"}, "missing"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(augment: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError, check=caused_by(code)):
        recipe_of(Path("rows.csv"), "intent", **augment)


def test_what_labels_of_places_do_not_allow_is_refused() -> None:
    recipe = recipe_of(Path("rows.conll"), "entities", copies=1, swap=0.1, drop=0.1, typo=0.1, paraphrase="some/model")
    assert [problem.field for problem in builder.find_problems(recipe)] == [
        "augment.paraphrase",
        "augment.swap",
        "augment.drop",
    ]
    assert builder.find_problems(recipe_of(Path("rows.conll"), "entities", copies=1, mask=0.1)) == []


def test_a_mask_needs_a_mask_token(tmp_path: Path, encoder: Path) -> None:
    document = json.loads((encoder / "tokenizer.json").read_text().replace("[MASK]", "[MUSK]"))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert augment.make_noise(AugmentConfig(copies=1, typo=0.1), tokenizer) == TextNoise(typo=0.1)
    with pytest.raises(ConfigError, check=caused_by("no_mask_token")):
        augment.make_noise(AugmentConfig(copies=1, mask=0.1), tokenizer)


@settings(deadline=None)
@given(st.text(max_size=40), st.none() | st.text(max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_copies_are_new_distinct_and_as_many_as_asked_for(text: str, pair: str | None, row: int, count: int) -> None:
    source_row, selected = SourceRow(1, text, pair, "a", None), AugmentConfig(copies=count, typo=0.5, swap=0.2)
    maker = augment.CopyMaker(selected, TextNoise(typo=0.5, swap=0.2), "text", lambda _: True)
    store = maker.make_copies(source_row, row, [text, "anew", "anew"])
    results = [(copy.text, copy.pair) for copy, _ in store]
    assert (text, pair) not in results
    assert len(set(results)) == len(results) <= count + 1
    assert len({key for _, key in store} | {row}) == len(store) + 1
    assert {(copy.label, copy.line) for copy, _ in store} <= {("a", 1)}
    assert replace(maker, is_allowed=lambda _: False).make_copies(source_row, row, ["anew"]) == []


# --------------------------------------------------------------------------------------------------------- paraphrases


def test_texts_are_rewritten_in_chunks_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paraphrase, "CHUNK_SIZE", 2)
    rows = [(2**64 - 1, "one"), (7, "two"), (8, "three")]

    def read(file: dict[str, Any]) -> Iterator[tuple[int, str]]:
        return iter(rows)

    results = list(paraphrase.iter_chunks({"number": 4}, read))
    assert [(part["chunk"], part["texts"]) for part in results] == [(0, ["one", "two"]), (1, ["three"])]
    (tmp_path / paraphrase.FOLDER).mkdir()
    for part in results:
        paraphrase.write_chunk(tmp_path, part, [[text.upper()] for text in part["texts"]])
    assert paraphrase.read_rewritten(tmp_path, 4) == {2**64 - 1: ["ONE"], 7: ["TWO"], 8: ["THREE"]}
    assert paraphrase.read_rewritten(tmp_path, 5) == {}


def test_only_training_texts_are_rewritten(path: Path, encoder: Path, plain: Store, tmp_path: Path) -> None:
    recipe = recipe_of(path, paraphrase="some/model")
    source = row_reader.inspect_source(recipe.data)
    job = shards.TokenizeJob(recipe, encoder, tmp_path, Splits.from_config(recipe.data, source))
    results = list(shards.iter_texts_to_rewrite({"number": 0, "file": list(source.files[0])}, job))
    assert len(results) == plain.num_rows("train")
    assert {key for key, _ in results} == set(plain.column("train", "row_id").tolist())  # each row occurs once
