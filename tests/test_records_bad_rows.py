"""Rows that cannot be used: set aside, each with a reason, and how many of them are too many."""

from pathlib import Path

import pytest

from rtrain.config import Data
from rtrain.data import records
from rtrain.data.records import Record
from rtrain.errors import UserError
from tests.test_records import read_bytes


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"caf\xe9,x", "column 'text' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"),
        (b"cafe,\xe9", "column 'label' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"),
        (b",x", "column 'text' is empty; write a text or remove the row"),
        (b" \t ,x", "column 'text' is empty; write a text or remove the row"),
        (b"a,", "column 'label' is empty; write a label or remove the row"),
        (b"a, ", "column 'label' is empty; write a label or remove the row"),
        (
            b"a" * 1_000_000 + b",x",
            "column 'text' has 1,000,000 bytes; split it, or raise data.max_row_bytes=200,000",
        ),
        (
            b"a," + b"x" * 200_001,
            "column 'label' has 200,001 bytes; split it, or raise data.max_row_bytes=200,000",
        ),
    ],
    ids=["text not UTF-8", "label not UTF-8", "no text", "blank text", "no label", "blank label", "1 MB", "long label"],
)
def test_a_bad_row_says_why_and_what_to_do(tmp_path: Path, row: bytes, reason: str) -> None:
    before, bad, after = read_bytes(tmp_path / "a.csv", b"text,label\na,b\n" + row + b"\nc,d\n")
    assert (bad.line, bad.reason) == (3, reason)
    assert before == Record(2, "a", None, "b", None)
    assert after == Record(4, "c", None, "d", None)


def test_the_limit_of_a_row_counts_bytes_not_characters(tmp_path: Path) -> None:
    content = "text,label\näää,x\nääää,x\n".encode()
    found = read_bytes(tmp_path / "a.csv", content, max_row_bytes=7)
    assert found[0].reason is None
    assert found[1].reason == "column 'text' has 8 bytes; split it, or raise data.max_row_bytes=7"


def test_a_bad_second_text_is_named(tmp_path: Path) -> None:
    [record] = read_bytes(tmp_path / "a.csv", b"text,other,label\na,\xff,x\n", text_pair="other")
    assert record.reason == "column 'other' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"


def test_an_empty_second_text_is_allowed(tmp_path: Path) -> None:
    assert read_bytes(tmp_path / "a.csv", b"text,other,label\na,,x\n", text_pair="other") == [
        Record(2, "a", "", "x", None)
    ]


def test_a_lone_surrogate_escape_in_json_is_bad(tmp_path: Path) -> None:
    [record] = read_bytes(tmp_path / "a.jsonl", b'{"text": "\\ud800", "label": "x"}\n')
    assert record.reason == "column 'text' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"


@pytest.mark.parametrize(("bad", "total", "refused"), [(0, 0, False), (2, 100, False), (3, 100, True), (1, 49, True)])
def test_a_source_with_too_many_bad_rows_is_refused(bad: int, total: int, refused: bool) -> None:
    examples = [f"rows.csv:{line}: no" for line in range(2, 2 + bad)]
    if not refused:
        records.refuse_if_too_bad(bad, total, examples, Data())
        return
    with pytest.raises(UserError) as caught:
        records.refuse_if_too_bad(bad, total, examples, Data())
    listed = "\n  ".join(examples)
    assert str(caught.value) == (
        f"{bad} of {total} rows cannot be used (data.max_bad_rows=0.02):\n  {listed}\n"
        "Mend these lines, or raise data.max_bad_rows to set them aside."
    )


def test_at_most_five_bad_lines_are_listed() -> None:
    with pytest.raises(UserError) as caught:
        records.refuse_if_too_bad(9, 9, [f"line {number}" for number in range(9)], Data())
    assert "line 4\n" in str(caught.value)
    assert "line 5" not in str(caught.value)
