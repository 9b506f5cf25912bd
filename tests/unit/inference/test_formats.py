"""Rows and answers as csv, JSON lines and Parquet, and the file that takes its place: no model answers here."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.config import DataConfig
from rtrain.data import row_reader
from rtrain.inference.batch import chunks, formats
from rtrain.inference.batch.formats import Format
from rtrain.inference.batch.predict_files import refuse_among_rows
from tests.support.answering import write_jsonl
from tests.support.refusing import refused


def written(path: Path, format: Format) -> bytes:
    """The rows of a file with no other column than the reason."""
    data = DataConfig(path=str(path), label=None)
    result = row_reader.inspect_source(data)
    survey = chunks.survey_files(result, data)
    layout = formats.build_output_schema(survey.column_types, [])
    [chunk] = [chunks.ChunkReader(result, data).read(portion) for portion in survey.chunks]
    portion = path.parent / "portion"
    portion.write_bytes(formats.encode_chunk(format, layout, chunk.columns, [[None] * len(chunk.records)]))
    file = io.BytesIO()
    formats.join_chunks(format, layout, [portion], file)
    return file.getvalue()


def table(content: bytes) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = pyarrow.parquet.read_table(pa.BufferReader(content)).to_pydict()
    return result


def test_a_text_with_a_carriage_return_is_a_cell_of_csv(tmp_path: Path) -> None:
    rows = [{"text": "one\rtwo", "n": 1}, {"text": 'a "b"', "n": 2}]
    content = written(write_jsonl(tmp_path / "a.jsonl", rows), "csv").decode()
    assert list(csv.reader(io.StringIO(content, newline=""))) == [
        ["text", "n", "reason"],
        ["one\rtwo", "1", ""],
        ['a "b"', "2", ""],
    ]


def test_ids_that_no_float_holds_stay_exact_beside_floats(tmp_path: Path) -> None:
    large = 1234567890123456789
    rows: list[dict[str, Any]] = [{"text": "a", "id": large, "ids": [large], "n": large, "small": 1}]
    rows += [{"text": "b", "id": 0.5, "ids": [0.5, 1], "n": 2, "small": 0.5}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    result = table(written(path, "parquet"))
    assert result["id"] == [str(large), "0.5"]
    assert result["ids"] == [[str(large)], ["0.5", "1"]]
    assert (result["n"], result["small"]) == ([large, 2], [1.0, 0.5])
    assert [json.loads(line)["id"] for line in written(path, "jsonl").splitlines()] == [large, 0.5]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_lines_hold_no_number_that_json_has_not(tmp_path: Path, number: str) -> None:
    value = float(number.replace("Infinity", "inf"))
    arguments = pa.table(
        {"text": ["a"], "v": [value], "list": [[0.5, value]], "struct": [{"x": value, "y": [value, 1.0]}]}
    )
    pyarrow.parquet.write_table(arguments, tmp_path / "a.parquet")
    row = f'{{"text": "a", "v": {number}, "list": [0.5, {number}], "struct": {{"x": {number}, "y": [{number}, 1.0]}}}}'
    (tmp_path / "a.jsonl").write_text(row + "\n")
    for name in ("a.parquet", "a.jsonl"):
        assert json.loads(written(tmp_path / name, "jsonl"), parse_constant=pytest.fail) == {
            **{"text": "a", "v": None, "list": [0.5, None], "struct": {"x": None, "y": [None, 1.0]}, "reason": None}
        }


def test_a_map_of_a_parquet_file_holds_none_either(tmp_path: Path) -> None:
    """Arrow gives it as a list of pairs, and these as tuples."""
    maps = pa.array([[("a", float("nan")), ("b", 1.0)]], pa.map_(pa.string(), pa.float64()))
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "map": maps}), tmp_path / "a.parquet")
    assert json.loads(written(tmp_path / "a.parquet", "jsonl"))["map"] == [["a", None], ["b", 1.0]]
    assert written(tmp_path / "a.parquet", "csv").decode().splitlines()[1] == 'a,"[[""a"", null], [""b"", 1.0]]",'


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_lists_in_lists_without_end_are_texts(tmp_path: Path, format: Format) -> None:
    deep = "[" * 700 + "]" * 700
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "deep": {deep}}}\n')
    assert written(tmp_path / "a.jsonl", format)


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("rows", "out"),
    [
        ("rows", "rows/answers.csv"),
        ("rows/a.csv", "rows/a.csv"),
        ("rows/*.csv", "rows/answers.csv"),
        ("link/*.csv", "rows/answers.csv"),
        ("link", "rows/answers.csv"),
        ("rows", "link/answers.csv"),
        ("link/a.csv", "rows/a.csv"),
        ("rows/**/*.csv", "rows/answers.csv"),
        ("rows/**/*.csv", "rows/more/still/answers.csv"),
    ],
)
def test_answers_are_not_written_where_they_would_be_read_as_rows(tmp_path: Path, rows: str, out: str) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.csv").write_text("text\nx\n")
    (tmp_path / "link").symlink_to("rows")
    data = DataConfig(path=str(tmp_path / rows), label=None)
    result = row_reader.inspect_source(data)
    with refused("among_the_rows", "--out"):
        refuse_among_rows(result, data, tmp_path / out)
    refuse_among_rows(result, data, tmp_path / "answers.csv")
    if "*" in rows:
        refuse_among_rows(result, data, tmp_path / "rows" / "answers.jsonl")
    if rows == "rows/*.csv":
        refuse_among_rows(result, data, tmp_path / "rows" / "more" / "answers.csv")


def test_names_that_are_no_unicode_get_a_question_mark_and_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text,Gr\u00f6\u00dfe,Gr\u00fc\u00dfe\nhello,1,2\n".encode("latin-1"))
    result = table(written(path, "parquet"))
    assert (result["Gr??e"], result["Gr??e (2)"]) == (["1"], ["2"])


def test_numbers_of_several_widths_stay_numbers() -> None:
    """As files of one address may have them, one each."""
    assert formats.common_type(pa.int32(), pa.int64()) == formats.common_type(pa.uint8(), pa.int16()) == pa.int64()
    assert formats.common_type(pa.float32(), pa.float64()) == pa.float64()
    assert formats.common_type(pa.uint64(), pa.int64()) == pa.string()  # no integer of 64 bits holds both
