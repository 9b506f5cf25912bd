"""Copies of training rows with words of other rows, for a student: which rows, which words, and once."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rtrain import config as configuration
from rtrain.config import Recipe
from rtrain.core.errors import ConfigError
from rtrain.data import row_reader
from rtrain.data.augment import word_replacement
from rtrain.data.splits import Splits
from tests.conftest import labelled_rows, write_rows
from tests.support import system_calls
from tests.support.causes import caused_by

ROWS, COPIES = 200, 3


def recipe_of(folder: Path, **overrides: object) -> Recipe:
    path = folder / "rows.csv"
    if not path.exists():
        write_rows(path, labelled_rows(ROWS))
    return configuration.load_config(
        "intent", {"data.path": str(path), "distill.augmented_copies": COPIES, **overrides}
    ).recipe


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_about_a_fifth_of_the_words_are_others_and_signs_and_gaps_stay() -> None:
    text = "  one two,\t3 four\n--  five " * 200
    result = word_replacement.replace_words(text, ["other"], np.random.default_rng(0))
    before, after = text.split(), result.split()
    assert len(before) == len(after)
    assert "".join(text.split(" ")).count("\t") == result.count("\t") == 200
    assert [entry for entry in after if not entry.isalpha() and "," not in entry] == ["3", "--"] * 200
    changed = [entry == "other" for entry in after]
    assert 0.17 < sum(changed) / (4 * 200) < 0.23
    assert all(new == "other" or new == old for old, new in zip(before, after, strict=True))


def test_training_rows_alone_are_copied_with_words_of_training_rows_alone(tmp_path: Path) -> None:
    """Else a student would train on its evaluation rows."""
    recipe = recipe_of(tmp_path)
    source = row_reader.inspect_source(recipe.data)
    splits = Splits.from_config(recipe.data, source)
    rows = [row for file in source.files for row in row_reader.read_rows(file, recipe.data)]
    trained = [row.text.split() for row in rows if splits.assign_split(row, "train") == "train"]
    held_out = [row.text.split() for row in rows if splits.assign_split(row, "train") != "train"]
    assert len(held_out) > 20
    source_rows = [row["text"].split() for row in read(word_replacement.build_or_open_copies(recipe, tmp_path))]
    assert COPIES * len(trained) * 0.5 < len(source_rows) <= COPIES * len(trained)
    words = {word for text in trained for word in text}
    assert {word for text in source_rows for word in text} <= words

    def shared(first: list[str], other: list[str]) -> float:
        return sum(a == b for a, b in zip(first, other, strict=False)) / max(len(first), len(other))

    assert all(max(shared(text, other) for other in trained) > 0.3 for text in source_rows)
    assert not any(text in trained for text in source_rows)


def test_copies_are_made_once_for_the_same_rows_and_number(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    store = word_replacement.build_or_open_copies(recipe, tmp_path / "runs")
    written = store.read_bytes()
    store.write_bytes(written + b"\n")  # it would be gone if they were made anew
    assert (
        word_replacement.build_or_open_copies(recipe_of(tmp_path, **{"distill.alpha": 0.1}), tmp_path / "runs") == store
    )
    assert store.read_bytes() == written + b"\n"
    assert word_replacement.build_or_open_copies(recipe, tmp_path / "other").read_bytes() == written
    other_values = [
        recipe_of(tmp_path, **{name: value})
        for name, value in (("distill.augmented_copies", 1), ("data.valid_share", 0.3))
    ]
    assert (
        len({store, *(word_replacement.build_or_open_copies(entry, tmp_path / "runs") for entry in other_values)}) == 3
    )
    assert sorted(path.name for path in store.parent.iterdir()) == [word_replacement.FILE]


def test_both_texts_of_a_row_are_copied_and_words_with_their_tags_stay_apart(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"a": f"first text number {entry}", "b": f"another one of {entry}", "y": "same"} for entry in range(60)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = {"data.path": str(pairs), "data.text": "a", "data.text_pair": "b", "data.label": "y"}
    assert all(
        row.keys() == {"a", "b"}
        for row in read(word_replacement.build_or_open_copies(recipe_of(tmp_path, **overrides), tmp_path))
    )
    words = tmp_path / "words.tsv"
    words.write_text("".join(f"Ada\tB-PER\nsaw\tO\n{entry}\tO\n\n" for entry in range(60)))
    tags = configuration.load_config(
        "entities", {"data.path": str(words), "data.format": "conll", "distill.augmented_copies": COPIES}
    ).recipe
    result = word_replacement.build_or_open_copies(tags, tmp_path)
    assert {len(row["tokens"].split()) for row in read(result)} == {3}


def test_rows_without_words_have_no_copies(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("text,label\n" + "".join(f"{entry},{entry % 2}\n" for entry in range(50)))
    with pytest.raises(ConfigError, check=caused_by("no_words")):
        word_replacement.build_or_open_copies(recipe_of(tmp_path, **{"data.path": str(path)}), tmp_path)
    assert list((tmp_path / word_replacement.FOLDER).iterdir()) == []


@system_calls.needed
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_copies_that_cannot_be_kept_are_an_error(tmp_path: Path, error: int) -> None:
    recipe = recipe_of(tmp_path)

    def make() -> None:
        word_replacement.build_or_open_copies(recipe, tmp_path)

    calls = system_calls.trace(make).calls
    shutil.rmtree(tmp_path / word_replacement.FOLDER)
    last = len(calls) - 1 - calls[::-1].index("rename")
    assert not system_calls.trace(make, last, error).succeeded
    assert word_replacement.build_or_open_copies(recipe, tmp_path).is_file()
