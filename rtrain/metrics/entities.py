"""Entities of tag sequences, and their precision, recall and F1: an entity counts where type, start and end are right.

The chunking is that of the CoNLL-2000 evaluation script and of seqeval's default mode, which is lenient: an I- tag that
follows no tag of its own type begins an entity. So BIO, IOB1 and IO are read alike, and a model that forgets a B- still
gets its entity. (seqeval's strict mode would drop such an entity.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORED, Ragged
from rtrain.metrics.sums import Additive, Floats, Ints, ratio

MISSING = -1000
"""Targets up to this one stand behind those of a row's tokens, in pairs, one for each word without a token: MISSING
less the word's place, and MISSING less one more than its tag. Such a word is answered O, and its tag counts."""


def missing_words(places: Ints, tags: Ints) -> Floats:
    """The targets of words without a token."""
    return MISSING - np.stack([places, tags + 1], axis=1).reshape(-1).astype(np.float64)


def of_tokens(targets: Ragged) -> Ragged:
    """The targets of tokens alone, one for each."""
    kept = targets.values > MISSING
    if kept.all():
        return targets
    ends = np.concatenate([[0], np.cumsum(kept)])[np.cumsum(targets.counts, dtype=np.int64)]
    return Ragged(targets.values[kept], np.diff(ends, prepend=0).astype(np.int32))


def true_tags(targets: Floats) -> tuple[Ints, Ints]:
    """(tag of each word, places of the words without a token), from the targets of a row."""
    tags = targets[(targets > MISSING) & (targets != IGNORED)].astype(np.int64)
    pairs = (MISSING - targets[targets <= MISSING].astype(np.int64)).reshape(-1, 2)
    return _filled(tags, pairs[:, 0], pairs[:, 1] - 1), pairs[:, 0]


def _filled(values: Ints, places: Ints, others: Ints) -> Ints:
    """`values` with `others` among them, at `places` of the whole."""
    if not len(places):
        return values
    found = np.empty(len(values) + len(places), dtype=values.dtype)
    found[places] = others
    found[np.setdiff1d(np.arange(len(found)), places)] = values
    return found


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
            raise UserError(
                f"tag {tag!r} of token {position} is not O, B-TYPE or I-TYPE; convert the tags to BIO", code="bad_tag"
            )
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
        raise UserError(
            f"{len(true)} sentences, but tags were predicted for {len(predicted)}; give one list for each",
            code="different_rows",
        )
    sides: list[list[set[Entity]]] = []
    for row, (want, have) in enumerate(zip(true, predicted, strict=True)):
        if len(want) != len(have):
            raise UserError(
                f"sentence {row} has {len(want)} tags, but {len(have)} were predicted; give one per token",
                code="different_rows",
            )
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
