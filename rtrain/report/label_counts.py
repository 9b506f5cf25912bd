"""What the training rows are labelled with, as figures: for the first lines of a run, and for its report.

Targets are read in blocks: the rows of a large store would take more memory as whole numbers than its process may use.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Ints, Ragged
from rtrain.data.store.store import Store

BLOCK_ROWS = 1 << 18
MOST_ALIKE = 3
"""Most groups of labels that look alike that are named."""
MISSING = frozenset({"none", "na", "n/a", "null", "nan"})
"""Names, in small letters, that programs write in place of a missing value."""
MOST_NAMED, MOST, RAREST = 12, 6, 4
"""So many labels are named each with its count; of more, the most frequent and the rarest."""


def told(store: Store, output: str) -> list[dict[str, Any]]:
    """What a run's log says of its labels by the kind of output: one entry, for several heads one each. Its size does
    not depend on the number of labels."""
    names, rows = store.manifest.labels, store.labelled("train")
    if output == "classes":
        return [{"of": "labels", **_named(names, of_classes(store))}]
    if output == "labels":
        counts, each = of_labels(store)
        return [{"of": "labels", **_named(names, counts), "per_row": float(counts.sum() / rows), "without": each[0]}]
    if output == "heads":
        return [{"of": "labels", "head": head, **_named(own, counts)} for head, own, counts in of_heads(store)]
    if output == "number":
        return [{"of": "numbers", "rows": rows, **_spread(store)}]
    if output == "tags":
        found = of_entities(store)
        every = dict(zip(found.types, found.counts.tolist(), strict=True))
        return [{"of": "entities", **_named([*every], found.counts), "rows": rows, "marked": found.marked}]
    if output == "spans":
        return [{"of": "questions", "rows": rows, "answered": _answered(store)}]
    return []


def _named(names: Sequence[str], counts: Ints) -> dict[str, Any]:
    order = np.argsort(-counts, kind="stable")
    pairs = [[names[place], int(counts[place])] for place in order]
    found = alike([name for name, _ in pairs])
    told: dict[str, Any] = {"number": len(pairs), **({"alike": found[:MOST_ALIKE]} if found else {})}
    if missing := [name for name, _ in pairs if name.casefold() in MISSING]:
        told["missing"] = missing[:MOST_ALIKE]
    if len(pairs) <= MOST_NAMED:
        return {**told, "most": pairs, "rarest": []}
    return {**told, "most": pairs[:MOST], "rarest": pairs[-RAREST:]}


def alike(names: Iterable[str]) -> list[list[str]]:
    """Labels that a person takes for one: they differ in case, in blanks, in signs that are not shown, or in how
    Unicode writes the same letter. They stay apart, since nobody knows whether that is meant."""
    groups: dict[str, list[str]] = {}
    for name in names:
        shown = "".join(sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
        groups.setdefault(" ".join(shown.casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def of_classes(store: Store) -> Ints:
    """Training rows of each label."""
    size = len(store.manifest.labels)
    return sum((_counted(block.values, size) for block in _blocks(store)), np.zeros(size, dtype=np.int64))


def of_labels(store: Store) -> tuple[Ints, list[int]]:
    """(training rows of each label, training rows with 0, 1, 2, ... labels)."""
    size = len(store.manifest.labels)
    counts, each = np.zeros(size, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    for block in _blocks(store):
        given = block.matrix(size) > 0
        counts += given.sum(axis=0)
        each += np.bincount(given.sum(axis=1), minlength=size + 1)
    return counts, each.tolist()


def of_heads(store: Store) -> list[tuple[str, list[str], Ints]]:
    """(name, own labels, training rows of each) of every head."""
    sizes, start, found = store.manifest.facts["heads"], 0, []
    for name, size in sizes:
        own = [label.removeprefix(f"{name}=") for label in store.manifest.labels[start : start + size]]
        found.append((name, own, np.zeros(size, dtype=np.int64)))
        start += size
    for block in _blocks(store):
        for (_, own, counts), column in zip(found, block.matrix(len(sizes)).T, strict=True):
            counts += _counted(column, len(own))
    return found


class Entities(NamedTuple):
    types: tuple[str, ...]
    """Those that occur, the most frequent first."""
    counts: Ints
    marked: int
    """Training rows with an entity."""


def of_entities(store: Store) -> Entities:
    """Entities of the training rows by type. They begin at B- tags; where a file has none of these (IO), at the first
    I- behind another tag."""
    labels = store.manifest.labels
    types = sorted({label[2:] for label in labels if label != "O"})
    kind = np.array([-1 if label == "O" else types.index(label[2:]) for label in labels])
    begins = np.array([label.startswith("B-") for label in labels])
    counts, marked = np.zeros(len(types), dtype=np.int64), 0
    for block in _blocks(store):
        tagged = block.values >= 0  # the rest are no words, or words whose tag training lacks
        tags = block.values[tagged].astype(np.int64)
        rows = np.repeat(np.arange(len(block)), block.counts)[tagged]
        own = kind[tags]
        same = np.zeros(len(tags), dtype=np.bool_)
        same[1:] = (own[1:] == own[:-1]) & (rows[1:] == rows[:-1])
        first = (own >= 0) & (begins[tags] | ~same)
        counts += np.bincount(own[first], minlength=len(types))
        marked += len(np.unique(rows[first]))
    order = [int(place) for place in np.argsort(-counts, kind="stable") if counts[place]]
    return Entities(tuple(types[place] for place in order), counts[order], marked)


def _spread(store: Store) -> Mapping[str, float]:
    """Lowest, highest and mean target."""
    lows, highs, sums = zip(
        *((block.values.min(), block.values.max(), block.values.sum(dtype=np.float64)) for block in _blocks(store)),
        strict=True,
    )
    return {"low": float(min(lows)), "high": float(max(highs)), "mean": float(sum(sums) / store.labelled("train"))}


def _answered(store: Store) -> int:
    """Training questions with an answer in some window: a first and a last token, 0 and 0 where it is not there."""
    found = 0
    for block in _blocks(store):
        rows = np.repeat(np.arange(len(block)), block.counts)
        found += len(np.unique(rows[1::2][block.values[1::2] > 0]))
    return found


def _blocks(store: Store) -> Iterator[Ragged]:
    rows = store.labelled("train")
    for start in range(0, rows, BLOCK_ROWS):
        yield store.targets("train", np.arange(start, min(start + BLOCK_ROWS, rows)))


def _counted(values: npt.NDArray[Any], size: int) -> Ints:
    places = values[values >= 0].astype(np.int64)
    return np.bincount(places, minlength=size)
