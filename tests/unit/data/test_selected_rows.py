"""Which rows are read, and how their texts and labels are made: `data.where`, `text`, `features`, `labels`."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Head
from rtrain.data import row_reader
from rtrain.data.row_reader import ReadCounts, SourceRow
from rtrain.data.store import builder
from rtrain.inference import score
from rtrain.inference.artifact import read_artifact
from rtrain.inference.predictor import InputError, Predictor
from tests.conftest import labelled_rows
from tests.support.causes import caused_by
from tests.support.tiny import CORPUS, make_store, make_task_artifact

CONDITION = "status = 'closed' and lang in ('de', 'en')"
ROWS: list[dict[str, Any]] = [
    {"subject": "Hi", "body": "<b>one</b>", "label": "p3", "status": "closed", "lang": "de", "channel": "mail"},
    {"subject": "", "body": "two", "label": "P1", "status": "open", "lang": "de", "channel": "mail"},
    {"subject": "Re", "body": "", "label": "Prio 3", "status": "closed", "lang": "en", "channel": ""},
    {"subject": "", "body": " ", "label": "P1", "status": "closed", "lang": "en", "channel": "web"},
    {"subject": "x", "body": "y", "label": "P1", "status": "closed", "lang": "fr", "channel": "web"},
]
SETTINGS: dict[str, Any] = {
    **{"where": CONDITION, "text": ("subject", "body"), "strip_html": True, "features": ("channel",)},
    "labels": {"p3": "P3", "Prio 3": "P3"},
}


def write(folder: Path, format: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"rows.{format}"
    if format == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    if format == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if format == "tsv" else ",")
        writer.writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    return path


def read(path: Path, **settings: Any) -> tuple[list[SourceRow], ReadCounts]:
    data, counts = DataConfig(path=str(path), **settings), ReadCounts()
    files = row_reader.inspect_source(data).files
    return [row for file in files for row in row_reader.read_rows(file, data, counts=counts)], counts


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_rows_are_selected_and_their_texts_made_in_each_format(tmp_path: Path, format: str) -> None:
    rows, counts = read(write(tmp_path, format), **SETTINGS)
    assert [(row.text, row.label) for row in rows if row.reason is None] == [
        ("channel: mail\nHi\none", "P3"),
        ("Re", "P3"),
    ]
    assert [row.line - rows[0].line for row in rows] == [0, 2, 3]  # the third has no text and is bad
    assert counts == ReadCounts(left_out=2, relabeled=2)


def test_labels_in_lists_and_in_several_columns_have_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"text": "a", "label": ["p3", "x"], "other": "p3"}])
    assert read(path, labels={"p3": "P3"})[0][0].label == '["P3", "x"]'
    assert read(path, labels={"p3": "P3"}, label="other")[0][0].label == "P3"
    heads = read(path, labels={"p3": "P3"}, label=("other", "text"))[0][0].label
    assert json.loads(heads) == {"other": "P3", "text": "a"}
    assert read(path, labels={"y": "z"})[1] == ReadCounts()
    numbered = write(tmp_path, "csv", [{"text": "a", "label": 1}, {"text": "b", "label": "1.0"}])
    assert [row.label for row in read(numbered, labels={1: 2})[0]] == ["2", "2"]


def test_columns_that_are_missing_are_named_together(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    with pytest.raises(ConfigError) as caught:
        read(path, text=("subjct", "body"), where="state = 1", features=("chanel",), stratify="team")
    fields = [(problem.field, problem.value, problem.code) for problem in caught.value.problems]
    assert fields == [
        ("data.text", "subjct", "unknown_column"),
        ("data.features", "chanel", "unknown_column"),
        ("data.where", "state", "unknown_column"),
        ("data.stratify", "team", "unknown_column"),
    ]


@pytest.mark.parametrize(
    ("settings", "field", "code"),
    [
        ({"data.where": "status = closed"}, "data.where", "invalid_filter"),
        ({"data.text": ["a", "a"]}, "data.text", "same_column"),
        ({"data.text": []}, "data.text", "same_column"),
        ({"data.text": ["a", "label"]}, "data.label", "same_column"),
        ({"data.features": ["text"]}, "data.features", "same_column"),
        ({"data.labels": {"a": "b"}, "data.label": None}, "data.labels", "conflicting_settings"),
        ({"data.stratify": "label", "data.test": "x.csv"}, "data.stratify", "conflicting_settings"),
        ({"data.stratify": "label", "data.label": None}, "data.stratify", "conflicting_settings"),
        ({"data.split_time": {"column": "a"}, "data.folds": 5}, "data.split_time", "conflicting_settings"),
        ({"data.split_time": {"column": "a", "test": "2024-01-01"}}, "data.split_time", "out_of_range"),
        ({"data.split_time": {"column": "a", "valid": 0}}, "data.split_time", "out_of_range"),
        ({"data.split_time": {"column": "a", "valid": 0.6, "test": 0.5}}, "data.split_time", "out_of_range"),
        (
            {"data.split_time": {"column": "a", "valid": "2024-02-01", "test": "2024-01-01"}},
            "data.split_time.valid",
            "out_of_range",
        ),
        (
            {"data.split_time": {"column": "a", "valid": "yesterday", "test": "2024-01-01"}},
            "data.split_time.valid",
            "invalid_date",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load_config("intent", {"data.path": "rows.csv", **settings})
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [(field, code)]


def test_texts_with_positions_are_not_changed(tmp_path: Path) -> None:
    changes = {"data.text": ["tokens", "more"], "data.features": ["a"], "data.strip_html": True}
    problems = builder.find_problems(config.load_config("entities", {"data.path": "x", **changes}).recipe)
    assert [(problem.field, problem.code) for problem in problems] == [(field, "unsupported") for field in changes]
    problems = builder.find_problems(config.load_config("squad", {"data.path": "x", **changes}).recipe)
    assert [problem.field for problem in problems] == ["data.strip_html"]


def test_a_store_counts_the_selection_and_has_its_own_address(tmp_path: Path, encoder: Path) -> None:
    rows = [
        {"subject": text, "body": "", "label": label, "status": status, "lang": "de", "channel": "web"}
        for text, label in labelled_rows(60)
        for status in ("closed", "open")
    ]
    path = write(tmp_path, "csv", rows)
    addresses = set()
    for settings in (SETTINGS, {**SETTINGS, "labels": {"refund": "money"}}):
        overrides = {f"data.{name}": value for name, value in settings.items()}
        recipe = config.load_config("intent", {"data.path": str(path), **overrides}).recipe
        store = make_store(recipe, encoder, tmp_path)
        addresses.add(store.folder)
    assert len(addresses) == 2
    assert store.manifest.selection == {"left_out": 60, "relabeled": 20}
    assert sum(store.manifest.rows.values()) == 60
    assert store.manifest.labels == ("login", "money", "parcel")

    nothing = config.load_config("intent", {"data.path": str(path), "data.text": "subject", "data.where": "lang = 1"})
    with pytest.raises(ConfigError, check=caused_by("no_rows")):
        make_store(nothing.recipe, encoder, tmp_path)


def test_an_artifact_reads_a_file_and_a_request_as_its_training_did(tmp_path: Path) -> None:
    settings = DataConfig(**SETTINGS).model_dump(mode="json")
    folder = make_task_artifact(tmp_path / "a", "classification", Head(("P1", "P3"), {}), data=settings)
    path = write(tmp_path, "csv", [*ROWS, {**ROWS[0], "body": f"<p>{CORPUS[0]}</p>"}])
    report = score.score_file(folder, score.resolve_data_settings(read_artifact(folder), {"data.path": str(path)}))
    assert (report["rows"], report["left_out_rows"], report["bad_rows"]) == (3, 2, 1)
    predictor = Predictor.load(folder)
    text = f"channel: mail\nHi\n{CORPUS[0]}"
    request: Any = {"text": f"Hi<br>{CORPUS[0]}", "features": {"channel": "mail"}}
    assert predictor([request]) == predictor([text])
    request["features"] = {"channel": " True "}  # as `true` in a cell
    assert predictor([request]) == predictor([f"channel: true\nHi\n{CORPUS[0]}"])
    request["features"] = {"color": "red"}
    with pytest.raises(InputError):
        predictor([request])
