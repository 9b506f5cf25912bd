"""The verbs predict and evaluate as a user meets them."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rtrain.cli.options import print_result
from rtrain.core.ragged import Head
from rtrain.inference.predictor import Predictor
from tests.conftest import write_rows
from tests.support.answering import MESSY, read_csv, read_jsonl, texts, write_csv, write_jsonl
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact, refused
from tests.unit.cli.test_cli import Cli, error_of, fields_of, run

__all__ = ["run"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = Head(("a", "b", "c"), {"thresholds": dict.fromkeys(("a", "b", "c"), 0.45)})
    return make_task_artifact(tmp_path_factory.mktemp("labels") / "artifact", "multi_label", head)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return put


# --------------------------------------------------------------------------------------------------------------- texts


def test_a_blank_line_has_an_empty_answer_and_a_reason(
    run: Cli, artifact: Path, typed: Callable[[bytes], None]
) -> None:
    typed(b"where\r\n\nmoney\n  \ncaf\xe9\n")
    code, out, err = run("predict", artifact)
    lines = out.split("\n")
    assert (code, len(lines)) == (0, 6)
    assert [bool(line) for line in lines] == [True, False, True, False, False, False]
    assert [line.split(" is ")[0] for line in err.splitlines()] == [f"rtrain: line {number}" for number in (2, 4, 5)]
    typed(b"\nwhere\n")
    code, out, err = run("predict", artifact, "--json")
    assert code == 0
    assert [answer is None for answer in json.loads(out)] == [True, False]


def test_the_exit_code_says_that_nothing_was_answered(run: Cli, artifact: Path, typed: Callable[[bytes], None]) -> None:
    typed(b"\n \n")
    assert run("predict", artifact)[0] == 1
    code, out, err = run("predict", artifact, " ")
    assert (code, out, err.startswith("rtrain: text 1 ")) == (1, "\n", True)
    typed(b"")
    assert run("predict", artifact)[:2] == (0, "")


def test_a_text_that_is_the_name_of_a_file_is_refused(run: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nwhere\n")
    code, out, _ = run("predict", artifact, "where", "rows.csv")
    assert (code, out) == (2, "")
    code, out, _ = run("predict", artifact, "where", "rows.csv", "--text")
    assert (code, len(out.splitlines())) == (0, 2)
    assert run("predict", artifact, "x" * 5000)[0] == 0  # longer than a file's name may be


def test_several_labels_are_those_past_the_threshold(run: Cli, labels: Path) -> None:
    answers = Predictor.load(labels)(CORPUS)
    code, out, _ = run("predict", labels, *CORPUS)
    lines = out.splitlines()
    assert (code, len(lines)) == (0, len(CORPUS))
    counts = set()
    for line, answer in zip(lines, answers, strict=True):
        past = [entry for entry in answer if entry["score"] >= 0.45]
        counts.add(len(past))
        words = [word for entry in past for word in (entry["label"], f"{entry['score']:.4f}")]
        assert line == ("\t".join(words) or "(no label)")
    assert len(counts) > 1
    code, out, _ = run("predict", labels, *CORPUS, "--top", 3)
    for line, answer in zip(out.splitlines(), answers, strict=True):
        words = line.split("\t")
        assert words[::2] == [entry["label"] for entry in answer]
        assert [word.endswith(" (below 0.45)") for word in words[1::2]] == [entry["score"] < 0.45 for entry in answer]
    _, out, _ = run("predict", labels, *CORPUS, "--top", 3, "--json")
    for found, answer in zip(json.loads(out), answers, strict=True):
        assert [entry["is_selected"] for entry in found] == [entry["score"] >= 0.45 for entry in answer]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_a_file_are_answered_into_a_file(run: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "messy.csv").write_bytes(MESSY)
    code, out, _ = run("predict", artifact, "--data", "messy.csv", "--out", "answers.csv", "--json")
    report = json.loads(out)
    assert code == 0
    assert {name: report[name] for name in ("rows", "answered", "empty", "unusable", "out")} == {
        **{"rows": 7, "answered": 3, "empty": 2, "unusable": 2},
        "out": str(tmp_path / "answers.csv"),
    }
    assert report["seconds"] > 0
    assert report["texts_per_second"] > 0
    assert len(read_csv(tmp_path / "answers.csv")) == 7
    assert error_of(run, "predict", artifact, "--data", "messy.csv", "--out", "answers.csv")[0] == 2
    code, out, _ = run("predict", artifact, "--data", "messy.csv", "--out", "answers.csv", "--overwrite")
    assert code == 0
    assert out.startswith("7 rows: 3 answered, 2 empty, 2 unusable; ")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["text", "--out", "a.csv"], ["--out"]),
        (["text", "--resume", "--set", "data.text=x"], ["--resume", "--set"]),
        (["text", "--data", "rows.csv", "--out", "a.csv"], ["--data"]),
        (["--data", "rows.csv", "--out", "a.csv", "--top", "2"], ["--top"]),
        (["--data", "rows.csv"], ["--out"]),
        (["--data", "rows.csv", "--out", "a.csv", "--resume", "--overwrite"], ["--resume"]),
        (["--data", "nowhere.csv", "--out", "a.csv"], ["data.path"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    run: Cli, artifact: Path, tmp_path: Path, arguments: list[str], fields: list[str]
) -> None:
    (tmp_path / "rows.csv").write_text("text\nwhere\n")
    code, error = error_of(run, "predict", artifact, *arguments)
    assert (code, fields_of(error)) == (2, fields)


def test_scores_of_all_labels_stand_in_columns(run: Cli, artifact: Path, labels: Path, tmp_path: Path) -> None:
    every = texts(20)
    write_csv(tmp_path / "rows.csv", every)
    for folder in (artifact, labels):
        code, _, err = run("predict", folder, "--data", "rows.csv", "--out", "a.csv", "--scores", "--overwrite")
        assert code == 0, err
        found, answers = read_csv(tmp_path / "a.csv"), Predictor.load(folder)(every)
        for row, answer in zip(found, answers, strict=True):
            for entry in answer:
                assert float(row[f"score {entry['label']}"]) == pytest.approx(entry["score"])
        assert list(found[0])[-4:] == ["score a", "score b", "score c", "reason"]
    assert run("predict", artifact, "a text", "--scores")[0] == 2


def test_scores_of_heads_are_named_and_answers_without_labels_refused(run: Cli, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", texts(3))
    folder = make_task_artifact(tmp_path / "heads", "multi_head", HEADS)
    code, _, err = run("predict", folder, "--data", "rows.csv", "--scores", "--out", "a.jsonl")
    assert code == 0, err
    rows = read_jsonl(tmp_path / "a.jsonl")
    assert all(row["mood score x"] + row["mood score y"] == pytest.approx(1) for row in rows)
    assert all(max(row["intent score p"], row["intent score q"]) == row["intent score"] for row in rows)
    number = make_task_artifact(tmp_path / "number", "regression", Head(("score",), {"mean": 3.0, "std": 1.0}))
    assert run("predict", number, "--data", "rows.csv", "--scores", "--out", "b.csv")[0] == 2


# ------------------------------------------------------------------------------------------------------------ evaluate


HEADS = Head(("mood=x", "mood=y", "intent=p", "intent=q"), {"heads": [["mood", 2], ["intent", 2]]})


def test_rows_of_other_programs_are_answered_and_scored_as_they_are_trained_on(run: Cli, tmp_path: Path) -> None:
    made, escape = make_artifact(tmp_path / "artifact", ("2", "false", "true")), ("--set", "data.escape=\\")
    rows = [
        (rf"{text} \"said; {number}\"", label)
        for number, (text, label) in enumerate(zip(texts(30), "abc" * 10, strict=True))
    ]
    names = {"a": "TRUE", "b": "False", "c": "2.00"}
    (tmp_path / "rows.csv").write_text(
        "text;label\n" + "".join(f'"{text}"; "{names[label]}"\n' for text, label in rows)
    )
    assert run("predict", made, "--data", "rows.csv", "--out", "a.csv", *escape)[0] == 0
    found = read_csv(tmp_path / "a.csv")
    assert [row["text"] for row in found] == [text.replace("\\", "") for text, _ in rows]
    assert {row["reason"] for row in found} == {""}
    code, out, err = run("evaluate", made, "--data", "rows.csv", "--json", *escape)
    report = json.loads(out)
    assert (code, report["bad_rows"], report["unknown_labels"]["rows"]) == (0, 0, 0), err
    values = {"a": True, "b": False, "c": 2.0}
    lines = [{"text": row["text"], "label": values[label]} for row, (_, label) in zip(found, rows, strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", lines)
    assert json.loads(run("evaluate", made, "--data", "rows.jsonl", "--json")[1])["scores"] == report["scores"]
    own = json.loads(run("evaluate", made, "--data", "a.csv", "--json", "--set", "data.label=label (answer)")[1])
    assert own["scores"]["accuracy"] == 1.0


def test_what_the_gate_has_refused_is_to_be_looked_at_next_and_not_served(
    run: Cli, artifact: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.csv", list(zip(texts(6), "abc" * 2, strict=True)))
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    for folder, verb in ((artifact, "serve"), (refused(copy), "inspect")):
        assert run("evaluate", folder, "--data", "rows.csv")[1].endswith(f"next: rtrain {verb} {folder}\n")
        assert run("explain", folder, "where is it?", "--steps", 4)[2].endswith(f"next: rtrain {verb} {folder}\n")


def test_a_name_that_is_not_utf_8_is_printed_as_json_escapes_it(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    name = os.fsdecode(b"caf\xe9")
    print_result({"name": name, "more": "\u00e9"}, True)
    print_result({}, False, name, "more")
    said = capsysbinary.readouterr().out.decode().splitlines()
    assert json.loads(said[0]) == {"name": name, "more": "\u00e9"}
    assert said[1:] == ["caf\\udce9", "more"]
