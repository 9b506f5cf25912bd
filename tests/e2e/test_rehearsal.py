"""Whole rehearsals, and jobs on rehearsed clusters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import labelled_rows, write_rows
from tests.support.machines import SAVE_EVERY
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")

SMALL = ("train.precision=fp32", "train.save_every=40", "train.evaluate_every=400", "quantize.calibration_rows=32")


def rehearsed(folder: Path, text: str, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """`rtrain cluster rehearse` of a file with a training of a tiny encoder."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yaml").write_text(text)
    data, model = write_rows(folder / "rows.csv", labelled_rows(403)), make_encoder(folder / "encoder")
    command = [sys.executable, "-m", "rtrain", "cluster", "rehearse", "--json", "--file", str(folder / "cluster.yaml")]
    command += ["--out", str(folder / "out"), "--folder", str(ROOT), "--max-mb", "20", "--", "train", "intent"]
    command += ["--data", str(data), "--model", str(model), *words]
    command += [word for setting in SMALL for word in ("--set", setting)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done, json.loads(lines[-1]) if lines else {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_project_s_own_file_is_rehearsed_whole(tmp_path: Path) -> None:
    done, report = rehearsed(tmp_path, TEXT, "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["passed"], report["problems"], report["left_behind"]) == (True, [], [])
    assert report["rows"] == {"matches_ledger": True, "lost": 0, "repeated": 0, "same_order": True}
    assert (report["weights"]["identical"], report["workers_by_attempt"]) == (True, [2, 2, 2])
    assert [fault["kind"] for fault in report["faults"]] == ["notice", "kill"]
    assert report["faults"][0]["recomputed_steps"] == 0
    assert [port for port in report["ports"] if not port["is_allowed"]] == []
    assert report["started_nodes"] >= report["expected_nodes"] == 3
    assert json.loads((tmp_path / "out" / "certificate.json").read_text()) == report


def on_machines(verb: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.machines", verb, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_workers_take_gpus_that_are_declared_and_land_on_the_nodes_that_have_them(tmp_path: Path) -> None:
    """CPU nodes are left to the data tasks."""
    document = yaml.safe_load(TEXT)
    worker = document["available_node_types"]["worker"]
    document["available_node_types"]["gpu"] = {**worker, "resources": {"CPU": 2, "GPU": 1}, "max_workers": 4}
    done, report = rehearsed(tmp_path, yaml.safe_dump(document), "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["passed"], report["device"], report["workers_by_attempt"]) == (True, "gpu", [2, 2, 2])
    assert (report["weights"]["identical"], report["left_behind"]) == (True, [])
    assert {fault["type"] for fault in report["faults"]} == {"gpu"}
    assert any("NCCL" in omission for omission in report["not_rehearsed"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_job_submitted_again_goes_on_from_its_storage_when_the_head_is_gone(tmp_path: Path) -> None:
    """The head's machine is cut off in the middle of a run, and takes the run's folder with it. The same job on a new
    cluster resumes from the newest checkpoint in the storage: nothing saved is lost."""
    first = on_machines("train", tmp_path)
    second = on_machines("again", tmp_path)
    assert (first["left"], second["left"]) == ([], [])
    assert second["resumed_from"] == first["stored"] >= 30


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_an_endpoint_s_replicas_bring_up_nodes_and_leave_none(tmp_path: Path) -> None:
    report = on_machines("serve", tmp_path)
    assert (report["nodes"], report["traceback"], report["left"]) == (2, False, [])
    assert report["statuses"].keys() == {
        "200",
        "refused",
    }  # accepted requests are answered, although the job is stopped


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_run_that_grows_starts_the_nodes_that_it_needs_and_no_more(tmp_path: Path) -> None:
    report = on_machines("grow", tmp_path)
    assert (sorted(set(report["workers"])), report["workers"][-2:], report["left"]) == ([1, 4], [4, 1], []), report
    assert report["needed"] == report["started"] == report["at_a_time"] == report["in_the_end"] == 6, report
    assert report["needed_by_one"] == report["left_of_one"] == 3
    assert set(report["lost"]) == {0}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_killed_driver_is_started_again_and_a_silent_storage_costs_no_update(tmp_path: Path) -> None:
    report = on_machines("broken", tmp_path)
    assert (report["storage"]["restarts"], report["left"]) == (0, []), report
    assert report["storage"]["told"] > 0 < report["storage"]["updates_meanwhile"], report
    assert 0 <= report["driver"]["recomputed"] <= 2 * SAVE_EVERY, report


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_trials_and_replicas_land_on_the_nodes_that_are_labelled_for_them(tmp_path: Path) -> None:
    report = on_machines("labels", tmp_path)
    assert (report["status"], report["trials"], report["left"]) == ("SUCCEEDED", 2, [])
    assert report["on"] == {"ray::RayTrainWorker": ["training"], "ray::ServeReplica": ["answers"]}
