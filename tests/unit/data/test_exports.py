"""Exports of annotation tools, sheets, and the layout of SQuAD on the hub: their rows, and which are bad."""

import json
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError
from rtrain.data import row_reader
from rtrain.data.row_reader import ReadCounts, SourceRow
from rtrain.runs import run_folders
from rtrain.tasks import base
from tests.support.tiny import make_store

TEXT = "Zoë Müller moved to New York, N.Y."
PERSON, PLACE = (0, 10, "PER"), (20, 28, "LOC")
WORDS = ["Zoë", "Müller", "moved", "to", "New", "York", ",", "N.Y", "."]
TAGS = ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O", "O", "O"]


def label_studio(text: str, spans: list[tuple[int, int, str]], label: list[str] | None = None) -> dict[str, Any]:
    result: list[dict[str, Any]] = [
        {"type": "labels", "value": {"start": start, "end": end, "text": text[start:end], "labels": [name]}}
        for start, end, name in spans
    ]
    result += [{"type": "choices", "value": {"choices": label}}] if label else []
    return {"id": 7, "data": {"text": text, "channel": "mail"}, "annotations": [{"result": result}]}


def doccano(text: str, spans: list[tuple[int, int, str]], label: list[str] | None = None) -> dict[str, Any]:
    return {"id": 7, "text": text, "label": label or [list(span) for span in spans], "channel": "mail"}


def prodigy(text: str, spans: list[tuple[int, int, str]], label: list[str] | None = None) -> dict[str, Any]:
    entities = [{"start": start, "end": end, "label": name} for start, end, name in spans]
    return {"text": text, "spans": entities, "accept": label or [], "answer": "accept", "channel": "mail"}


TOOLS = {"label_studio": label_studio, "doccano": doccano, "prodigy": prodigy}


def write(path: Path, format: str, rows: list[Any]) -> Path:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(json.dumps(rows) if format == "label_studio" else lines)
    return path


def read(path: Path | str, **settings: Any) -> tuple[list[SourceRow], ReadCounts]:
    data, counts = DataConfig(path=str(path), **settings), ReadCounts()
    files = row_reader.inspect_source(data).files
    return [row for file in files for row in row_reader.read_rows(file, data, counts=counts)], counts


@pytest.mark.parametrize("format", TOOLS)
def test_entities_are_placed_on_words(tmp_path: Path, encoder: Path, format: str) -> None:
    rows = [TOOLS[format](TEXT, [PLACE, PERSON]), TOOLS[format](TEXT, [])]
    path = write(tmp_path / "export.json", format, rows)
    read_rows, _ = read(path, format=format, text="tokens", label="tags", where="channel = 'mail'")
    assert [(row.text, json.loads(row.label)) for row in read_rows] == [
        (" ".join(WORDS), TAGS),
        (" ".join(WORDS), ["O"] * 9),
    ]
    task = base.get_task("token_tags")
    assert [base.validate_task_row(task, row.text, row.pair, row.label) for row in read_rows] == [None, None]
    many = write(tmp_path / "many.json", format, [TOOLS[format](f"{TEXT} {n}", [PERSON]) for n in range(60)])
    recipe = config.load_config("entities", {"data.path": str(many), "data.format": format}).recipe
    store = make_store(recipe, encoder, tmp_path)
    assert (sum(store.manifest.rows.values()), store.manifest.quarantined) == (60, 0)


@pytest.mark.parametrize("format", TOOLS)
def test_labels_of_texts_are_read(tmp_path: Path, format: str) -> None:
    rows = [TOOLS[format](TEXT, [], ["moving"]), TOOLS[format](TEXT, [], ["moving", "people"])]
    read_rows, _ = read(write(tmp_path / "export.json", format, rows), format=format)
    assert [(row.text, row.label) for row in read_rows] == [(TEXT, "moving"), (TEXT, '["moving", "people"]')]


@pytest.mark.parametrize("format", TOOLS)
def test_entities_that_cannot_be_placed_make_bad_rows(tmp_path: Path, format: str) -> None:
    make = TOOLS[format]
    bad: list[Any] = [
        make(TEXT, [(0, 99, "PER")]),
        make(TEXT, [(5, 5, "PER")]),
        make(TEXT, [(-1, 5, "PER")]),
        make(TEXT, [PERSON, (4, 10, "PER")]),
        make(TEXT, [(0, 2, "PER"), (2, 3, "PER")]),  # within one word
        make(TEXT, [(0, 3, "")]),
        {**make(TEXT, []), "data": {}, "text": None},
        5,
    ]
    read_rows, _ = read(write(tmp_path / "a.json", format, [*bad, make(TEXT, [(1, 8, "PER")])]), format=format)
    rows, _ = read(tmp_path / "a.json", format=format, text="tokens", label="tags")
    assert [row.reason is None for row in rows] == [False] * len(bad) + [True]
    assert [row.line for row in read_rows] == list(range(1, len(bad) + 2))
    assert json.loads(rows[-1].label)[:3] == ["B-PER", "I-PER", "O"]  # it takes the words that it touches


def test_rows_without_a_finished_annotation_are_left_out(tmp_path: Path) -> None:
    rejected = {**prodigy(TEXT, [(0, 99, "PER")], ["x"]), "answer": "reject"}
    rows = [prodigy(TEXT, [], ["a"]), rejected, {**prodigy(TEXT, [], ["x"]), "answer": "ignore"}]
    prodigy_rows, counts = read(write(tmp_path / "a.jsonl", "prodigy", rows), format="prodigy")
    assert ([row.label for row in prodigy_rows], counts.left_out) == (["a"], 2)
    task = label_studio(TEXT, [], ["a"])
    skipped = {**task, "annotations": [{"was_cancelled": True, "result": []}]}
    studio_path = write(tmp_path / "a.json", "label_studio", [{**task, "annotations": []}, skipped, task])
    studio_rows, counts = read(studio_path, format="label_studio")
    assert ([(row.line, row.label) for row in studio_rows], counts.left_out) == ([(3, "a")], 2)
    unlabeled, counts = read(tmp_path / "a.json", format="label_studio", label=None)
    assert (len(unlabeled), counts.left_out) == (3, 0)


def test_other_forms_of_the_tools(tmp_path: Path) -> None:
    entities = [{"label": "PER", "start_offset": 0, "end_offset": 10}]
    path = write(tmp_path / "a.jsonl", "doccano", [{"text": TEXT, "entities": entities}])
    assert json.loads(read(path, format="doccano", text="tokens", label="tags")[0][0].label)[:2] == TAGS[:2]
    value = {"start": 0, "end": 10, "text": TEXT[:10], "labels": ["PER"]}
    short = {"id": 1, "text": TEXT, "who": [value], "topic": {"choices": ["a", "b"]}, "mood": "good"}
    path = write(tmp_path / "a.json", "label_studio", [short])
    assert json.loads(read(path, format="label_studio", text="tokens", label="tags")[0][0].label)[:2] == TAGS[:2]
    assert read(path, format="label_studio", label="topic")[0][0].label == '["a", "b"]'
    assert read(path, format="label_studio", label="mood")[0][0].label == "good"
    rated = {"data": {"review": TEXT}, "annotations": [{"result": [{"type": "rating", "value": {"rating": 4}}]}]}
    path = write(tmp_path / "b.json", "label_studio", [rated])
    assert [(row.text, row.label) for row in read(path, format="label_studio")[0]] == [(TEXT, "4")]


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "a.json", format="label_studio")
    assert caught.value.problems[0].field == "data.path"


# -------------------------------------------------------------------------------------------------------------- sheets


def make_workbook(path: Path) -> Path:
    workbook = openpyxl.Workbook()
    first = workbook.worksheets[0]
    for row in (["text", None, " label "], ["one", "x", 1], [], ['two, "2"\nlines', None, 1.0], [None, None, "b"]):
        first.append(row)
    second = workbook.create_sheet("March 2024")
    for cells in ([], ["text", "label", "at"], ["three", True, "2024-03-01"], ["four", "no", "2024-03-02"]):
        second.append(cells)
    workbook.save(path)
    return path


def test_a_sheet_gives_its_rows(tmp_path: Path) -> None:
    path = make_workbook(tmp_path / "rows.xlsx")
    rows, _ = read(path)
    assert [(row.line, row.text, row.label, row.reason is None) for row in rows] == [
        (2, "one", "1", True),
        (4, 'two, "2"\nlines', "1", True),
        (5, "", "b", False),
    ]
    march = f"{path}#March 2024"
    assert [(row.line, row.text, row.label) for row in read(march)[0]] == [(3, "three", "true"), (4, "four", "no")]
    sources = [row_reader.inspect_source(DataConfig(path=address)) for address in (str(path), march)]
    assert sources[0].digest() != sources[1].digest()


def test_a_sheet_by_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workbook(tmp_path / "rows.xlsx")
    monkeypatch.chdir(tmp_path)
    resolved = run_folders.resolve_paths(config.load_config("intent", {"data.path": "rows.xlsx#March 2024"}))
    monkeypatch.chdir("/")
    assert len(read(str(resolved.recipe.data.path))[0]) == 2


def test_sheets_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    make_workbook(tmp_path / "rows.xlsx")
    (tmp_path / "text.xlsx").write_text("text,label\n")
    openpyxl.Workbook().save(tmp_path / "empty.xlsx")
    for name in ("rows.xlsx#April", "text.xlsx", "empty.xlsx", "missing.xlsx#March"):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / name)
        assert caught.value.problems[0].field == "data.path"


# --------------------------------------------------------------------------------------------------------------- SQuAD


def test_squad_as_the_hub_has_it_is_read(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"q{n}",
            "title": f"t{n // 4}",
            "question": "Who moved?",
            "context": f"{n:02d} {TEXT}",
            "answers": answers,
        }
        for n, answers in enumerate([{"text": ["Zoë"], "answer_start": [3]}, {"text": [], "answer_start": []}] * 20)
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", "jsonl", rows)
    task = base.get_task("span_qa")
    for name in ("rows.parquet", "rows.jsonl"):
        overrides = {"data.path": str(tmp_path / name), "data.format": None}
        data = config.load_config("squad", overrides).recipe.data
        (file,) = row_reader.inspect_source(data).files
        read_rows = list(row_reader.read_rows(file, data))
        assert [base.validate_task_row(task, row.text, row.pair, row.label) for row in read_rows] == [None] * 40
