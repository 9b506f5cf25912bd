"""Which rows make which update: a pure function of (digest, seed, rows_per_update, update). No Ray, no I/O, no state.

An epoch is a fresh permutation of all rows. It is made in two levels, so that reads of a store larger than memory stay
local: the store is cut into windows of `WINDOW_ROWS` consecutive rows, the windows are permuted, and the rows are
permuted inside their window. Both permutations are keyed Feistel networks with cycle walking (Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains"), so any position of any epoch is found in O(1), without a table.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtrain.tasks.batch import Ints, batches

WINDOW_ROWS = 1 << 18
"""Rows that are shuffled with each other; a store with fewer rows is shuffled as a whole."""

Words = npt.NDArray[np.uint64]
_ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """The rows of every update of a run, and the run's length."""

    digest: str
    rows: int
    rows_per_update: int
    epochs: int
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        """The last update of an epoch may be short: its rows are kept, not dropped, and no row is repeated."""
        return math.ceil(self.rows / self.rows_per_update)

    @property
    def updates(self) -> int:
        return self.epochs * self.updates_per_epoch

    def positions(self, update: int) -> Ints:
        """Store positions of the rows of `update` (counted from 0), in training order."""
        epoch, index = divmod(update, self.updates_per_epoch)
        start = index * self.rows_per_update
        return self._permuted(epoch, np.arange(start, min(start + self.rows_per_update, self.rows), dtype=np.int64))

    def _permuted(self, epoch: int, places: Ints) -> Ints:
        windows = math.ceil(self.rows / WINDOW_ROWS)
        short = self.rows - (windows - 1) * WINDOW_ROWS
        slots = permute(np.arange(windows, dtype=np.uint64), windows, self._key(epoch, "windows")).astype(np.int64)
        # Places after the slot of the short last window are shifted by what that window lacks.
        before = int(np.flatnonzero(slots == windows - 1)[0]) * WINDOW_ROWS
        shifted = np.where(places < before + short, places, places + WINDOW_ROWS - short)
        slot, place = np.divmod(shifted, WINDOW_ROWS)
        result = np.empty_like(places)
        for index in np.unique(slot):
            chosen, window = slot == index, int(slots[index])
            size = short if window == windows - 1 else WINDOW_ROWS
            inside = permute(place[chosen].astype(np.uint64), size, self._key(epoch, f"window {window}"))
            result[chosen] = window * WINDOW_ROWS + inside.astype(np.int64)
        return result

    def _key(self, epoch: int, part: str) -> Words:
        text = f"{self.digest} {self.seed} {epoch} {part}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), dtype=np.uint64)


def permute(index: Words, size: int, key: Words) -> Words:
    """`index` (values below `size`) mapped by the permutation of range(size) that `key` names."""
    half = max(1, math.ceil(math.log2(size) / 2)) if size > 1 else 1
    result = index.copy()
    outside = np.ones(len(index), dtype=bool)
    # A value that falls outside the domain is mapped again until it falls inside: at most 4 times in the mean.
    while outside.any():
        result[outside] = _feistel(result[outside], half, key)
        outside = result >= size
    return result


def _feistel(value: Words, half: int, key: Words) -> Words:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = value >> shift, value & mask
    for word in key:
        left, right = right, left ^ (_mix(right ^ word) & mask)
    return (left << shift) | right


def _mix(value: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014); uint64 products wrap by design."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def deal(
    lengths: npt.NDArray[np.int32], workers: int, most_rows: int | None, most_tokens: int | None = None
) -> list[list[Ints]]:
    """Share the rows of an update: for each worker its passes, each the indices of at most `most_rows` rows and of rows
    with at most `most_tokens` tokens; a longer row is alone.

    Rows are sorted by length and dealt forth and back, so that workers get equal tokens; a worker's rows are cut into
    passes in that order, so that a pass pads little. Where an update has fewer rows than workers, some get no pass.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    turn = np.arange(len(order)) % (2 * workers)
    owner = np.where(turn < workers, turn, 2 * workers - 1 - turn)
    rows, tokens = most_rows or len(order), most_tokens or int(lengths.sum(dtype=np.int64))
    return [list(batches(lengths, order[owner == worker], rows, tokens)) for worker in range(workers)]


def rows_digest(update: int, row_ids: Words) -> bytes:
    """Digest of an update's rows, in order."""
    return hashlib.sha256(update.to_bytes(8, "little") + row_ids.astype("<u8").tobytes()).digest()


def chain(previous: bytes, digest: bytes) -> bytes:
    """The next link of a run's ledger: two runs with equal links trained on the same rows in the same order."""
    return hashlib.sha256(previous + digest).digest()
