"""The command line as a user meets it: its verbs, its exit codes, and what it says to bad input."""

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain import config
from rtrain.cli import app as cli
from rtrain.cluster import connection
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from tests.conftest import STARTUP, Row, labelled_rows, write_rows
from tests.support import stock
from tests.support.root import ROOT
from tests.support.tiny import make_artifact, make_encoder

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`run("train", ...)` -> (exit code, stdout, stderr), from inside an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return call


class Begun(Exception):
    """The command went on to start Ray."""


@pytest.fixture
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rtrain serve` raises `Begun` where it would start Ray."""

    def begin(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.launcher.session", begin)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def csv_of(folder: Path, rows: list[Row], name: str = "rows.csv") -> Path:
    return write_rows(folder / name, rows)


def left_behind(folder: Path) -> list[str]:
    """Runs in a folder that could be taken for finished, and half-made token stores."""
    wrong = [path for path in folder.rglob("*") if path.name in ("artifact", "summary.json", "config.yaml")]
    return [str(path) for path in wrong] + [path.name for path in folder.glob("**/.tokens/*")]


def error_of(run: Cli, *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit code, the error that a verb with --json prints on stdout)."""
    code, out, err = run(*arguments, "--json")
    assert "Traceback" not in err
    error: dict[str, Any] = json.loads(out)["error"]
    return code, error


def fields_of(error: dict[str, Any]) -> list[str]:
    return [problem["field"] for problem in error["problems"]]


# ----------------------------------------------------------------------------------------------------------- explain


def test_explain_draws_words_and_sentences_and_prints_json(run: Cli, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    text = "where is my parcel? the door was \x1b[31mopen."
    code, out, err = run("explain", folder, text, "--label", "lost")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("lost: ")
    assert "completeness error 0." in lines[0]
    bars = [line for line in lines if "│" in line]
    assert [line.split()[0] for line in bars[2:6]] == ["where", "is", "my", "parcel"]
    assert bars[0].startswith("  where is my parcel?")
    assert max(line.count("█") for line in bars[2:]) == 20
    assert all(("-" in line.split("│")[0]) == ("█" in line.split("│")[0]) or "█" not in line for line in bars)
    assert "\x1b" not in out
    code, out, _ = run("explain", folder, text, "--label", "lost", "--steps", 8, "--json")
    [answer] = json.loads(out)["answers"]
    assert (code, answer["label"], answer["steps"]) == (0, "lost", 8)


def test_explain_refuses_a_label_that_is_not_there(run: Cli, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    for words, cause in ((["parcel", "--label", "lots"], "unknown_label"), ([" "], "invalid_input")):
        code, error = error_of(run, "explain", folder, *words)
        assert (code, error["code"]) == (1, cause)


# ------------------------------------------------------------------------------------------------------------- verbs


@pytest.mark.parametrize("name", config.list_recipe_names())
def test_a_recipe_in_full_names_every_setting_with_a_comment_and_is_the_recipe(
    run: Cli, tmp_path: Path, name: str
) -> None:
    code, out, _ = run("recipes", "show", name, "--all")
    assert code == 0
    (tmp_path / "all.yaml").write_text(out)
    assert config.load_config("all.yaml") == config.load_config(name)
    assert config.flatten_document(yaml.safe_load(out)).keys() == set(config.iter_setting_names())
    lines = [line.strip() for line in out.splitlines()]
    settings = [place for place, line in enumerate(lines) if line and line[0] != "#" and not line.endswith(":")]
    assert len(settings) == len(set(config.iter_setting_names()))
    assert [lines[place] for place in settings if not lines[place - 1].startswith("# ")] == []


def test_a_recipe_in_full_can_be_edited_and_given_back(run: Cli, tmp_path: Path) -> None:
    _, out, _ = run("recipes", "show", "intent", "--all")
    (tmp_path / "mine.yaml").write_text(out.replace("epochs: 5", "epochs: 0"))
    code, _, err = run("train", "mine.yaml", "--data", "x.csv")
    assert (code, "train.epochs=0" in err) == (2, True)


def test_bare_rtrain_is_a_question_for_help(run: Cli) -> None:
    for group in ([], ["recipes"]):
        code, out, err = run(*group)
        assert (code, out) == (2, "")
        assert err.startswith("Usage: ")
        assert "Commands:" in err
    assert run("--version")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "'train'"),
        (["recipes", "shw"], "'show'"),
        (["train", "intnt"], " intent?"),
        (["train", "intent", "--data", "tickts.csv"], "tickets.csv?"),
        (["train", "runs/first"], "runs/first/config.yaml"),
        (["train", "runs/first/confg.yaml"], "runs/first/config.yaml?"),
        (["train", "--resume", "--out", "runs/frst"], "runs/first?"),
        (["train", "intent", "--resume", "--out", "runs/frst"], "runs/first?"),
        (["report", "runs/frst"], "runs/first?"),
        (["distill", "runs/frst"], "runs/first?"),
        (["verify", "--ledger", "runs/frst"], "runs/first?"),
        (["predict", "runs/frst/artifact", "text"], "first/artifact?"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_in_one_line(
    run: Cli, tmp_path: Path, arguments: list[str], meant: str
) -> None:
    (tmp_path / "runs" / "first" / "artifact").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("name: intent\ntask: classification\n")
    csv_of(tmp_path, labelled_rows(9), "tickets.csv")
    code, out, err = run(*arguments)
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1), err
    assert meant in err


def test_recipes_are_listed_with_what_they_are_for(run: Cli) -> None:
    lines = run("recipes", "list")[1].splitlines()
    assert [line.split()[0] for line in lines] == config.list_recipe_names()
    assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize("arguments", [["trane"], ["train"], ["train", "intent", "--nope"]])
def test_wrong_usage_exits_2_without_a_traceback(run: Cli, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--out", "~no-such-user/x"], ["--model", "~no-such-user/x", "--data", "rows.csv"]])
def test_the_home_of_nobody_is_one_line_in_any_verb(run: Cli, words: list[str]) -> None:
    code, _, err = run("train", "intent", *words)
    assert code == 2
    assert err.count("\n") == 1


def test_a_full_disk_is_one_line_in_any_verb(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which names no file

    monkeypatch.setattr("rtrain.verification.verify.check_ledger", full)
    code, _, err = run("verify", "--ledger", "run")
    assert code == 1
    assert err.count("\n") == 1


def test_predict_reads_lines_and_prints_one_answer_each(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_artifact(tmp_path / "artifact")
    code, out, _ = run("predict", folder, "first text", "second text", "--top", 2)
    assert code == 0
    assert [len(line.split("\t")) for line in out.splitlines()] == [4, 4]
    code, as_json, _ = run("predict", folder, "first text", "--json")
    assert json.loads(as_json)[0][0]["label"] == out.splitlines()[0].split("\t")[0]


def test_a_run_stands_for_its_artefact_and_another_folder_for_none(run: Cli, tmp_path: Path) -> None:
    made = make_artifact(tmp_path / "runs" / "a" / "artifact")
    answer = run("predict", made, "text")
    assert (answer[0], answer[2]) == (0, "")
    code, out, err = run("predict", "runs/a", "text")
    assert (code, out, err) == (0, answer[1], "answering with runs/a/artifact\n")
    code, error = error_of(run, "predict", "runs", "text")
    assert (code, error["code"]) == (1, "not_an_artifact")


@pytest.mark.parametrize("verb", ["predict", "explain", "evaluate", "distill", "quantize"])
def test_every_verb_that_takes_a_run_takes_a_search_and_says_how_to_go_on_with_it(
    run: Cli, tmp_path: Path, verb: str
) -> None:
    stock.search(tmp_path / "runs" / "s", best=None)
    more = {"predict": ["text"], "explain": ["text"], "evaluate": ["--data", "x.csv"]}.get(verb, [])
    code, error = error_of(run, verb, "runs/s", *more)
    assert (code, error["code"], "rtrain tune --resume --out " in error["message"]) == (1, "not_finished", True)


@pytest.mark.parametrize("verb", ["distill", "quantize", "export"])
def test_a_run_that_has_not_ended_is_made_smaller_and_carried_by_going_on_with_it_first(
    run: Cli, tmp_path: Path, verb: str
) -> None:
    cut = stock.make(tmp_path / "runs" / "cut", ended="interrupted")
    more = ["--out", "cut.tar"] if verb == "export" else []
    code, error = error_of(run, verb, "runs/cut", *more)
    assert (code, error["code"]) == (1, "not_finished")
    assert error["message"].endswith(f"rtrain train --resume --out {cut}")


@pytest.mark.parametrize("layers", [2, 3])
def test_a_student_with_too_many_layers_is_refused_before_ray_starts(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    teacher = stock.make(tmp_path / "teacher", ended="interrupted")
    make_artifact(teacher.artifact)  # of two layers
    monkeypatch.setattr(connection, "session", lambda *_: pytest.fail("Ray was started"))
    code, error = error_of(run, "distill", "teacher", "--set", f"distill.layers={layers}")
    assert (code, fields_of(error)) == (2, ["distill.layers"])
    assert not (tmp_path / "teacher-student").exists()


@pytest.mark.ray
def test_train_prints_one_json_object_leaves_an_artefact_and_sets_a_bad_row_aside_with_its_reason(
    run: Cli, tmp_path: Path, encoder: Path, ray_session: Path
) -> None:
    import pyarrow.parquet

    csv_of(tmp_path, [*labelled_rows(300), ("", "parcel")])
    code, out, err = run(
        *("train", "intent", "--data", "rows.csv", "--model", encoder, "--out", "runs/here", "--json"),
        *("--set", "train.epochs=1"),
    )
    assert code == 0, err
    summary = json.loads(out)
    assert summary["status"] == "finished"
    assert (tmp_path / "runs" / "here" / "artifact" / "MANIFEST.json").is_file()
    [table] = list((tmp_path / "runs" / ".tokens").glob("*/quarantine.parquet"))
    assert pyarrow.parquet.read_table(table).to_pylist() == [
        {
            "source": str(tmp_path / "rows.csv"),
            "line": 302,
            "reason": "column 'text' is empty; write a text or remove the row",
        }
    ]


# --------------------------------------------------------------------------------------- bad input, before Ray starts


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--data", "empty.csv"], ["data.path"]),
        (["--data", "others.csv"], ["data.text", "data.label"]),
        (["--data", "rows.csv", "--model", "no-tokenizer"], ["model.name"]),
        (["--data", "nowhere.csv", "--model", "./no-model"], ["data.path", "model.name"]),
        (["--set", "optim.learning_rate=1", "--set", "train.epoch=2"], ["optim.learning_rate", "train.epoch"]),
        (
            ["--data", "rows.csv", "--set", "tune.objective=time_to_target", "--set", "data.label=text"],
            ["data.label", "tune.target"],
        ),
        (["--data", "rows.csv", "--resume", "--new"], ["--new"]),
        (["--resume"], ["--resume"]),
    ],
)
def test_all_that_is_wrong_with_a_recipe_is_told_at_once_and_nothing_is_left(
    run: Cli, tmp_path: Path, encoder: Path, arguments: list[str], fields: list[str]
) -> None:
    (tmp_path / "empty.csv").touch()
    csv_of(tmp_path, labelled_rows(40))
    write_rows(tmp_path / "others.csv", labelled_rows(40), header=("message", "intent"))
    (make_encoder(tmp_path / "no-tokenizer") / "tokenizer.json").unlink()
    model = [] if "--model" in arguments else ["--model", encoder]
    code, error = error_of(run, "train", "intent", *model, *arguments)
    assert (code, sorted(fields_of(error))) == (2, sorted(fields))
    assert left_behind(tmp_path) == []


def test_no_free_disk(run: Cli, tmp_path: Path) -> None:
    """The weights are a header and a hole, larger than a ninth of any disk of a test machine."""
    folder, size = make_encoder(tmp_path / "model"), 10 << 40
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (folder / "model-00002.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(folder / "model-00002.safetensors", 8 + len(header) + size)
    data = csv_of(tmp_path, labelled_rows(40))
    assert error_of(run, "train", "intent", "--data", data, "--model", folder, "--out", "run")[0] == 1
    assert left_behind(tmp_path) == []


def test_a_resume_needs_the_folder_of_its_run_and_no_recipe(run: Cli, tmp_path: Path) -> None:
    for arguments in (["train"], ["tune"], ["train", "--resume", "--out", "none"]):
        code, error = error_of(run, *arguments)
        assert (code, fields_of(error)) == (2, ["recipe"])
    run_folders.write_frozen_config(
        Run(tmp_path / "run"), config.load_config("intent", {"data.path": str(tmp_path / "gone.csv")})
    )
    csv_of(tmp_path, labelled_rows(40), "gone2.csv")
    code, error = error_of(run, "train", "--resume", "--out", "run")
    assert (code, fields_of(error)) == (2, ["data.path"])  # of the run's own, which has gone
    code, error = error_of(run, "train", "--resume", "--out", "run", "--set", "optim.lr=1e-5", "--workers", 3)
    assert (code, fields_of(error)) == (2, ["optim.lr"])


def test_a_student_is_not_trained_by_its_configuration_and_the_command_that_makes_it_is_named(
    run: Cli, tmp_path: Path
) -> None:
    student = stock.make(tmp_path / "student", ended="interrupted", distill__teacher="abc", distill__layers=2)
    for words in (["train", "student/config.yaml", "--out", "x"], ["train", "--new", "--out", "student"]):
        code, error = error_of(run, *words)
        assert (code, (tmp_path / "x").exists(), (tmp_path / "student-2").exists()) == (2, False, False)
        assert [(each["field"], each["code"]) for each in error["problems"]] == [("distill.teacher", "needs_teacher")]
        assert f"--set distill.layers=2 --out {student}-again" in error["message"]
    shutil.copyfile(student.config, tmp_path / "mine.yaml")
    assert fields_of(error_of(run, "train", "mine.yaml")[1]) == ["distill.teacher"]
    # Resumed, its rows are looked for.
    assert fields_of(error_of(run, "train", "--resume", "--out", "student")[1]) == ["data.path"]


@pytest.mark.parametrize("reuse", [[], ["--resume"]], ids=["anew", "resume"])
@pytest.mark.parametrize("verb", ["tune", "distill"])
def test_a_search_of_which_the_storage_alone_is_left_is_refused_with_a_way_on(
    verb: str, reuse: list[str], run: Cli, tmp_path: Path
) -> None:
    """Its trials are copied, and its journal is not. Each of --resume and a new search named the other as the fix."""
    gone = {"data.path": str(tmp_path / "gone.csv")}
    run_folders.write_frozen_config(
        Run(tmp_path / "mounted" / "search" / "trial-000"), config.load_config("intent", gone)
    )
    run_folders.write_frozen_config(Run(teacher := tmp_path / "teacher"), config.load_config("intent", gone))
    make_artifact(teacher / "artifact")
    words = ["tune", "intent", "--data", csv_of(tmp_path, labelled_rows(40))]
    words = words if verb == "tune" else ["distill", teacher, "--search"]
    storage = (tmp_path / "mounted").as_uri()
    code, _, err = run(*words, *reuse, "--out", "search", "--set", f"cluster.storage={storage}")
    assert code == 1, err
    assert not (tmp_path / "search").exists()
    way_on = shlex.split(err.split("Resume one of its trials: rtrain ")[1])
    assert way_on[:2] == (["train", "intent"] if verb == "tune" else ["distill", str(teacher)])
    if verb == "tune":  # a student's rows are read by Ray
        code, _, err = run(*(word.replace("NEW", "new") for word in way_on))
        assert (code, "no such file" in err) == (2, True), err  # of the trial's own rows, which have gone
        assert Run(tmp_path / "new" / "trial-000").exists


# ---------------------------------------------------------------------------------- bad input, found by the token job


@pytest.mark.ray
@pytest.mark.parametrize("fault", ["bytes", "class", "workers"])
def test_rows_that_cannot_be_trained_on_are_refused_and_leave_no_run(
    run: Cli, tmp_path: Path, encoder: Path, ray_session: Path, fault: str
) -> None:
    rows = labelled_rows(60)
    path = csv_of(tmp_path, [(text, "same") for text, _ in rows] if fault == "class" else rows)
    if fault == "bytes":
        lines = path.read_bytes().splitlines()
        lines[6], lines[9] = "Stra\xdfe,parcel".encode("latin-1"), "caf\xe9,parcel".encode("latin-1")
        path.write_bytes(b"\n".join(lines))
    more = ["--workers", 50] if fault == "workers" else []
    code, error = error_of(run, "train", "intent", "--data", path, "--model", encoder, "--out", "runs/run", *more)
    assert code == (2 if fault == "workers" else 1)
    if fault == "bytes":
        assert all(place in error["message"] for place in ("rows.csv:7", "rows.csv:10"))
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.ray
def test_more_workers_than_the_cluster_has_cpus(run: Cli, tmp_path: Path, encoder: Path, ray_session: Path) -> None:
    csv_of(tmp_path, labelled_rows(200))
    words = ("--data", "rows.csv", "--model", encoder, "--out", "run", "--workers", 9)
    code, error = error_of(run, "train", "intent", *words)
    assert (code, fields_of(error)) == (2, ["train.workers"])
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.parametrize("verb", ["train", "serve"])
def test_with_an_empty_home_ray_s_token_is_its_owner_s_alone(tmp_path: Path, encoder: Path, verb: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rows = csv_of(tmp_path, [(text, "same") for text, _ in labelled_rows(60)])
    with socket.socket() as taken:  # both commands are refused after Ray has started
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = {
            "train": ["train", "intent", "--data", rows, "--model", encoder, "--out", "run"],
            "serve": ["serve", make_artifact(tmp_path / "artifact"), "--port", taken.getsockname()[1]],
        }[verb]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
        done = subprocess.run(
            ["sh", "-c", 'umask 022; exec "$@"', "sh", sys.executable, "-m", "rtrain", *map(str, words)],
            env={**kept, "HOME": str(home), "PYTHONPATH": f"{ROOT}:{STARTUP}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64


@pytest.mark.serve
def test_port_in_use(run: Cli, tmp_path: Path, ray_session: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("serve", folder, "--port", port)
    assert code == 1
    assert (str(port) in err, "Traceback" in err) == (True, False)


def test_a_student_of_a_student_learns_copies_of_its_own(run: Cli, tmp_path: Path, encoder: Path) -> None:
    """Its teacher's configuration names a file of other copies, which it would have learned in silence."""
    stale = tmp_path / "stale.jsonl"
    stale.write_text('{"text": "of other rows"}\n')
    rows = {"data.path": str(csv_of(tmp_path, labelled_rows(60))), "model.name": str(encoder)}
    taught = Run(tmp_path / "taught")
    run_folders.write_frozen_config(
        taught,
        config.load_config(
            "intent", {**rows, "distill.augmented_copies": 3, "distill.augmented_rows_path": str(stale)}
        ),
    )
    make_artifact(taught.artifact)
    code, _, told = run("distill", taught.folder, "--set", "distill.augmented_copies=1", "--set", "distill.layers=9")
    assert (code, "distill.layers" in told) == (2, True)
    [made] = tmp_path.glob(".copies/*/rows.jsonl")
    assert 0 < len(made.read_text().splitlines()) <= 60


def test_a_search_over_students_is_gone_on_with_by_the_verb_that_began_it(run: Cli, tmp_path: Path) -> None:
    """By another one no trial would learn from the teacher, and distill.lr would change nothing."""
    search = Run(tmp_path / "students")
    student = config.load_config(
        "intent", {"data.path": str(csv_of(tmp_path, labelled_rows(60))), "distill.teacher": "v1"}
    )
    run_folders.write_frozen_config(search, student)
    search.trials.touch()
    way_on = f"rtrain distill TEACHER --search --resume --out {search.folder}"
    code, _, told = run("tune", "--resume", "--out", search.folder)
    assert (code, way_on in told) == (2, True)
    code, _, told = run("serve", search.folder)
    assert (code, told.strip().endswith(way_on)) == (1, True)
    assert Run(tmp_path).resume_command == f"rtrain train --resume --out {tmp_path}"
