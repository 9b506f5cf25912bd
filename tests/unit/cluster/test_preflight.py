"""Checks before a process starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies

from rtrain import config
from rtrain.cluster import autoscaler_requests, capacity as cluster_capacity, preflight
from rtrain.config import Recipe
from rtrain.core.errors import Problem
from rtrain.runs.recovery import usable_workers
from tests.support.refusals import refused_with
from tests.support.root import ROOT


def recipe(workers: int) -> Recipe:
    return config.load_config("intent", {"train.workers": workers}).recipe


@pytest.mark.parametrize(("rows", "workers", "fix"), [(1, 2, 1), (3, 4, 3), (0, 2, 1)])
def test_more_workers_than_rows_are_refused(rows: int, workers: int, fix: int) -> None:
    [problem] = preflight.check_rows(recipe(workers), rows)
    assert (problem.field, problem.value, problem.code) == ("train.workers", workers, "too_few_rows")
    assert f"--workers {fix}" in problem.fix


def test_workers_of_one_replica_share_a_row() -> None:
    assert preflight.check_rows(recipe(4), 4) == []
    cut = recipe(4).model_copy(update={"train": recipe(4).train.model_copy(update={"tensor_parallel_size": 2})})
    assert preflight.check_rows(cut, 2) == []
    assert [problem.code for problem in preflight.check_rows(cut, 1)] == ["too_few_rows"]


def capacity(total: Recipe, device: str, requested: int | None, cpus: int) -> list[Problem]:
    """The problems on one node of so many CPUs, which has GPUs too, and no autoscaler."""
    needs = cluster_capacity.ResourceRequest(device, requested)
    hosts = [cluster_capacity.NodeSpec({"CPU": float(cpus), "GPU": 100.0})]
    return preflight.check_capacity(total, needs, hosts, cluster_capacity.parse_autoscaler_limits({}))


@pytest.mark.parametrize(("cpus", "workers", "spare", "fix"), [(2, 2, 1, 1), (4, 8, 2, 2), (1, 2, 1, 0), (3, 3, 1, 2)])
def test_a_layout_that_can_never_be_placed_is_refused(cpus: int, workers: int, spare: int, fix: int) -> None:
    [problem] = capacity(recipe(workers), "cpu", spare, cpus)
    assert (problem.code, f"--workers {fix}" in problem.fix) == ("insufficient_capacity", bool(fix))


def test_workers_with_gpus_need_cpus_for_their_data_alone() -> None:
    assert capacity(recipe(2), "cpu", 1, 3) == []
    assert capacity(recipe(8), "gpu", 2, 2) == []
    assert [problem.code for problem in capacity(recipe(8), "gpu", 2, 1)] == ["insufficient_capacity"]


@given(
    max_count=strategies.integers(1, 100),
    share=strategies.floats(0, 1),
    device=strategies.sampled_from(["cpu", "gpu"]),
    requested=strategies.none() | strategies.integers(1, 6),
    cpus=strategies.integers(0, 40),
)
def test_what_is_not_refused_starts_by_what_is_free(
    max_count: int, share: float, device: str, requested: int | None, cpus: int
) -> None:
    """An elastic run waits for its least number; where that has room it must not wait for the data tasks of all."""
    minimum = max(1, int(share * max_count))
    hosts, needs = (
        [cluster_capacity.NodeSpec({"CPU": float(cpus), "GPU": 100.0})],
        cluster_capacity.ResourceRequest(device, requested),
    )
    elastic = config.load_config("intent", {"train.workers": max_count, "train.min_workers": minimum}).recipe
    refused = capacity(elastic, device, requested, cpus)
    workers = usable_workers(max_count, minimum, needs.max_workers(hosts))
    assert bool(refused) == (workers == 0)
    places = autoscaler_requests.run_bundles(max_count, needs, hosts, cluster_capacity.parse_autoscaler_limits({}))
    assert bool(refused) == (len(places) < minimum + needs.capacity_for(minimum).data_cpus)


def test_a_full_disk_is_refused_also_for_a_folder_that_is_yet_to_be(tmp_path: Path) -> None:
    preflight.check_disk_space(tmp_path / "runs" / "new", required_bytes=1)
    with refused_with("disk_full"):
        preflight.check_disk_space(tmp_path / "runs" / "new", required_bytes=1 << 60)


@pytest.mark.parametrize(
    ("nodes", "is_shared"),
    [
        ({"a": (True, True), "b": (True, True)}, True),
        ({"a": (True, True), "b": (False, False)}, False),
        ({"a": (True, True), "c": (True, False), "b": (False, True)}, False),
        ({}, True),
    ],
)
def test_a_folder_that_some_node_does_not_share(nodes: dict[str, tuple[bool, bool]], is_shared: bool) -> None:
    result = preflight.find_folder_problem(Path("/runs"), nodes)
    assert (result is None) == is_shared
    assert all(name in (result or "") for name, answers in nodes.items() if not all(answers))


def test_a_file_is_the_same_by_its_size_and_a_small_one_by_its_content(tmp_path: Path) -> None:
    small, large, size = tmp_path / "config.json", tmp_path / "model.safetensors", preflight.MAX_HASHED_BYTES + 1
    small.write_text("{  }")
    large.touch()
    os.truncate(large, size)
    files = preflight.fingerprint_files([small, large])
    assert files[large] == (size, None)
    expected: dict[str, preflight.FileFingerprints] = {"model": files, "gone": {tmp_path / "rows.csv": (5, None)}}
    marker = tmp_path / "marker"
    marker.write_text(marker.name)
    assert preflight.probe_node(str(marker), f"{marker}-own", expected) == (True, ["gone"])
    with large.open("r+b") as file:
        file.write(b"changed")  # nobody looks
    assert preflight.probe_node(str(marker), f"{marker}-own", expected) == (True, ["gone"])
    small.write_text("{ } ")
    assert preflight.probe_node(str(marker), f"{marker}-own", expected) == (True, ["model", "gone"])


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_with_another_folder_there_is_named(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (unshare --mount)")
    command = [sys.executable, "-m", "tests.support.unshared", str(tmp_path)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, left = done.stdout.splitlines()[-2:]
    assert str(tmp_path) in refused
    assert left == "left behind: []"


@pytest.mark.parametrize(
    ("concurrent", "workers", "refused"), [(5, 2, True), (2, 8, True), (4, 2, False), (None, 64, False)]
)
def test_a_search_with_more_workers_than_a_private_machine_can_carry_is_refused(
    concurrent: int | None, workers: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    requested = {"data.path": "rows.csv", "tune.max_concurrent_trials": concurrent, "train.workers": workers}
    result = preflight.check_oversubscription(config.load_config("intent", requested), 2)
    assert [(problem.field, problem.code) for problem in result] == [
        ("tune.max_concurrent_trials", "too_many_workers")
    ] * refused
    shared = config.load_config("intent", {**requested, "cluster.address": "10.0.0.1:6379"})
    assert preflight.check_oversubscription(shared, 2) == []


def test_the_verb_refuses_it_before_ray_is_imported_or_a_row_is_read(tmp_path: Path) -> None:
    words = ["tune", "intent", "--data", "no-such-file.csv", "--out", "search"]
    words += ["--set", "tune.max_concurrent_trials=5000"]
    program = (
        f"import atexit, sys\nfrom rtrain.cli.app import main\n"
        "atexit.register(lambda: print(sorted({'ray', 'torch', 'transformers'} & sys.modules.keys())))\n"
        f"main({words!r})"
    )
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert list(tmp_path.iterdir()) == []
