"""Sources that are refused before a start, with all that is wrong and what to do."""

import os
import shlex
from pathlib import Path

import pytest

from rtrain.config import Data, load, parse_assignment
from rtrain.data import records
from rtrain.errors import ConfigError, Problem
from tests.test_records import problems, read_bytes


def test_no_path_is_a_problem() -> None:
    assert problems(Data()) == (Problem("data.path", None, "not given", "write --data FILE"),)


def test_a_path_that_is_not_there_names_the_nearest_or_lists_what_is(tmp_path: Path) -> None:
    for name in ("rows.csv", "other.csv", ".rowz.csv"):
        (tmp_path / name).write_text("text,label\n")
    fixes = {
        "row.csv": f"did you mean {tmp_path / 'rows.csv'}?",
        "tickets.jsonl": f"{tmp_path} holds other.csv, rows.csv",
    }
    for name, fix in fixes.items():
        [problem] = problems(Data(path=str(tmp_path / name)))
        assert (problem.field, problem.reason) == ("data.path", "no such file, folder or glob")
        assert problem.fix == fix


def test_a_path_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    [problem] = problems(Data(path=str(tmp_path / "no" / "row.csv")))
    assert problem.fix == "write the path of an existing file, or a hub name (owner/name)"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    [problem] = problems(Data(path=str(tmp_path / "a.csv")))
    assert (problem.reason, problem.fix) == ("the file is empty", "write a header line and rows, or remove it")


@pytest.mark.parametrize("content", ["\n", "\na,b\n", " , \na,b\n"])
def test_a_file_without_header_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    [problem] = problems(Data(path=str(tmp_path / "a.csv")))
    assert (problem.reason, problem.fix) == ("no header line", "name the columns in the first line")


def test_a_file_with_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    assert read_bytes(tmp_path / "a.csv", b"text,label\n") == []


def test_missing_columns_are_named_together_with_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("message,intent,lang\na,b,c\n")
    found = problems(Data(path=str(path), text_pair="reply"))
    columns = "a.csv has message, intent, lang"
    assert [str(problem) for problem in found] == [
        f"data.text=text: no such column; {columns}; write --set data.text=COLUMN",
        f"data.text_pair=reply: no such column; {columns}; write --set data.text_pair=COLUMN",
        f"data.label=label: no such column; {columns}; write --set data.label=COLUMN",
    ]


def test_many_files_that_lack_the_same_columns_are_told_once(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.csv").write_text("body,tag\na,b\n")
    (tmp_path / "other.csv").write_text("text,tag\na,b\n")
    found = [str(problem) for problem in problems(Data(path=str(tmp_path)))]
    assert len(found) == 3
    assert "000.csv (and 299 more like it) has body, tag" in found[0]
    assert "other.csv has text, tag" in found[2]


def test_a_pipe_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    [problem] = problems(Data(path=str(tmp_path / "rows.csv")))
    assert (problem.reason, problem.fix) == (
        "no file or folder, but a pipe or the like",
        "its rows are read more than once: write them to a file",
    )


def test_a_file_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """As a zip file of an old Windows leaves it. A store could not name its rows, once all of them are tokenised."""
    with open(os.fsencode(tmp_path) + b"/donn\xe9es.csv", "wb") as file:
        file.write(b"text,label\na,b\n")
    [problem] = problems(Data(path=str(tmp_path)))
    assert (problem.reason, problem.fix) == ("its name is not UTF-8", "rename it: what is kept of a row names its file")
    assert "donn\\udce9es.csv" in str(problem)


def test_names_of_columns_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("текст,\x1b[2J\n1,2\n", encoding="utf-8")
    assert r"a.csv has текст, \x1b[2J;" in str(problems(Data(path=str(path)))[0])
    path.write_text("text,\x1b[2J,\x1b[2J\n1,2,3\n", encoding="utf-8")
    assert r"two columns are called \x1b[2J;" in str(problems(Data(path=str(path)))[0])


def test_columns_of_one_name_are_refused_and_so_are_those_without(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    fix = "give each column a name of its own, or remove it"
    for header, reason in (
        ("text,label,,,", "3 columns have no name"),
        ("text,text,label, , ", "two columns are called text and 2 columns have no name"),
    ):
        path.write_text(f"{header}\na,b,c,d,e\n")
        [problem] = problems(Data(path=str(path)))
        assert (problem.reason, problem.fix) == (reason, fix)


def test_a_tsv_whose_columns_another_sign_parts_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text;label\na;b\n")
    fixes = [problem.fix for problem in problems(Data(path=str(path)))]
    assert len(fixes) == 2
    assert all("--set data.format=csv" in fix for fix in fixes)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("category", "did you mean --set data.label=Category?"),
        (" CATEGORY ", "did you mean --set data.label=Category?"),
        ("Categorie", "did you mean --set data.label=Category?"),
        ("kind of mesage", "did you mean --set 'data.label=Kind of message'?"),
        ("intent", "write --set data.label=COLUMN"),  # like none of them
    ],
)
def test_the_column_that_was_meant_is_named_and_one_without_a_name_is_seen(
    asked: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "tickets.csv"
    path.write_text(",Message,Category,Kind of message\n0,a,b,c\n")
    [problem] = problems(Data(path=str(path), text="Message", label=asked))
    assert problem.fix == f"tickets.csv has (unnamed), Message, Category, Kind of message; {meant}"


def test_problems_of_both_files_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,intent\na,b\n")
    found = problems(Data(path=str(path), test=str(tmp_path / "gone.csv")))
    assert [problem.field for problem in found] == ["data.label", "data.test"]


def test_a_json_document_is_no_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a", "label": "b"}]')
    [problem] = problems(Data(path=str(path)))
    assert problem.reason == "line 1 is not a JSON object"


def test_utf16_file_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\none,parcel\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"the file is UTF-16, not UTF-8; convert it, e.g. iconv -f utf-16 -t utf-8"):
        records.inspect(Data(path=str(path)))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label,label\none,parcel,refund\n")
    with pytest.raises(ConfigError, match="two columns are called label; give each column a name of its own"):
        records.inspect(Data(path=str(path)))


def test_a_setting_that_is_advised_is_read_as_the_column_that_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Body: text,2024,Comment #2\na,b,c\n")
    data = Data(path=str(path), text="body: text", label="2023", slices=("Body: text", "comment #2"))
    for problem in problems(data):
        [_, setting] = shlex.split(problem.fix.rpartition("did you mean ")[2].removesuffix("?"))
        found = load("intent", {"data.path": str(path), **dict([parse_assignment(setting)])}).recipe.data
        data = data.model_copy(update={problem.field.removeprefix("data."): getattr(found, problem.field[5:])})
    assert (data.text, data.label, data.slices) == ("Body: text", "2024", ("Body: text", "Comment #2"))
    records.inspect(data)
