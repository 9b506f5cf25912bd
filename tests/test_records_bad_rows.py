"""Rows that cannot be used: set aside, each with a reason, and how many of them are too many."""

import gzip
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.config import Data
from rtrain.data import records, tokens
from rtrain.data.formats import files
from rtrain.data.records import Record
from rtrain.errors import ConfigError, UserError
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from tests.test_records import problems, read_bytes
from tests.tiny import make_tokenizer


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
    """The file is UTF-8: to convert it would spoil all of its accents."""
    [record] = read_bytes(tmp_path / "a.jsonl", b'{"text": "\\ud83d", "label": "x"}\n')
    assert record.reason == "column 'text' holds half of a character (as \\ud83d, of an emoji); write it whole"


def test_a_slice_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    """No row is bad for it, so that a report, the JSON of `rtrain evaluate` and a terminal must be able to hold it."""
    [record] = read_bytes(tmp_path / "a.csv", b"text,label,lang\na,x,fran\xe7ais\n", slices=("lang",))
    assert (record.reason, record.slices) == (None, ("fran?ais",))
    [record] = read_bytes(tmp_path / "a.jsonl", b'{"text": "a", "label": "x", "lang": "\\ud800"}\n', slices=("lang",))
    assert (record.reason, record.slices) == (None, ("?",))


@pytest.mark.parametrize(("bad", "total", "refused"), [(0, 0, False), (2, 100, False), (3, 100, True), (1, 49, True)])
def test_a_source_with_too_many_bad_rows_is_refused(bad: int, total: int, refused: bool) -> None:
    examples = [f"rows.csv:{line}: no" for line in range(2, 2 + bad)]
    if not refused:
        records.refuse_if_too_bad(bad, total, examples, Data())
        return
    with pytest.raises(UserError) as caught:
        records.refuse_if_too_bad(bad, total, examples, Data())
    listed, enough = "\n  ".join(examples), {49: "0.021", 100: "0.031"}[total]
    assert str(caught.value) == (
        f"{bad} of {total} rows cannot be used (data.max_bad_rows=0.02):\n  {listed}\n"
        f"Mend these lines, or set them aside by --set data.max_bad_rows={enough}"
    )
    records.refuse_if_too_bad(bad, total, examples, Data(max_bad_rows=float(enough)))  # as it is told


def test_at_most_five_bad_lines_are_listed() -> None:
    with pytest.raises(UserError) as caught:
        records.refuse_if_too_bad(9, 9, [f"line {number}" for number in range(9)], Data())
    assert "line 4\n" in str(caught.value)
    assert "line 5" not in str(caught.value)


NOT_JSON = "is not JSON; write {}, with double quotes, as json.dumps does"


@pytest.mark.parametrize(
    ("task", "label", "reason"),
    [
        ("multi_label", "['a', 'b']", f"the label \"['a', 'b']\" {NOT_JSON.format(json.dumps(['a', 'b']))}"),
        ("multi_label", "[oops", f"the label '[oops' {NOT_JSON.format(json.dumps(['a', 'b']))}"),
        ("multi_label", '["a", null]', """the label '["a", null]' holds what is no text; write ["a", "b"]"""),
        ("multi_label", '["a", " "]', """the label '["a", " "]' holds an empty text; leave it out, as in ["a", "b"]"""),
        (
            "multi_label",
            '["\\ud800"]',
            """the label '["\\\\ud800"]' holds half of a character; write it whole, in UTF-8""",
        ),
        ("token_tags", "['O', 'B-PER']", f"the label \"['O', 'B-PER']\" {NOT_JSON.format(json.dumps(['O', 'B-PER']))}"),
        ("token_tags", "[oops", f"the label '[oops' {NOT_JSON.format(json.dumps(['O', 'B-PER']))}"),
        ("multi_head", "{oops", f"the label '{{oops' {NOT_JSON.format(json.dumps({'intent': 'buy', 'mood': 'good'}))}"),
        ("multi_head", '{"x": ["a"]}', "holds what is no text"),
        ("multi_head", '{"x": null}', "is empty"),
        (
            "span_qa",
            "{}",
            'the answers are not a list of {"text", "start"} objects; write [{"text": "on monday", "start": 12}]',
        ),
        ("span_qa", "[" * 100_000, "the answers are not a list"),
        ("span_qa", '[{"text": "two", "start": 1e999}]', "the answers are not a list"),
        ("span_qa", '[{"text": "two", "start": -3}]', "answer 'two' is not at character -3 of the context"),
        ("regression", "1e300", "the score '1e300' is larger than a model can compute with"),
        ("regression", "9" * 5000, f"the score '{'9' * 56}... is not a number"),
    ],
)
def test_a_malformed_label_is_a_bad_row(task: str, label: str, reason: str) -> None:
    assert reason in str(base.get(task).flaw("one two", "one two", label))


def write_parquet(path: Path, **columns: pa.Array) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def test_a_value_that_python_has_not_is_a_bad_row(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"caf\xe9", b"three"]).view(pa.string())
    labels = pa.array([0, 10**18, 10**18 + 1]).cast(pa.timestamp("us"))
    path = write_parquet(tmp_path / "a.parquet", text=texts, label=labels)
    found = list(records.read(files.Piece(str(path), "parquet", "train"), Data()))
    assert [record.reason for record in found] == [
        None,
        "column 'text' is not UTF-8; write the file again with texts that are",
        "column 'label' holds what cannot be read ('date value out of range'); correct it",
    ]


def test_a_class_that_has_no_name_is_a_bad_row(tmp_path: Path) -> None:
    """A `datasets` file; its class of a list of labels was a crash as well."""
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}, "text": [{"_type": "Value"}]}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"text": ["x"] * 4, "label": [1, 2, -1, None]}).replace_schema_metadata(metadata)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    found = list(records.read(files.Piece(str(tmp_path / "a.arrow"), "datasets", "train"), Data()))
    empty = "column 'label' is empty; write a label or remove the row"
    assert [(record.label, record.reason) for record in found] == [
        ("b", None),
        ("", "column 'label' is class 2, and the file names 2; write the data set again"),
        ("", empty),
        ("", empty),
    ]


def test_bytes_are_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=pa.array(["é".encode(), b"\xe9"]), label=pa.array(["a", "b"]))
    one, other = records.read(files.Piece(str(path), "parquet", "train"), Data())
    assert (one.text, one.reason) == ("é", None)
    assert other.reason == "column 'text' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"


@pytest.mark.parametrize("words", [["to", None], ["to", ["be"]], [{"to": "be"}]])
def test_a_list_of_more_than_words_is_bad(tmp_path: Path, words: list[object]) -> None:
    [record] = read_bytes(tmp_path / "a.jsonl", json.dumps({"text": words, "label": "a"}).encode())
    assert record.reason == """column 'text' is a list of more than words; write texts, e.g. ["to", "be"]"""


def test_a_document_without_a_token_is_bad(tmp_path: Path) -> None:
    from rtrain.data.packing import packed

    tokenizer = load_tokenizer(make_tokenizer(tmp_path), 32)
    rows = [Record(number, text, None, "", None) for number, text in enumerate(["one", "\u200b\x00", "two"])]
    found = list(packed(rows, tokenizer, 32, lambda record: "train"))
    assert [(row.text, row.reason) for row in found] == [
        ("\u200b\x00", "the model reads no token of it; write a text or remove the row"),
        ("one\n\ntwo", None),
    ]


# ------------------------------------------------------------------------------------------------------ damaged files


def damaged(folder: Path, kind: str) -> Path:
    """A file that begins well."""
    content = b"text,label\n" + b"".join(b"%d,a\n" % (number * 7919 % 10_007) for number in range(30_000))
    path = folder / f"rows.{kind}"
    if kind == "csv.gz":
        whole = gzip.compress(content)
        path.write_bytes(whole[: len(whole) // 2])
        return path
    write_parquet(path, text=pa.array(content.decode().split()), label=pa.array(["a"] * 30_001))
    written = path.read_bytes()
    path.write_bytes(written[:2000] + bytes(7000) + written[9000:])
    return path


@pytest.mark.parametrize("kind", ["csv.gz", "parquet"])
def test_a_file_that_breaks_off_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind)
    [piece] = records.inspect(Data(path=str(path))).pieces
    with pytest.raises(UserError, match=rf"rows\.{kind} cannot be read to its end \(.+\); copy or write it again"):
        list(records.read(piece, Data()))


def test_a_zip_file_that_cannot_be_read_is_refused_before_a_start(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.zip"

    def reason(written: bytes) -> str:
        path.write_bytes(written)
        [problem] = problems(Data(path=str(path)))
        return problem.reason

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "text,label\na,b\n")
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")  # of the directory at the end: flags are its bytes 8 and 9, then the packing
    assert reason(whole[: entry + 8] + b"\x01" + whole[entry + 9 :]) == "it asks for a password"
    assert reason(whole[: entry + 10] + b"\x09" + whole[entry + 11 :]) == "it is packed in a way of its own"
    zipfile.ZipFile(path, "w").close()
    assert reason(path.read_bytes()) == "it holds no file"


@pytest.mark.parametrize(("name", "kind"), [("a.csv.gz", "csv"), ("a.parquet", "parquet")])
def test_a_file_of_another_kind_is_refused_before_a_start(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"text,label\na,b\n")
    with pytest.raises(ConfigError, match=f"not readable as {kind} "):
        records.inspect(Data(path=str(tmp_path / name)))


@pytest.mark.ray
def test_a_file_that_breaks_off_in_a_data_task_is_told_without_a_traceback(tmp_path: Path, ray_session: Path) -> None:
    path = damaged(tmp_path, "csv.gz")
    recipe = config.load("intent", {"data.path": str(path)}).recipe
    make_tokenizer(tmp_path / "encoder")
    with pytest.raises(UserError) as caught:
        tokens.ensure(recipe, records.inspect(recipe.data), tmp_path / "encoder", tmp_path)
    assert str(caught.value).startswith(f"file://{path} cannot be read to its end (")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in (tmp_path / ".tokens").iterdir()] == []
