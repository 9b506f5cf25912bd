"""Rows and sources that cannot be used: bad rows with a reason, too many of them, sources refused before a start."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.config import DataConfig
from rtrain.core.errors import UserError
from rtrain.data import row_reader, sources
from rtrain.data.row_reader import SourceRow
from rtrain.data.store import builder
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.support.tiny import make_tokenizer
from tests.unit.data.test_row_reader import codes, problems, read_bytes


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (b"caf\xe9,x", "text"),
        (b"cafe,\xe9", "label"),
        (b",x", "text"),
        (b" \t ,x", "text"),
        (b"a,", "label"),
        (b"a, ", "label"),
        (b"a" * 1_000_000 + b",x", "text"),
        (b"a," + b"x" * 200_001, "label"),
    ],
    ids=["text not UTF-8", "label not UTF-8", "no text", "blank text", "no label", "blank label", "1 MB", "long label"],
)
def test_a_bad_row_names_its_column_and_the_others_are_read(tmp_path: Path, row: bytes, column: str) -> None:
    before, bad, after = read_bytes(tmp_path / "a.csv", b"text,label\na,b\n" + row + b"\nc,d\n")
    assert (bad.line, f"column {column!r}" in (bad.reason or "")) == (3, True)
    assert before == SourceRow(2, "a", None, "b", None)
    assert after == SourceRow(4, "c", None, "d", None)


def test_the_limit_of_a_row_counts_bytes_not_characters(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path / "a.csv", "text,label\näää,x\nääää,x\n".encode(), max_row_bytes=7)
    assert [row.reason is None for row in rows] == [True, False]


def test_an_empty_second_text_is_allowed(tmp_path: Path) -> None:
    assert read_bytes(tmp_path / "a.csv", b"text,other,label\na,,x\n", text_pair="other") == [
        SourceRow(2, "a", "", "x", None)
    ]


def test_a_bad_second_text_and_half_of_a_character_are_bad(tmp_path: Path) -> None:
    [row] = read_bytes(tmp_path / "a.csv", b"text,other,label\na,\xff,x\n", text_pair="other")
    assert "'other'" in (row.reason or "")
    [row] = read_bytes(tmp_path / "a.jsonl", b'{"text": "\\ud83d", "label": "x"}\n')
    assert row.reason
    assert "iconv" not in row.reason  # the file is UTF-8: to convert it would spoil all of its accents


def test_a_slice_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    """No row is bad for it, so that a report, the JSON of `rtrain evaluate` and a terminal must be able to hold it."""
    [row] = read_bytes(tmp_path / "a.csv", b"text,label,lang\na,x,fran\xe7ais\n", slices=("lang",))
    assert (row.reason, row.slices) == (None, ("fran?ais",))
    [row] = read_bytes(tmp_path / "a.jsonl", b'{"text": "a", "label": "x", "lang": "\\ud800"}\n', slices=("lang",))
    assert (row.reason, row.slices) == (None, ("?",))


@pytest.mark.parametrize(("bad", "total", "refused"), [(0, 0, False), (2, 100, False), (3, 100, True), (9, 9, True)])
def test_a_source_with_too_many_bad_rows_is_refused(bad: int, total: int, refused: bool) -> None:
    examples = [f"rows.csv:{line}: no" for line in range(2, 2 + bad)]
    if not refused:
        row_reader.check_bad_row_share(bad, total, examples, DataConfig())
        return
    with pytest.raises(UserError) as caught:
        row_reader.check_bad_row_share(bad, total, examples, DataConfig())
    assert caught.value.code == "too_many_bad_rows"
    assert str(caught.value).count("rows.csv:") == min(bad, 5)
    if bad < total:  # the share in the message is enough
        reported = float(str(caught.value).rpartition("data.max_bad_rows=")[2])
        row_reader.check_bad_row_share(bad, total, examples, DataConfig(max_bad_rows=reported))


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("multi_label", "['a', 'b']"),
        ("multi_label", "[oops"),
        ("multi_label", '["a", null]'),
        ("multi_label", '["a", " "]'),
        ("multi_label", '["\\ud800"]'),
        ("token_tags", "['O', 'B-PER']"),
        ("token_tags", "[oops"),
        ("multi_head", "{oops"),
        ("multi_head", '{"x": ["a"]}'),
        ("multi_head", '{"x": null}'),
        ("span_qa", "{}"),
        ("span_qa", "[" * 100_000),
        ("span_qa", '[{"text": "two", "start": 1e999}]'),
        ("span_qa", '[{"text": "two", "start": -3}]'),
        ("regression", "1e300"),
        ("regression", "9" * 5000),
    ],
)
def test_a_malformed_label_is_a_bad_row(task: str, label: str) -> None:
    reason = base.get_task(task).validate_row("one two", "one two", label)
    assert reason
    assert len(reason) < 400


def write_parquet(path: Path, **columns: pa.Array) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def test_a_value_that_python_has_not_is_a_bad_row(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"caf\xe9", b"three"]).view(pa.string())
    labels = pa.array([0, 10**18, 10**18 + 1]).cast(pa.timestamp("us"))
    path = write_parquet(tmp_path / "a.parquet", text=texts, label=labels)
    rows = list(row_reader.read_rows(sources.SourceFile(str(path), "parquet", "train"), DataConfig()))
    assert [row.reason is None for row in rows] == [True, False, False]


def test_a_class_that_has_no_name_is_a_bad_row(tmp_path: Path) -> None:
    """A `datasets` file; its class of a list of labels was a crash as well."""
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}, "text": [{"_type": "Value"}]}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"text": ["x"] * 4, "label": [1, 2, -1, None]}).replace_schema_metadata(metadata)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    rows = list(row_reader.read_rows(sources.SourceFile(str(tmp_path / "a.arrow"), "datasets", "train"), DataConfig()))
    assert [(row.label, row.reason is None) for row in rows] == [("b", True), *[("", False)] * 3]


def test_bytes_are_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=pa.array(["é".encode(), b"\xe9"]), label=pa.array(["a", "b"]))
    first, other = row_reader.read_rows(sources.SourceFile(str(path), "parquet", "train"), DataConfig())
    assert (first.text, first.reason) == ("é", None)
    assert other.reason


@pytest.mark.parametrize("words", [["to", None], ["to", ["be"]], [{"to": "be"}]])
def test_a_list_of_more_than_words_is_bad(tmp_path: Path, words: list[object]) -> None:
    [row] = read_bytes(tmp_path / "a.jsonl", json.dumps({"text": words, "label": "a"}).encode())
    assert row.reason


def test_a_document_without_a_token_is_bad(tmp_path: Path) -> None:
    from rtrain.data.store.shards import pack_documents

    tokenizer = load_tokenizer(make_tokenizer(tmp_path), 32)
    rows = [SourceRow(number, text, None, "", None) for number, text in enumerate(["one", "\u200b\x00", "two"])]
    source_rows = list(pack_documents(rows, tokenizer, 32, lambda source_row: "train"))
    assert [(row.text, row.reason is None) for row in source_rows] == [("\u200b\x00", False), ("one\n\ntwo", True)]


# ------------------------------------------------------------------------------------------------------ damaged files


def damaged(folder: Path, kind: str) -> Path:
    """A file that begins well."""
    content = b"text,label\n" + b"".join(b"%d,a\n" % (number * 7919 % 10_007) for number in range(30_000))
    path = folder / f"rows.{kind}"
    if kind == "csv.gz":
        full = gzip.compress(content)
        path.write_bytes(full[: len(full) // 2])
        return path
    write_parquet(path, text=pa.array(content.decode().split()), label=pa.array(["a"] * 30_001))
    written = path.read_bytes()
    path.write_bytes(written[:2000] + bytes(7000) + written[9000:])
    return path


@pytest.mark.parametrize("kind", ["csv.gz", "parquet"])
def test_a_file_that_breaks_off_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind)
    [file] = row_reader.inspect_source(DataConfig(path=str(path))).files
    with pytest.raises(UserError) as caught:
        list(row_reader.read_rows(file, DataConfig()))
    assert caught.value.code == "damaged_file"
    assert path.name in str(caught.value)


@pytest.mark.ray
def test_a_file_that_breaks_off_in_a_data_task_is_told_without_a_traceback(tmp_path: Path, ray_session: Path) -> None:
    path = damaged(tmp_path, "csv.gz")
    recipe = config.load_config("intent", {"data.path": str(path)}).recipe
    make_tokenizer(tmp_path / "encoder")
    with pytest.raises(UserError) as caught:
        builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), tmp_path / "encoder", tmp_path)
    assert caught.value.code == "damaged_file"
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in (tmp_path / ".tokens").iterdir()] == []


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
