"""The split of each row: train, valid (which chooses among weights) or test; by its file, a column, or a hash.

`find_in_training_set` finds evaluation rows that are training rows too: the model has learned their labels, so their
scores do not generalize. Two rows are equal if their texts differ only in case, blanks, punctuation and Unicode
normalization. The hash keeps equal texts in one split. Separate files, columns that name the split, and texts that
differ in case or punctuation can still put equal rows into two splits. Texts with other words are different rows: a
paraphrase is not counted, nor is another filling of a template.
"""

import bisect
import hashlib
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rtrain.config import DataConfig
from rtrain.config.data import SplitTime, parse_time
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.row_reader import DataSource, SourceRow, read_rows
from rtrain.data.sources import SourceFile

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
    strata: "StrataTable | None" = None
    time_cuts: tuple[float, float] | None = None
    """First time of the validation rows and of the test rows, in seconds since 1970."""

    @classmethod
    def from_config(cls, data: DataConfig, source: DataSource, survey: "RowSurvey | None" = None) -> "Splits":
        """The splits of the settings. `survey` is of the rows of the training files; without it they are read here, if
        the splits depend on all rows."""
        has_split_column = data.split_column is not None
        default_share = 0.0 if has_split_column or source.has_valid else DEFAULT_SHARE
        share = default_share if data.valid_share is None else data.valid_share
        splits = cls(source.has_test or has_split_column, share, data.folds, data.fold, data.validation_fold)
        if data.validation_fold and data.validation_fold >= splits.num_validation_folds:
            reason = f"there are {splits.num_validation_folds} validation folds of the size data.valid_share"
            fix = "folds count from 0"
            raise ConfigError([Problem("data.validation_fold", data.validation_fold, reason, fix, code="out_of_range")])
        if (times := data.split_time) is not None and isinstance(times.test, str):
            # The configuration has checked the dates.
            return replace(splits, time_cuts=(parse_time(times.valid) or 0.0, parse_time(times.test) or 0.0))
        if data.stratify is None and times is None:
            return splits
        survey = survey or RowSurvey.merge([survey_file(file, data) for file in source.files if file.role == "train"])
        if times is not None:
            return replace(splits, time_cuts=survey.find_time_cuts(times))
        return replace(splits, strata=survey.stratify(splits))

    @property
    def num_validation_folds(self) -> int:
        """The number of disjoint validation folds (`data.validation_fold`); 0 if a file or a column names the
        validation rows, or a time, or `data.valid_share` is 0."""
        if self.time_cuts is not None:
            return 0
        # Rounding errors of a sum of shares are smaller than this.
        return int(self._train_and_valid_share / self.valid_share + 1e-9) if self.valid_share else 0

    @property
    def _train_and_valid_share(self) -> float:
        """Share of the rows that are for training and validation; of those outside of the test, where there are
        folds."""
        return 1.0 if self.has_test or self.folds is not None else 1.0 - DEFAULT_SHARE

    def assign_split(self, row: SourceRow, role: str) -> str:
        """`train`, `valid` or `test`; `role` is that of the row's file."""
        if self.time_cuts is not None and role == "train":
            valid_start, test_start = self.time_cuts
            assert row.time is not None  # else the row is bad
            return "test" if row.time >= test_start else "valid" if row.time >= valid_start else "train"
        return self.assign_by_hash(row.split or role, hash_content(row)[0], row.stratum)

    def assign_by_hash(self, assigned_split: str, text_hash: int, stratum: str | None = None) -> str:
        """The split of a row that its file or column puts into `assigned_split`; `text_hash` is the first of
        `hash_content`.

        Rows that are named `train` are split further by their hash.
        """
        if assigned_split != "train":
            return assigned_split
        if self.strata is not None and (split := self.strata.find_split(text_hash, stratum)):
            return split
        return self._assign_by_share(text_hash / 2**64)

    def _assign_by_share(self, share: float) -> str:
        """The split at a position in [0, 1) among all rows."""
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


@dataclass(frozen=True)
class StrataTable:
    """The splits of the rows of each stratum, by their hashes."""

    runs: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
    """For each stratum: first hashes of runs of rows of one split, ascending, and these splits."""
    main_strata: Mapping[int, str]
    """The stratum of the most rows, for each hash that rows of several strata have: they stay in one split."""

    def find_split(self, text_hash: int, stratum: str | None) -> str | None:
        """The split of a row; None for a stratum without rows."""
        firsts, names = self.runs.get(self.main_strata.get(text_hash, stratum or ""), ((), ()))
        return names[max(0, bisect.bisect_right(firsts, text_hash) - 1)] if names else None


@dataclass(frozen=True, eq=False)
class RowSurvey:
    """What stratified splits, and splits by shares of time, need to know of all rows. Bad rows are not among them."""

    strata: tuple[str, ...]
    """Names of the strata."""
    codes: npt.NDArray[np.int32]
    """The number in `strata` of each row's stratum."""
    hashes: npt.NDArray[np.uint64]
    """First hash of each row (`hash_content`)."""
    times: npt.NDArray[np.float64]
    """Time of each row, in seconds since 1970; NaN without `data.split_time`."""

    @classmethod
    def from_values(cls, values: Iterable[tuple[str, int, float | None]]) -> "RowSurvey":
        """A survey from the stratum, hash and time of each row."""
        numbers: dict[str, int] = {}
        rows = [
            (numbers.setdefault(stratum, len(numbers)), text_hash, math.nan if time is None else time)
            for stratum, text_hash, time in values
        ]
        table = np.array(rows, dtype=[("code", np.int32), ("hash", np.uint64), ("time", np.float64)])
        return cls(tuple(numbers), table["code"], table["hash"], table["time"])

    @classmethod
    def merge(cls, surveys: Sequence["RowSurvey"]) -> "RowSurvey":
        numbers: dict[str, int] = {}
        codes = [np.empty(0, np.int32)]
        for survey in surveys:
            new_codes = [numbers.setdefault(name, len(numbers)) for name in survey.strata]
            codes.append(np.array(new_codes, np.int32)[survey.codes] if new_codes else survey.codes)
        hashes = np.concatenate([np.empty(0, np.uint64), *(survey.hashes for survey in surveys)])
        times = np.concatenate([np.empty(0), *(survey.times for survey in surveys)])
        return cls(tuple(numbers), np.concatenate(codes), hashes, times)

    def find_time_cuts(self, settings: SplitTime) -> tuple[float, float]:
        """The first time of the validation rows and of the test rows; rows of one time stay together."""
        times, shares = np.sort(self.times), (float(settings.valid), float(settings.test))

        def cut(share: float) -> float:
            newest = round(len(times) * share)
            return float(times[-newest]) if newest else math.inf

        return cut(sum(shares)), cut(shares[1])

    def stratify(self, splits: Splits) -> StrataTable:
        """Split the rows of each stratum by the shares of `splits`, in the order of their hashes.

        Shares are rounded up or down by a hash of the stratum's name, so that the small strata together have them too.
        A stratum that would have no training row has no others.
        """
        pairs, counts = np.unique(np.rec.fromarrays([self.hashes, self.codes]), return_counts=True)
        hashes, codes = pairs["f0"], pairs["f1"]
        order = np.lexsort((codes, -counts, hashes))
        hashes, codes = hashes[order], codes[order]
        is_main = np.concatenate([[True], hashes[1:] != hashes[:-1]]) if len(hashes) else np.zeros(0, np.bool_)
        is_shared = np.isin(hashes, hashes[~is_main])
        main_strata = {
            int(value): self.strata[code]
            for value, code in zip(hashes[is_main & is_shared], codes[is_main & is_shared], strict=True)
        }
        runs: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for code, name in enumerate(self.strata):
            ranked = hashes[is_main & (codes == code)].tolist()  # ascending
            rounding = min(max(_hash_bytes(_encode_text(name)) / 2**64, 1e-6), 1 - 1e-6)
            names = [splits._assign_by_share((rank + 1 - rounding) / len(ranked)) for rank in range(len(ranked))]
            if "train" not in names:
                names = ["train"] * len(names)
            firsts = [rank for rank in range(len(names)) if rank == 0 or names[rank] != names[rank - 1]]
            runs[name] = tuple(ranked[rank] for rank in firsts), tuple(names[rank] for rank in firsts)
        return StrataTable(runs, main_strata)


def survey_file(source_file: SourceFile, data: DataConfig) -> RowSurvey:
    """Survey the rows of a file that are not bad."""
    rows = (row for row in read_rows(source_file, data) if row.reason is None)
    return RowSurvey.from_values((row.stratum or "", hash_content(row)[0], row.time) for row in rows)


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
