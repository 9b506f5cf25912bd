"""Rows in memory: equal rows are one file, whatever holds them, and a value of another type is refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.api import rows
from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import ROWS_FOLDER
from rtrain.data import row_reader
from rtrain.runs.store import scan
from tests.support import stock

RECORDS = [{"text": f"text {number}", "label": "ab"[number % 2], "weight": number / 2} for number in range(100)]
FIELD = "data.path"


def write(data: Any, root: Path) -> Path:
    return Path(rows.store_rows({FIELD: data}, root)[FIELD])


def files(root: Path) -> list[Path]:
    return sorted(path for path in (root / ROWS_FOLDER).rglob("*") if path.is_file())


class Stream:
    """Rows that only speak Arrow's C interface, as polars' and DuckDB's do, in small batches."""

    def __init__(self, table: pa.Table):
        self._reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(7))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)


def as_datasets(records: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(records)


def test_equal_rows_are_one_file_whatever_holds_them(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    frame = pd.DataFrame(RECORDS)
    chunked = pa.concat_tables([table.slice(0, 13), table.slice(13)])
    dictionary = table.set_column(1, "label", table.column("label").dictionary_encode())
    shifted = pd.concat([frame.tail(1), frame]).iloc[1:]
    sources = [RECORDS, tuple(RECORDS), frame, table, chunked, dictionary, shifted, Stream(table), as_datasets(RECORDS)]
    assert len({write(data, tmp_path) for data in sources}) == 1
    [file] = files(tmp_path)
    assert pyarrow.parquet.read_table(file).to_pylist() == RECORDS


def test_other_rows_another_order_or_another_column_are_another_file(tmp_path: Path) -> None:
    frame = pd.DataFrame(RECORDS)
    sources = [
        frame,
        frame.iloc[::-1],
        frame.head(99),
        frame.rename(columns={"label": "topic"}),
        frame.assign(text="x"),
    ]
    assert len({write(data, tmp_path) for data in sources}) == len(sources)


def test_the_bytes_depend_on_no_batch_where_rows_fill_several_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_GROUP", 30)
    table = pa.Table.from_pylist(RECORDS)
    assert write(table, tmp_path) == write(Stream(table), tmp_path) == write(RECORDS, tmp_path)
    file = pyarrow.parquet.ParquetFile(files(tmp_path)[0])
    assert [file.metadata.row_group(place).num_rows for place in range(file.num_row_groups)] == [30, 30, 30, 10]


def test_rows_are_read_as_those_of_a_file_are(tmp_path: Path) -> None:
    data = DataConfig(path=str(write(pd.DataFrame(RECORDS), tmp_path)))
    source = row_reader.inspect_source(data)
    read = [row for file in source.files for row in row_reader.read_rows(file, data)]
    assert [(row.text, row.label) for row in read] == [(record["text"], record["label"]) for record in RECORDS]


def test_rows_take_the_place_of_files_of_another_format(tmp_path: Path) -> None:
    overrides = rows.store_rows({FIELD: RECORDS, "data.test": "test.csv"}, tmp_path)
    assert (overrides["data.format"], overrides["data.test"]) == (None, "test.csv")
    assert rows.store_rows({FIELD: "rows.csv"}, tmp_path) == {FIELD: "rows.csv"}


def test_class_names_of_datasets_stay(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features)
    data = DataConfig(path=str(write(dataset.select([2, 1]), tmp_path)))
    [file] = row_reader.inspect_source(data).files
    assert [(row.text, row.label) for row in row_reader.read_rows(file, data)] == [("c", "yes"), ("b", "no")]


def test_a_column_that_only_later_rows_have_is_kept(tmp_path: Path) -> None:
    file = write([{"text": "a"}, {"text": "b", "label": "x"}], tmp_path)
    assert pyarrow.parquet.read_table(file).to_pylist() == [{"text": "a", "label": None}, {"text": "b", "label": "x"}]


def generate() -> Iterator[dict[str, str]]:
    yield {"text": "a"}


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (generate(), "generator"),
        ({"text": ["a"]}, "dict"),
        (np.zeros(3), "numpy.ndarray"),
        (["a", "b"], "list"),
        (b"text,label", "bytes"),
        (3, "int"),
    ],
)
def test_what_is_no_rows_is_refused_by_name_before_anything_is_written(data: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write(data, tmp_path)
    [problem] = caught.value.problems
    assert (problem.field, problem.value, problem.code) == (FIELD, name, "unsupported_type")
    assert list(tmp_path.iterdir()) == []


def test_splits_of_datasets_are_refused_with_the_arguments_to_write(tmp_path: Path) -> None:
    import datasets

    splits = datasets.DatasetDict({"train": as_datasets(RECORDS), "validation": as_datasets(RECORDS)})
    with pytest.raises(ConfigError) as caught:
        write(splits, tmp_path)
    [problem] = caught.value.problems
    assert problem.code == "unsupported_type"
    assert 'data=splits["train"]' in problem.fix


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (pd.DataFrame({"text": ["a", 1]}), "wrong_type"),
        ([{"text": "a"}, {"text": 1}], "wrong_type"),
        (pd.DataFrame({"text": []}), "empty_file"),
        ([], "empty_file"),
    ],
    ids=["mixed frame", "mixed list", "empty frame", "empty list"],
)
def test_rows_without_one_type_per_column_and_no_rows_are_refused(data: Any, code: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write(data, tmp_path)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert files(tmp_path) == []


def test_all_wrong_types_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rows.store_rows({"data.path": 1, "data.test": 2, "data.valid": "rows.csv"}, tmp_path)
    assert [problem.field for problem in caught.value.problems] == ["data.path", "data.test"]


def test_rows_belong_to_the_runs_that_were_trained_on_them(tmp_path: Path) -> None:
    used, other = write(RECORDS, tmp_path), write(RECORDS[:9], tmp_path)
    stock.make(tmp_path / "run", data__path=str(used))
    items = {item.path.name: [user.name for user in item.users] for item in scan.scan_folder(tmp_path).shared}
    assert items[used.parent.name] == ["run"]
    assert items[other.parent.name] == []
