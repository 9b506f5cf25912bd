"""A trimmed vocabulary: kept tokens, their new numbers, and unchanged splits of texts with kept tokens only."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings, strategies as st
from tokenizers import models

from rtrain.core.errors import UserError
from rtrain.models import vocab_trimming
from tests.support.tiny import CORPUS
from tests.support.vocabularies import KINDS, ROWS, STRANGE, Cut, cut_of


@pytest.fixture(scope="module", params=KINDS)
def cut(request: pytest.FixtureRequest) -> Cut:
    return cut_of(request.param)


def test_every_training_row_has_the_same_pieces(cut: Cut) -> None:
    assert len(cut.ids) < len(vocab_trimming.tokens_by_id(cut.document)), "nothing was cut"
    for row in ROWS:
        assert cut.old(row) == cut.whole.encode(row).ids
        pair = cut.small.encode(row, ROWS[0]), cut.whole.encode(row, ROWS[0])
        assert [cut.ids[number] for number in pair[0].ids] == pair[1].ids
        assert pair[0].type_ids == pair[1].type_ids


def test_new_numbers_are_those_of_the_pieces_one_to_one(cut: Cut) -> None:
    before, after = vocab_trimming.tokens_by_id(cut.document), vocab_trimming.tokens_by_id(cut.after)
    assert sorted(after) == list(range(len(cut.ids))) == list(range(cut.small.get_vocab_size()))
    assert len(set(cut.ids)) == len(cut.ids)
    assert [after[place] for place in range(len(cut.ids))] == [before[number] for number in cut.ids]
    assert cut.small.get_vocab() == {piece: number for number, piece in after.items()}


@pytest.mark.parametrize("text", [*STRANGE, *CORPUS])
def test_texts_of_other_words_fall_apart_and_are_no_error(cut: Cut, text: str) -> None:
    before, after = cut.whole.encode(text), cut.small.encode(text)
    assert len(after.ids) >= len(before.ids)
    assert all(number < len(cut.ids) for number in after.ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(" ".join(CORPUS).split()), max_size=12).map(" ".join))
@example(text="".join(STRANGE))
def test_any_text_of_kept_pieces_is_read_as_before(kind: str, text: str) -> None:
    cut = cut_of(kind)
    before = cut.whole.encode(text).ids
    after = cut.old(text)
    if set(before) <= set(cut.ids):
        assert after == before
    else:
        assert after != before


def test_all_ways_to_a_piece_are_kept() -> None:
    """`abc` is a + bc and ab + c; whichever a text takes, its parts are there."""
    merges = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"], ["x", "y"]]
    names = ["a", "b", "c", "x", "y", "ab", "bc", "abc", "xy"]
    model = {"type": "BPE", "vocab": {name: place for place, name in enumerate(names)}, "merges": merges}
    ids = vocab_trimming.select_ids({"model": model}, [names.index("abc")])
    assert [names[number] for number in ids] == ["a", "b", "c", "x", "y", "ab", "bc", "abc"]
    old = {"model": {**model, "merges": [" ".join(pair) for pair in merges]}}
    for document, expected in (({"model": model}, merges[:4]), (old, ["a b", "b c", "ab c", "a bc"])):
        assert vocab_trimming.renumber(document, ids)["model"]["merges"] == expected


def test_a_vocabulary_is_filled_up_in_its_own_order() -> None:
    names = ["[PAD]", "[UNK]", "[unused0]", "a", "##a", "the", "of", "rare", "and"]
    model = {"type": "WordPiece", "vocab": {name: place for place, name in enumerate(names)}, "unk_token": "[UNK]"}
    document = {"model": {**model, "continuing_subword_prefix": "##"}, "added_tokens": [{"id": 0, "content": "[PAD]"}]}
    for at_least, expected in ((0, "rare"), (6, "the rare"), (7, "the of rare"), (99, "the of rare and")):
        ids = vocab_trimming.select_ids(document, [names.index("rare")], at_least)
        assert [names[number] for number in ids] == ["[PAD]", "[UNK]", "a", "##a", *expected.split()]


def test_of_more_pieces_than_are_wanted_the_first_stay() -> None:
    """The used ids are ordered by frequency; no token is added beside them."""
    names = ["[PAD]", "[UNK]", "a", "##a", "the", "of", "rare", "and"]
    model = {"type": "WordPiece", "vocab": {name: place for place, name in enumerate(names)}, "unk_token": "[UNK]"}
    document = {"model": {**model, "continuing_subword_prefix": "##"}, "added_tokens": [{"id": 0, "content": "[PAD]"}]}
    used = [names.index(name) for name in ("and", "a", "of", "rare")]
    for maximum, expected in (
        (4, ""),
        (5, "and"),
        (6, "of and"),
        (7, "of rare and"),
        (8, "the of rare and"),
        (99, "the of rare and"),
    ):
        ids = vocab_trimming.select_ids(document, used, min_size=99, max_size=maximum)
        assert [names[number] for number in ids] == ["[PAD]", "[UNK]", "a", "##a", *expected.split()]
    with pytest.raises(UserError, check=lambda error: error.code == "out_of_range"):
        vocab_trimming.select_ids(document, used, max_size=3)


def test_the_padding_keeps_its_number() -> None:
    """RoBERTa counts positions from it: with another, every text would be read at other places."""
    names = ["<s>", "##", "xx", "<pad>", "</s>", "<unk>", "a", "b"]
    model = {"type": "WordPiece", "vocab": {name: place for place, name in enumerate(names)}, "unk_token": "<unk>"}
    document = {"model": {**model, "continuing_subword_prefix": "##"}, "added_tokens": []}
    assert vocab_trimming.select_ids(document, [0], extra_ids=[3], pad_id=3) == [0, 5, 6, 3, 7]
    assert vocab_trimming.select_ids(document, [0], extra_ids=[3]) == [0, 3, 5, 6, 7]


def test_the_price_of_an_unknown_character_stays() -> None:
    cut = cut_of("unigram")
    lowest = min(score for _, score in cut.document["model"]["vocab"])
    assert lowest == min(score for _, score in cut.after["model"]["vocab"])
    assert cut.after["model"]["vocab"][cut.after["model"]["unk_id"]][0] == "<unk>"


@pytest.mark.parametrize("model", [models.WordLevel({"a": 0}, unk_token="a"), models.Unigram([("a", -1.0)])])
def test_a_tokenizer_that_cannot_be_cut_is_refused(model: Any) -> None:
    document = json.loads(tokenizers.Tokenizer(model).to_str())
    with pytest.raises(UserError, check=lambda error: error.code == "unsupported"):
        vocab_trimming.select_ids(document, [0])
