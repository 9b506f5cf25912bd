"""Augmented rows for a student: training rows with some words replaced by words of other rows, labeled by the teacher.

<root>/.copies/<address>/rows.jsonl     the copies; the address is made from the rows and from how many copies each has

A teacher's outputs for texts that resemble its training rows teach a student more than the rows alone; the texts need
not make sense (TinyBERT, Jiao et al. 2020, arXiv:1909.10351, where a language model chooses the words).
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
REPLACED_SHARE = 0.2
"""The share of a copy's words that are another row's."""
MAX_WORDS = 1_000_000
"""Most words in the pool of replacements; a large data set is sampled."""
_WORD = re.compile(r"\S+")


def build_or_open_copies(recipe: Recipe, root: Path) -> Path:
    """The file with `distill.augmented_copies` copies of each training row, made once for the runs under `root`.

    Validation and test rows are not copied: a student would train on its evaluation rows. Raises `ConfigError` as
    `row_reader.inspect_source` does, and if no row has a word.
    """
    source = row_reader.inspect_source(recipe.data, root).with_cached_digests(root)
    data_settings = recipe.data.model_dump(mode="json", exclude={"path", "valid", "test"})
    address = hashlib.sha256(
        json.dumps([source.digest(), data_settings, recipe.distill.augmented_copies, REPLACED_SHARE]).encode()
    ).hexdigest()
    final = root / FOLDER / address[:16]
    if (final / FILE).is_file():
        return final / FILE
    atomic_write.remove_stale_drafts(final)
    draft = atomic_write.Draft(final)
    try:
        words = sample_words(
            word
            for texts in _iter_training_texts(recipe, source)
            for text in texts.values()
            for word in _WORD.findall(text)
        )
        if not any(map(_has_letters, words)):
            reason, fix = "no training row has a word to put another in place of", "leave it out"
            raise ConfigError(
                [Problem("distill.augmented_copies", recipe.distill.augmented_copies, reason, fix, code="no_words")]
            )
        with (draft.folder / FILE).open("w", encoding="utf-8") as out:
            for row, texts in enumerate(_iter_training_texts(recipe, source)):
                for copy in range(recipe.distill.augmented_copies):
                    rng = np.random.default_rng((copy, row))
                    changed = {column: replace_words(text, words, rng) for column, text in texts.items()}
                    if changed != texts:
                        out.write(f"{json.dumps(changed)}\n")
        (draft.folder / atomic_write.LOCK_FILE).unlink()
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


def sample_words(words: Iterator[str]) -> list[str]:
    """At most `MAX_WORDS` of the words, sampled uniformly: frequent words stay frequent."""
    reservoir: list[str] = []
    rng = np.random.default_rng(0)
    for number, word in enumerate(words):
        if number < MAX_WORDS:
            reservoir.append(word)
        elif (slot := int(rng.integers(number + 1))) < MAX_WORDS:
            reservoir[slot] = word
    return reservoir


def replace_words(text: str, words: list[str], rng: np.random.Generator) -> str:
    """The text with about `REPLACED_SHARE` of its words replaced by some of `words`; signs, numbers and white space
    stay."""

    def replace_word(word: re.Match[str]) -> str:
        draw, index = rng.random(), int(rng.integers(len(words)))
        return words[index] if draw < REPLACED_SHARE and _has_letters(word[0]) else word[0]

    return _WORD.sub(replace_word, text)


def _has_letters(word: str) -> bool:
    return any(map(str.isalpha, word))


def _iter_training_texts(recipe: Recipe, source: row_reader.DataSource) -> Iterator[dict[str, str]]:
    """The texts of each training row by their columns, without bad ones."""
    splits = Splits.from_config(recipe.data, source)
    for source_file in source.files:
        for row in row_reader.read_rows(source_file, recipe.data) if source_file.role == "train" else ():
            if row.reason is None and splits.assign_split(row, source_file.role) == "train":
                second = recipe.data.text_pair
                yield {recipe.data.text: row.text} | ({second: row.pair or ""} if second else {})
