"""Entities of tag sequences, and their precision, recall and F1: an entity counts where type, start and end are right.

The chunking is that of the CoNLL-2000 evaluation script and of seqeval's default mode, which is lenient: an I- tag that
follows no tag of its own type begins an entity. So BIO, IOB1 and IO are read alike, and a model that forgets a B- still
gets its entity. (seqeval's strict mode would drop such an entity.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rtrain.errors import UserError
from rtrain.metrics.additive import Additive, Floats, ratio


class Entity(NamedTuple):
    """Tokens `start` up to, and without, `end`."""

    type: str
    start: int
    end: int


class TypeScores(NamedTuple):
    """Entities of one type: `support` are in the truth, `predicted` were found, rightly or not."""

    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, in order. Tags are O, B-TYPE and I-TYPE; anything else is a `UserError`."""
    found: list[Entity] = []
    start, current = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, type = tag.partition("-")
        if not (tag == "O" or (prefix in ("B", "I") and type)):
            raise UserError(f"tag {tag!r} of token {position} is not O, B-TYPE or I-TYPE; convert the tags to BIO")
        if prefix == "B" or type != current:
            if current:
                found.append(Entity(current, start, position))
            start, current = position, type
    return found


def additive(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Additive:
    """micro precision, recall and f1, and macro f1 over the types that occur or are predicted; a row is a sentence.

    Both must have as many tags per sentence as there are tokens: a truncated prediction has to be filled up with O.
    """
    counts, types = _counts(true, predicted)
    return Additive(counts.reshape(len(true), 3 * len(types)), lambda sums: _scores(sums, len(types)))


def per_type(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, TypeScores]:
    """The scores of each type, by name."""
    counts, types = _counts(true, predicted)
    right, support, found = counts.sum(axis=0)
    columns = (ratio(right, found), ratio(right, support), ratio(2 * right, support + found))
    return {
        name: TypeScores(float(precision), float(recall), float(f1), int(have), int(given))
        for name, precision, recall, f1, have, given in zip(types, *columns, support, found, strict=True)
    }


def _counts(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[Floats, list[str]]:
    """(sentences, 3, types): entities that are right, that are true, that are predicted; and the types, sorted."""
    if len(true) != len(predicted):
        raise UserError(f"{len(true)} sentences, but tags were predicted for {len(predicted)}; give one list for each")
    sides: list[list[set[Entity]]] = []
    for row, (want, have) in enumerate(zip(true, predicted, strict=True)):
        if len(want) != len(have):
            raise UserError(f"sentence {row} has {len(want)} tags, but {len(have)} were predicted; give one per token")
        wanted, given = set(entities(want)), set(entities(have))
        sides.append([wanted & given, wanted, given])
    types = sorted({entity.type for _, wanted, given in sides for entity in wanted | given})
    column = {name: index for index, name in enumerate(types)}
    counts = np.zeros((len(sides), 3, len(types)))
    for row, three in enumerate(sides):
        for part, found in enumerate(three):
            for entity in found:
                counts[row, part, column[entity.type]] += 1
    return counts, types


def _scores(sums: Floats, types: int) -> dict[str, Floats]:
    right, support, found = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, types), -2, 0)
    present = ((support + found) > 0).sum(axis=-1)
    return {
        "precision": ratio(right.sum(axis=-1), found.sum(axis=-1)),
        "recall": ratio(right.sum(axis=-1), support.sum(axis=-1)),
        "f1": ratio(2 * right.sum(axis=-1), (support + found).sum(axis=-1)),
        "macro_f1": ratio(ratio(2 * right, support + found).sum(axis=-1), present),
    }
