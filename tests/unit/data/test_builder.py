"""Rows to token store, without Ray: its address, its splits, its row ids, and the rows as tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from rtrain import config
from rtrain.config import Recipe
from rtrain.core.errors import ConfigError, UserError
from rtrain.data import row_reader
from rtrain.data.splits import Splits
from rtrain.data.store import builder, commit, shards
from rtrain.data.store.store import Store
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import Row, labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_encoder, make_store

SINGLE = Splits(has_test=False, valid_share=0.1)


def recipe_of(path: Path, **overrides: Any) -> Recipe:
    dotted = {f"data.{name}": value for name, value in overrides.items()}
    return config.load_config("intent", {"data.path": str(path), **dotted}).recipe


def store_of(folder: Path, rows: Sequence[Row], encoder: Path, **overrides: Any) -> Store:
    folder.mkdir(exist_ok=True)
    return make_store(recipe_of(write_rows(folder / "rows.csv", list(rows)), **overrides), encoder, folder)


def texts_by_split(store: Store, encoder: Path) -> dict[str, list[str]]:
    """The rows of each split as text again."""
    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    results = {}
    for split in ("train", "valid", "test"):
        rows = (store.read_tokens(split, np.array([row])).ids.tolist() for row in range(store.num_rows(split)))
        results[split] = [tokenizer.decode(ids) for ids in rows]
    return results


# ------------------------------------------------------------------------------------------------------------ address


def digest_of(path: Path, encoder: Path, **overrides: Any) -> str:
    recipe = recipe_of(path, **overrides)
    return builder.compute_digest(recipe, row_reader.inspect_source(recipe.data), encoder)


def test_equal_rows_have_one_address_wherever_they_lie(tmp_path: Path, encoder: Path) -> None:
    first, copy = (write_rows(tmp_path / name, labelled_rows(9)) for name in ("a.csv", "b.csv"))
    assert digest_of(first, encoder) == digest_of(copy, encoder)
    assert digest_of(first, encoder) == digest_of(first, encoder, max_bad_rows=0.5)
    assert len(digest_of(first, encoder)) == 16


def test_what_shapes_the_rows_is_in_the_address(tmp_path: Path, encoder: Path) -> None:
    path = write_rows(tmp_path / "a.csv", labelled_rows(9))
    edited = write_rows(tmp_path / "edited.csv", labelled_rows(10))
    other = make_encoder(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    addresses = [
        digest_of(path, encoder),
        digest_of(edited, encoder),
        digest_of(path, other),
        digest_of(path, encoder, max_tokens=32),
        digest_of(path, encoder, text="label", label="text"),
        digest_of(path, encoder, max_row_bytes=100),
        digest_of(path, encoder, test=str(edited)),
    ]
    assert len(set(addresses)) == len(addresses)


def test_training_settings_are_not_in_the_address(tmp_path: Path, encoder: Path) -> None:
    recipe = recipe_of(write_rows(tmp_path / "a.csv", labelled_rows(9)))
    other = config.load_config("intent", {"data.path": recipe.data.path, "optim.lr": 1e-5, "train.seed": 4}).recipe
    source = row_reader.inspect_source(recipe.data)
    assert builder.compute_digest(recipe, source, encoder) == builder.compute_digest(other, source, encoder)


def test_a_finished_store_is_reused_without_reading_rows(tmp_path: Path, encoder: Path) -> None:
    recipe = recipe_of(write_rows(tmp_path / "a.csv", labelled_rows(60)))
    store = make_store(recipe, encoder, tmp_path)
    token_store, was_made = builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), encoder, tmp_path)
    assert (token_store.folder, token_store.manifest, was_made) == (store.folder, store.manifest, False)


def test_a_folder_without_tokenizer_is_refused_before_a_job(tmp_path: Path, encoder: Path) -> None:
    recipe = recipe_of(write_rows(tmp_path / "a.csv", labelled_rows(60)))
    broken = make_encoder(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, check=caused_by("unreadable")):
        builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), broken, tmp_path)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, check=caused_by("no_tokenizer")):
        load_tokenizer(broken, 16)
    assert not (tmp_path / ".tokens").exists()


# ------------------------------------------------------------------------------------------------------------- splits


def test_equal_texts_fall_into_one_split_whatever_their_label(tmp_path: Path, encoder: Path) -> None:
    rows = [(f"the same words {number % 40}", label) for number in range(240) for label in ("x", "y")]
    texts_of_splits = texts_by_split(store_of(tmp_path, rows, encoder), encoder)
    assert {split: len(texts) % 12 for split, texts in texts_of_splits.items()} == {"train": 0, "valid": 0, "test": 0}
    splits = [set(texts) for texts in texts_of_splits.values()]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 40


def test_a_row_keeps_its_split_when_others_come_and_go(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(200)
    all_rows = texts_by_split(store_of(tmp_path / "all", rows, encoder), encoder)
    half = texts_by_split(store_of(tmp_path / "half", rows[::-2], encoder), encoder)
    for split, texts in half.items():
        assert set(texts) < set(all_rows[split])


# ------------------------------------------------------------------------------------------------------------ row ids


def test_equal_rows_get_distinct_ids() -> None:
    content = np.array([7, 5, 7, 7, 5, 9], dtype=np.uint64)
    ids = commit.assign_row_ids(content)
    step = 0x9E3779B97F4A7C15
    # The first occurrence keeps its content's hash, the next ones add the step, modulo 2^64.
    assert ids.tolist() == [7, 5, 7 + step, (7 + 2 * step) % 2**64, 5 + step, 9]


def test_ids_do_not_depend_on_how_rows_lie_in_files_and_shards(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*labelled_rows(150), *labelled_rows(30)]  # 30 of them twice
    full = store_of(tmp_path / "whole", rows, encoder)
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(3):
        write_rows(parts / f"{number}.csv", rows[60 * number : 60 * number + 60])
    cut = make_store(recipe_of(parts), encoder, tmp_path)
    assert (len(full.manifest.shards), len(cut.manifest.shards)) == (1, 3 * 9)  # ceil(60 / 7) = 9 shards a file
    assert full.manifest.digest != cut.manifest.digest
    for split in ("train", "valid", "test"):
        positions = np.arange(full.num_rows(split))
        first, second = full.read_tokens(split, positions), cut.read_tokens(split, positions)
        for name in ("ids", "window_lengths", "pair_start", "targets", "row_ids"):
            assert np.array_equal(getattr(first, name), getattr(second, name)), (split, name)
        assert len(set(first.row_ids.tolist())) == len(positions)


def test_names_of_special_tokens_in_a_text_are_text(encoder: Path) -> None:
    tokenizer = load_tokenizer(encoder, 16)
    task = base.get_task("classification")
    first, second = task.encode(tokenizer, ["where [SEP] is [PAD]", "[UNK]"], ["[MASK] [CLS]", ""])
    special = {tokenizer.token_to_id(name) for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")}
    places = [place for place, number in enumerate(first.ids) if number in special]
    assert places == [0, first.windows[0].pair_start - 1, len(first.ids) - 1]
    assert len(second.ids) > 4  # the brackets are pieces of their own
