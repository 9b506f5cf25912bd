"""Evaluation rows that are training rows too: the model has learned their labels, so their scores do not generalize.

Two rows are equal if their texts differ only in case, blanks, punctuation and Unicode normalization. Splits made by
rtrain keep equal texts together (`rtrain.data.splits`). Separate files, columns that name the split, and texts that
differ in case or punctuation can still put equal rows into two splits. Texts with other words are different rows: a
paraphrase is not counted, nor is another filling of a template.
"""

import hashlib
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rtrain.data.row_reader import SourceRow

TextKeys = npt.NDArray[np.uint64]


class _CharacterMap(dict[int, str | int | None]):
    """Replacements of characters by code point, for `str.translate`. Filled lazily."""

    def __missing__(self, code: int) -> str | int | None:
        category = unicodedata.category(chr(code))
        replacement: str | int | None = code
        if category == "Cf":  # a soft hyphen or a zero-width joiner: it separates no words
            replacement = None
        elif category[0] in "PZ" or category == "Cc":
            replacement = " "
        self[code] = replacement
        return replacement


_CHARACTER_MAP = _CharacterMap()


def normalize_text(text: str) -> str:
    """Normalize a text for comparison: lower case, no punctuation unless there is nothing else."""
    if not text.isascii():
        # Normalized again after case folding, which can decompose a character.
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    else:
        text = text.lower()
    return " ".join(text.translate(_CHARACTER_MAP).split()) or " ".join(text.split())


def compute_text_key(row: SourceRow) -> int:
    """64-bit hash of a row's normalized texts."""
    text = normalize_text(row.text) + "\x00" + normalize_text(row.pair or "")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def find_in_training_set(training_keys: Iterable[TextKeys], keys: TextKeys) -> npt.NDArray[np.bool_]:
    """Mark the rows whose key is among the training rows' keys, which come in blocks.

    The evaluation rows are sorted, not the training rows: there may be a thousand times as many training rows.
    """
    unique_keys, inverse = np.unique(keys, return_inverse=True)
    is_training_key = np.zeros(len(unique_keys), dtype=np.bool_)
    for block in training_keys:
        if len(unique_keys):
            slots = np.minimum(np.searchsorted(unique_keys, block), len(unique_keys) - 1)
            is_training_key[slots[unique_keys[slots] == block]] = True
    return is_training_key[inverse]
