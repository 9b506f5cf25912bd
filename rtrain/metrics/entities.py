"""Entities of tag sequences, and their precision, recall and F1: an entity counts where type, start and end are right.

The chunking is that of the CoNLL-2000 evaluation script and of seqeval's default mode, which is lenient: an I- tag that
follows no tag of its own type begins an entity. So BIO, IOB1 and IO are read alike, and a model that forgets a B- still
gets its entity. (seqeval's strict mode would drop such an entity.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, RaggedArray
from rtrain.metrics.sums import Floats, Ints, SumMetric, ratio

MISSING_WORD = -1000
"""Targets up to this one follow the targets of a row's tokens, in pairs, one pair per word without a token:
MISSING_WORD minus the word's position, and MISSING_WORD minus one more than its tag. Such a word is answered O, and its
tag counts."""


def encode_missing_words(positions: Ints, tags: Ints) -> Floats:
    """The targets of words without a token."""
    return MISSING_WORD - np.stack([positions, tags + 1], axis=1).reshape(-1).astype(np.float64)


def select_token_targets(targets: RaggedArray) -> RaggedArray:
    """The targets of tokens only, one for each."""
    is_token = targets.values > MISSING_WORD
    if is_token.all():
        return targets
    ends = np.concatenate([[0], np.cumsum(is_token)])[np.cumsum(targets.counts, dtype=np.int64)]
    return RaggedArray(targets.values[is_token], np.diff(ends, prepend=0).astype(np.int32))


def decode_true_tags(targets: Floats) -> tuple[Ints, Ints]:
    """(tag of each word, positions of the words without a token), from the targets of a row."""
    tags = targets[(targets > MISSING_WORD) & (targets != IGNORE_INDEX)].astype(np.int64)
    pairs = (MISSING_WORD - targets[targets <= MISSING_WORD].astype(np.int64)).reshape(-1, 2)
    return _insert_at(tags, pairs[:, 0], pairs[:, 1] - 1), pairs[:, 0]


def _insert_at(values: Ints, positions: Ints, new_values: Ints) -> Ints:
    """`values` with `new_values` inserted at `positions` of the result."""
    if not len(positions):
        return values
    merged_values = np.empty(len(values) + len(positions), dtype=values.dtype)
    merged_values[positions] = new_values
    merged_values[np.setdiff1d(np.arange(len(merged_values)), positions)] = values
    return merged_values


class Entity(NamedTuple):
    """Tokens `start` up to, and without, `end`."""

    type: str
    start: int
    end: int


class TypeScores(NamedTuple):
    """Scores of one entity type: `support` counts gold entities, `predicted` predicted ones."""

    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


def extract_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, in order. Tags are O, B-TYPE and I-TYPE; anything else is a `UserError`."""
    entities: list[Entity] = []
    start, current = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, type = tag.partition("-")
        if not (tag == "O" or (prefix in ("B", "I") and type)):
            raise UserError(
                f"tag {tag!r} of token {position} is not O, B-TYPE or I-TYPE; convert the tags to BIO", code="bad_tag"
            )
        if prefix == "B" or type != current:
            if current:
                entities.append(Entity(current, start, position))
            start, current = position, type
    return entities


def make_sum_metric(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> SumMetric:
    """micro precision, recall and f1, and macro f1 over the types that occur or are predicted; a row is a sentence.

    Both must have as many tags per sentence as there are tokens: fill a truncated prediction with O.
    """
    counts, types = _count_entities(true, predicted)
    return SumMetric(counts.reshape(len(true), 3 * len(types)), lambda sums: _compute_scores(sums, len(types)))


def compute_type_scores(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, TypeScores]:
    """The scores of each type, by name."""
    counts, types = _count_entities(true, predicted)
    true_positives, support, predicted_counts = counts.sum(axis=0)
    columns = (
        ratio(true_positives, predicted_counts),
        ratio(true_positives, support),
        ratio(2 * true_positives, support + predicted_counts),
    )
    return {
        name: TypeScores(float(precision), float(recall), float(f1), int(num_true), int(num_predicted))
        for name, precision, recall, f1, num_true, num_predicted in zip(
            types, *columns, support, predicted_counts, strict=True
        )
    }


def _count_entities(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[Floats, list[str]]:
    """(sentences, 3, types): correct, gold and predicted entities; and the types, sorted."""
    if len(true) != len(predicted):
        raise UserError(
            f"{len(true)} sentences, but tags were predicted for {len(predicted)}; give one list for each",
            code="different_rows",
        )
    sides: list[list[set[Entity]]] = []
    for row, (true_tags, predicted_tags) in enumerate(zip(true, predicted, strict=True)):
        if len(true_tags) != len(predicted_tags):
            raise UserError(
                f"sentence {row} has {len(true_tags)} tags, but {len(predicted_tags)} were predicted; give one per "
                "token",
                code="different_rows",
            )
        true_entities, predicted_entities = set(extract_entities(true_tags)), set(extract_entities(predicted_tags))
        sides.append([true_entities & predicted_entities, true_entities, predicted_entities])
    types = sorted({entity.type for _, true, predicted in sides for entity in true | predicted})
    column = {name: index for index, name in enumerate(types)}
    counts = np.zeros((len(sides), 3, len(types)))
    for row, three in enumerate(sides):
        for part, entity_set in enumerate(three):
            for entity in entity_set:
                counts[row, part, column[entity.type]] += 1
    return counts, types


def _compute_scores(sums: Floats, types: int) -> dict[str, Floats]:
    true_positives, support, predicted = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, types), -2, 0)
    present = ((support + predicted) > 0).sum(axis=-1)
    return {
        "precision": ratio(true_positives.sum(axis=-1), predicted.sum(axis=-1)),
        "recall": ratio(true_positives.sum(axis=-1), support.sum(axis=-1)),
        "f1": ratio(2 * true_positives.sum(axis=-1), (support + predicted).sum(axis=-1)),
        "macro_f1": ratio(ratio(2 * true_positives, support + predicted).sum(axis=-1), present),
    }
