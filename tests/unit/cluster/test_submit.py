"""Verbs that submit jobs: refusals before the cluster is asked, and output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtrain.cluster.connection import JOB_CONFIG_VARIABLE
from tests.support.root import ROOT
from tests.unit.cli.test_cli import Cli, run  # noqa: F401
from tests.unit.cluster.test_jobs import checkout  # noqa: F401


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["--data", "messages.csv"], True),
        (["--data", "s3://b/rows.csv", "--set", "data.test=beside.csv"], True),
        (["--data", "folder/of_rows"], True),
        (["--model", "encoder"], True),
        (["--data", "code.py", "--valid", "*.py"], False),
        (["--data", "owner/rows", "--model", "owner/encoder"], False),
        (["--data", "/shared/rows.csv", "--model", "minilm"], False),
        (["--plugin", "my_company.ext", "--plugin", "my_ext.py"], True),
        (["--plugin", "my_company.ext", "--plugin", "code.py"], False),
    ],
)
def test_relative_paths_of_a_job_are_among_the_files_that_it_takes_along(
    run: Cli,  # noqa: F811
    checkout: Path,  # noqa: F811
    tmp_path: Path,
    words: list[str],
    is_refused: bool,
) -> None:
    (tmp_path / "folder" / "of_rows").mkdir(parents=True)
    (tmp_path / "encoder").mkdir()
    submit = ("cluster", "submit", "--folder", checkout, "--address", "no-address", "--")
    code, _, err = run(*submit, "train", "intent", "--out", "/shared/x", *words)
    assert code == (2 if is_refused else 1), err  # 1: the address is wrong


def test_a_pod_has_no_files_of_the_current_folder(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "rows.csv").touch()
    words = ("train", "intent", "--out", "/shared/runs/x", "--data")
    assert run("cluster", "kubernetes", "--", *words, "rows.csv")[:2] == (2, "")
    assert run("cluster", "kubernetes", "--", *words, "/shared/rows.csv")[0] == 0


STOPPED = """
import os, signal, sys
from pathlib import Path
import typer
from rtrain.api import process
from rtrain.cli import app, options
from rtrain.core import signals
from rtrain.report import PhaseTimer
context = typer.Context(typer.main.get_command(app.app), obj=PhaseTimer())
with signals.raise_on_sigterm(), options.follow_verb(context, "train"), process.name_interrupted_run(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_job_that_was_stopped_is_submitted_again(tmp_path: Path) -> None:
    """Its entry point resumes the run; the command on the node is nothing that its user can type."""
    (tmp_path / "config.yaml").touch()
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, JOB_CONFIG_VARIABLE: "{}"}, cwd=ROOT, capture_output=True, text=True
    )
    *_, error = ended.stderr.splitlines()
    assert "CommandInterruptedError" in error
    assert "rtrain train" not in error
