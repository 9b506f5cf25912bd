"""Entities of tag sequences, and their precision, recall and F1: an entity counts where type, start and end are right.

The chunking is that of the CoNLL-2000 evaluation script and of seqeval's default mode, which is lenient: an I- tag that
follows no tag of its own type begins an entity. So BIO, IOB1 and IO are read alike, and a model that forgets a B- still
gets its entity. (seqeval's strict mode would drop such an entity.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, Head, RaggedArray
from rtrain.metrics.bootstrap import Bools, Floats, Ints, SumMetric, combine_metrics, ratio
from rtrain.metrics.classification import ClassScores, build_calibration_table, list_class_scores, sort_classes

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


def extract_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, in order. Tags are O, B-TYPE and I-TYPE; anything else is a `UserError`."""
    entities: list[Entity] = []
    start, current = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, type = tag.partition("-")
        if not (tag == "O" or (prefix in ("B", "I") and type)):
            problem = f"tag {tag!r} of token {position} is not O, B-TYPE or I-TYPE; convert the tags to BIO"
            raise UserError(problem, code="bad_tag")
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


def compute_type_scores(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, ClassScores]:
    """The scores of each type, by name; `support` counts gold entities, `predicted` predicted ones."""
    counts, types = _count_entities(true, predicted)
    return dict(zip(types, list_class_scores(*counts.sum(axis=0)), strict=True))


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


# ------------------------------------------------------------------------------------------------ the output `tags`


class WordResults(NamedTuple):
    """Results of a row's words, [words] each: the columns of its row result."""

    tag: Any
    """Number of the predicted tag."""
    probability: Any
    """NaN for a word without a token."""
    loss: Any

    @classmethod
    def from_row(cls, row_result: Floats) -> "WordResults":
        return cls(*row_result.reshape(-1, len(cls._fields)).T)


def to_tag_names(tag_ids: Any, head: Head) -> list[str]:
    """Tags by number. A tag that the head lacks (-1) is shown as O: no prediction of it can be right."""
    return [head.labels[int(tag_id)] if tag_id >= 0 else "O" for tag_id in tag_ids]


def _collect_tags(row_results: RaggedArray, targets: RaggedArray) -> list[tuple[Ints, Floats]]:
    """For each row the true and the predicted tag numbers of its words."""
    return [
        (decode_true_tags(row_targets)[0], WordResults.from_row(row).tag)
        for row, row_targets in zip(row_results, targets, strict=True)
    ]


def _name_tags(pairs: list[tuple[Ints, Floats]], head: Head) -> tuple[list[list[str]], list[list[str]]]:
    """The names of the true and of the predicted tags."""
    return [to_tag_names(true, head) for true, _ in pairs], [to_tag_names(predicted, head) for _, predicted in pairs]


def make_tags_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Precision, recall and F1 of whole entities (type, start and end right), and the share of words with the right
    tag."""
    pairs = _collect_tags(row_results, targets)
    sums = np.array([((true == predicted).sum(), len(true)) for true, predicted in pairs], dtype=np.float64)
    words = SumMetric(sums.reshape(-1, 2), lambda total: {"word_accuracy": ratio(total[..., 0], total[..., 1])})
    return combine_metrics(make_sum_metric(*_name_tags(pairs, head)), words)


def build_tag_tables(row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
    pairs = _collect_tags(row_results, targets)
    types = compute_type_scores(*_name_tags(pairs, head))
    confidence = WordResults.from_row(row_results.values).probability
    is_correct = np.concatenate([np.empty(0, np.bool_), *(true == predicted for true, predicted in pairs)])
    begins = np.cumsum([0, *(len(true) for true, _ in pairs)])
    missing_by_row = [begin + decode_true_tags(row)[1] for begin, row in zip(begins, targets, strict=False)]
    missing = np.concatenate([*missing_by_row, np.empty(0, np.int64)])
    # The model has not read these words, and has no confidence in them.
    return {
        **sort_classes([{"class": name, **scores._asdict()} for name, scores in types.items()]),
        "calibration": build_calibration_table(np.delete(confidence, missing), np.delete(is_correct, missing)),
        **({"words_without_tokens": len(missing)} if len(missing) else {}),
    }


def mark_correct_tags(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Bools:
    """The tag of every word."""
    pairs = _collect_tags(row_results, targets)
    return np.array([bool((true == predicted).all()) for true, predicted in pairs], dtype=np.bool_)
