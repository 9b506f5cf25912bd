"""Sentences of texts with and without capitals, of titles and initials, of several scripts."""

import pytest

from rtrain.core.text_segmentation import find_sentence_spans


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Dr. Who paid 3.5 e.g. for J. Smith. End", ["Dr. Who paid 3.5 e.g. for J. Smith.", "End"]),
        ("A title\n\nand a line\nanother", ["A title", "and a line", "another"]),
        ("我在哪里\uff1f还没到。好", ["我在哪里\uff1f", "还没到。", "好"]),
        (
            "small letters only. so what? e.g. nothing. dr. who",
            ["small letters only.", "so what?", "e.g. nothing.", "dr. who"],
        ),
        ("वह आया। वह गया॥ अंत", ["वह आया।", "वह गया॥", "अंत"]),
        ("هل جاء؟ نعم.", ["هل جاء؟", "نعم."]),
        ("no end", ["no end"]),
        (" \n ", []),
    ],
)
def test_sentences_are_found(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in find_sentence_spans(text)] == expected
