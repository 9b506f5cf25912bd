"""Copies of training rows for a student, with words of other rows in place of some, whose answers its teacher gives.

<root>/.copies/<address>/rows.jsonl     the copies; the address is made from the rows and from how many copies each has

A teacher says more of its way to answer by texts that are like its own rows, and need not mean anything, than a
student finds in the rows alone (TinyBERT, Jiao et al. 2020, arXiv:1909.10351, whose words a language model chooses).
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rtrain.config import Recipe
from rtrain.core import atomic_write
from rtrain.core.errors import ConfigError, Problem
from rtrain.data import row_reader
from rtrain.data.splits import Splits

FOLDER, FILE = ".copies", "rows.jsonl"
SHARE = 0.2
"""The share of a copy's words that are another row's."""
MOST_WORDS = 1_000_000
"""Words that are chosen from: a sample of a large set's."""
_WORD = re.compile(r"\S+")


def ensure(recipe: Recipe, root: Path) -> Path:
    """The file with `distill.copies` copies of each training row, made once for the runs under `root`.

    Rows of the validation and of the test are not copied: a student would learn what it is judged by. Raises
    `ConfigError` as `records.inspect` does, and where no row has a word.
    """
    source = row_reader.inspect(recipe.data, root).beside(root)
    read = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test"})
    address = hashlib.sha256(json.dumps([source.digest(), read, recipe.distill.copies, SHARE]).encode()).hexdigest()
    final = root / FOLDER / address[:16]
    if (final / FILE).is_file():
        return final / FILE
    atomic_write.sweep(final)
    draft = atomic_write.Draft(final)
    try:
        words = sample(
            word for texts in _rows(recipe, source) for text in texts.values() for word in _WORD.findall(text)
        )
        if not any(map(_has_letters, words)):
            reason, fix = "no training row has a word to put another in place of", "leave it out"
            raise ConfigError([Problem("distill.copies", recipe.distill.copies, reason, fix, code="no_words")])
        with (draft.folder / FILE).open("w", encoding="utf-8") as out:
            for row, texts in enumerate(_rows(recipe, source)):
                for copy in range(recipe.distill.copies):
                    drawn = np.random.default_rng((copy, row))
                    changed = {column: replaced(text, words, drawn) for column, text in texts.items()}
                    if changed != texts:
                        out.write(f"{json.dumps(changed)}\n")
        (draft.folder / atomic_write.LOCK).unlink()
        try:
            atomic_write.publish_folder(draft.folder, final)
        except OSError:
            if not (final / FILE).is_file():
                raise
            # Another run has made the same folder meanwhile.
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    return final / FILE


def sample(words: Iterator[str]) -> list[str]:
    """At most `MOST_WORDS` of the words, each as likely as the others, in which one that is frequent is there often."""
    found: list[str] = []
    drawn = np.random.default_rng(0)
    for number, word in enumerate(words):
        if number < MOST_WORDS:
            found.append(word)
        elif (place := int(drawn.integers(number + 1))) < MOST_WORDS:
            found[place] = word
    return found


def replaced(text: str, words: list[str], drawn: np.random.Generator) -> str:
    """The text with about `SHARE` of its words replaced by some of `words`; signs, numbers and white space stay."""

    def one(word: re.Match[str]) -> str:
        chance, place = drawn.random(), int(drawn.integers(len(words)))
        return words[place] if chance < SHARE and _has_letters(word[0]) else word[0]

    return _WORD.sub(one, text)


def _has_letters(word: str) -> bool:
    return any(map(str.isalpha, word))


def _rows(recipe: Recipe, source: row_reader.Source) -> Iterator[dict[str, str]]:
    """The texts of each training row by their columns, without bad ones."""
    splits = Splits.of(recipe.data, source)
    for piece in source.pieces:
        for row in row_reader.read(piece, recipe.data) if piece.role == "train" else ():
            if row.reason is None and splits.split(row, piece.role) == "train":
                second = recipe.data.text_pair
                yield {recipe.data.text: row.text} | ({second: row.pair or ""} if second else {})
