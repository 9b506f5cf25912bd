"""Rows of files get their answers: as many rows out as in, in their order, each with its own columns."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.core.ragged import Head
from rtrain.inference.batch import chunks, predict_files
from rtrain.inference.batch.chunks import Chunk
from rtrain.inference.batch.pipeline import AnsweredChunk, BatchPredictJob, ChunkAnswerer
from rtrain.inference.batch.predict_files import Reuse
from rtrain.inference.predictor import Predictor
from tests.conftest import STARTUP
from tests.support.answering import MESSY, asked, read_csv, read_jsonl, read_parquet, texts, write_csv, write_jsonl
from tests.support.refusing import refused, refused_fields
from tests.support.root import ROOT
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

EMPTY = "column 'text' is empty; write a text or remove the row"
OUTSIDE = {"out_of_scope_label": "other", "threshold": 0.6}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("other") / "artifact", seed=1)


@pytest.fixture
def portions_of_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", 7)


def best(artifact: Path, rows: list[Any]) -> list[tuple[str, float]]:
    """Label and score of each, by the path of single texts."""
    result = Predictor.load(artifact)(rows, {"top_k": 1})
    return [(answer[0]["label"], answer[0]["score"]) for answer in result]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_each_row_of_a_messy_file_keeps_its_place_and_its_columns(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "messy.csv").write_bytes(MESSY)
    events: list[dict[str, Any]] = []
    report = predict_files.answer_to_file(
        asked(artifact, tmp_path / "messy.csv"), tmp_path / "answers.csv", on_event=events.append
    )
    assert {name: report[name] for name in ("rows", "answered", "empty", "unusable")} == {
        **{"rows": 7, "answered": 3},
        **{"empty": 2, "unusable": 2},
    }
    assert report["renamed"] == {"label": "label (answer)"}
    assert "the rows have a column 'label' of their own: the answer's is 'label (answer)'" in [
        event.get("text") for event in events
    ]
    rows = read_csv(tmp_path / "answers.csv")
    assert [tuple(row.values())[:4] for row in rows] == [
        ("0", "hello, my parcel\r\nis lost", "2020-01-01", "b"),
        ("1", "", "2020-01-02", "a"),
        ("", "", "", ""),
        ("3", "  ", "x", ""),
        ("4", "caf?", "y", "c"),
        ("5", 'say "hi"', "z", "a"),
        ("6", "日本 é", "z", "b"),
    ]
    assert list(rows[0])[4:] == ["label (answer)", "score", "reason"]
    assert [row["reason"] for row in rows] == [
        "",
        f"line 4: {EMPTY}",
        "line 5: 3 columns instead of 4; quote a text that holds the separator",
        f"line 6: {EMPTY}",
        "line 7: column 'text' is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8",
        "",
        "",
    ]
    expected = best(artifact, ["hello, my parcel\r\nis lost", 'say "hi"', "日本 é"])
    answered = [row for row in rows if not row["reason"]]
    assert [row["label (answer)"] for row in answered] == [label for label, _ in expected]
    assert [float(row["score"]) for row in answered] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert {row["label (answer)"] + row["score"] for row in rows if row["reason"]} == {""}


@pytest.mark.usefixtures("portions_of_seven")
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_answers_of_many_portions_are_those_of_single_texts(artifact: Path, tmp_path: Path, suffix: str) -> None:
    rows = texts(50)
    write_csv(tmp_path / "rows.csv", rows)
    out = tmp_path / f"answers.{suffix}"
    report = predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out)
    read: Any = {"csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}[suffix]
    result = read(out)
    assert (report["rows"], report["answered"]) == (50, 50)
    assert [(row["number"], row["text"]) for row in result] == [(str(place), text) for place, text in enumerate(rows)]
    expected = best(artifact, rows)
    assert len({label for label, _ in expected}) > 1
    assert [row["label"] for row in result] == [label for label, _ in expected]
    assert [float(row["score"]) for row in result] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, "rows.csv"])


def test_parquet_keeps_the_types_of_its_columns(artifact: Path, tmp_path: Path) -> None:
    stamp = pa.array([10**18 + 1, None, 3], pa.timestamp("ns"))  # to a nanosecond, which Python's own types cannot hold
    table = pa.table(
        {
            "text": pa.array(["where is my parcel", None, "money"]),
            "when": stamp,
            "kinds": pa.array([["a"], [], None], pa.list_(pa.string())),
            "code": pa.array(["x", "y", "x"]).dictionary_encode(),
            "score": pa.array([1.5, float("nan"), None]),
        }
    ).replace_schema_metadata({"pandas": "{}", "huggingface": "{}"})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.parquet"), tmp_path / "a.parquet")
    result = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").read()
    assert result.schema.names == [*table.schema.names, "label", "score (answer)", "reason"]
    for name in table.schema.names:
        assert result[name].type == table[name].type
        assert result[name].combine_chunks().equals(table[name].combine_chunks()) or name == "score"
    assert result["reason"].to_pylist() == [None, f"row 2: {EMPTY}", None]
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.parquet"), tmp_path / "a.jsonl")
    rows = read_jsonl(tmp_path / "a.jsonl")
    assert [row["score"] for row in rows] == [1.5, None, None]
    assert [row["kinds"] for row in rows] == [["a"], [], None]
    assert rows[0]["when"].startswith("2001-09-09")
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.parquet"), tmp_path / "a.csv")
    assert [row["kinds"] for row in read_csv(tmp_path / "a.csv")] == ['["a"]', "[]", ""]


def test_json_lines_keep_their_values_and_parquet_gives_each_column_one_type(artifact: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "where", "n": 1, "mixed": "x", "tags": ["a"], "deep": {"a": [None]}, "flag": True},
        {"text": "money \ud800", "n": 2.5},
        {"text": "parcel", "n": None, "mixed": 3, "tags": [1, None], "huge": 10**30, "label": "own"},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.jsonl"), tmp_path / "a.jsonl")
    result = read_jsonl(tmp_path / "a.jsonl")
    assert [{name: row[name] for name in value} for row, value in zip(result, rows, strict=True)] == [
        rows[0],
        {**rows[1], "text": "money ?"},
        rows[2],
    ]
    assert [row["label (answer)"] is None for row in result] == [False, True, False]
    assert result[1]["reason"].startswith("line 2: column 'text' holds half of a character")
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.jsonl"), tmp_path / "a.parquet")
    table = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").read()
    assert table["n"].to_pylist() == [1.0, 2.5, None]
    assert table["mixed"].to_pylist() == ["x", None, "3"]
    assert table["tags"].to_pylist() == [["a"], None, ["1", None]]
    assert table["deep"].to_pylist() == ['{"a": [null]}', None, None]
    assert table["flag"].type == pa.bool_()
    assert table["huge"].to_pylist() == [None, None, str(10**30)]


def test_a_file_of_texts_alone_has_an_answer_for_every_line(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text\nwhere\n\nmoney\n\n")
    report = predict_files.answer_to_file(asked(artifact, tmp_path / "texts.csv"), tmp_path / "a.csv")
    assert (report["rows"], report["answered"], report["empty"]) == (4, 2, 2)
    assert [row["text"] for row in read_csv(tmp_path / "a.csv")] == ["where", "", "money", ""]


def test_files_of_a_folder_are_answered_in_order_with_the_columns_of_all(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_csv(folder / "b.csv", texts(3))
    write_jsonl(folder / "a.jsonl", [{"text": "where", "more": 1}, {"text": ""}])
    predict_files.answer_to_file(asked(artifact, folder), tmp_path / "a.csv")
    result = read_csv(tmp_path / "a.csv")
    assert [row["text"] for row in result] == ["where", "", *texts(3)]
    assert [(row["more"], row["number"]) for row in result] == [("1", ""), ("", ""), ("", "0"), ("", "1"), ("", "2")]
    assert result[1]["reason"] == f"a.jsonl line 2: {EMPTY}"


def test_columns_that_the_artefact_asks_for_and_the_file_lacks_are_named(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("Message\nwhere\n")
    with refused_fields("data.text"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), tmp_path / "a.csv")
    report = predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv", text="Message"), tmp_path / "a.csv")
    assert report["answered"] == 1


# --------------------------------------------------------------------------------------------------------------- tasks


HEADS = Head(("mood=x", "mood=y", "intent=p", "intent=q"), {"heads": [["mood", 2], ["intent", 2]]})
NUMBER = Head(("score",), {"mean": 3.0, "std": 1.0, "lowest": 0.0, "highest": 6.0, "step": 1.0})
QA = {"text": "question", "text_pair": "context"}


@pytest.mark.parametrize(
    ("task", "head", "data"),
    [
        ("classification", Head(("a", "b", "c"), OUTSIDE), {}),
        ("multi_label", Head(("a", "b", "c"), {"thresholds": dict.fromkeys(("a", "b", "c"), 0.45)}), {}),
        ("multi_head", HEADS, {}),
        ("regression", NUMBER, {}),
        ("span_qa", Head(("start", "end"), {"no_answer": False}), QA),
        ("token_tags", Head(("O", "B-PER", "I-PER")), {}),
        ("extractive_summary", Head(("left out", "taken"), {"max_words": 8}), {}),
    ],
)
def test_the_columns_of_a_task_are_its_http_answer(task: str, head: Head, data: dict[str, str], tmp_path: Path) -> None:
    folder = make_task_artifact(tmp_path / "artifact", task, head, data=data)
    rows: list[Any] = [{"question": text, "context": CORPUS[place - 1]} for place, text in enumerate(CORPUS)]
    if not data:
        rows = [{"text": f"{text}. {text} again."} for text in CORPUS]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    answers = Predictor.load(folder)([row if data else row["text"] for row in rows])
    predict_files.answer_to_file(asked(folder, tmp_path / "rows.jsonl"), tmp_path / "a.jsonl")
    predict_files.answer_to_file(asked(folder, tmp_path / "rows.jsonl"), tmp_path / "a.parquet")
    result, table = read_jsonl(tmp_path / "a.jsonl"), read_parquet(tmp_path / "a.parquet")
    assert json.loads(json.dumps(table)) == result  # lists and objects are such, in both
    assert len(result) == len(CORPUS)
    for row, answer in zip(result, answers, strict=True):
        match task:
            case "classification":
                assert (row["label"], row["score"]) == (answer[0]["label"], pytest.approx(answer[0]["score"], abs=1e-5))
                assert row["abstained"] == (answer[0]["label"] == "other")
            case "multi_label":
                assert row["labels"] == [entry["label"] for entry in answer if entry["score"] >= 0.45]
                assert len(row["scores"]) == len(row["labels"])
            case "multi_head":
                assert (row["mood"], row["intent"]) == tuple(answer[name][0]["label"] for name in ("mood", "intent"))
                assert row["mood score"] == pytest.approx(answer["mood"][0]["score"], abs=1e-5)
            case "regression":
                assert row["value"] == pytest.approx(answer, abs=1e-5)
            case "span_qa":
                assert [row[name] for name in ("answer", "start", "end")] == [
                    answer[name] for name in ("answer", "start", "end")
                ]
                assert row["context"][row["start"] : row["end"]] == row["answer"] != ""
            case "token_tags":
                assert [dict(entity, score=0) for entity in row["entities"]] == [
                    dict(entity, score=0) for entity in answer
                ]
            case _:
                assert row["summary"] == answer["summary_text"]
                assert [item["text"] for item in row["sentences"]] == [item["text"] for item in answer["sentences"]]
    if task == "classification":
        assert {row["abstained"] for row in result} == {True, False}
    if task == "multi_label":
        assert len({len(row["labels"]) for row in result}) > 1


def test_questions_need_a_context_and_no_answers(tmp_path: Path) -> None:
    folder = make_task_artifact(tmp_path / "artifact", "span_qa", Head(("start", "end"), {"no_answer": True}), data=QA)
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "who", "context": " "}, {"question": "who", "context": "anna"}])
    predict_files.answer_to_file(asked(folder, tmp_path / "rows.jsonl"), tmp_path / "a.jsonl")
    result = read_jsonl(tmp_path / "a.jsonl")
    assert [row["reason"] for row in result] == ["line 1: it has an empty context; send a text", None]
    asks = [{"id": "1", "question": "who"}, {"id": "2", "question": "where"}]
    document = {"data": [{"title": "t", "paragraphs": [{"context": "anna is here", "qas": asks}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(document))
    report = predict_files.answer_to_file(asked(folder, tmp_path / "squad.json", format="squad"), tmp_path / "b.jsonl")
    assert report["answered"] == 2
    assert [row["id"] for row in read_jsonl(tmp_path / "b.jsonl")] == ["1", "2"]


# -------------------------------------------------------------------------------------------------------------- resume


class Stopped(Exception):
    pass


def stops_after(count: int) -> predict_files.AnswerChunks:
    def answers(work: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        assert len(portions) > count
        yield from ChunkAnswerer(work).answer_all(portions[:count])
        raise Stopped

    return answers


def done_here(numbers: list[int]) -> predict_files.AnswerChunks:
    """Answers portions from the last to the first, and notes which."""

    def answers(work: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        answerer = ChunkAnswerer(work)
        for portion in reversed(portions):
            numbers.append(portion.number)
            yield answerer.answer(portion)

    return answers


@pytest.mark.usefixtures("portions_of_seven")
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_stopped_job_goes_on_with_the_same_bytes(artifact: Path, tmp_path: Path, suffix: str) -> None:
    write_csv(tmp_path / "rows.csv", texts(50))
    job = asked(artifact, tmp_path / "rows.csv")
    full, out = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    predict_files.answer_to_file(job, full)
    with pytest.raises(Stopped):
        predict_files.answer_to_file(job, out, answer_chunks=stops_after(3))
    assert not out.exists()
    hidden = tmp_path / f".out.{suffix}.chunks"
    with (hidden / "chunks.jsonl").open("a") as log:
        log.write("\0" * 80 + '\n{"number": 3, "cou\n[]\n{}\n{"number": 4, "cou')
    (hidden / f"000001.{suffix}").write_bytes(b"damaged")
    numbers: list[int] = []
    report = predict_files.answer_to_file(job, out, "resume", done_here(numbers))
    assert numbers == [7, 6, 5, 4, 3, 1]
    assert (report["rows"], report["reused_rows"]) == (50, 14)
    assert out.read_bytes() == full.read_bytes()
    assert not hidden.exists()


def test_a_job_that_fails_before_its_first_answer_leaves_nothing(artifact: Path, tmp_path: Path) -> None:
    job = asked(artifact, write_csv(tmp_path / "rows.csv", texts(5)))

    def fails(work: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        raise Stopped

    with pytest.raises(Stopped):
        predict_files.answer_to_file(job, tmp_path / "a.csv", answer_chunks=fails)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.usefixtures("portions_of_seven")
def test_what_portions_were_made_of_must_be_the_same(artifact: Path, other: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", texts(50))
    out = tmp_path / "out.csv"
    with pytest.raises(Stopped):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out, answer_chunks=stops_after(1))
    with refused("other_job"):
        predict_files.answer_to_file(asked(other, tmp_path / "rows.csv"), out, "resume")
    with refused("other_job"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv", max_row_bytes=1000), out, "resume")
    with refused("unfinished_job", "--out"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out)
    bound = tmp_path / ".out.csv.chunks" / "manifest.json"
    full = bound.read_bytes()
    bound.write_bytes(b"")
    with refused("unreadable"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out, "resume")
    assert bound.with_name("chunks.jsonl").read_bytes()
    bound.write_bytes(full)
    write_csv(tmp_path / "rows.csv", texts(51))
    with refused("other_job"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out, "resume")
    assert predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out, "overwrite")["reused_rows"] == 0
    assert len(read_csv(out)) == 51
    with refused("already_exists", "--out"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), out)


def test_rows_that_change_while_they_are_read_are_refused(artifact: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", texts(5))

    def changes(work: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        yield from ChunkAnswerer(work).answer_all(portions)
        write_csv(tmp_path / "rows.csv", texts(6))

    with refused("rows_changed"):
        predict_files.answer_to_file(asked(artifact, tmp_path / "rows.csv"), tmp_path / "a.csv", answer_chunks=changes)
    assert not (tmp_path / "a.csv").exists()


def test_a_killed_command_is_resumed_without_a_row_lost_or_twice(artifact: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", texts(20_000))
    command = [sys.executable, "-m", "rtrain", "predict", str(artifact), "--data", "rows.csv", "--out", "a.csv"]
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": f"{root}:{STARTUP}"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
        log, deadline = tmp_path / ".a.csv.chunks" / "chunks.jsonl", time.monotonic() + 120
        while not (log.exists() and log.read_bytes().count(b"\n") >= 1):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "a.csv").exists()
    job = asked(artifact, tmp_path / "rows.csv")
    with refused("other_job"):
        predict_files.answer_to_file(
            predict_files.BatchRequest(job.artifact, job.overrides, batch_rows=2), tmp_path / "a.csv", "resume"
        )
    report = predict_files.answer_to_file(job, tmp_path / "a.csv", "resume")
    assert report["rows"] == 20_000
    assert 0 < report["reused_rows"] < 20_000
    assert [(row["number"], row["text"]) for row in read_csv(tmp_path / "a.csv")] == [
        (str(number), text) for number, text in enumerate(texts(20_000))
    ]
    predict_files.answer_to_file(job, tmp_path / "whole.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


# ---------------------------------------------------------------------------------------------------------------- out


@pytest.mark.parametrize("reuse", ["refuse", "overwrite"])
def test_answers_are_not_written_among_the_rows(artifact: Path, tmp_path: Path, reuse: Reuse) -> None:
    path = write_csv(tmp_path / "rows.csv", ["where"])
    before = path.read_bytes()
    for data, out in ((path, path), (tmp_path, tmp_path / "a.csv"), (tmp_path / "*.csv", path)):
        with refused("among_the_rows", "--out"):
            predict_files.answer_to_file(asked(artifact, data), out, reuse)
    assert path.read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused_before_the_first_answer(artifact: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rows.csv", ["where"])
    (tmp_path / "file").write_text("")
    with refused("not_writable"):
        predict_files.answer_to_file(asked(artifact, data), tmp_path / "file" / "a.csv")
    with refused("unknown_format", "--out"):
        predict_files.answer_to_file(asked(artifact, data), tmp_path / "answers.xls")
    (tmp_path / "folder.csv").mkdir()
    with refused("is_a_folder", "--out"):
        predict_files.answer_to_file(asked(artifact, data), tmp_path / "folder.csv", "overwrite")


def test_two_jobs_do_not_write_one_file(artifact: Path, tmp_path: Path) -> None:
    job = asked(artifact, write_csv(tmp_path / "rows.csv", texts(3)))

    def meanwhile(work: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        with refused("already_running"):
            predict_files.answer_to_file(job, tmp_path / "a.csv", "resume")
        yield from ChunkAnswerer(work).answer_all(portions)

    assert predict_files.answer_to_file(job, tmp_path / "a.csv", answer_chunks=meanwhile)["rows"] == 3


def test_a_timestamp_is_no_text_of_python(artifact: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["where"], "day": [datetime.date(2020, 1, 2)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    predict_files.answer_to_file(asked(artifact, tmp_path / "rows.parquet"), tmp_path / "a.jsonl")
    assert read_jsonl(tmp_path / "a.jsonl")[0]["day"] == "2020-01-02"
