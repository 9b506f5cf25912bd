"""Which rows make which update: a pure function of (digest, seed, rows_per_update, update). No Ray, no I/O, no state.

An epoch is a fresh permutation of all rows. A store of up to `SHUFFLE_WINDOW_ROWS` rows is permuted as a whole. A
larger store is permuted in two levels, so that reads stay local where the store is larger than memory: its blocks of
`BLOCK_ROWS` consecutive rows are permuted, their sequence is cut into shuffle windows, and the rows of each shuffle
window are permuted. A shuffle window thus holds blocks from all over the store, so that even in a sorted file the
labels of an update come from all over the file. Permutations are keyed Feistel networks with cycle walking (Black and
Rogaway 2002, "Ciphers with Arbitrary Finite Domains"), so that any position of any epoch is found in O(1), without a
table of rows.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Ints, batches

SHUFFLE_WINDOW_ROWS = 1 << 18
"""Rows of a shuffle window at most; a store with no more rows is shuffled as a whole."""
BLOCK_ROWS = 512
"""Consecutive rows of a larger store that stay in one shuffle window.

The labels of a shuffle window's 512 blocks are a sample of the store's labels. How good a sample was measured on a
sorted file of 3 million rows, as the distance between the mix of labels in an update and that in the file, divided by
the same distance for independent draws:

    rows of an update    blocks of 256    of 512    of 1,024    no blocks
    64                   1.04             1.09      1.12        6.3
    256                  1.11             1.23      1.33

With blocks of 256 the rows of a shuffle window lie in twice as many shards, more than a reader keeps open.
"""

Words = npt.NDArray[np.uint64]
_ROUNDS = 6


def version(rows: int) -> int:
    """The number of the rule that orders a store of so many rows: 2 permutes blocks, and holds for more than one
    shuffle window; 1 has none."""
    return 1 if rows <= SHUFFLE_WINDOW_ROWS else 2


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
        """Updates that an epoch takes. The last may be short: no row is dropped, and none is repeated to fill it."""
        return math.ceil(self.rows / self.rows_per_update)

    @property
    def updates(self) -> int:
        return self.epochs * self.updates_per_epoch

    @property
    def identity(self) -> str:
        """Digest of the rows of all of a run's updates."""
        rule = version(self.rows)
        parts = astuple(self) if rule == 1 else (*astuple(self), rule)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def rows_until(self, update: int) -> int:
        """Rows trained on after `update` updates."""
        epochs, rest = divmod(update, self.updates_per_epoch)
        return epochs * self.rows + min(rest * self.rows_per_update, self.rows)

    def update_at(self, rows: int) -> int:
        """The first update after which at least `rows` rows have been trained on; at most the run's last."""
        epochs, rest = divmod(rows, self.rows)
        return min(epochs * self.updates_per_epoch + math.ceil(rest / self.rows_per_update), self.updates)

    # A worker needs the positions of an update twice: to check the stream, and to check that all workers together have
    # the update's rows.
    @lru_cache(maxsize=1)  # noqa: B019 - a few numbers
    def positions(self, update: int) -> Ints:
        """Store positions of the rows of `update` (counted from 0), in training order; not to be written to."""
        epoch, index = divmod(update, self.updates_per_epoch)
        start = index * self.rows_per_update
        places = self._in_shuffle_windows(epoch, start, min(start + self.rows_per_update, self.rows))
        found = places if version(self.rows) == 1 else self._in_blocks(epoch, places)
        found.setflags(write=False)
        return found

    def _in_shuffle_windows(self, epoch: int, start: int, stop: int) -> Ints:
        """Places `start` to `stop - 1` of an epoch, permuted inside their shuffle windows.

        The windows have equal lengths but for a few rows: a very short one would hold the rows of one or two blocks.
        """
        width = math.ceil(self.rows / math.ceil(self.rows / SHUFFLE_WINDOW_ROWS))
        parts = []
        for window in range(start // width, math.ceil(stop / width)):
            first = window * width
            size = min(width, self.rows - first)
            places = np.arange(max(start - first, 0), min(stop - first, size), dtype=np.uint64)
            parts.append(first + permute(places, size, self._key(epoch, f"window {window}")).astype(np.int64))
        return np.concatenate(parts)

    def _in_blocks(self, epoch: int, places: Ints) -> Ints:
        """The position in the store of each place in the epoch's sequence of blocks."""
        whole, rest = divmod(self.rows, BLOCK_ROWS)
        # The store's last block is short. It stands anywhere among the others, and shifts the places after it.
        begin = int(self._key(epoch, "short block")[0] % np.uint64(whole + 1)) * BLOCK_ROWS
        short = (places >= begin) & (places < begin + rest)
        slot, inside = np.divmod(np.where(places < begin, places, places - rest), BLOCK_ROWS)
        slot = np.clip(slot, 0, whole - 1)  # only places of the short block are outside, and they are replaced below
        # The places come from one shuffle window or two, so that their slots are few and lie side by side.
        first = int(slot.min())
        near = np.arange(first, int(slot.max()) + 1, dtype=np.uint64)
        block = permute(near, whole, self._key(epoch, "blocks")).astype(np.int64)[slot - first]
        return np.where(short, whole * BLOCK_ROWS + places - begin, block * BLOCK_ROWS + inside)

    def _key(self, epoch: int, part: str) -> Words:
        text = f"{self.digest} {self.seed} {epoch} {part}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), dtype=np.uint64)


def permute(index: Words, size: int, key: Words) -> Words:
    """`index` (values below `size`) mapped by the permutation of range(size) that `key` names."""
    half = max(1, math.ceil(math.log2(size) / 2)) if size > 1 else 1
    # A half has few values (512 for a shuffle window), so a table of each round's images of all of them costs less than
    # a computation for every entry of `index`.
    rounds = _mix(np.arange(1 << half, dtype=np.uint64) ^ key[:, None]) & np.uint64((1 << half) - 1)
    result = _feistel(index, half, rounds)
    # A value that falls outside the domain is mapped again until it falls inside: at most 4 times on average.
    outside = np.flatnonzero(result >= size)
    while len(outside):
        result[outside] = again = _feistel(result[outside], half, rounds)
        outside = outside[again >= size]
    return result


def _feistel(value: Words, half: int, rounds: Words) -> Words:
    """`value` through a Feistel network of two halves of `half` bits; `rounds[n]` has the image of each half in round
    n."""
    shift = np.uint64(half)
    left, right = value >> shift, value & np.uint64((1 << half) - 1)
    for images in rounds:
        left, right = right, left ^ images[right]
    return (left << shift) | right


def _mix(value: Words) -> Words:
    """Mixes bits by the finalizer of splitmix64 (Steele, Lea and Flood 2014); uint64 products wrap by design."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def deal(
    lengths: npt.NDArray[np.int32],
    workers: int,
    rank: int,
    most_rows: int | None,
    most_tokens: int | None = None,
    *,
    at_random: bool = False,
    speeds: Sequence[float] = (),
) -> list[Ints]:
    """The passes of worker `rank` in an update whose rows have these `lengths` (in tokens), as arrays of row indices.

    A pass has at most `most_rows` rows and `most_tokens` tokens (None: no limit); a longer row is alone in its pass.
    Rows are sorted by length and dealt to the workers forth and back, so that all get about equally many tokens. A
    worker's rows are cut into passes in that order, so that a pass pads little. If the update has fewer rows than
    there are workers, some get no pass.

    With `speeds`, one for each worker, a row goes to the worker that would be done first with it, the longest row first
    (Graham 1969, "Bounds on multiprocessing timing anomalies"), so that all are done at about the same time.

    With `at_random` a worker's rows are any of the update's, whose order is random, and so are the first pass's of a
    worker that is alone, which has half of the rows at most. Rows of like lengths resemble each other: the noise of
    gradients is measured without that, and between a pass and more than it.
    """
    limits = (most_rows or len(lengths), most_tokens or int(lengths.sum(dtype=np.int64)))
    if at_random:
        own, first = np.arange(rank, len(lengths), workers), list[Ints]()
        if workers == 1:
            most = min(limits[0], max(1, len(own) // 2))
            first = list(itertools.islice(batches(lengths, own, most, limits[1]), 1))
            own = own[sum(map(len, first)) :]
        return [*first, *batches(lengths, own[_longest_first(lengths[own])], *limits)]
    if len(set(speeds)) > 1:
        return list(batches(lengths, _first_done(lengths, speeds, rank), *limits))
    turns = np.arange(math.ceil(len(lengths) / workers))
    places = turns * workers + np.where(turns % 2, workers - 1 - rank, rank)
    own = _longest_first(lengths)[places[places < len(lengths)]]
    return list(batches(lengths, own, *limits))


def _first_done(lengths: npt.NDArray[np.int32], speeds: Sequence[float], rank: int) -> Ints:
    """The rows of a worker, the longest first, where workers compute so many tokens in the same time."""
    tokens, own = [0] * len(speeds), []
    for row in _longest_first(lengths).tolist():
        length = int(lengths[row])
        ends = [(before + length) / speed for before, speed in zip(tokens, speeds, strict=True)]
        first = ends.index(min(ends))
        tokens[first] += length
        if first == rank:
            own.append(row)
    return np.array(own, dtype=np.int64)


def _longest_first(lengths: npt.NDArray[np.int32]) -> Ints:
    below = lengths.max(initial=0) - lengths
    # numpy sorts 16-bit numbers by radix, which is several times as fast as its other sorts.
    return np.argsort(below.astype(np.uint16) if below.max(initial=0) < 1 << 16 else below, kind="stable")


def rows_digest(update: int, row_ids: Words) -> bytes:
    """SHA-256 of an update's number and its row ids, in order."""
    return hashlib.sha256(update.to_bytes(8, "little") + row_ids.astype("<u8").tobytes()).digest()


def chain(previous: bytes, digest: bytes) -> bytes:
    """The next link of a run's ledger: two runs with equal links trained on the same rows in the same order."""
    return hashlib.sha256(previous + digest).digest()
