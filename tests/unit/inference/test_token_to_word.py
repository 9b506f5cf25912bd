"""Attributions of tokens to words and sentences: every character once, and nothing of the sum lost."""

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.ragged import EncodedRow, TokenWindow
from rtrain.core.text_segmentation import Span
from rtrain.inference import explainer
from rtrain.inference.explainer import AttributedSpan

TEXTS = [
    "Don't pay 1,250.50 for a well-known (bad) card!",
    "हिन्दी में लिखा है",
    "我的包裹在哪里\uff1f还没有到。",
    "cafe\u0301 👩‍👩‍👧 naïve_word",
    "  tabs\tand\nlines  ",
    "...",
    "x",
]


def cut(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXTS[0], ["Don't", "pay", "1,250.50", "for", "a", "well-known", "(", "bad", ")", "card", "!"]),
        (TEXTS[1], ["हिन्दी", "में", "लिखा", "है"]),
        (TEXTS[2], [*"我的包裹在哪里\uff1f还没有到。"]),
        ("ที่นี่ดี ครับ", ["ที่นี่ดี", "ครับ"]),
        ("ذَهَبَ مُحَمَّدٌ.", ["ذَهَبَ", "مُحَمَّدٌ", "."]),
        ("cafe\u0301 - 'quoted'", ["cafe\u0301", "-", "'", "quoted", "'"]),
        ("hi\u2764\ufe0fok 👩\u200d👩\u200d👧👍🏽🇩🇪", ["hi", "\u2764\ufe0f", "ok", "👩\u200d👩\u200d👧", "👍🏽", "🇩🇪"]),
        (TEXTS[4], ["tabs", "and", "lines"]),
        ("", []),
        (" \n", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert cut(text, explainer.word_spans(text)) == expected


@given(st.text() | st.text("aé\u0301ी3.,'-हक漢字\u200d\u200c\ufe0f👩🏽🇩\u0600 \x1c\n"))
@settings(deadline=None)
def test_words_are_every_character_that_is_no_blank_once(text: str) -> None:
    assert "".join(cut(text, explainer.word_spans(text))) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "tokens", "attributions", "expected"),
    [
        ("unpaid bill", [(0, 2), (2, 6), (7, 11)], [0.5, -0.125, 2.0], [(0, 6, 0.375), (7, 11, 2.0)]),  # summed
        ("(a) b", [(0, 3), (4, 5)], [1.0, 2.0], [(0, 3, 1.0), (4, 5, 2.0)]),  # a token over several words joins them
        # Windows overlap.
        ("a b c", [(0, 1), (2, 3), (2, 3), (4, 5)], [1.0, 2.0, 3.0, 4.0], [(0, 1, 1.0), (2, 3, 5.0), (4, 5, 4.0)]),
        # A word without tokens adds nothing; a word that was not read is not listed.
        ("a ! b c", [(0, 1), (4, 5)], [1.0, 2.0], [(0, 1, 1.0), (2, 3, 0.0), (4, 5, 2.0)]),
    ],
)
def test_attributions_of_words(
    text: str, tokens: list[Span], attributions: list[float], expected: list[tuple[int, int, float]]
) -> None:
    assert explainer.attribute_words(text, tokens, attributions) == expected


@pytest.mark.parametrize("blank", [(1, 2), (1, 1), (3, 4)])
def test_a_piece_of_blanks_keeps_its_share(blank: tuple[int, int]) -> None:
    parts = explainer.attribute_words("a b ", [(0, 1), blank, (2, 3)], [1.0, 4.0, 2.0])
    assert [(part.start, part.end) for part in parts] == [(0, 1), (2, 3)]
    assert [part.attribution for part in parts] == [1.0, 6.0]
    assert explainer.attribute_words("  ", [(0, 2)], [4.0]) == [AttributedSpan(0, 2, 4.0)]


def test_sentences_add_up_their_words() -> None:
    text = "One two. Three."
    parts = explainer.attribute_words(text, [(0, 3), (4, 7), (7, 8), (9, 14), (14, 15)], [1.0, 2.0, 4.0, 8.0, 16.0])
    assert explainer.attribute_sentences(text, parts) == [AttributedSpan(0, 8, 7.0), AttributedSpan(9, 15, 24.0)]
    assert explainer.attribute_sentences(text, parts[:3]) == [
        AttributedSpan(0, 8, 7.0)
    ]  # truncated text has no sentence
    assert explainer.attribute_sentences(text, []) == []


@pytest.mark.parametrize("typed", [True, False])
def test_tokens_know_their_text_with_and_without_token_types(typed: bool) -> None:
    """[CLS] a b [SEP] c [SEP], in two windows; RoBERTa's tokenizer gives no types, and two separators."""
    special = [True, False, False, True, False, True]
    window = TokenWindow(6, 4 if typed else 6)
    encoded = EncodedRow([0] * 12, [window, window], False, [(0, 0)] * 12)
    assert explainer.text_indices(encoded, special * 2, paired=True) == [-1, 0, 0, -1, 1, -1] * 2
    untyped = EncodedRow([0] * 6, [TokenWindow(6, 6)], False, [])
    assert explainer.text_indices(untyped, special, paired=False) == [-1, 0, 0, -1, 0, -1]
    roberta = [True, False, True, True, False, True]
    assert explainer.text_indices(untyped, roberta, paired=True) == [-1, 0, -1, -1, 1, -1]
