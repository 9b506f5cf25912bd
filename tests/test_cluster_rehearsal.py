"""Whole rehearsals, and jobs on rehearsed clusters."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster.rehearsal.machines import network
from tests.conftest import labelled_rows, write_rows
from tests.machines import SAVE_EVERY
from tests.tiny import make_encoder

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")

SMALL = ("train.precision=fp32", "train.save_every=40", "train.evaluate_every=400", "quantize.calibration_rows=32")


def rehearsed(folder: Path, text: str, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """`rtrain cluster rehearse` of a file with a training of a tiny encoder."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yaml").write_text(text)
    data, model = write_rows(folder / "rows.csv", labelled_rows(403)), make_encoder(folder / "encoder")
    command = [sys.executable, "-m", "rtrain", "cluster", "rehearse", "--json", "--file", str(folder / "cluster.yaml")]
    command += ["--out", str(folder / "out"), "--folder", str(ROOT), "--most-mb", "20", "--", "train", "intent"]
    command += ["--data", str(data), "--model", str(model), *words]
    command += [word for setting in SMALL for word in ("--set", setting)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done, json.loads(lines[-1]) if lines else {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_project_s_own_file_is_rehearsed_whole(tmp_path: Path) -> None:
    done, found = rehearsed(tmp_path, TEXT, "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["passed"], found["problems"], found["left_behind"]) == (True, [], [])
    assert found["rows"] == {"agrees": True, "lost": 0, "repeated": 0, "same_order": True}
    assert (found["weights"]["identical"], found["workers"]) == (True, [2, 2, 2])
    assert [fault["kind"] for fault in found["faults"]] == ["notice", "kill"]
    assert found["faults"][0]["recomputed"] == 0
    assert [one for one in found["ports"] if not one["allowed"]] == []
    assert found["nodes_started"] >= found["nodes_needed"] == 3
    assert json.loads((tmp_path / "out" / "certificate.json").read_text()) == found


def on_machines(verb: str, folder: Path, script: str = "tests.machines", *more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", script, verb, str(folder), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_workers_take_gpus_that_are_declared_and_land_on_the_nodes_that_have_them(tmp_path: Path) -> None:
    """Beside nodes of CPUs, which the data tasks may have."""
    document = yaml.safe_load(TEXT)
    worker = document["available_node_types"]["worker"]
    document["available_node_types"]["gpu"] = {**worker, "resources": {"CPU": 2, "GPU": 1}, "max_workers": 4}
    done, found = rehearsed(tmp_path, yaml.safe_dump(document), "--workers", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["passed"], found["device"], found["workers"]) == (True, "gpu", [2, 2, 2])
    assert (found["weights"]["identical"], found["left_behind"]) == (True, [])
    assert {fault["type"] for fault in found["faults"]} == {"gpu"}
    assert any("NCCL" in one for one in found["not_rehearsed"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_job_submitted_again_goes_on_from_its_storage_when_the_head_is_gone(tmp_path: Path) -> None:
    """The head's machine is cut off in the middle of a run, and takes the run's folder with it. The same job on a new
    cluster goes on from the newest checkpoint that the storage has: nothing that was saved is lost."""
    first = on_machines("train", tmp_path)
    second = on_machines("again", tmp_path)
    assert (first["left"], second["left"]) == ([], [])
    assert second["resumed_from"] == first["stored"] >= 30


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("case", "beside", "lives"),
    [
        ("gcs", ("redis",), True),
        ("processes", ("redis",), False),
        ("gcs", (), False),
        ("processes", (), False),
        ("machine", (), False),
    ],
)
def test_whatever_a_lost_head_ends_the_run_goes_on_from_its_storage(
    tmp_path: Path, case: str, beside: tuple[str, ...], lives: bool
) -> None:
    """By itself where its driver lives, else as it is submitted again. Without a Redis what comes back is another
    cluster's head: its autoscaler starts Ray anew on the machines that there are."""
    if lacking := network.problem():
        pytest.skip(lacking)
    if beside and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    found = on_machines(case, tmp_path, "tests.lost_head", *beside)
    assert (found["driver"], found["submitted_again"], found["left"]) == (lives, not lives, []), found
    assert found["updates_lost"] == 0


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_an_endpoint_s_replicas_bring_up_nodes_and_leave_none(tmp_path: Path) -> None:
    found = on_machines("serve", tmp_path)
    assert (found["nodes"], found["traceback"], found["left"]) == (2, False, [])
    assert found["statuses"].keys() == {"200", "refused"}  # what was accepted is answered, though the job is stopped


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_run_that_grows_starts_the_nodes_that_it_needs_and_no_more(tmp_path: Path) -> None:
    found = on_machines("grow", tmp_path)
    assert (sorted(set(found["workers"])), found["workers"][-2:], found["left"]) == ([1, 4], [4, 1], []), found
    assert found["needed"] == found["started"] == found["at_a_time"] == found["in_the_end"] == 6, found
    assert found["needed_by_one"] == found["left_of_one"] == 3
    assert set(found["lost"]) == {0}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_killed_driver_is_started_again_and_a_silent_storage_costs_no_update(tmp_path: Path) -> None:
    found = on_machines("broken", tmp_path)
    assert (found["storage"]["restarts"], found["left"]) == (0, []), found
    assert found["storage"]["told"] > 0 < found["storage"]["updates_meanwhile"], found
    assert 0 <= found["driver"]["recomputed"] <= 2 * SAVE_EVERY, found


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_trials_and_replicas_land_on_the_nodes_that_are_labelled_for_them(tmp_path: Path) -> None:
    found = on_machines("labels", tmp_path)
    assert (found["status"], found["trials"], found["left"]) == ("SUCCEEDED", 2, [])
    assert found["on"] == {"ray::RayTrainWorker": ["training"], "ray::ServeReplica": ["answers"]}
