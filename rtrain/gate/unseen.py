"""Which rows say something of a candidate and its base: those that neither has learned from.

A candidate of another split of the same texts, as of another `data.fold`, was trained on rows that its base has held
out: it has learned their answers, which say nothing of other rows.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rtrain import score
from rtrain.artifact import Artifact
from rtrain.batch import Ints
from rtrain.data import overlap
from rtrain.data.records import Record
from rtrain.data.stores.store import Store
from rtrain.errors import UserError


def rows(candidate: Artifact, stores: Sequence[Store], split: str, positions: Ints) -> tuple[Ints, int | None]:
    """(those of the positions, in the first of `stores`, whose rows say something of the candidate; how many others
    there are, or None where the stores do not tell). `stores`: the candidate's own is among them, where it is there.

    Rows of its own store are all left, and so are those on which both sides were trained: neither has an advantage.
    Raises `UserError` where no row is left.
    """
    store, digest = stores[0], candidate.lineage.get("data_digest")
    if digest in (None, store.manifest.digest):
        return positions, 0
    own = next((one for one in stores if one.manifest.digest == digest), None)
    if own is None or not all(_has_keys(one, of) for one, of in ((store, split), (store, "train"), (own, "train"))):
        return positions, None
    keys = store.keys(split)[positions]
    both, mine = (overlap.seen([one.keys("train")], keys) for one in (store, own))
    left = positions[both | ~mine]
    if len(positions) and not len(left):
        raise UserError(
            f"the candidate was trained on each of the {len(positions):,} {split} rows of {store.folder}, by another "
            "split than its base's; write --data with a file of rows that neither has seen, or train both by one "
            "split (data.fold, data.test)"
        )
    return left, len(positions) - len(left)


def of_file(sides: Sequence[Artifact], stores: Sequence[Store], rows: Sequence[Record]) -> npt.NDArray[np.bool_] | None:
    """Which rows of a file are training or validation rows of a side; None where the store of one is not among
    `stores`, or kept no keys of texts."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for digest in {side.lineage.get("data_digest") for side in sides}:
        seen = score.find_seen_rows(next((one for one in stores if one.manifest.digest == digest), None), rows)
        if seen is None:
            return None
        found |= seen.either
    return found


def _has_keys(store: Store, split: str) -> bool:
    return len(store.keys(split)) == store.rows(split)
