"""Rows to answer, and their answers: shared by the tests of batch inference."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

from rtrain.inference.batch.predict_files import BatchRequest
from tests.support.tiny import CORPUS

MESSY = (
    b"\xef\xbb\xbf,text,when,label\r\n"
    b'0,"hello, my parcel\r\nis lost",2020-01-01,b\r\n'
    b"1,,2020-01-02,a\r\n"
    b"2,where,2020\r\n"
    b"3,  ,x,\r\n"
    b"4,caf\xe9,y,c\r\n"
    b"\r\n"
    b'5,"say ""hi""",z,a\r\n'
    b"6,\xe6\x97\xa5\xe6\x9c\xac \xc3\xa9,z,b"
)
"""A BOM, CRLF, a quoted newline, an index column, blank texts, a short line, a byte that is no UTF-8, a blank line, and
no newline at the end."""


def asked(artifact: Path, data: Path | str, **settings: Any) -> BatchRequest:
    return BatchRequest(
        artifact, {"data.path": str(data), **{f"data.{name}": value for name, value in settings.items()}}
    )


def texts(count: int) -> list[str]:
    """Texts of many lengths, each unlike all others."""
    return [f"{number} {CORPUS[number % len(CORPUS)][: 5 + number % 60]}" for number in range(count)]


def write_csv(path: Path, rows: Iterable[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("number", "text"))
        lines.writerows(enumerate(rows))
    return path


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    return rows
