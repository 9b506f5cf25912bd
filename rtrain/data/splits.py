"""Which rows are trained on, which choose, and which are the test: from the file, a column, or a hash of the texts."""

import hashlib
from dataclasses import dataclass

from rtrain.config import Data
from rtrain.data.records import Record, Source

SHARE = 0.1
"""Of the rows, where nothing says otherwise: for validation, and for the test."""


@dataclass(frozen=True)
class Splits:
    """What is known before a row is read. Equal texts (or values of `data.split_by`) never straddle two splits, unless
    a file or a column says so."""

    has_test: bool
    """Test rows come from a file of their own, or are named by a column."""
    valid_share: float
    folds: int | None = None
    fold: int = 0

    @classmethod
    def of(cls, data: Data, source: Source) -> "Splits":
        named = data.split is not None
        share = data.valid_share if data.valid_share is not None else 0.0 if named or source.has_valid else SHARE
        return cls(source.has_test or named, share, data.folds, data.fold)

    def split(self, record: Record, role: str) -> str:
        """`train`, `valid` or `test`; `role` is that of the row's file."""
        return self.at(record.split or role, content_hashes(record)[0])

    def at(self, named: str, text_hash: int) -> str:
        """By what names the row, a file or a column, and the first of its `content_hashes`."""
        if named != "train":
            return named
        share = text_hash / 2**64
        if self.folds is not None:
            place = share * self.folds
            if int(place) == self.fold:
                return "test"
            return "valid" if place % 1 < self.valid_share else "train"
        most = 1.0 if self.has_test else 1.0 - SHARE
        if share >= most:
            return "test"
        return "valid" if share >= most - self.valid_share else "train"


def content_hashes(record: Record) -> tuple[int, int]:
    """(hash of what keeps rows in one split, by default the texts; hash of texts and label), 64 bits each."""
    text = _bytes("\x00".join((record.text, record.pair or "")))
    whole = text + b"\x00" + _bytes(record.label)
    kept = text if record.group is None else _bytes(record.group)
    return tuple(int.from_bytes(hashlib.blake2b(part, digest_size=8).digest(), "little") for part in (kept, whole))  # type: ignore[return-value]


def _bytes(text: str) -> bytes:
    """The file's own bytes where they are not UTF-8; JSON can hold halves of characters that no bytes are read as."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
