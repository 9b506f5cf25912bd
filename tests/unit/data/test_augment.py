"""Noise on words, and copies of training rows with words of other rows for a student."""

import errno
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config as configuration
from rtrain.config import Recipe
from rtrain.core.errors import ConfigError
from rtrain.data import augment, row_reader
from rtrain.data.augment import TextNoise, add_noise, add_noise_to_tokens
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
    result = augment.replace_words(text, ["other"], np.random.default_rng(0))
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
    source_rows = [row["text"].split() for row in read(augment.build_or_open_copies(recipe, tmp_path))]
    assert COPIES * len(trained) * 0.5 < len(source_rows) <= COPIES * len(trained)
    words = {word for text in trained for word in text}
    assert {word for text in source_rows for word in text} <= words

    def shared(first: list[str], other: list[str]) -> float:
        return sum(a == b for a, b in zip(first, other, strict=False)) / max(len(first), len(other))

    assert all(max(shared(text, other) for other in trained) > 0.3 for text in source_rows)
    assert not any(text in trained for text in source_rows)


def test_copies_are_made_once_for_the_same_rows_and_number(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    store = augment.build_or_open_copies(recipe, tmp_path / "runs")
    written = store.read_bytes()
    store.write_bytes(written + b"\n")  # it would be gone if they were made anew
    assert augment.build_or_open_copies(recipe_of(tmp_path, **{"distill.alpha": 0.1}), tmp_path / "runs") == store
    assert store.read_bytes() == written + b"\n"
    assert augment.build_or_open_copies(recipe, tmp_path / "other").read_bytes() == written
    other_values = [
        recipe_of(tmp_path, **{name: value})
        for name, value in (("distill.augmented_copies", 1), ("data.valid_share", 0.3))
    ]
    assert len({store, *(augment.build_or_open_copies(entry, tmp_path / "runs") for entry in other_values)}) == 3
    assert sorted(path.name for path in store.parent.iterdir()) == [augment.FILE]


def test_both_texts_of_a_row_are_copied_and_words_with_their_tags_stay_apart(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"a": f"first text number {entry}", "b": f"another one of {entry}", "y": "same"} for entry in range(60)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = {"data.path": str(pairs), "data.text": "a", "data.text_pair": "b", "data.label": "y"}
    assert all(
        row.keys() == {"a", "b"}
        for row in read(augment.build_or_open_copies(recipe_of(tmp_path, **overrides), tmp_path))
    )
    words = tmp_path / "words.tsv"
    words.write_text("".join(f"Ada\tB-PER\nsaw\tO\n{entry}\tO\n\n" for entry in range(60)))
    tags = configuration.load_config(
        "entities", {"data.path": str(words), "data.format": "conll", "distill.augmented_copies": COPIES}
    ).recipe
    result = augment.build_or_open_copies(tags, tmp_path)
    assert {len(row["tokens"].split()) for row in read(result)} == {3}


def test_rows_without_words_have_no_copies(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("text,label\n" + "".join(f"{entry},{entry % 2}\n" for entry in range(50)))
    with pytest.raises(ConfigError, check=caused_by("no_words")):
        augment.build_or_open_copies(recipe_of(tmp_path, **{"data.path": str(path)}), tmp_path)
    assert list((tmp_path / augment.FOLDER).iterdir()) == []


@system_calls.needed
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_copies_that_cannot_be_kept_are_an_error(tmp_path: Path, error: int) -> None:
    recipe = recipe_of(tmp_path)

    def make() -> None:
        augment.build_or_open_copies(recipe, tmp_path)

    calls = system_calls.trace(make).calls
    shutil.rmtree(tmp_path / augment.FOLDER)
    last = len(calls) - 1 - calls[::-1].index("rename")
    assert not system_calls.trace(make, last, error).succeeded
    assert augment.build_or_open_copies(recipe, tmp_path).is_file()


SOME = TextNoise(typo=0.1, swap=0.1, drop=0.1, mask=0.1)
TEXT = "please send the refund for order 1234 back\n\nto my old account today"


def test_the_same_text_everywhere() -> None:
    """Written down: a change of these is another data set for the same seed."""
    noisy = [add_noise(TEXT, SOME, seed=1, copy=copy, row=2**64 - 1) for copy in (0, 1, 2)]
    assert noisy == [
        "send the reund forr order 1234 [MASK]\n\nto my old account today",
        "please snd [MASK] [MASK] for [MASK] 1234 [MASK]\n\not my account old today",
        "please send refund for 1234 back\n\nmy today",
    ]


def test_another_process_gives_the_same() -> None:
    script = (
        "from rtrain.data.augment import TextNoise, add_noise; "
        f"print(repr(add_noise({TEXT!r}, TextNoise(0.2, 0.2, 0.2, 0.2), 3, 4, 5)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(add_noise(TEXT, TextNoise(0.2, 0.2, 0.2, 0.2), 3, 4, 5))


def test_each_kind_by_hand() -> None:
    assert add_noise("a bb ccc", TextNoise(mask=1.0, mask_token="<mask>"), 0, 0, 0) == "<mask> <mask> <mask>"
    assert add_noise("a bb ccc", TextNoise(swap=1.0), 0, 0, 0) == "bb ccc a"  # a moves with each swap
    assert add_noise("a bb", TextNoise(drop=1.0), 0, 0, 0) == "a bb"  # never empty
    assert add_noise(" \n", TextNoise(drop=1.0), 0, 0, 0) == " \n"
    assert add_noise("", SOME, 0, 0, 0) == ""


@pytest.mark.parametrize("word", ["1234", "A4", "$5.00", "a", "?!"])
def test_words_with_digits_or_one_letter_have_no_typos(word: str) -> None:
    assert {add_noise(word, TextNoise(typo=1.0), 0, copy, 0) for copy in range(50)} == {word}


def test_typos_of_a_word_are_the_three_kinds() -> None:
    counts = Counter(add_noise("cat.", TextNoise(typo=1.0), 0, copy, 0) for copy in range(3000))
    assert set(counts) == {"act.", "cta.", "at.", "ct.", "ca.", "ccat.", "caat.", "catt."}
    # Changing places is not possible at the last letter: there it is left out instead. Each pair (how, where) is 1/9.
    assert counts["ca."] == pytest.approx(3000 * 2 / 9, rel=0.15)
    assert counts["act."] == pytest.approx(3000 / 9, rel=0.2)


def test_shares_are_those_asked_for() -> None:
    tokens = ["word"] * 20_000
    noisy = add_noise_to_tokens(tokens, TextNoise(typo=0.2, swap=0.1, drop=0.1, mask=0.3), 0, 0, 0)
    assert len(noisy) == len(tokens)
    assert noisy.count("[MASK]") / 20_000 == pytest.approx(0.3, abs=0.015)
    assert sum(token not in ("word", "[MASK]") for token in noisy) / 20_000 == pytest.approx(0.2, abs=0.015)
    left = add_noise(" ".join(tokens), TextNoise(drop=0.25), 0, 0, 0).split()
    assert len(left) / 20_000 == pytest.approx(0.75, abs=0.015)


noises = st.builds(TextNoise, *[st.floats(0, 0.25)] * 4)


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=60), noises, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_text_keeps_its_words_and_is_never_empty(text: str, noise: TextNoise, seed: int, row: int) -> None:
    noisy = add_noise(text, noise, seed, 0, row)
    assert noisy == add_noise(text, noise, seed, 0, row)
    assert bool(noisy.split()) == bool(text.split())
    assert len(noisy.split()) <= len(text.split())
    tokens = text.split()
    changed = add_noise_to_tokens(tokens, noise, seed, 0, row)
    assert len(changed) == len(tokens)
    assert all(changed)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["cat", "dog", "owl"]), min_size=1, max_size=12), st.integers(0, 99))
def test_swaps_only_reorder_and_drops_only_remove(words: list[str], copy: int) -> None:
    text = " ".join(words)
    assert Counter(add_noise(text, TextNoise(swap=0.5), 0, copy, 0).split()) == Counter(words)
    rest = iter(words)
    assert all(word in rest for word in add_noise(text, TextNoise(drop=0.5), 0, copy, 0).split())  # in their order
