"""Words of running text as annotators cut them, in any script."""

import itertools
import re

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.text_segmentation import find_word_cuts, find_word_spans, join_words


def cut(text: str) -> list[str]:
    return [text[start:end] for start, end in find_word_spans(text)]


@pytest.mark.parametrize(
    ("words", "cuts", "running", "expected"),
    [
        # Every sign is a word.
        (
            ["Siemens", "AG", "'", "s", "e", "-", "mail", "."],
            {"cut_before": "'-.", "cut_after": "'-."},
            "Siemens AG's e-mail.",
            ["Siemens", "AG", "'", "s", "e", "-", "mail", "."],
        ),
        # Contractions apart from their words.
        (
            ["Siemens", "AG", "'s", "e-mail"],
            {"cut_before": "'"},
            "Siemens AG's e-mail",
            ["Siemens", "AG", "'s", "e-mail"],
        ),
        (["It", "is", "O'Brien", "'s", "car"], {}, "It is O'Brien's car", ["It", "is", "O'Brien's", "car"]),
        (["(", "1", ",", "200", ")", ",", "no"], {"cut_before": "(),", "cut_after": "(),"}, "(1,200), no", None),
    ],
)
def test_running_text_is_cut_as_the_rows_are(
    words: list[str], cuts: dict[str, str], running: str, expected: list[str] | None
) -> None:
    assert find_word_cuts(words) == cuts
    text, spans = join_words(words)
    assert text == running
    assert [text[start:end] for start, end in spans] == words
    assert [text[start:end] for start, end in find_word_spans(text, **cuts)] == (expected or words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("हिन्दी में लिखा है।", ["हिन्दी", "में", "लिखा", "है", "।"]),
        ("ที่นี่ดี (ครับ)", ["ที่นี่ดี", "(", "ครับ", ")"]),
        ("ذَهَبَ مُحَمَّدٌ إِلَى البَيْتِ.", ["ذَهَبَ", "مُحَمَّدٌ", "إِلَى", "البَيْتِ", "."]),
        ("cafe\u0301, Zoe\u0308!", ["cafe\u0301", ",", "Zoe\u0308", "!"]),
        ("نمی\u200cشود അവന്\u200d", ["نمی\u200cشود", "അവന്\u200d"]),
        # A heart that was made coloured is no mark of the word before it.
        ("hi\u2764\ufe0f 👍🏽👍🏽", ["hi", "\u2764\ufe0f", "👍🏽", "👍🏽"]),
        ("👩\u200d👩\u200d👧🇩🇪🇫🇷 1\ufe0f\u20e3", ["👩\u200d👩\u200d👧", "🇩🇪", "🇫🇷", "1\ufe0f\u20e3"]),
        (
            "@user: see https://t.co/Ab1, #Tag's...",
            ["@", "user", ":", "see", "https://t.co/Ab1", ",", "#", "Tag's", *"..."],
        ),
        ("(U.S.) don't, 3.5%", ["(", "U.S", ".", ")", "don't", ",", "3.5", "%"]),
        ("\u0301a \u200bb", ["\u0301", "a", "\u200b", "b"]),
        (" \n\t", []),
    ],
)
def test_letters_keep_their_marks_and_emoji_are_whole(text: str, expected: list[str]) -> None:
    assert cut(text) == expected


@given(st.text(st.characters(codec="latin-1") | st.sampled_from("abcжйλ .,'-()#@/:_123"), max_size=40))
@settings(deadline=None)
def test_without_marks_they_are_runs_from_letter_to_letter(text: str) -> None:
    text = re.sub(r"[\x00-\x1f\x7f-\xa0\xad]", " ", text)
    assert cut(text) == re.findall(r"\w(?:\S*\w)?|[^\w\s]", text)


@given(st.text() | st.text("aé\u0301ी3.,'-हक漢字\u200d\u200c\ufe0f👩🏽🇩\u0600 \n"))
@settings(deadline=None)
def test_every_character_that_is_no_blank_is_in_one_word(text: str) -> None:
    spans = find_word_spans(text)
    assert [end for _, end in spans] == sorted({end for _, end in spans})
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    covered = {place for start, end in spans for place in range(start, end)}
    assert all(place in covered or character.isspace() for place, character in enumerate(text))
