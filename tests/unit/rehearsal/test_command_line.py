"""The words of a rehearsed command: whole paths, another folder, another model."""

from pathlib import Path

import pytest

from rtrain.rehearsal import plan as commands


def test_a_command_keeps_its_words_but_for_where_it_writes_and_runs() -> None:
    words = ["train", "intent", "--data", "rows.csv", "--model=enc", "--out", "/shared/x", "--resume", "--workers", "3"]
    words += ["--set", "cluster.storage=s3://b/r", "--set=cluster.storage=s3://c", "--set", "train.epochs=2"]
    words += ["--set", "cluster.address=ray://head:10001", "--address=auto"]
    saved = ["train", "intent", "--data", "rows.csv", "--model", "enc", "--workers", "3", "--set", "train.epochs=2"]
    saved += ["--out", "/out", "--set", "train.log_every=1"]
    assert commands.rehearsal_command(words, "/out", "file:///store") == [
        *saved,
        "--set",
        "cluster.storage=file:///store",
    ]
    assert "cluster.storage" not in " ".join(commands.rehearsal_command(words[:4], "/out", "file:///store"))


def test_another_model_and_settings_come_behind_all_others() -> None:
    words = ["train", "intent", "--model", "a", "--set", "model.name=b", "--set", "optim.lr=1e-3", "--new"]
    assert commands.override_command(words, "/c", "optim.lr=1") == [
        *("train", "intent", "--set", "optim.lr=1e-3", "--new", "--model", "/c", "--set", "optim.lr=1")
    ]


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, in which there is a file for everything."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows.csv", "v.csv", "more.csv", "text", "intent"):
        (tmp_path / name).touch()
    (tmp_path / "enc").mkdir()
    return tmp_path


def test_whatever_the_words_name_on_this_machine_is_named_whole(working_folder: Path) -> None:
    words = ["train", "intent.yaml", "--data", "rows.csv", "--model=enc", "--set", "data.valid=v.csv"]
    words += ["--set=distill.unlabeled_rows_path=*.csv", "--test", "s3://bucket/rows.csv", "--set", "data.text=text"]
    (working_folder / "intent.yaml").write_text("name: mine\n")
    resolved, problems = commands.resolve_local_paths(words)
    assert problems == []
    assert resolved == [
        *(
            "train",
            f"{working_folder}/intent.yaml",
            "--data",
            f"{working_folder}/rows.csv",
            "--model",
            f"{working_folder}/enc",
        ),
        *(
            "--set",
            f"data.valid={working_folder}/v.csv",
            "--set",
            f"distill.unlabeled_rows_path={working_folder}/*.csv",
        ),
        *("--test", "s3://bucket/rows.csv", "--set", "data.text=text"),
    ]


def test_what_a_recipe_s_file_names_is_named_whole_unless_the_words_say_otherwise(working_folder: Path) -> None:
    (working_folder / "mine.yaml").write_text(
        "data: {path: rows.csv, valid: v.csv, text: text}\nmodel: {name: a/hub-name}\n"
    )
    resolved, _ = commands.resolve_local_paths(["train", "mine.yaml", "--valid", "more.csv", "--set", "model.name=enc"])
    assert resolved == [
        *(
            "train",
            f"{working_folder}/mine.yaml",
            "--valid",
            f"{working_folder}/more.csv",
            "--set",
            f"model.name={working_folder}/enc",
        ),
        *("--set", f"data.path={working_folder}/rows.csv"),
    ]


def test_a_path_that_is_not_here_is_a_problem_and_a_name_is_none(working_folder: Path) -> None:
    words = ["train", "intent", "--data", "./nowhere.csv", "--set", "data.test=/nowhere/x", "--model", "a/hub-name"]
    _, problems = commands.resolve_local_paths(words)
    assert [problem.value for problem in problems] == ["./nowhere.csv", "/nowhere/x"]
