"""The order of rows: each once per epoch, a pure function of its four inputs, and shared out without loss."""

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.ragged import iter_batches
from rtrain.data import order
from rtrain.data.order import RowOrder, assign_micro_batches, chain_digest, hash_step_rows


def small_windows(window: int, block: int) -> Any:
    """Shuffle windows and blocks of so many rows."""
    return mock.patch.multiple(order, SHUFFLE_WINDOW_ROWS=window, BLOCK_ROWS=block)


def epoch_of(row_order: RowOrder, epoch: int) -> list[npt.NDArray[np.int64]]:
    """The positions of each update of an epoch."""
    per_epoch = row_order.steps_per_epoch
    return [row_order.positions(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]


def assert_every_row_once(row_order: RowOrder, epoch: int) -> None:
    steps = epoch_of(row_order, epoch)
    full, last = divmod(row_order.rows, row_order.global_batch_size)
    assert [len(rows) for rows in steps] == [row_order.global_batch_size] * full + [last] * bool(last)
    assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(row_order.rows))


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_every_row_comes_once_round_the_real_window(difference: int) -> None:
    assert_every_row_once(RowOrder("digest", order.SHUFFLE_WINDOW_ROWS + difference, 100_000, epochs=1, seed=0), 0)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 700),
    blocks=st.integers(1, 16),
    block=st.integers(1, 40),
    global_batch_size=st.integers(1, 800),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_every_row_comes_once_whatever_the_windows_and_blocks(
    rows: int, blocks: int, block: int, global_batch_size: int, seed: int, epoch: int
) -> None:
    with small_windows(blocks * block, block):
        assert_every_row_once(RowOrder("digest", rows, global_batch_size, epoch + 1, seed), epoch)


def test_the_order_is_pinned() -> None:
    """A run resumes under a later version only if its order is unchanged."""
    row_order = RowOrder("digest", rows=10, global_batch_size=4, epochs=2, seed=7)
    results = [row_order.positions(step).tolist() for step in range(row_order.num_steps)]
    assert results == [[8, 6, 4, 7], [2, 1, 9, 3], [5, 0], [3, 8, 1, 9], [5, 7, 4, 6], [0, 2]]


def test_a_store_of_one_window_keeps_the_order_that_it_had_before_there_were_blocks() -> None:
    """The largest such store has its rows as they were before: a run on it resumes."""
    row_order = RowOrder("digest", order.SHUFFLE_WINDOW_ROWS, global_batch_size=8, epochs=2, seed=7)
    assert order.shuffle_version(row_order.rows) == 1
    assert row_order.positions(0).tolist() == [236220, 137066, 51502, 53673, 120067, 84253, 119978, 197786]
    assert row_order.positions(40_000).tolist() == [228098, 202367, 177701, 162740, 49673, 233831, 253285, 18040]


def test_the_order_of_a_larger_store_is_pinned() -> None:
    row_order = RowOrder("digest", order.SHUFFLE_WINDOW_ROWS + 1, global_batch_size=8, epochs=2, seed=7)
    assert order.shuffle_version(row_order.rows) == 2
    assert row_order.positions(0).tolist() == [158758, 25110, 130862, 115625, 69890, 61213, 69801, 178573]
    assert row_order.positions(40_000).tolist() == [151522, 243876, 187889, 194318, 189463, 223911, 2312, 112216]


def test_epochs_seeds_and_data_each_change_the_order() -> None:
    def first_epoch(digest: str, seed: int, epoch: int = 0) -> tuple[int, ...]:
        row_order = RowOrder(digest, rows=500, global_batch_size=500, epochs=2, seed=seed)
        return tuple(row_order.positions(epoch).tolist())

    orders = {
        first_epoch("digest", 0),
        first_epoch("digest", 0, epoch=1),
        first_epoch("digest", 1),
        first_epoch("other", 0),
        tuple(range(500)),
    }
    assert len(orders) == 5


def test_the_order_of_an_epoch_does_not_depend_on_the_rows_per_update() -> None:
    full = np.concatenate(epoch_of(RowOrder("digest", 103, 103, 2, seed=1), 1))
    for global_batch_size in (1, 8, 50, 102):
        assert np.array_equal(np.concatenate(epoch_of(RowOrder("digest", 103, global_batch_size, 2, seed=1), 1)), full)


@pytest.mark.parametrize(("rows", "window"), [(30, 30), (122, 64)])
def test_each_row_is_equally_often_at_each_place(rows: int, window: int) -> None:
    """In one window, and in two, where 30 blocks of 4 rows and a short one of 2 are permuted first."""
    seeds = 1500
    counts = np.zeros((rows, rows))
    with small_windows(window, block=4):
        for seed in range(seeds):
            counts[np.arange(rows), RowOrder("digest", rows, rows, 1, seed).positions(0)] += 1
    # Chi squared of n x n degrees of freedom, here 29 x 29 and 121 x 121, has mean n^2 and deviation n x sqrt(2).
    expected, free = seeds / rows, rows - 1
    assert abs(((counts - expected) ** 2 / expected).sum() - free**2) < 4 * 1.42 * free


def test_a_step_reads_the_blocks_of_few_windows() -> None:
    row_order = RowOrder("digest", rows=64 * 20 + 44, global_batch_size=16, epochs=1, seed=2)
    with small_windows(64, block=8):
        rows = np.concatenate(epoch_of(row_order, 0))
    width = math.ceil(row_order.rows / 21)  # 21 windows of 64 rows, but for 20 rows
    blocks = [np.unique(rows[first : first + width] // 8) for first in range(0, row_order.rows, width)]
    # A window begins and ends within a block, and so does the short one.
    assert max(len(match) for match in blocks) <= width // 8 + 3
    assert all(np.ptp(match) > 64 for match in blocks)  # from all over the store: 166 blocks
    assert len(np.unique(np.concatenate(blocks))) == math.ceil(row_order.rows / 8)


LABELS = 8
SORTED_ROWS = 3_000_000


def distance(
    label_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]], steps: list[npt.NDArray[Any]]
) -> float:
    """Mean distance (total variation) of the updates' mix of labels from the data's, which is even."""
    mixes = np.array([np.bincount(label_of(rows), minlength=LABELS) / len(rows) for rows in steps])
    return float(np.abs(mixes - 1 / LABELS).sum(axis=1).mean() / 2)


@pytest.mark.parametrize("kind", ["sorted", "cyclic"])
def test_an_update_of_a_large_file_has_the_mix_of_its_labels(kind: str) -> None:
    def label_of(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows * LABELS // SORTED_ROWS if kind == "sorted" else rows % LABELS

    row_order, random = RowOrder("digest", SORTED_ROWS, 64, epochs=2, seed=11), np.random.default_rng(0)
    results = [row_order.positions(int(step)) for step in random.choice(row_order.num_steps, 600, replace=False)]
    independent = [random.integers(0, SORTED_ROWS, 64) for _ in range(600)]
    assert 0.12 < distance(label_of, independent) < 0.14
    assert distance(label_of, results) <= 1.2 * distance(label_of, independent)


# ------------------------------------------------------------------------------------------------------------ sharing


def shares_of(
    lengths: npt.NDArray[np.int32], workers: int, most_rows: int | None, most_tokens: int | None = None
) -> list[list[npt.NDArray[np.int64]]]:
    """The micro-batches of every worker."""
    return [assign_micro_batches(lengths, workers, rank, most_rows, most_tokens) for rank in range(workers)]


def test_rows_are_dealt_forth_and_back_by_length() -> None:
    # Sorted by length: rows 1, 3, 0, 4, 2 (9, 7, 5, 3, 1 tokens). Dealt 0 1 | 1 0 | 0: worker 0 gets 9 + 3 + 1 tokens,
    # worker 1 gets 7 + 5.
    lengths = np.array([5, 9, 1, 7, 3], dtype=np.int32)
    shares = shares_of(lengths, workers=2, most_rows=2)
    assert [[rows.tolist() for rows in micro_batches] for micro_batches in shares] == [[[1, 4], [2]], [[3, 0]]]


@given(
    lengths=st.lists(st.integers(1, 200) | st.integers(1, 200_000), min_size=1, max_size=120),
    workers=st.integers(1, 150),
    most_rows=st.integers(1, 20) | st.none(),
    most_tokens=st.integers(1, 3000) | st.none(),
)
@settings(deadline=None, max_examples=40)
def test_a_worker_s_passes_are_its_part_of_all_workers(
    lengths: list[int], workers: int, most_rows: int | None, most_tokens: int | None
) -> None:
    """As plainly as it can be said: sort all rows, deal them to all workers, and look at each one's."""
    array = np.array(lengths, dtype=np.int32)
    order = np.argsort(-array.astype(np.int64), kind="stable")
    turn = np.arange(len(order)) % (2 * workers)
    owner = np.where(turn < workers, turn, 2 * workers - 1 - turn)
    rows, tokens = most_rows or len(order), most_tokens or sum(lengths)
    for rank in range(workers):
        expected = [part.tolist() for part in iter_batches(array, order[owner == rank], rows, tokens)]
        assert [
            part.tolist() for part in assign_micro_batches(array, workers, rank, most_rows, most_tokens)
        ] == expected


@given(
    lengths=st.lists(st.integers(1, 512), min_size=1, max_size=120),
    workers=st.integers(1, 9),
    micro_batch=st.integers(1, 20),
)
@settings(deadline=None)
def test_dealing_loses_no_row_and_balances_tokens(lengths: list[int], workers: int, micro_batch: int) -> None:
    shares = shares_of(np.array(lengths, dtype=np.int32), workers, micro_batch)
    rows = [[int(row) for rows in micro_batches for row in rows] for micro_batches in shares]
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    # Between two workers the rounds differ by turns in either direction, each by no more than the round's spread, and
    # the spreads of all rounds lie side by side: in sum they cannot exceed the longest row.
    tokens = [sum(lengths[row] for row in share) for share in rows]
    assert max(tokens) - min(tokens) <= max(lengths)
    for micro_batches in shares:
        sizes = [len(rows) for rows in micro_batches]
        assert all(size == micro_batch for size in sizes[:-1])
        assert all(1 <= size <= micro_batch for size in sizes)
        longest = [lengths[row] for rows in micro_batches for row in rows]
        assert longest == sorted(longest, reverse=True)  # neighbours in length share a pass


def test_tokens_bound_a_pass_and_a_longer_row_is_alone() -> None:
    lengths = np.array([5, 40, 1, 7, 3, 6], dtype=np.int32)
    micro_batches = assign_micro_batches(lengths, 1, 0, max_rows=None, max_tokens=14)
    assert [rows.tolist() for rows in micro_batches] == [[1], [3, 5], [0, 4, 2]]
    assert [rows.tolist() for rows in assign_micro_batches(lengths, 1, 0, max_rows=2, max_tokens=14)] == [
        [1],
        [3, 5],
        [0, 4],
        [2],
    ]


@given(
    lengths=st.lists(st.integers(1, 512), min_size=1, max_size=120),
    speeds=st.lists(st.integers(1, 16), min_size=2, max_size=6),
)
@settings(deadline=None)
def test_workers_of_unequal_speeds_are_done_within_a_row_of_each_other(lengths: list[int], speeds: list[int]) -> None:
    """No row is lost, and no worker could have been done sooner by giving its last row to another."""
    array = np.array(lengths, dtype=np.int32)
    shares = [assign_micro_batches(array, len(speeds), rank, None, worker_speeds=speeds) for rank in range(len(speeds))]
    rows = [[int(row) for rows in micro_batches for row in rows] for micro_batches in shares]
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    if len(set(speeds)) == 1:
        assert rows == [[int(row) for part in subset for row in part] for subset in shares_of(array, len(speeds), None)]
        return
    tokens = [sum(lengths[row] for row in share) for share in rows]
    for share, subset, speed in zip(rows, tokens, speeds, strict=True):
        if share:
            last = lengths[share[-1]]
            other_values = [(other + last) / entry for other, entry in zip(tokens, speeds, strict=True)]
            assert subset / speed <= min(other_values) + 1e-9


def test_a_worker_of_half_the_speed_gets_half_of_the_tokens() -> None:
    lengths = np.array([6, 5, 4, 3, 3, 3], dtype=np.int32)
    # 6 | 5 (by 11 or 10); 4 to the first (10 or 18); 3 to the first (13 or 16), 3 to both (16 or 16), 3 to the second.
    dealt = [
        [rows.tolist() for rows in assign_micro_batches(lengths, 2, rank, None, worker_speeds=(1.0, 0.5))]
        for rank in (0, 1)
    ]
    assert [sum(lengths[row] for rows in subset for row in rows) for subset in dealt] == [16, 8]
    at_random = assign_micro_batches(lengths, 2, 0, None, is_random=True, worker_speeds=(1.0, 0.5))
    assert [rows.tolist() for rows in at_random] == [[0, 2, 4]]  # what measures noise takes any rows


@pytest.mark.parametrize(
    ("rows", "most_rows", "most_tokens", "expected"),
    [
        (6, None, 100, [[0, 1, 2], [5, 4, 3]]),
        (5, None, 100, [[0, 1], [4, 3, 2]]),
        (6, 2, 100, [[0, 1], [5, 4], [3, 2]]),
        (6, None, 3, [[0, 1], [5], [4], [3], [2]]),
        (1, None, 100, [[0]]),
    ],
)
def test_a_worker_that_is_alone_measures_by_a_first_pass_of_half_of_the_rows(
    rows: int, most_rows: int | None, most_tokens: int, expected: list[list[int]]
) -> None:
    """A pass over all rows would tell nothing of the noise."""
    lengths = np.arange(1, rows + 1, dtype=np.int32)
    dealt = assign_micro_batches(lengths, 1, 0, most_rows, most_tokens, is_random=True)
    assert [entry.tolist() for entry in dealt] == expected


# ------------------------------------------------------------------------------------------------------------- ledger


def test_digest_of_an_update_is_over_its_number_and_its_rows_in_order() -> None:
    rows = np.array([1, 2**64 - 1], dtype=np.uint64)
    expected = hashlib.sha256(b"\x03" + bytes(7) + b"\x01" + bytes(7) + b"\xff" * 8).digest()
    assert hash_step_rows(3, rows) == expected
    assert hash_step_rows(4, rows) != expected
    assert hash_step_rows(3, rows[::-1]) != expected
    assert hash_step_rows(3, rows.astype(">u8")) == expected  # the same on a machine of the other byte order


def test_the_ledger_chains_the_updates_in_order() -> None:
    first, second = hash_step_rows(0, np.arange(3, dtype=np.uint64)), hash_step_rows(1, np.arange(3, dtype=np.uint64))
    genesis = bytes(32)
    link = chain_digest(chain_digest(genesis, first), second)
    assert link == hashlib.sha256(hashlib.sha256(genesis + first).digest() + second).digest()
    assert link != chain_digest(chain_digest(genesis, second), first)
