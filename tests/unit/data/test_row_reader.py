"""Files of every format to rows: values of good rows, and which rows are bad."""

import csv
import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.data import row_reader
from rtrain.data.row_reader import SourceRow
from rtrain.tasks import base

ROWS = [("where is my parcel", "parcel"), ("I forgot my password", "login")]
RECORDS = [
    SourceRow(1, "where is my parcel", None, "parcel", None),
    SourceRow(2, "I forgot my password", None, "login", None),
]


def read(data: DataConfig) -> list[SourceRow]:
    """All rows of all pieces."""
    return [row for file in row_reader.inspect_source(data).files for row in row_reader.read_rows(file, data)]


def read_bytes(path: Path, content: bytes, **settings: Any) -> list[SourceRow]:
    path.write_bytes(content)
    return read(DataConfig(path=str(path), **settings))


def problems(data: DataConfig) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        row_reader.inspect_source(data)
    return caught.value.problems


def codes(data: DataConfig) -> list[tuple[str, str]]:
    """The field and the cause of each problem."""
    return [(problem.field, problem.code) for problem in problems(data)]


def numbered(lines: list[int]) -> list[SourceRow]:
    """ROWS at these lines."""
    return [row._replace(line=line) for row, line in zip(RECORDS, lines, strict=True)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"text,label\nwhere is my parcel,parcel\nI forgot my password,login\n", numbered([2, 3])),
        (b"\xef\xbb\xbftext,label\r\nwhere is my parcel,parcel\r\nI forgot my password,login", numbered([2, 3])),
        (b"text,label\n\na,b\n\n\nc,d\n\n", [SourceRow(3, "a", None, "b", None), SourceRow(6, "c", None, "d", None)]),
        (b'text, label\na,"b"', [SourceRow(2, "a", None, "b", None)]),
        (b"id,label,text,note\n7, Paket ,wo ist es,x\n", [SourceRow(2, "wo ist es", None, "Paket", None)]),
    ],
    ids=["plain", "byte-order mark, Windows", "empty lines", "blanks, no last newline", "other columns"],
)
def test_csv(tmp_path: Path, content: bytes, expected: list[SourceRow]) -> None:
    assert read_bytes(tmp_path / "a.csv", content) == expected


def test_csv_quotes_separators_newlines_and_doubled_quotes(tmp_path: Path) -> None:
    content = b'label,text\nx,"one, two"\ny,"three\n\nfour"\nz,"say ""hi"""\n'
    assert read_bytes(tmp_path / "a.csv", content) == [
        SourceRow(2, "one, two", None, "x", None),
        SourceRow(3, "three\n\nfour", None, "y", None),  # a row is named by its first line
        SourceRow(6, 'say "hi"', None, "z", None),
    ]


def test_csv_rows_with_too_few_or_many_columns_are_bad(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", b"text,label\na,b\nno, thanks,c\nd\ne,f\n")
    assert rows == [
        SourceRow(2, "a", None, "b", None),
        SourceRow(3, "", None, "", ANY),
        SourceRow(4, "", None, "", ANY),
        SourceRow(5, "e", None, "f", None),
    ]


def test_csv_rows_behind_a_quote_that_is_never_closed_are_each_bad(tmp_path: Path) -> None:
    """Else a single bad row would stand for half of the file."""
    rows = read_bytes(tmp_path / "a.csv", b'text,label\na,b\n"oops,c\nd,e\nf,g\n')
    assert rows[0] == SourceRow(2, "a", None, "b", None)
    assert [row.line for row in rows] == [2, 3, 4, 5]
    assert all(row.reason for row in rows[1:])


def test_csv_with_a_stray_carriage_return_is_bad_and_reading_goes_on(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", b"text,label\na\rb,c\nd,e\n")
    assert [(row.line, row.text) for row in rows] == [(2, ""), (3, "d")]
    assert rows[0].reason


def test_csv_whose_lines_end_by_carriage_returns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mac.csv"
    path.write_bytes(b"text,label\ra,b\rc,d\r")
    assert codes(DataConfig(path=str(path))) == [("data.path", "unreadable")]


def test_tsv_keeps_quotes_and_commas(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.tsv", b'text\tlabel\nsay "hi, all\tx\n"quoted"\ty\r\n')
    assert rows == [SourceRow(2, 'say "hi, all', None, "x", None), SourceRow(3, '"quoted"', None, "y", None)]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"text": text, "label": label, "other": [1]}) for text, label in ROWS]
    rows = read_bytes(tmp_path / f"a.{suffix}", f"{lines[0]}\n\n{lines[1]}\n".encode())
    assert rows == numbered([1, 3])


def test_json_values_that_are_no_strings(tmp_path: Path) -> None:
    lines = [
        {"text": 4711, "label": True},
        {"text": None, "label": "x"},
        {"label": "x"},
        {"text": float("nan"), "label": 1.5},
    ]
    rows = read_bytes(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    assert [(row.text, row.label, row.reason is None) for row in rows] == [
        ("4711", "true", True),
        ("", "x", False),
        ("", "x", False),
        ("", "1.5", False),
    ]


@pytest.mark.parametrize(
    "line",
    ["{broken", "[1, 2]", '"text"', "[" * 200_000, "1" * 5000],
    ids=["broken", "list", "string", "nested too deep", "number too long"],
)
def test_a_line_that_is_no_json_object_is_bad(tmp_path: Path, line: str) -> None:
    content = f'{{"text": "a", "label": "b"}}\n{line}\n{{"text": "c", "label": "d"}}\n'
    assert read_bytes(tmp_path / "a.jsonl", content.encode()) == [
        SourceRow(1, "a", None, "b", None),
        SourceRow(2, "", None, "", ANY),
        SourceRow(3, "c", None, "d", None),
    ]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": [1, 2, 3], "label": [7, 8, None], "text": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert read(DataConfig(path=str(path))) == [
        SourceRow(1, "a", None, "7", None),
        SourceRow(2, "b", None, "8", None),
        SourceRow(3, "c", None, "", ANY),
    ]


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv"])
def test_the_format_may_be_given(tmp_path: Path, name: str) -> None:
    assert read_bytes(tmp_path / name, b"text\tlabel\na, b\tc\n", format="tsv") == [
        SourceRow(2, "a, b", None, "c", None)
    ]


def test_every_text_that_csv_can_write_is_read_back(tmp_path: Path) -> None:
    texts = ['"', ",", 'a"b', "a\nb", "a\r\nb", "\r", "'", "\\", "\u2028x", "\x00x", "\ufeffx", "x" * 150_000, "é"]
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text + ".", "x") for text in texts)])
    assert [row.text for row in read(DataConfig(path=str(path)))] == [text + "." for text in texts]


def test_csv_rows_that_a_stray_quote_has_joined_are_bad_and_not_one_row(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", b'text,label\n"hello, world,a\nok,b\n"bye,c\nfine,d\n"one" more,e\n')
    assert all(row.reason for row in rows[:3])
    assert [(row.line, row.text, row.reason) for row in rows] == [
        *((line, "", ANY) for line in (2, 3, 4)),
        (5, "fine", None),
        (6, "one more", None),  # of one line: nothing is lost
    ]


def test_tsv_is_told_what_helps_where_quotes_mean_nothing(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.tsv", b'text\tlabel\n"a\tb"\tx\n"a\rb"\tx\n"c"\tx\n')
    assert [row.reason is None for row in rows] == [False, False, True]
    assert rows[2].text == '"c"'


def test_jsonl_columns_need_not_be_in_the_first_row(tmp_path: Path) -> None:
    content = b'{"text": "a", "label": "x"}\n{"text": "b", "label": "x", "lang": "en"}\n'
    assert [row.slices for row in read_bytes(tmp_path / "a.jsonl", content, slices=("lang",))] == [("",), ("en",)]


def test_class_names_of_datasets_are_read_from_parquet_and_in_lists(tmp_path: Path) -> None:
    classes = {"names": ["joy", "anger"], "_type": "ClassLabel"}
    features = {"label": classes, "both": {"feature": classes, "_type": "Sequence"}, "old": [classes]}
    table = pa.table({"text": ["a", "b"], "label": [0, 1], "both": [[0, 1], [1]], "old": [[0], [2]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert [row.label for row in read(DataConfig(path=str(path)))] == ["joy", "anger"]
    assert [row.label for row in read(DataConfig(path=str(path), label="both"))] == ['["joy", "anger"]', '["anger"]']
    rows = read(DataConfig(path=str(path), label="old"))
    assert (rows[0].label, rows[1].reason is None) == ('["joy"]', False)


def test_a_parquet_file_without_rows_and_pages_is_read_beside_others(tmp_path: Path) -> None:
    schema = pa.schema({"text": pa.string(), "label": pa.string()})
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "0.parquet", use_dictionary=False)
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "label": ["b"]}), tmp_path / "1.parquet")
    assert [row.text for row in read(DataConfig(path=str(tmp_path)))] == ["a"]


def test_rows_stay_together_by_a_name_with_blanks_and_by_a_number_of_any_kind(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": ["a", "b"], "label": ["x", "y"], "doc": [7, 8]}), tmp_path / "a.parquet")
    gap = pa.table({"text": ["c", "d"], "label": ["x", "y"], "doc": [7.0, None]})
    pa.parquet.write_table(gap, tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("text,label,doc\ne,x,7 \nf,y, 7\ng,y,7.5\n")
    rows = read(DataConfig(path=str(tmp_path), group_column="doc"))
    assert [row.group for row in rows] == ["7", "8", "7", "", "7", "7", "7.5"]


def test_a_class_has_one_name_whether_or_not_its_file_has_a_gap(tmp_path: Path) -> None:
    """Whole numbers beside a null are floats in a Parquet file: `1.0` would be a class beside `1`."""
    full = pa.table({"text": ["a", "b"], "label": [1, 0], "part": [3, 4]})
    gap = pa.table({"text": ["c", "d", "e"], "label": [1.0, None, 2.5], "part": [3.0, None, 4.0]})
    pa.parquet.write_table(full, tmp_path / "a.parquet")
    pa.parquet.write_table(gap, tmp_path / "b.parquet")
    rows = read(DataConfig(path=str(tmp_path), slices=("part",)))
    assert [row.label for row in rows] == ["1", "0", "1", "", "2.5"]
    assert [row.slices for row in rows] == [("3",), ("4",), ("3",), ("",), ("4",)]
    assert rows[3].reason


def test_a_label_that_begins_with_a_bracket_is_parted_by_the_separator_unless_it_is_a_list(tmp_path: Path) -> None:
    content = b'text,label\na,[urgent]; billing\nb,[urgent]\nc,"[""x"", ""y; z""]"\n'
    rows = read_bytes(tmp_path / "a.csv", content, separator=";")
    assert [json.loads(row.label) for row in rows] == [["[urgent]", "billing"], ["[urgent]"], ["x", "y; z"]]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_test_file_needs_no_column_by_which_nothing_is_split(tmp_path: Path, format: str) -> None:
    rows = {"text": ["a"], "label": ["x"]}
    (tmp_path / "train.csv").write_text("text,label,doc\nb,y,1\n")
    if format == "csv":
        (tmp_path / "test.csv").write_text("text,label\na,x\n")
    else:
        pa.parquet.write_table(pa.table(rows), tmp_path / "test.parquet")
    data = DataConfig(path=str(tmp_path / "train.csv"), test=str(tmp_path / f"test.{format}"), group_column="doc")
    assert [(row.text, row.group, row.reason) for row in read(data)] == [("b", "1", None), ("a", "", None)]
    assert codes(DataConfig(path=data.test, group_column="doc")) == [("data.group_column", "unknown_column")]


def test_csv_with_escaped_quotes_is_read_by_a_setting_and_else_set_aside(tmp_path: Path) -> None:
    """As Spark, MySQL and Postgres may write it: read as other files are, the text would be another one."""
    content = (
        rb"text,label" + b"\n" + rb'"He said \"hi\" there",a' + b"\n" + rb'"\"hi, you\"",b' + b"\n"
        rb'"ends with \"",c' + b"\n" + rb'"two' + b"\n" + rb'lines \"q\" C:\dir \\",d' + b"\n" + rb"C:\new\x,e" + b"\n"
    )
    rows = read_bytes(tmp_path / "a.csv", content, escape="\\")
    assert [(row.line, row.text, row.label) for row in rows] == [
        (2, 'He said "hi" there', "a"),
        (3, '"hi, you"', "b"),
        (4, 'ends with "', "c"),
        (5, 'two\nlines "q" C:\\dir \\', "d"),
        (7, "C:\\new\\x", "e"),
    ]
    strict = read_bytes(tmp_path / "b.csv", content)
    assert [row.line for row in strict] == [2, 3, 4, 5, 6, 7]
    assert all(row.reason for row in strict[:4])
    assert strict[5] == SourceRow(7, "C:\\new\\x", None, "e", None)


def test_csv_texts_with_backslashes_are_no_escapes(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", b'text,label\n"C:\\dir\\",a\n"say ""\\""",b\nc\\,d\n')
    assert [row.text for row in rows] == ["C:\\dir\\", 'say "\\"', "c\\"]
    assert not any(row.reason for row in rows)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_the_sign_of_databases_for_a_missing_value_is_no_value(tmp_path: Path, suffix: str) -> None:
    sign = "," if suffix == "csv" else "\t"
    content = "\n".join(sign.join(row) for row in [("text", "label", "pair"), ("a", r"\N", "x"), ("b", "c", r"\N")])
    rows = read_bytes(tmp_path / f"a.{suffix}", content.encode(), text_pair="pair")
    assert (rows[0].label, rows[0].reason is None) == ("", False)
    assert rows[1] == SourceRow(3, "b", "", "c", None)


@pytest.mark.parametrize(
    "content",
    [
        b'"text", "label"\n"hello, you", "greeting"\n"two\nlines", "a ""b"""\nplain, x\n',
        b'text,label\n "hello, you",\t"greeting"\n"two\nlines","a ""b"""\nplain,x\n',
        b'"label","text"\n"greeting", "hello, you"\n"a ""b""", "two\nlines"\nx,plain\n',
    ],
)
def test_csv_blanks_before_a_quoted_field_are_no_part_of_it(tmp_path: Path, content: bytes) -> None:
    rows = read_bytes(tmp_path / "a.csv", content)
    assert [(row.text, row.label, row.reason) for row in rows] == [
        ("hello, you", "greeting", None),
        ("two\nlines", 'a "b"', None),
        ("plain", "x", None),
    ]


def test_csv_texts_that_begin_with_a_quoted_word_behind_a_blank_are_kept(tmp_path: Path) -> None:
    content = b'label,text\na, "quoted" word\nb,"in, ""quotes"", and"\n'
    assert [row.text for row in read_bytes(tmp_path / "a.csv", content)] == [' "quoted" word', 'in, "quotes", and']


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_csv_columns_may_have_another_sign_between_them(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text{sign}label\n1,5 "and{sign} 2{sign}x\n"a{sign} b"{sign} "y"\n')
    source = row_reader.inspect_source(DataConfig(path=str(path)))
    assert source.columns == ("text", "label")
    rows = [source_row for source_row in row_reader.read_rows(source.files[0], DataConfig())]
    assert [row.reason is None for row in rows] == [False, True]
    assert rows[1] == SourceRow(3, f"a{sign} b", None, "y", None)


def test_csv_columns_have_the_sign_that_is_set_between_them_where_the_header_shows_it(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", b"text:label, of it\na, b:c\n", delimiter=":", label="label, of it")
    assert rows == [SourceRow(2, "a, b", None, "c", None)]
    assert read_bytes(tmp_path / "b.csv", b"text,label\na:b,c\n", delimiter=":") == [
        SourceRow(2, "a:b", None, "c", None)
    ]


def test_a_truth_value_and_a_whole_number_have_one_name_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,True\nb,FALSE\nc,1.00\nd,1\ne,-2.0\n")
    values = [True, False, 1.0, 1, "-2.0"]
    lines = (json.dumps({"text": text, "label": value}) for text, value in zip("abcde", values, strict=True))
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "label": [True, False]}), tmp_path / "c.parquet")
    names = ["true", "false", "1", "1", "-2"]
    assert [row.label for row in read(DataConfig(path=str(tmp_path)))] == [*names, *names, "true", "false"]


def test_labels_that_only_look_like_numbers_keep_their_spelling(tmp_path: Path) -> None:
    labels = ["1.5", "007", "01.0", "1.0.0", "v1.0", "tRue", "1e3", "1.", "-0"]
    content = "text,label\n" + "".join(f"a,{label}\n" for label in labels)
    assert [row.label for row in read_bytes(tmp_path / "a.csv", content.encode())] == labels


def test_jsonl_columns_that_are_named_are_looked_for_in_all_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"})] * 150 + ["no json", "[]", json.dumps({"text": "b", "label": "x"})]
    rows = read_bytes(tmp_path / "a.jsonl", "\n".join(lines).encode())
    assert rows[-1] == SourceRow(153, "b", None, "x", None)
    assert all(row.reason for row in rows[:-1])
    assert codes(DataConfig(path=str(tmp_path / "a.jsonl"), label="topic")) == [("data.label", "unknown_column")]


def test_one_of_two_texts_may_be_empty_where_the_task_reads_both(tmp_path: Path) -> None:
    content = b"subject,body,label\n,my parcel is late,a\nURGENT,,b\n,,c\n"
    rows = read_bytes(tmp_path / "a.csv", content, text="subject", text_pair="body")
    assert [row.reason is None for row in rows] == [True, True, False]
    for name, usable in (("classification", True), ("span_qa", False), ("token_tags", False), ("masked_lm", False)):
        task = base.get_task(name)
        assert (base.validate_task_row(task, rows[0].text, rows[0].pair, "a") is None) is usable
        assert task.is_blank("", "") is True
