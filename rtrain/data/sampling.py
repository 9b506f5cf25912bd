"""Mix of the training rows by the values of a column (`data.sampling`): how many rows of each value an epoch draws, and
which.

A value of n rows gets a share of an epoch in proportion to n^temperature, as in multilingual pretraining (Conneau and
Lample 2019, arXiv:1901.07291). An epoch has as many rows as there are training rows. The rows of a value are drawn from
permutations of them, one after another, across epochs: after any number of epochs the rows of a value
have been drawn equally often, but for one time. All is a pure function of (digest, seed, sizes of the values, step).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from rtrain.config import Recipe
from rtrain.core.ragged import Ints
from rtrain.data.order import RowOrder, permute
from rtrain.data.store.store import Store, open_store


@dataclass(frozen=True)
class SampledOrder(RowOrder):
    """The rows of every step, drawn by the values of a column."""

    sizes: tuple[int, ...]
    """Rows of each value."""
    temperature: float
    store: Path | None
    """Folder of the token store, which has the rows of each value. None: the rows of each value are consecutive."""

    @property
    def planned_digest(self) -> str:
        parts = astuple(self)[:-1]  # the digest names the store
        return hashlib.sha256(repr(("sampled", *parts)).encode()).hexdigest()[:16]

    @cached_property
    def quotas(self) -> Ints:
        """Rows of each value in an epoch."""
        return compute_quotas(self.sizes, self.temperature)

    @lru_cache(maxsize=1)  # noqa: B019 - a few numbers
    def positions(self, step: int) -> Ints:
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        places = np.arange(start, min(start + self.global_batch_size, self.rows), dtype=np.uint64)
        slots = permute(places, self.rows, self._derive_key(epoch, "sample")).astype(np.int64)
        ends = np.cumsum(self.quotas)
        groups, positions = np.searchsorted(ends, slots, side="right"), np.empty(len(slots), dtype=np.int64)
        group_starts = np.cumsum(self.sizes) - self.sizes
        # The draws of a value are numbered through all epochs: each permutation has as many as the value has rows.
        draws = epoch * self.quotas[groups] + slots - (ends - self.quotas)[groups]
        cycles, offsets = np.divmod(draws, np.array(self.sizes)[groups])
        for group, cycle in np.unique(np.stack([groups, cycles], axis=1), axis=0).tolist():
            is_member = (groups == group) & (cycles == cycle)
            key = self._derive_key(cycle, f"value {group}")
            members = permute(offsets[is_member].astype(np.uint64), self.sizes[group], key).astype(np.int64)
            positions[is_member] = group_starts[group] + members
        positions = positions if self.store is None else open_store(self.store).sampling_groups.members[positions]
        positions.setflags(write=False)
        return positions

    def find_wrong_draws(self, draws: Ints, step: int) -> tuple[int, int]:
        """(draws too many, draws too few) if the row at each position was drawn so often in the first `step` steps."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        too_many = too_few = 0
        members = np.arange(self.rows) if self.store is None else open_store(self.store).sampling_groups.members
        for rows, quota in zip(np.split(members, np.cumsum(self.sizes)[:-1]), self.quotas.tolist(), strict=True):
            min_draws, max_draws = epochs * quota, (epochs + bool(rest)) * quota
            counts, total = draws[rows], int(draws[rows].sum())
            too_many += max(0, total - max_draws) + int((counts > -(-max_draws // len(rows))).sum())
            too_few += max(0, min_draws - total) + int((counts < min_draws // len(rows)).sum())
        return too_many, too_few


def compute_quotas(sizes: Sequence[int], temperature: float) -> Ints:
    """Rows of each value in an epoch of sum(sizes) rows: shares in proportion to size^temperature, rounded by the
    largest remainders, so that they add up."""
    total, powers = sum(sizes), np.array(sizes, dtype=np.float64) ** temperature
    exact = powers * (total / powers.sum())
    quotas: Ints = np.floor(exact + 1e-9).astype(np.int64)
    missing = total - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    return quotas


def make_order(recipe: Recipe, store: Store) -> RowOrder:
    """The order of a run's rows."""
    arguments = (
        *(store.manifest.digest, store.num_rows("train"), recipe.global_batch_size),
        *(recipe.train.epochs, recipe.train.seed),
    )
    if recipe.data.sampling is None:
        return RowOrder(*arguments)
    return SampledOrder(*arguments, store.sampling_groups.sizes, recipe.data.sampling.temperature, store.folder)
