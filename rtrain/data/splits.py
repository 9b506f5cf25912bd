"""The split of each row: train, valid (which chooses among weights) or test; by its file, a column, or a hash.

`find_in_training_set` finds evaluation rows that are training rows too: the model has learned their labels, so their
scores do not generalize. Two rows are equal if their texts differ only in case, blanks, punctuation and Unicode
normalization. The hash keeps equal texts in one split. Separate files, columns that name the split, and texts that
differ in case or punctuation can still put equal rows into two splits. Texts with other words are different rows: a
paraphrase is not counted, nor is another filling of a template.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.row_reader import DataSource, SourceRow

DEFAULT_SHARE = 0.1
"""Default share of the rows for validation, and also for the test."""


@dataclass(frozen=True)
class Splits:
    """How rows are split, as known before any row is read.

    Rows with equal texts (or equal values of `data.group_column`) are in one split, unless a file or a column says
    otherwise.
    """

    has_test: bool
    """Test rows have a file, or a column names them."""
    valid_share: float
    folds: int | None = None
    fold: int = 0
    validation_fold: int = 0

    @classmethod
    def from_config(cls, data: DataConfig, source: DataSource) -> "Splits":
        has_split_column = data.split_column is not None
        default_share = 0.0 if has_split_column or source.has_valid else DEFAULT_SHARE
        share = default_share if data.valid_share is None else data.valid_share
        splits = cls(source.has_test or has_split_column, share, data.folds, data.fold, data.validation_fold)
        if data.validation_fold and data.validation_fold >= splits.num_validation_folds:
            reason = f"there are {splits.num_validation_folds} validation folds of the size data.valid_share"
            fix = "folds count from 0"
            raise ConfigError([Problem("data.validation_fold", data.validation_fold, reason, fix, code="out_of_range")])
        return splits

    @property
    def num_validation_folds(self) -> int:
        """The number of disjoint validation folds (`data.validation_fold`); 0 if a file or a column names the
        validation rows, or `data.valid_share` is 0."""
        # Rounding errors of a sum of shares are smaller than this.
        return int(self._train_and_valid_share / self.valid_share + 1e-9) if self.valid_share else 0

    @property
    def _train_and_valid_share(self) -> float:
        """Share of the rows that are for training and validation; of those outside of the test, where there are
        folds."""
        return 1.0 if self.has_test or self.folds is not None else 1.0 - DEFAULT_SHARE

    def assign_split(self, row: SourceRow, role: str) -> str:
        """`train`, `valid` or `test`; `role` is that of the row's file."""
        return self.assign_by_hash(row.split or role, hash_content(row)[0])

    def assign_by_hash(self, assigned_split: str, text_hash: int) -> str:
        """The split of a row that its file or column puts into `assigned_split`; `text_hash` is the first of
        `hash_content`.

        Rows that are named `train` are split further by their hash.
        """
        if assigned_split != "train":
            return assigned_split
        share = text_hash / 2**64
        if self.folds is not None:
            position = share * self.folds
            if int(position) == self.fold:
                return "test"
            first = self.valid_share * self.validation_fold
            return "valid" if first <= position % 1 < self.valid_share * (self.validation_fold + 1) else "train"
        if share >= self._train_and_valid_share:
            return "test"
        first = self._train_and_valid_share - self.valid_share * (self.validation_fold + 1)
        end = self._train_and_valid_share - self.valid_share * self.validation_fold
        return "valid" if first <= share < end else "train"


def hash_content(row: SourceRow) -> tuple[int, int]:
    """Two hashes of 64 bits each. Rows with equal first hashes stay in one split: it is of the texts, or of the group
    where there is one. The second is of texts and label, and makes the row's id."""
    text = _encode_text("\x00".join((row.text, row.pair or "")))
    text_and_label = text + b"\x00" + _encode_text(row.label)
    return _hash_bytes(text if row.group is None else _encode_text(row.group)), _hash_bytes(text_and_label)


def _hash_bytes(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _encode_text(text: str) -> bytes:
    """The text as bytes: the file's own bytes, even if they are not UTF-8.

    JSON can hold a lone surrogate, which comes from no bytes; it is encoded with surrogatepass.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# ------------------------------------------------------------------------------- evaluation rows that are training rows

TextKeys = npt.NDArray[np.uint64]


class _CharacterMap(dict[int, str | int | None]):
    """Replacements of characters by code point, for `str.translate`. Filled lazily."""

    def __missing__(self, code: int) -> str | int | None:
        category = unicodedata.category(chr(code))
        is_separator = category[0] in "PZ" or category == "Cc"
        self[code] = " " if is_separator else code
        if category == "Cf":  # a soft hyphen or a zero-width joiner: it separates no words
            self[code] = None
        return self[code]


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
    return _hash_bytes(text.encode("utf-8", "surrogatepass"))


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
