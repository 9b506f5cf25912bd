"""Portions of files: read in any order they are the rows of one reading from first to last."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rtrain.config import DataConfig
from rtrain.data import row_reader
from rtrain.inference.batch import chunks
from rtrain.inference.batch.chunks import Chunk, ChunkReader, ChunkRows
from tests.support.answering import MESSY, texts, write_csv, write_jsonl

ROWS = 5


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", ROWS)


def unclosed(path: Path) -> Path:
    """Behind the tenth row a quote opens that is never closed: each of the lines behind it is a bad row."""
    rows = [f"{number},text {number}" for number in range(23)]
    rows[10] = '10,"never closed'
    path.write_text("\n".join(["number,text", *rows]))
    return path


def broken_lines(path: Path) -> Path:
    """Bare carriage returns, blank lines, short lines, quoted newlines."""
    lines = [f'{number},"a\n\nb {number}"' for number in range(30)]
    lines[3], lines[7], lines[8], lines[20] = "3,a\rb", "", "x", "20,y,z"
    path.write_text("\n".join(["number,text", *lines, "", ""]), newline="")
    return path


def conll(path: Path) -> Path:
    path.write_text("\n\n".join(f"word{number} O\nof B-PER" for number in range(23)) + "\n\nbad\n\nlast O\n")
    return path


def squad(path: Path) -> Path:
    asks = [{"id": str(number), "question": f"what {number}"} for number in range(17)]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": "here", "qas": asks}]}]}))
    return path


def parquet(path: Path) -> Path:
    table = pa.table({"number": list(range(37)), "text": [None, *texts(36)]})
    pyarrow.parquet.write_table(table, path, row_group_size=8)
    return path


def folder_of_datasets(path: Path) -> Path:
    path.mkdir()
    table = pa.table({"number": list(range(23)), "text": texts(23)})
    with pyarrow.ipc.new_stream(path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return path


def zipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(write_csv(path.with_suffix(".plain"), texts(23)).read_bytes()))
    return path


def messy(path: Path) -> Path:
    path.write_bytes(MESSY)
    return path


FILES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "rows.csv": (lambda path: write_csv(path, texts(23)), {}, 23),
    "messy.csv": (messy, {}, 7),
    "unclosed.csv": (unclosed, {}, 23),
    "broken.csv": (broken_lines, {}, 29),
    "rows.csv.gz": (zipped, {}, 23),
    "rows.jsonl": (lambda path: write_jsonl(path, [{"text": text} for text in texts(23)]), {}, 23),
    "rows.conll": (conll, {"text": "tokens"}, 25),
    "squad.json": (squad, {"text": "question", "text_pair": "context", "format": "squad"}, 17),
    "rows.parquet": (parquet, {}, 37),
    "datasets": (folder_of_datasets, {}, 23),
    "none.csv": (lambda path: write_csv(path, []), {}, 0),
}


def rows_of(chunk: ChunkRows) -> list[Any]:
    columns = chunk.columns.to_pylist() if isinstance(chunk.columns, pa.Table) else chunk.columns
    return list(zip(chunk.records, columns, strict=True))


@pytest.mark.parametrize("name", FILES)
def test_portions_in_any_order_are_the_rows_of_one_reading(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings, count = FILES[name]
    data = DataConfig(path=str(make(tmp_path / name)), **{"label": None, **settings})
    result = row_reader.inspect_source(data)
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", 10_000)
    [full] = chunks.survey_files(result, data).chunks or [Chunk(0, 0, 0)]
    expected = rows_of(ChunkReader(result, data).read(full)) if full.rows else []
    assert [record for record, _ in expected] == [
        record for piece in result.files for record in row_reader.read_rows(piece, data)
    ]
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", ROWS)
    survey = chunks.survey_files(result, data)
    assert survey.rows == count == len(expected)
    assert [portion.number for portion in survey.chunks] == list(range(-(-count // ROWS)))
    assert all(portion.rows == ROWS for portion in survey.chunks[:-1])
    in_order, shuffled = list(survey.chunks), list(survey.chunks)
    random.Random(0).shuffle(shuffled)
    for order in (in_order, shuffled, in_order[::2], in_order[::-1]):
        reader = ChunkReader(result, data)
        for portion in order:
            first = portion.number * ROWS
            assert rows_of(reader.read(portion)) == expected[first : first + portion.rows], portion
        reader.close()


def test_a_portion_ends_at_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", 1000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 300)
    rows = ["x" * 100] * 20
    data = DataConfig(path=str(write_csv(tmp_path / "rows.csv", rows)), label=None)
    assert {portion.rows for portion in chunks.survey_files(row_reader.inspect_source(data), data).chunks} == {3, 2}
    pyarrow.parquet.write_table(pa.table({"text": [f"{place}" * 50 for place in range(20)]}), tmp_path / "rows.parquet")
    data = data.model_copy(update={"path": str(tmp_path / "rows.parquet")})
    assert len(chunks.survey_files(row_reader.inspect_source(data), data).chunks) > 2


def test_plain_files_are_not_read_from_their_beginning_for_each_portion(tmp_path: Path) -> None:
    data = DataConfig(path=str(write_csv(tmp_path / "rows.csv", texts(23))), label=None)
    portions = chunks.survey_files(row_reader.inspect_source(data), data).chunks
    assert [portion.rows_to_skip for portion in portions] == [0] * 5
    assert [portion.lines_before for portion in portions] == [0, 6, 11, 16, 21]
    lines = (tmp_path / "rows.csv").read_bytes().split(b"\n")
    assert portions[2].start_byte == len(b"\n".join(lines[:11])) + 1
