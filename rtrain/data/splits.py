"""The split of each row: train, valid (which chooses among weights) or test; by its file, a column, or a hash."""

import hashlib
from dataclasses import dataclass

from rtrain.config import Data
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.row_reader import Record, Source

SHARE = 0.1
"""Default share of the rows for validation, and also for the test."""


@dataclass(frozen=True)
class Splits:
    """How rows are split, as known before any row is read.

    Rows with equal texts (or equal values of `data.split_by`) are in one split, unless a file or a column says
    otherwise.
    """

    has_test: bool
    """Test rows come from a file of their own, or are named by a column."""
    valid_share: float
    folds: int | None = None
    fold: int = 0
    valid_part: int = 0

    @classmethod
    def of(cls, data: Data, source: Source) -> "Splits":
        named = data.split is not None
        share = data.valid_share if data.valid_share is not None else 0.0 if named or source.has_valid else SHARE
        splits = cls(source.has_test or named, share, data.folds, data.fold, data.valid_part)
        if data.valid_part and data.valid_part >= splits.valid_parts:
            reason = f"the rows that are trained on have {splits.valid_parts} parts of the size of data.valid_share"
            raise ConfigError(
                [Problem("data.valid_part", data.valid_part, reason, "parts count from 0", code="out_of_range")]
            )
        return splits

    @property
    def valid_parts(self) -> int:
        """How many parts of the rows could validate, none of which shares a row with another (`data.valid_part`); 0
        where the validation rows are named, or there are none."""
        # A sum of shares is off by less than this, which moves no row.
        return int(self._most / self.valid_share + 1e-9) if self.valid_share else 0

    @property
    def _most(self) -> float:
        """Share of the rows that are for training and validation; of those outside of the test, where there are
        folds."""
        return 1.0 if self.has_test or self.folds is not None else 1.0 - SHARE

    def split(self, record: Record, role: str) -> str:
        """`train`, `valid` or `test`; `role` is that of the row's file."""
        return self.at(record.split or role, content_hashes(record)[0])

    def at(self, named: str, text_hash: int) -> str:
        """The split of a row that its file or column puts into `named`; `text_hash` is the first of `content_hashes`.

        Rows that are named `train` are split further by their hash.
        """
        if named != "train":
            return named
        share = text_hash / 2**64
        if self.folds is not None:
            place = share * self.folds
            if int(place) == self.fold:
                return "test"
            first = self.valid_share * self.valid_part
            return "valid" if first <= place % 1 < self.valid_share * (self.valid_part + 1) else "train"
        if share >= self._most:
            return "test"
        first = self._most - self.valid_share * (self.valid_part + 1)
        return "valid" if first <= share < self._most - self.valid_share * self.valid_part else "train"


def content_hashes(record: Record) -> tuple[int, int]:
    """Two hashes of 64 bits each. Rows with equal first hashes stay in one split: it is of the texts, or of the group
    where there is one. The second is of texts and label, and makes the row's id."""
    text = _bytes("\x00".join((record.text, record.pair or "")))
    whole = text + b"\x00" + _bytes(record.label)
    kept = text if record.group is None else _bytes(record.group)
    return tuple(int.from_bytes(hashlib.blake2b(part, digest_size=8).digest(), "little") for part in (kept, whole))  # type: ignore[return-value]


def _bytes(text: str) -> bytes:
    """The text as bytes: the file's own, even where they are not UTF-8.

    JSON can hold half of a character, which no bytes are read as; it is encoded as it stands.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
