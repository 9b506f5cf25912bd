"""Verbs that hand a job to a cluster: what is refused before the cluster is asked, and what is said of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtrain.cluster.jobs import client
from rtrain.cluster.session import IN_JOB
from tests.test_cli import Cli, run  # noqa: F401
from tests.test_cluster_jobs import checkout  # noqa: F401
from tests.test_imports import ROOT


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--data", "messages.csv"], "--data=messages.csv"),
        (["--data", "s3://b/rows.csv", "--set", "data.test=beside.csv"], "data.test=beside.csv"),
        (["--data", "folder/of_rows"], "--data=folder/of_rows"),
        (["--model", "encoder"], "--model=encoder"),
        (["--data", "code.py", "--valid", "*.py"], None),
        (["--data", "owner/rows", "--model", "owner/encoder"], None),
        (["--data", "/shared/rows.csv", "--model", "minilm"], None),
    ],
)
def test_relative_paths_of_a_job_are_among_the_files_that_it_takes_along(
    run: Cli,  # noqa: F811
    checkout: Path,  # noqa: F811
    tmp_path: Path,
    words: list[str],
    refused: str | None,
) -> None:
    (tmp_path / "folder" / "of_rows").mkdir(parents=True)
    (tmp_path / "encoder").mkdir()
    submit = ("cluster", "submit", "--folder", checkout, "--address", "no-address", "--")
    code, _, err = run(*submit, "train", "intent", "--out", "/shared/x", *words)
    assert (code, "no-address" in err) == ((2, False) if refused else (1, True)), err
    assert refused is None or err.startswith(f"rtrain: {refused}: ")


def test_a_pod_has_no_files_of_the_current_folder(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "rows.csv").touch()
    words = ("train", "intent", "--out", "/shared/runs/x", "--data")
    code, out, err = run("cluster", "kubernetes", "--", *words, "rows.csv")
    assert (code, out, "--data=rows.csv" in err) == (2, "", True)
    assert run("cluster", "kubernetes", "--", *words, "/shared/rows.csv")[0] == 0


@pytest.mark.parametrize("verb", ["submit", "kubernetes", "rehearse"])
def test_options_of_the_job_without_two_dashes_are_told_where_these_go(run: Cli, verb: str) -> None:  # noqa: F811
    code, _, err = run("cluster", verb, "train", "intent", "--data", "rows.csv")
    assert (code, f"rtrain cluster {verb} -- train" in err) == (2, True)


class Answers:
    """A cluster on which an endpoint answers at once."""

    def __init__(self, address: str | None):
        pass

    def submit(self, words: list[str], *_: object) -> str:
        [setting] = [word for word in words if word.startswith("serve.port=")]
        self._port = setting.partition("=")[2]
        return "rtrain-serve-x"

    def await_line(self, job: str, sign: str) -> str:
        return f"{sign}/shared/a at home (x)/artifact at http://127.0.0.1:{self._port} (Ctrl-C ends it)"


def test_an_endpoint_s_own_port_is_forwarded(
    run: Cli,  # noqa: F811
    checkout: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "Jobs", Answers)
    code, _, err = run("cluster", "serve", "/shared/x", "--folder", checkout, "--set", "serve.port=8155")
    assert (code, "ray attach -p 8155 " in err) == (0, True), err


STOPPED = """
import os, signal, sys
from pathlib import Path
from rtrain import signals
from rtrain.cli import options
with signals.owned(), options.resumable(Path(sys.argv[1]), "train"):
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_job_that_was_stopped_is_submitted_again(tmp_path: Path) -> None:
    """Its entry point resumes the run; the command on the node is nothing that its user can type."""
    (tmp_path / "config.yaml").touch()
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, IN_JOB: "{}"}, cwd=ROOT, capture_output=True, text=True)
    *_, error = ended.stderr.splitlines()
    assert "Ended" in error
    assert "submit the same job again" in error
    assert "rtrain train" not in error
