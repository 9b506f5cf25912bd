"""A search as a job on a head started as cluster.yaml starts it: its driver is killed in the midst, and then asked to
end."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rtrain.cluster import supervisor
from rtrain.core.run_folder import Run
from tests.conftest import labelled_rows, write_rows
from tests.support.heads import Head, related
from tests.support.root import ROOT
from tests.support.tiny import make_encoder
from tune.history import read_journal, replay_journal

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def drivers(head: Head) -> list[psutil.Process]:
    """The children of jobs' supervisors that search."""
    result = []
    for process in related(head.folder):
        try:
            if (
                supervisor.CHILD_VARIABLE in process.environ()
                and "tune" in process.cmdline()
                and "-m" in process.cmdline()
            ):
                result.append(process)
        except psutil.Error:
            continue
    return result


def rung_result(search: Run) -> int:
    return sum(event["kind"] == "rung_result" for event in read_journal(search.trials))


def test_a_search_whose_driver_is_killed_in_a_job_goes_on_with_what_it_knew(head: Head) -> None:
    """After the kill it is asked to end, as a head that is about to go asks: the trial in hand is saved there."""
    search = Run(head.folder / "runs" / "killed-search")
    data = write_rows(head.folder / "searched.csv", labelled_rows(403))
    model = make_encoder(head.folder / "encoder-searched")
    settings = ["train.precision=fp32", "train.epochs=2", "train.workers=1"]
    settings += ["tune.trials=4", "tune.sampler=random", "tune.final_budget_rows=0", "gate.latency_seconds=0.5"]
    command = ["python", "-m", "rtrain", "tune", "intent", "--data", str(data), "--model", str(model), "--json"]
    command += ["--out", str(search), *(part for setting in settings for part in ("--set", setting))]
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(head.submit, ROOT, *command)
        while rung_result(search) < 2:
            assert not submitted.done(), submitted.result().stdout
            time.sleep(0.05)
        [driver] = drivers(head)
        before = read_journal(search.trials)
        driver.kill()
        while rung_result(search) < 3:
            assert not submitted.done(), submitted.result().stdout
            time.sleep(0.05)
        [driver] = drivers(head)
        os.kill(driver.ppid(), signal.SIGUSR1)
        overrides = submitted.result()
    assert overrides.returncode != 0
    assert "the driver was killed by SIGKILL; restarting it" in overrides.stdout
    assert "exit code 75" in overrides.stdout
    assert "was stopped by a request. Continue it with the same command and --resume" in overrides.stdout
    assert "SIGUSR1" not in overrides.stdout  # which would have ended it where it stood
    ended = head.submit(ROOT, *command, "--resume")
    assert ended.returncode == 0, ended.stdout
    after = read_journal(search.trials)
    assert after[: len(before)] == before
    history = replay_journal(after)
    assert history.winner is not None
    assert [trial.number for trial in history.original_trials] == [0, 1, 2, 3]
    rungs = [(event["trial"], event["rung"]) for event in after if event["kind"] == "rung_result"]
    assert len(rungs) == len(set(rungs))  # none was run again
    assert json.loads(_document(ended.stdout))["winning_trial"] == history.winner
    assert sorted(job["status"] for job in head.jobs() if str(search) in job["entrypoint"]) == ["FAILED", "SUCCEEDED"]
    assert drivers(head) == []


def _document(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith('{"trials"'))
