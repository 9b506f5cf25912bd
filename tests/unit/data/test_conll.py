"""CoNLL files to sentences: columns, tag schemes, and the reason of each bad line."""

import io

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.data.readers import tabular
from rtrain.data.readers.tabular import Sentence
from rtrain.metrics import entities


def read(content: str | bytes, labelled: bool = True) -> list[Sentence]:
    raw = content if isinstance(content, bytes) else content.encode()
    return list(tabular.read_sentences(io.BytesIO(raw), labelled))


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
    assert " ".join(tabular.to_bio(tags.split())) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), max_size=10))
def test_to_bio_keeps_the_entities_and_is_strict_bio(tags: list[str]) -> None:
    result = tabular.to_bio(tags)
    assert entities.extract_entities(result) == entities.extract_entities(tags)
    assert tabular.to_bio(result) == result
    for before, tag in zip(["O", *result], result, strict=False):
        assert not tag.startswith("I-") or before[1:] == tag[1:]


def test_bytes_that_are_not_utf8_refuse_their_sentence_only() -> None:
    bad, good = read(b"caf\xe9\tO\n\nb\tO\n")
    assert bad.reason
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
    assert read(rows)[0].reason is not None
    assert read("1\tO\n2\tO\n3\tO\n")[0].reason is None  # a text of numbers


def test_sentences_that_are_to_be_answered_need_no_tags() -> None:
    def words(content: bytes) -> list[tuple[tuple[str, ...], tuple[str, ...], str | None]]:
        return [(entry.tokens, entry.tags, entry.reason) for entry in read(content, labelled=False)]

    assert words(b"EU\nrejects\n\nPeter\n") == [(("EU", "rejects"), (), None), (("Peter",), (), None)]
    assert words(b"EU _\nrejects _\n") == [(("EU", "rejects"), ("_", "_"), None)]
    assert words(b"EU I-ORG\nrejects O\n") == [(("EU", "rejects"), ("B-ORG", "O"), None)]
    assert words(b"EU x y\nrejects\n")[0][2] is not None  # a line of other columns stays a bad one


@pytest.mark.parametrize(
    "line", ["lonely", "New York\tx\tO", "\tO", "Anna\tPER", "Anna\tS-PER", "Anna\tB-", "An\rna\tO"]
)
def test_a_bad_line_refuses_its_sentence_only(line: str) -> None:
    rows = read(f"a\tO\n\nb\tO\n{line}\nc\tB-\n\nd\tO\n")
    assert [(row.line, row.tokens) for row in rows] == [(1, ("a",)), (3, ()), (7, ("d",))]
    assert (rows[1].reason or "").startswith("line 4 ")  # the first of its bad lines
    assert rows[1].tags == ()


def test_a_bad_first_line_does_not_set_the_number_of_columns() -> None:
    bad, good = read("title\n\na O\n")
    assert (bad.reason is None, good) == (False, Sentence(3, ("a",), ("O",), None))
