"""CoNLL files to sentences: columns, tag schemes, and what each bad line says."""

import io

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.data.formats import conll
from rtrain.data.formats.conll import Sentence
from rtrain.errors import UserError
from rtrain.metrics import entities


def read(content: str | bytes, token: int = 1, tag: int = -1) -> list[Sentence]:
    raw = content if isinstance(content, bytes) else content.encode()
    return list(conll.read(io.BytesIO(raw), token, tag))


ANNA = Sentence(1, ("Anna", "Berg", "left"), ("B-PER", "I-PER", "O"), None)


@pytest.mark.parametrize(
    "content",
    [
        "Anna\tB-PER\nBerg\tI-PER\nleft\tO\n",
        "Anna B-PER\nBerg   I-PER \nleft O",
        "Anna\tB-PER \r\nBerg\tI-PER\r\nleft\tO\r\n\r\n",
        "\ufeffAnna\tB-PER\nBerg\tI-PER\nleft\tO\n\n \n\t\n\n",
        "Anna NNP x I-PER\nBerg NNP x I-PER\nleft VBD x O\n",  # IO, in the form of CoNLL-2003
    ],
    ids=["tabs", "blanks", "windows", "byte-order-mark", "four-columns"],
)
def test_one_sentence(content: str) -> None:
    assert read(content) == [ANNA]


def test_sentences_end_at_empty_lines_and_at_document_lines() -> None:
    rows = read("-DOCSTART- -X- O O\n\na x O\n\n\nb x O\nc x O\n-DOCSTART- -X- O O\nd x O\n")
    assert [(row.line, row.tokens) for row in rows] == [(3, ("a",)), (6, ("b", "c")), (9, ("d",))]
    assert read("\n\n-DOCSTART-\n\n") == []


def test_columns_are_chosen_by_number() -> None:
    content = "1\tAnna\tI-PER\tx\n2\tleft\tO\ty\n"
    assert read(content, token=2, tag=3) == [Sentence(1, ("Anna", "left"), ("B-PER", "O"), None)]
    assert read(content, token=-3, tag=-2) == read(content, token=2, tag=3)
    with pytest.raises(UserError, match="there is no column 0"):
        read(content, token=0)


def test_a_token_keeps_characters_at_which_python_would_cut() -> None:
    odd = "a\N{NO-BREAK SPACE}b\N{LINE SEPARATOR}c\x85"
    assert read(f"{odd} O\n")[0].tokens == (odd,)
    assert read(f"New York\tB-LOC\n{odd}\tO\n")[0].tokens == ("New York", odd)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-X I-X O I-X", "B-X I-X O B-X"),
        ("I-X I-X I-Y O", "B-X I-X B-Y O"),  # IO
        ("I-X B-X I-X", "B-X B-X I-X"),  # IOB1: a B- where an entity touches one of its own type
        ("B-X I-Y I-Y", "B-X B-Y I-Y"),
        ("", ""),
    ],
)
def test_to_bio(tags: str, expected: str) -> None:
    assert " ".join(conll.to_bio(tags.split())) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), max_size=10))
def test_to_bio_keeps_the_entities_and_is_strict_bio(tags: list[str]) -> None:
    found = conll.to_bio(tags)
    assert entities.entities(found) == entities.entities(tags)
    assert conll.to_bio(found) == found
    for before, tag in zip(["O", *found], found, strict=False):
        assert not tag.startswith("I-") or before[1:] == tag[1:]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lonely", "has 1 column instead of 2; separate columns by one tab, or by blanks"),
        ("New York\tx\tO", "has 3 columns instead of 2; separate columns by one tab, or by blanks"),
        ("\tO", "has an empty token; write one or remove the line"),
        ("Anna\tPER", "has the tag 'PER', not O, B-TYPE or I-TYPE; write BIO tags in the last column"),
        ("Anna\tS-PER", "has the tag 'S-PER', not O, B-TYPE or I-TYPE; write BIO tags in the last column"),
        ("Anna\tB-", "has the tag 'B-', not O, B-TYPE or I-TYPE; write BIO tags in the last column"),
        ("An\rna\tO", "holds a carriage return; end lines by a newline"),
    ],
)
def test_a_bad_line_refuses_its_sentence_only(line: str, told: str) -> None:
    rows = read(f"a\tO\n\nb\tO\n{line}\nc\tB-\n\nd\tO\n")
    assert [(row.line, row.tokens) for row in rows] == [(1, ("a",)), (3, ()), (7, ("d",))]
    assert rows[1].reason == f"line 4 {told}"  # the first of its bad lines
    assert rows[1].tags == ()


def test_a_column_that_no_line_has_is_told() -> None:
    [row] = read("a O\nb O\n", tag=4)
    assert row.reason == "line 1 has 2 columns: no column 4; name the columns by their numbers"


def test_a_bad_first_line_does_not_set_the_number_of_columns() -> None:
    first, second = read("title\n\na O\n", token=2)[0], read("title\n\na O\n", token=1, tag=2)[1]
    assert first.reason == "line 1 has 1 column: no column 2; name the columns by their numbers"
    assert second == Sentence(3, ("a",), ("O",), None)


def test_bytes_that_are_not_utf8_refuse_their_sentence_only() -> None:
    bad, good = read(b"caf\xe9\tO\n\nb\tO\n")
    assert bad.reason == "line 1 is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8, or from utf-16"
    assert good.tokens == ("b",)
    assert all(row.reason for row in read("a O\n".encode("utf-16")))


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_crash_it(content: bytes) -> None:
    for row in read(content):
        assert (row.reason is None) == bool(row.tokens)
        assert len(row.tokens) == len(row.tags)


def test_a_first_column_that_counts_the_words_is_refused() -> None:
    rows = b"1\tAnna\tB-PER\tO\n2\tis\tO\tO\n3\there\tO\tO\n\n"
    [sentence] = conll.read(io.BytesIO(rows))
    assert sentence.reason is not None
    assert sentence.reason.startswith("its first column counts the words; write the words in the first column")
    assert next(conll.read(io.BytesIO(b"1\tO\n2\tO\n3\tO\n"))).reason is None  # a text of numbers


def test_sentences_that_are_to_be_answered_need_no_tags() -> None:
    def words(content: bytes) -> list[tuple[tuple[str, ...], tuple[str, ...], str | None]]:
        found = conll.read(io.BytesIO(content), labelled=False)
        return [(one.tokens, one.tags, one.reason) for one in found]

    assert words(b"EU\nrejects\n\nPeter\n") == [(("EU", "rejects"), (), None), (("Peter",), (), None)]
    assert words(b"EU _\nrejects _\n") == [(("EU", "rejects"), ("_", "_"), None)]
    assert words(b"EU I-ORG\nrejects O\n") == [(("EU", "rejects"), ("B-ORG", "O"), None)]
    assert words(b"EU x y\nrejects\n")[0][2] is not None  # a line of other columns stays a bad one
