"""Sources that are refused before a start, with all that is wrong."""

import os
from pathlib import Path

import pytest

from rtrain.config import DataConfig
from tests.unit.data.test_row_reader import codes, problems, read_bytes


def test_no_path_is_a_problem() -> None:
    assert codes(DataConfig()) == [("data.path", "missing")]


def test_a_path_that_is_not_there_names_the_nearest_or_lists_what_is(tmp_path: Path) -> None:
    for name in ("rows.csv", "other.csv", ".rowz.csv"):
        (tmp_path / name).write_text("text,label\n")
    for name, nearby in (("row.csv", "rows.csv"), ("tickets.jsonl", "other.csv, rows.csv"), ("no/row.csv", "")):
        [problem] = problems(DataConfig(path=str(tmp_path / name)))
        assert (problem.field, problem.code) == ("data.path", "not_found")
        assert nearby in problem.fix
        assert "rowz" not in problem.fix


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.csv", b"", "empty_file"),
        ("a.csv", b"\n", "no_header"),
        ("a.csv", b"\na,b\n", "no_header"),
        ("a.csv", b" , \na,b\n", "no_header"),
        ("a.csv", b"text,label,,,\na,b,c,d,e\n", "duplicate_columns"),
        ("a.csv", b"text,text,label\na,b,c\n", "duplicate_columns"),
        ("a.csv", "text,label\none,parcel\n".encode("utf-16"), "not_utf8"),
        ("a.json", b'[{"text": "a", "label": "b"}]', "unreadable"),
        ("a.csv.gz", b"text,label\na,b\n", "unreadable"),
        ("a.parquet", b"text,label\na,b\n", "unreadable"),
        ("a.zip", b"PK", "unknown_format"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_before_a_start(
    tmp_path: Path, name: str, content: bytes, code: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert codes(DataConfig(path=str(tmp_path / name))) == [("data.path", code)]


def test_a_file_with_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    assert read_bytes(tmp_path / "a.csv", b"text,label\n") == []


def test_missing_columns_are_told_at_once_and_for_files_of_one_making_once(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.csv").write_text("body,tag,\na,b,c\n")
    (tmp_path / "other.csv").write_text("text,tag\na,b\n")
    result = problems(DataConfig(path=str(tmp_path), text_pair="reply", test=str(tmp_path / "gone.csv")))
    assert [(problem.field, problem.code) for problem in result] == [
        *((f"data.{name}", "unknown_column") for name in ("text", "text_pair", "label", "text_pair", "label")),
        ("data.test", "not_found"),
    ]
    assert "body, tag, (unnamed)" in result[0].fix


def test_a_pipe_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    assert codes(DataConfig(path=str(tmp_path / "rows.csv"))) == [("data.path", "not_a_file")]


def test_a_file_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """As a zip file of an old Windows leaves it. A store could not name its rows, once all of them are tokenised."""
    with open(os.fsencode(tmp_path) + b"/donn\xe9es.csv", "wb") as file:
        file.write(b"text,label\na,b\n")
    assert codes(DataConfig(path=str(tmp_path))) == [("data.path", "not_utf8")]


def test_names_of_columns_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for header in ("текст,\x1b[2J", "text,\x1b[2J,\x1b[2J"):
        path.write_text(f"{header}\n1,2,3\n", encoding="utf-8")
        shown = str(problems(DataConfig(path=str(path)))[0])
        assert r"\x1b[2J" in shown
        assert "\x1b" not in shown


def test_a_tsv_whose_columns_another_sign_parts_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text;label\na;b\n")
    assert all("data.format=csv" in problem.fix for problem in problems(DataConfig(path=str(path))))


@pytest.mark.parametrize(
    ("requested_column", "suggested_column"),
    [("category", "Category?"), (" CATEGORY ", "Category?"), ("Categorie", "Category?"), ("intent", "COLUMN")],
)
def test_the_column_that_was_meant_is_named(requested_column: str, suggested_column: str, tmp_path: Path) -> None:
    path = tmp_path / "tickets.csv"
    path.write_text(",Message,Category,Kind of message\n0,a,b,c\n")
    [problem] = problems(DataConfig(path=str(path), text="Message", label=requested_column))
    assert problem.fix.endswith(suggested_column)
