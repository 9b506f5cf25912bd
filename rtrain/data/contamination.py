"""Rows to be scored that are training rows too: a model has learned their answers, so they say nothing of other rows.

Two rows are one where their texts are equal but for case, blanks, punctuation and the ways in which Unicode writes a
character. Splits made by rtrain keep equal texts together (`rtrain.data.splits`); what it cannot prevent are files of
their own, columns that name the split, and texts that differ in such a trifle. Texts with other words in them are not
looked for: a paraphrase is no repetition, and a template's next filling is a row of its own.
"""

import hashlib
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rtrain.data.row_reader import Record

Keys = npt.NDArray[np.uint64]


class _Table(dict[int, str | int | None]):
    """What becomes of a character, by its code: for `str.translate`. Filled as characters are met."""

    def __missing__(self, code: int) -> str | int | None:
        category = unicodedata.category(chr(code))
        found: str | int | None = code
        if category == "Cf":  # a soft hyphen or a zero-width joiner: it parts no words
            found = None
        elif category[0] in "PZ" or category == "Cc":
            found = " "
        self[code] = found
        return found


_TABLE = _Table()


def plain(text: str) -> str:
    """The text by which rows are compared: without punctuation, unless it is nothing else."""
    if not text.isascii():
        # Once more after the case is folded, which can take a character apart.
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    else:
        text = text.lower()
    return " ".join(text.translate(_TABLE).split()) or " ".join(text.split())


def key(record: Record) -> int:
    """Hash of 64 bits of a row's texts as they are compared."""
    text = plain(record.text) + "\x00" + plain(record.pair or "")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def seen(trained_on: Iterable[Keys], keys: Keys) -> npt.NDArray[np.bool_]:
    """Which of the rows with these keys are among the rows that are trained on, whose keys come in blocks.

    The held-out rows are sorted, not the training rows, of which there may be a thousand times as many.
    """
    known, places = np.unique(keys, return_inverse=True)
    found = np.zeros(len(known), dtype=np.bool_)
    for block in trained_on:
        if len(known):
            at = np.minimum(np.searchsorted(known, block), len(known) - 1)
            found[at[known[at] == block]] = True
    return found[places]
