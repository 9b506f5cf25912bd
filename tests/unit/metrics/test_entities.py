"""Entity scores against arithmetic by hand, and against seqeval on any tags, also malformed ones."""

import warnings

import pytest
from hypothesis import given, settings, strategies as st
from seqeval.metrics.sequence_labeling import get_entities, precision_recall_fscore_support

from rtrain.core.errors import UserError
from rtrain.metrics import entities
from rtrain.metrics.entities import Entity
from tests.support.causes import caused_by


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O", [Entity("PER", 1, 3)]),
        ("B-PER B-PER", [Entity("PER", 0, 1), Entity("PER", 1, 2)]),
        ("I-PER I-PER I-LOC", [Entity("PER", 0, 2), Entity("LOC", 2, 3)]),  # IO: a change of type ends an entity
        ("I-PER B-PER I-PER", [Entity("PER", 0, 1), Entity("PER", 1, 3)]),  # IOB1
        ("B-PER I-LOC", [Entity("PER", 0, 1), Entity("LOC", 1, 2)]),  # malformed BIO: an I- of its own begins
        ("O I-PER", [Entity("PER", 1, 2)]),
        ("B-a-b I-a-b", [Entity("a-b", 0, 2)]),  # a type may hold a hyphen
        ("", []),
    ],
)
def test_entities(tags: str, expected: list[Entity]) -> None:
    assert entities.extract_entities(tags.split()) == expected


@pytest.mark.parametrize("tag", ["PER", "S-PER", "B-", "B", "o", "", "O-PER"])
def test_another_tag_is_refused_by_name(tag: str) -> None:
    with pytest.raises(UserError, check=caused_by("bad_tag")):
        entities.extract_entities(["O", tag])


TRUE = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O"]]
PREDICTED = [["B-PER", "I-PER", "O", "B-PER"], ["B-PER", "I-PER"]]


tag = st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "I-MISC"])
sentence = st.integers(0, 8).flatmap(
    lambda size: st.tuples(st.lists(tag, min_size=size, max_size=size), st.lists(tag, min_size=size, max_size=size))
)


@settings(max_examples=500, deadline=None)
@given(st.lists(sentence, min_size=1, max_size=4))
def test_scores_are_seqevals(rows: list[tuple[list[str], list[str]]]) -> None:
    true, predicted = [list(row[0]) for row in rows], [list(row[1]) for row in rows]
    for tags in true + predicted:
        assert [(name, start, end - 1) for name, start, end in entities.extract_entities(tags)] == get_entities(tags)
    actual_scores = entities.compute_type_scores(true, predicted)
    if not actual_scores:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where a type is never predicted
        micro = precision_recall_fscore_support(true, predicted, average="micro")
        macro = precision_recall_fscore_support(true, predicted, average="macro")
        each = precision_recall_fscore_support(true, predicted, average=None)
    scores = entities.make_sum_metric(true, predicted).scores()
    assert (scores["precision"], scores["recall"], scores["f1"]) == pytest.approx(micro[:3], abs=1e-12)
    assert scores["macro_f1"] == pytest.approx(macro[2], abs=1e-12)
    for column, values in enumerate(each[:3]):
        assert [row[column] for row in actual_scores.values()] == pytest.approx(list(values), abs=1e-12)
    assert [row.support for row in actual_scores.values()] == list(each[3])
