"""The verbs predict and evaluate as a user meets them."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtrain import score
from rtrain.batch import Head
from rtrain.cli import app as cli
from rtrain.cli.output import answer_text, show
from rtrain.predict import Predictor
from tests.answering import MESSY, read_csv, read_jsonl, texts, write_csv, write_jsonl
from tests.conftest import STARTUP, write_rows
from tests.test_cli import Cli, run
from tests.tiny import CORPUS, make_artifact, make_task_artifact, refused

__all__ = ["run"]
EMPTY = "is empty; send a text"


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


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ([{"label": "a", "score": 0.5}, {"label": "b", "score": 0.25}], "a\t0.5000\tb\t0.2500"),
        (
            {"intent": [{"label": "buy", "score": 0.5}], "mood": [{"label": "good", "score": 0.25}]},
            "intent\tbuy\t0.5000\tmood\tgood\t0.2500",
        ),
        ({"answer": "two\nlines\tand more", "score": 0.5, "start": 3, "end": 9}, "two lines and more\t0.5000\t3\t9"),
        (
            {"summary_text": "One. Two.", "sentences": [{"text": "One.", "score": 0.5, "start": 0, "end": 4}]},
            "One. Two.\tOne.\t0.5000\t0\t4",
        ),
        (2.0, "2.0000"),
        ([], ""),
    ],
)
def test_an_answer_of_any_task_is_one_line_of_columns(answer: Any, line: str) -> None:
    assert answer_text(answer) == line


def test_a_blank_line_has_an_empty_answer_and_a_reason(
    run: Cli, artifact: Path, typed: Callable[[bytes], None]
) -> None:
    typed(b"where\r\n\nmoney\n  \ncaf\xe9\n")
    code, out, err = run("predict", artifact)
    lines = out.split("\n")
    assert (code, len(lines)) == (0, 6)
    assert [bool(line) for line in lines] == [True, False, True, False, False, False]
    assert err.splitlines() == [
        f"rtrain: line 2 {EMPTY}",
        f"rtrain: line 4 {EMPTY}",
        "rtrain: line 5 is not valid Unicode (a lone surrogate); send UTF-8 text",
    ]
    typed(b"\nwhere\n")
    code, out, err = run("predict", artifact, "--json")
    assert code == 0
    assert [answer is None for answer in json.loads(out)] == [True, False]


def test_the_exit_code_says_that_nothing_was_answered(run: Cli, artifact: Path, typed: Callable[[bytes], None]) -> None:
    typed(b"\n \n")
    assert run("predict", artifact)[0] == 1
    code, out, err = run("predict", artifact, " ")
    assert (code, out, err) == (1, "\n", f"rtrain: text 1 {EMPTY}\n")
    typed(b"")
    assert run("predict", artifact)[:2] == (0, "")


def test_a_text_that_is_the_name_of_a_file_is_refused(run: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nwhere\n")
    code, out, err = run("predict", artifact, "where", "rows.csv")
    assert (code, out) == (2, "")
    assert f"rtrain predict {artifact} --data rows.csv --out answers.csv answers its rows" in err
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
        assert [entry["given"] for entry in found] == [entry["score"] >= 0.45 for entry in answer]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_a_file_are_answered_into_a_file(run: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "messy.csv").write_bytes(MESSY)
    code, out, err = run("predict", artifact, "--data", "messy.csv", "--out", "answers.csv", "--json")
    report = json.loads(out)
    assert code == 0
    assert {name: report[name] for name in ("rows", "answered", "empty", "bad", "out")} == {
        **{"rows": 7, "answered": 3, "empty": 2, "bad": 2},
        "out": str(tmp_path / "answers.csv"),
    }
    assert report["seconds"] > 0
    assert report["texts_per_second"] > 0
    assert "the answer's is 'label (answer)'" in err
    assert "row 7/7" in err
    assert len(read_csv(tmp_path / "answers.csv")) == 7
    code, _, err = run("predict", artifact, "--data", "messy.csv", "--out", "answers.csv")
    assert code == 2
    assert "there is such a file already; name another, or write it anew with --overwrite" in err
    code, out, _ = run("predict", artifact, "--data", "messy.csv", "--out", "answers.csv", "--overwrite")
    assert code == 0
    assert out.startswith("7 rows: 3 answered, 2 empty, 2 bad; ")


def test_rows_go_through_a_pipe(artifact: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("where", "", "money")])
    root = Path(cli.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "rtrain", "predict", artifact, "--data", "-"],
        input=(tmp_path / "rows.jsonl").read_bytes(),
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{STARTUP}"},
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["text"], row["label"] is None) for row in found] == [("where", False), ("", True), ("money", False)]
    assert b"3 rows: 2 answered, 1 empty, 0 bad" in done.stderr


def test_a_reader_that_has_enough_ends_it_quietly(artifact: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", texts(20_000))
    root = Path(cli.__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-m", "rtrain", "predict", str(artifact), "--data", "rows.csv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{STARTUP}"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["number"] == "0"
        process.stdout.close()
        told = process.stderr.read()
    assert process.returncode == 0
    assert b"20,000 rows:" not in told  # it did not go on to its end
    assert b"Traceback" not in told
    assert b"Broken pipe" not in told


def test_json_lines_of_stdin_go_into_a_file(
    run: Cli, artifact: Path, tmp_path: Path, typed: Callable[[bytes], None]
) -> None:
    typed(b'{"text": "where"}\n')
    code, _, err = run("predict", artifact, "--data", "-", "--out", "a.jsonl")
    assert code == 0, err
    assert [row["text"] for row in read_jsonl(tmp_path / "a.jsonl")] == ["where"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    typed(b'{"text": " "}\n')
    code, _, err = run("predict", artifact, "--data", "-", "--out", "a.jsonl", "--overwrite")
    assert code == 1  # a row, and no answer


def test_a_cluster_is_not_asked_where_no_row_is_left(run: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("text\n")
    nowhere = ("--address", "127.0.0.1:1")
    code, out, err = run("predict", artifact, "--data", "none.csv", "--out", "a.csv", *nowhere, "--json")
    assert (code, json.loads(out)["rows"]) == (0, 0), err
    assert (tmp_path / "a.csv").read_text() == "text,label,score,reason\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["text", "--out", "a.csv"], "--out: is for rows of files; name them with --data FILE"),
        (["text", "--resume"], "--resume: is for rows of files"),
        (["text", "--set", "data.text=x"], "--set: is for rows of files"),
        (["text", "--data", "rows.csv"], "--data: there are texts too; leave out one of the two"),
        (["--data", "rows.csv", "--top", "2"], "--top: is for texts"),
        (["--data", "rows.csv", "--resume"], "--resume: the answers go to stdout; name a file with --out"),
        (["--data", "rows.csv", "--json"], "--json: the answers go to stdout; name a file with --out"),
        (["--data", "rows.csv", "--out", "a.csv", "--resume", "--overwrite"], "--resume: --overwrite begins anew"),
        (["--data", "-", "--out", "a.csv"], "--out: JSON lines are answered as JSON lines; end its name by .jsonl"),
        (["--data", "-", "--out", "a.jsonl", "--resume"], "--resume: standard input cannot be read again"),
        (["--data", "nowhere.csv", "--out", "a.csv"], "data.path=nowhere.csv: no such file, folder or glob"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    run: Cli, artifact: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "rows.csv").write_text("text\nwhere\n")
    code, out, err = run("predict", artifact, *arguments)
    assert (code, out) == (2, "")
    assert told in err


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
    code, out, err = run("predict", folder, "--data", "rows.csv", "--scores")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert all(row["mood score x"] + row["mood score y"] == pytest.approx(1) for row in rows)
    assert all(max(row["intent score p"], row["intent score q"]) == row["intent score"] for row in rows)
    number = make_task_artifact(tmp_path / "number", "regression", Head(("score",), {"mean": 3.0, "std": 1.0}))
    assert run("predict", number, "--data", "rows.csv", "--scores")[0] == 2


# ------------------------------------------------------------------------------------------------------------ evaluate


HEADS = Head(("mood=x", "mood=y", "intent=p", "intent=q"), {"heads": [["mood", 2], ["intent", 2]]})


def test_evaluate_leaves_each_row_with_its_answer_and_what_is_right(run: Cli, artifact: Path, tmp_path: Path) -> None:
    rows = [*zip(texts(20), "abc" * 7, strict=False), ("", "a"), ("where", "unknown")]
    write_rows(tmp_path / "rows.csv", rows)
    code, plain, _ = run("evaluate", artifact, "--data", "rows.csv", "--json")
    code, out, err = run("evaluate", artifact, "--data", "rows.csv", "--out", "a.csv", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["scores"] == json.loads(plain)["scores"]
    found = read_csv(tmp_path / "a.csv")
    assert [(row["text"], row["label"]) for row in found] == rows
    assert list(found[0]) == [
        *("text", "label", "label (answer)", "score", "target", "right", "reason"),
    ]
    assert found[20]["reason"] == "line 22: column 'text' is empty; write a text or remove the row"
    assert (found[20]["right"], found[21]["right"]) == ("", "false")
    answered = [row for row in found if not row["reason"]]
    assert {row["right"] == "true" for row in answered} == {True, False}
    assert all((row["right"] == "true") == (row["target"] == row["label (answer)"]) for row in answered)
    right = sum(row["right"] == "true" for row in answered)
    assert right / len(answered) == pytest.approx(report["scores"]["accuracy"])
    assert run("evaluate", artifact, "--data", "rows.csv", "--out", "a.csv")[0] == 2
    code, _, err = run("evaluate", artifact, "--data", "rows.csv", "--out", "rows.csv", "--overwrite")
    assert code == 2
    assert "it is among the rows that --data names" in err


def test_rows_of_other_programs_are_answered_and_scored_as_they_are_trained_on(run: Cli, tmp_path: Path) -> None:
    made = make_artifact(tmp_path / "artifact", ("2", "false", "true"))
    rows = [
        (f'{text} ""said; {number}""', label)
        for number, (text, label) in enumerate(zip(texts(30), "abc" * 10, strict=True))
    ]
    names = {"a": "TRUE", "b": "False", "c": "2.00"}
    (tmp_path / "rows.csv").write_text(
        "text;label\n" + "".join(f'"{text}"; "{names[label]}"\n' for text, label in rows)
    )
    assert run("predict", made, "--data", "rows.csv", "--out", "a.csv")[0] == 0
    found = read_csv(tmp_path / "a.csv")
    assert [row["text"] for row in found] == [text.replace('""', '"') for text, _ in rows]
    assert {row["reason"] for row in found} == {""}
    code, out, err = run("evaluate", made, "--data", "rows.csv", "--json")
    report = json.loads(out)
    assert (code, report["bad_rows"], report["unknown_labels"]["rows"]) == (0, 0, 0), err
    values = {"a": True, "b": False, "c": 2.0}
    lines = [{"text": row["text"], "label": values[label]} for row, (_, label) in zip(found, rows, strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", lines)
    assert json.loads(run("evaluate", made, "--data", "rows.jsonl", "--json")[1])["scores"] == report["scores"]
    own = json.loads(run("evaluate", made, "--data", "a.csv", "--json", "--set", "data.label=label (answer)")[1])
    assert own["scores"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("task", "head", "settings", "label"),
    [
        (
            "multi_label",
            Head(("a", "b"), {"thresholds": dict.fromkeys(("a", "b"), 0.5)}),
            {},
            lambda answer: [e["label"] for e in answer if e["score"] >= 0.5],
        ),
        ("multi_head", HEADS, {"label": ["mood", "intent"]}, None),
        ("token_tags", Head(("O", "B-PER", "I-PER")), {}, None),
        ("span_qa", Head(("start", "end"), {"no_answer": True}), {"text": "question", "text_pair": "context"}, None),
        (
            "regression",
            Head(("score",), {"mean": 3.0, "std": 1.0, "lowest": 0.0, "highest": 6.0, "step": 1.0}),
            {},
            None,
        ),
    ],
)
def test_rows_whose_label_is_the_answer_are_right(
    task: str, head: Head, settings: dict[str, Any], label: Any, tmp_path: Path
) -> None:
    from rtrain.answers import scored
    from rtrain.artifact import read

    folder = make_task_artifact(tmp_path / "artifact", task, head, data=settings)
    predictor = Predictor.load(folder)
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(CORPUS):
        text = " ".join(text.replace(",", "").replace("?", "").split())
        asked: Any = {"question": text, "context": CORPUS[number - 1]} if task == "span_qa" else text
        [answer] = predictor([asked])
        row = dict(asked) if task == "span_qa" else {"text": text}
        wrong = number % 2
        match task:
            case "multi_label":
                given = [entry["label"] for entry in answer if entry["score"] >= 0.5]
                row["label"] = [label for label in "ab" if (label in given) != bool(wrong)]
            case "multi_head":
                moods = [entry["label"] for entry in answer["mood"]]
                row |= {"mood": moods[wrong], "intent": answer["intent"][0]["label"]}
            case "token_tags":
                tags = tags_of(text, answer)
                row["label"] = [("B-PER" if tag == "O" else "O") if wrong else tag for tag in tags]
            case "span_qa":
                found = [{"text": answer["answer"], "start": answer["start"]}] if answer["answer"] else []
                none = [{"text": asked["context"].split()[0], "start": 0}] if not found else []
                row["label"] = none if wrong else found
            case _:
                row["label"] = answer
        rows.append(row)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = score.settings(read(folder), {"data.path": str(tmp_path / "rows.jsonl")})
    report = scored.run(folder, data, tmp_path / "a.jsonl")
    answered = read_jsonl(tmp_path / "a.jsonl")
    assert [{name: row[name] for name in given} for row, given in zip(answered, rows, strict=True)] == rows
    assert report["scores"]["rows"] == len(rows)
    expected = [None if task == "regression" else not number % 2 for number in range(len(rows))]
    assert [row["right"] for row in answered] == expected
    assert all(row["target"] for row in answered if task in ("token_tags", "multi_head", "regression"))


def tags_of(text: str, entities: list[dict[str, Any]]) -> list[str]:
    """The tags of a text's words that say what an answer says."""
    found, start = [], 0
    for word in text.split(" "):
        inside = next((one for one in entities if one["start"] <= start < one["end"]), None)
        found.append("O" if inside is None else "B-PER" if inside["start"] == start else "I-PER")
        start += len(word) + 1
    return found


def test_what_the_gate_has_refused_is_to_be_looked_at_next_and_not_served(
    run: Cli, artifact: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.csv", list(zip(texts(6), "abc" * 2, strict=True)))
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    for folder, verb in ((artifact, "serve"), (refused(copy), "inspect")):
        assert run("evaluate", folder, "--data", "rows.csv")[1].endswith(f"next: rtrain {verb} {folder}\n")
        assert run("explain", folder, "where is it?", "--steps", 4)[2].endswith(f"next: rtrain {verb} {folder}\n")


def test_evaluate_into_a_file_that_cannot_be_written_is_refused(run: Cli, artifact: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", ["where"])
    code, _, err = run("evaluate", artifact, "--data", "rows.csv", "--out", "a.xls", "--set", "data.label=number")
    assert code == 2
    assert "end the name by .csv, .jsonl or .parquet" in err


def test_a_name_that_is_not_utf_8_is_printed_as_json_escapes_it(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    name = os.fsdecode(b"caf\xe9")
    show({"name": name, "more": "\u00e9"}, True)
    show({}, False, name, "more")
    said = capsysbinary.readouterr().out.decode().splitlines()
    assert json.loads(said[0]) == {"name": name, "more": "\u00e9"}
    assert said[1:] == ["caf\\udce9", "more"]
