"""The rows of each step: a pure function of (digest, seed, global_batch_size, step). No Ray, no I/O, no state.

An epoch is a fresh permutation of all rows. A store of up to `SHUFFLE_WINDOW_ROWS` rows is permuted as a whole. A
larger store is permuted in two levels, so that reads stay local where the store is larger than memory: its blocks of
`BLOCK_ROWS` consecutive rows are permuted, their sequence is cut into shuffle windows, and the rows of each shuffle
window are permuted. A shuffle window thus holds blocks from all over the store, so that even in a sorted file the
labels of a step come from all over the file. Permutations are keyed Feistel networks with cycle walking (Black and
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

from rtrain.core.ragged import Ints, iter_batches

SHUFFLE_WINDOW_ROWS = 1 << 18
"""Rows of a shuffle window at most; a store with no more rows is shuffled as a whole."""
BLOCK_ROWS = 512
"""Consecutive rows of a larger store that stay in one shuffle window.

The larger the blocks, the fewer a shuffle window has, and the more a step's mix of labels differs from the store's.
Measured on a sorted file of 3 million rows: the distance between the mix of a step and that of the file, divided by
the same distance for independent draws:

    rows of a step       blocks of 256    of 512    of 1,024    no blocks
    64                   1.04             1.09      1.12        6.3
    256                  1.11             1.23      1.33

The rows of a shuffle window of 256-row blocks lie in twice as many shards, more than a reader keeps open.
"""

Uint64s = npt.NDArray[np.uint64]
_ROUNDS = 6


def shuffle_version(rows: int) -> int:
    """The version of the rule that orders a store of so many rows: 2 permutes blocks, for more than one shuffle window;
    1 permutes the whole store."""
    return 1 if rows <= SHUFFLE_WINDOW_ROWS else 2


@dataclass(frozen=True)
class RowOrder:
    """The rows of every step of a run, and the run's length."""

    digest: str
    rows: int
    global_batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch. The last may be short: no row is dropped or repeated to fill it."""
        return math.ceil(self.rows / self.global_batch_size)

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def planned_digest(self) -> str:
        """Digest of the rows of all steps of a run, known before the first. The `order_digest` of events and artifacts
        is another: the chain over the steps that were trained (`chain_digest`)."""
        rule = shuffle_version(self.rows)
        parts = astuple(self) if rule == 1 else (*astuple(self), rule)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def rows_until(self, step: int) -> int:
        """Rows trained on after `step` steps."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.rows + min(rest * self.global_batch_size, self.rows)

    def step_at(self, rows: int) -> int:
        """The first step after which at least `rows` rows have been trained on; at most the run's last."""
        epochs, rest = divmod(rows, self.rows)
        return min(epochs * self.steps_per_epoch + math.ceil(rest / self.global_batch_size), self.num_steps)

    # A worker needs the positions of a step twice: to check the stream, and to check that all workers together have the
    # step's rows.
    @lru_cache(maxsize=1)  # noqa: B019 - a few numbers
    def positions(self, step: int) -> Ints:
        """Store positions of the rows of `step` (from 0), in training order; read-only."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        sequence_positions = self._permute_windows(epoch, start, min(start + self.global_batch_size, self.rows))
        has_blocks = shuffle_version(self.rows) > 1
        positions = self._map_to_blocks(epoch, sequence_positions) if has_blocks else sequence_positions
        positions.setflags(write=False)
        return positions

    def _permute_windows(self, epoch: int, start: int, stop: int) -> Ints:
        """Places `start` to `stop - 1` of an epoch, permuted inside their shuffle windows.

        The windows have equal lengths but for a few rows: a very short one would hold the rows of one or two blocks.
        """
        width = math.ceil(self.rows / math.ceil(self.rows / SHUFFLE_WINDOW_ROWS))
        parts = []
        for window in range(start // width, math.ceil(stop / width)):
            first = window * width
            size = min(width, self.rows - first)
            offsets = np.arange(max(start - first, 0), min(stop - first, size), dtype=np.uint64)
            parts.append(first + permute(offsets, size, self._derive_key(epoch, f"window {window}")).astype(np.int64))
        return np.concatenate(parts)

    def _map_to_blocks(self, epoch: int, sequence_positions: Ints) -> Ints:
        """The position in the store of each place in the epoch's sequence of blocks."""
        num_full_blocks, rest = divmod(self.rows, BLOCK_ROWS)
        # The store's last block is short. It is permuted with the others, and shifts the positions after it.
        begin = int(self._derive_key(epoch, "short block")[0] % np.uint64(num_full_blocks + 1)) * BLOCK_ROWS
        short = (sequence_positions >= begin) & (sequence_positions < begin + rest)
        in_full_blocks = np.where(sequence_positions < begin, sequence_positions, sequence_positions - rest)
        slot, inside = np.divmod(in_full_blocks, BLOCK_ROWS)
        # Only positions of the short block are outside; they are replaced below.
        slot = np.clip(slot, 0, num_full_blocks - 1)
        # The places come from one shuffle window or two, so that their slots are few and lie side by side.
        first = int(slot.min())
        nearby_slots = np.arange(first, int(slot.max()) + 1, dtype=np.uint64)
        block = permute(nearby_slots, num_full_blocks, self._derive_key(epoch, "blocks")).astype(np.int64)[slot - first]
        return np.where(short, num_full_blocks * BLOCK_ROWS + sequence_positions - begin, block * BLOCK_ROWS + inside)

    def _derive_key(self, epoch: int, part: str) -> Uint64s:
        text = f"{self.digest} {self.seed} {epoch} {part}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), dtype=np.uint64)


def permute(index: Uint64s, size: int, key: Uint64s) -> Uint64s:
    """`index` (values below `size`) mapped by the permutation of range(size) that `key` names."""
    half = max(1, math.ceil(math.log2(size) / 2)) if size > 1 else 1
    # A half has few values (512 for a shuffle window), so a table of each round's images of all of them costs less than
    # a computation for every entry of `index`.
    rounds = _mix(np.arange(1 << half, dtype=np.uint64) ^ key[:, None]) & np.uint64((1 << half) - 1)
    result = _feistel(index, half, rounds)
    # A value that falls outside the domain is mapped again until it falls inside: at most 4 times on average.
    out_of_range = np.flatnonzero(result >= size)
    while len(out_of_range):
        result[out_of_range] = remapped = _feistel(result[out_of_range], half, rounds)
        out_of_range = out_of_range[remapped >= size]
    return result


def _feistel(value: Uint64s, half: int, rounds: Uint64s) -> Uint64s:
    """`value` through a Feistel network of two halves of `half` bits; `rounds[n]` has the image of each half in round
    n."""
    shift = np.uint64(half)
    left, right = value >> shift, value & np.uint64((1 << half) - 1)
    for images in rounds:
        left, right = right, left ^ images[right]
    return (left << shift) | right


def _mix(value: Uint64s) -> Uint64s:
    """Mixes bits by the finalizer of splitmix64 (Steele, Lea and Flood 2014); uint64 products wrap by design."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def assign_micro_batches(
    lengths: npt.NDArray[np.int32],
    workers: int,
    rank: int,
    max_rows: int | None,
    max_tokens: int | None = None,
    *,
    is_random: bool = False,
    worker_speeds: Sequence[float] = (),
) -> list[Ints]:
    """The micro-batches of worker `rank` in a step whose rows have these `lengths` (in tokens), as arrays of row
    indices.

    A micro-batch has at most `max_rows` rows and `max_tokens` tokens (None: no limit); a longer row gets its own
    micro-batch. Rows are sorted by length and assigned to the workers in alternating direction, so all get about
    equally many tokens. A worker's rows are cut into micro-batches in that order, so a micro-batch pads little. If the
    step has fewer rows than there are workers, some workers get none.

    With `worker_speeds`, one for each worker, a row goes to the worker that would finish it first, the longest row
    first (Graham 1969, "Bounds on multiprocessing timing anomalies"), so all workers finish at about the same time.

    `is_random` assigns the step's rows in their random order, not by length: rows of similar length resemble each
    other, which would bias the gradient noise. A single worker's first micro-batch then has random rows, and at most
    half of them: the noise is measured between this micro-batch and all rows.
    """
    limits = (max_rows or len(lengths), max_tokens or int(lengths.sum(dtype=np.int64)))
    if is_random:
        worker_rows, first = np.arange(rank, len(lengths), workers), list[Ints]()
        if workers == 1:
            max_first_rows = min(limits[0], max(1, len(worker_rows) // 2))
            first = list(itertools.islice(iter_batches(lengths, worker_rows, max_first_rows, limits[1]), 1))
            worker_rows = worker_rows[sum(map(len, first)) :]
        return [*first, *iter_batches(lengths, worker_rows[_sort_longest_first(lengths[worker_rows])], *limits)]
    if len(set(worker_speeds)) > 1:
        return list(iter_batches(lengths, _balance_by_speed(lengths, worker_speeds, rank), *limits))
    turns = np.arange(math.ceil(len(lengths) / workers))
    sorted_positions = turns * workers + np.where(turns % 2, workers - 1 - rank, rank)
    worker_rows = _sort_longest_first(lengths)[sorted_positions[sorted_positions < len(lengths)]]
    return list(iter_batches(lengths, worker_rows, *limits))


def _balance_by_speed(lengths: npt.NDArray[np.int32], worker_speeds: Sequence[float], rank: int) -> Ints:
    """The rows of worker `rank`, the longest first, for workers of these speeds (tokens per unit of time)."""
    tokens, worker_rows = [0] * len(worker_speeds), []
    for row in _sort_longest_first(lengths).tolist():
        length = int(lengths[row])
        ends = [(before + length) / speed for before, speed in zip(tokens, worker_speeds, strict=True)]
        first = ends.index(min(ends))
        tokens[first] += length
        if first == rank:
            worker_rows.append(row)
    return np.array(worker_rows, dtype=np.int64)


def _sort_longest_first(lengths: npt.NDArray[np.int32]) -> Ints:
    below = lengths.max(initial=0) - lengths
    # numpy sorts 16-bit numbers by radix, which is several times as fast as its other sorts.
    return np.argsort(below.astype(np.uint16) if below.max(initial=0) < 1 << 16 else below, kind="stable")


def hash_step_rows(step: int, row_ids: Uint64s) -> bytes:
    """SHA-256 of a step's number and its row ids, in order."""
    return hashlib.sha256(step.to_bytes(8, "little") + row_ids.astype("<u8").tobytes()).digest()


def chain_digest(previous: bytes, digest: bytes) -> bytes:
    """The next link of a run's ledger: two runs with equal links trained on the same rows in the same order."""
    return hashlib.sha256(previous + digest).digest()
