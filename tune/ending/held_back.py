"""The validation rows that steer no rung of a search: by them its end decides.

Whoever picks the best of several by some rows flatters it on these very rows (Cawley & Talbot 2010): so the rungs are
told the scores of one part, the steering rows, and the end is judged on the other, the held-back rows. A row's side is
a hash of its content, the same on every machine, in every start and with any number of workers.
"""

import numpy as np
import numpy.typing as npt

from rtrain.data.stores import columns
from rtrain.data.stores.store import Store
from rtrain.metrics.additive import Bools, Ints

KEY = np.uint64(0x5EA2C40F4E1DBAC7)
"""Makes this hash another one than any that a row's id may be used in."""
SPLIT = "valid"
FEW = 200
"""With fewer held-back rows than these, each seed of the end is judged on rows of its own (`judged.parts`)."""


def mask(row_ids: npt.NDArray[np.uint64], share: float) -> Bools:
    """Which of the validation rows are held back, (rows,); about that share of them.

    `row_ids` are those of all validation rows, in any order. Rows of equal texts and labels are on one side; those of
    equal texts and other labels may not be, since an id tells no text. Of two rows or more there is one on each side,
    unless the share is 0: then nothing is held back, and nothing of a single row.
    """
    if share == 0 or len(row_ids) < 2:
        return np.zeros(len(row_ids), dtype=np.bool_)
    first = columns.firsts(row_ids)
    draw = _mixed(first)
    held = draw < np.uint64(min(int(share * 2**64), 2**64 - 1))
    if held.all() == held.any():
        # By chance, of few rows: the one row that is nearest to the other side, with its equals unless there are none
        # but these, goes there.
        nearest = draw == (draw.max() if held.all() else draw.min())
        if nearest.all():
            nearest = row_ids == row_ids.max()
        held = held ^ nearest
    return held


def held(store: Store, share: float) -> Ints:
    """Positions of the held-back rows among the validation rows of a store."""
    return np.flatnonzero(mask(store.column(SPLIT, "row_id"), share))


def steering(store: Store, share: float) -> Ints:
    """Positions of the validation rows that steer the rungs."""
    return np.flatnonzero(~mask(store.column(SPLIT, "row_id"), share))


def _mixed(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits each: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    found = ids ^ KEY
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
