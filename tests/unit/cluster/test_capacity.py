"""Capacity of a cluster: counted over live and startable nodes."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml

from rtrain import ray_internals
from rtrain.cluster import capacity, connection, data_tasks
from rtrain.planning import placement
from tests.conftest import STARTUP
from tests.support.root import ROOT


def max_workers_on(nodes: list[capacity.NodeResources], device: str, data_cpus: int | None) -> int:
    return capacity.ResourceRequest(device, data_cpus).max_workers([capacity.NodeSpec(node) for node in nodes])


def test_a_worker_is_on_one_node() -> None:
    assert capacity.count_worker_slots([{"CPU": 1.5}, {"CPU": 1.5}, {"GPU": 4.0}], "cpu") == 2
    assert capacity.count_worker_slots([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}], "gpu") == 1


@pytest.mark.parametrize(("device", "cpus"), [("cpu", 1), ("gpu", 0)])
@pytest.mark.parametrize("requested", [None, 1, 2, 5])
def test_a_run_has_room_for_as_many_workers_as_there_are_cpus_for_their_data(
    device: str, cpus: int, requested: int | None
) -> None:
    """The data tasks of more workers take more CPUs; those of fewer have room where those of all have none."""
    for has in range(20):
        node = {"CPU": float(has), "GPU": 32.0}
        fitting = [n for n in range(1, 33) if n * cpus + data_tasks.resolve_data_cpus(requested, n) <= has]
        assert max_workers_on([node], device, requested) == max(fitting, default=0), (has, requested)


DOCUMENT = {
    "max_workers": 5,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 0}},
        "small": {"max_workers": 10, "resources": {"CPU": 4}},
        "gpu": {"max_workers": 2, "resources": {"CPU": 8, "GPU": 4}},
    },
}


@pytest.mark.parametrize(("device", "max_count"), [("cpu", 2 * 8 + 3 * 4), ("gpu", 2 * 4)])
def test_an_autoscaler_starts_the_largest_nodes_up_to_its_limit(device: str, max_count: int) -> None:
    nodes = capacity.reachable_nodes(capacity.parse_autoscaler_limits(DOCUMENT), device)
    assert capacity.count_worker_slots(nodes, device) == max_count


@pytest.mark.parametrize(
    ("cloud", "node_config", "declared", "counted"),
    [
        ("aws", {"InstanceType": "g6.2xlarge"}, None, {"CPU": 8.0, "GPU": 1.0}),
        ("aws", {"InstanceType": "g6.2xlarge"}, {"CPU": 4}, {"CPU": 4.0, "GPU": 1.0}),
        ("aws", {"InstanceType": "x9.large"}, {"CPU": 4}, {"CPU": 4.0}),
        ("gcp", {"machineType": "g2-standard-8"}, None, {}),
        ("azure", {"azure_arm_parameters": {"vmSize": "Standard_F8s_v2"}}, {"GPU": 1}, {"GPU": 1.0}),
    ],
)
def test_only_aws_adds_the_resources_of_the_instance_type(
    cloud: str, node_config: dict[str, Any], declared: dict[str, float] | None, counted: dict[str, float]
) -> None:
    """As `fillout_available_node_types_resources` of Ray's providers does; limits and plans count alike."""
    node_type = {"node_config": node_config, **({} if declared is None else {"resources": declared})}
    document = {"provider": {"type": cloud}, "available_node_types": {"worker": node_type}}
    assert capacity.parse_autoscaler_limits(document).node_types["worker"][0].resources == counted
    assert placement.parse_cluster(document).node_types[0].resources == counted


@pytest.mark.parametrize(
    ("requested", "workers", "each"), [(None, 1, 1.0), (None, 2, 1.0), (None, 4, 0.5), (None, 1000, 0.12), (8, 4, 1.0)]
)
def test_each_worker_s_stream_has_a_task_within_the_cpus_of_the_data_tasks(
    requested: int | None, workers: int, each: float
) -> None:
    assert data_tasks.cpus_per_data_task(requested, workers) == each
    assert workers * each <= data_tasks.resolve_data_cpus(requested, workers)


def test_nodes_are_counted_by_their_labels() -> None:
    """Nodes with other labels, or none, do not count."""
    kinds = DOCUMENT["available_node_types"]
    assert isinstance(kinds, dict)
    labelled = {**kinds, "small": {**kinds["small"], "labels": {"for": "training", "market": "spot"}}}
    may = capacity.parse_autoscaler_limits({**DOCUMENT, "available_node_types": labelled})
    assert capacity.reachable_nodes(may, "cpu", {"for": "training"}) == [{"CPU": 4.0}] * 5
    assert capacity.reachable_nodes(may, "cpu", {"for": "answers"}) == []
    assert capacity.reachable_nodes(may, "gpu", {}) == capacity.reachable_nodes(
        capacity.parse_autoscaler_limits(DOCUMENT), "gpu"
    )
    assert capacity.matches_labels({"zone": "a"}, capacity.ANY_LABELS)
    assert not capacity.matches_labels(None, {"zone": "a"})


def test_labels_that_no_node_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "live_nodes_by_id", lambda: {})
    monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, json.dumps(DOCUMENT))
    [problem] = capacity.find_unmatched_labels("cluster.labels", {"for": "trainng"})
    assert (problem.field, problem.code) == ("cluster.labels", "unknown_labels")
    assert capacity.find_unmatched_labels("cluster.labels", {}) == []
    kinds = {"gpu": {"resources": {"GPU": 1}, "labels": {"for": "training"}}}
    monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, json.dumps({"max_workers": 1, "available_node_types": kinds}))
    assert capacity.find_unmatched_labels("cluster.labels", {"for": "training"}) == []


def test_a_node_is_lost_where_ray_says_so_or_where_nobody_takes_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
        closed.close()
        nodes = [
            {"NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            | {"Resources": {"CPU": 8.0}, "Labels": {"for": name}}
            for name, alive, port in (
                ("here", True, gone),
                ("there", True, listener.getsockname()[1]),
                ("dead", False, listener.getsockname()[1]),
                ("silent", True, gone),
            )
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
        monkeypatch.setattr(capacity, "LOST_NODE_POLL_S", 0.01)
        assert capacity.find_lost_nodes({"here", "there"}, 0.05) == {}
        assert set(capacity.find_lost_nodes({"here", "there", "dead", "silent"}, 0.05)) == {"dead", "silent"}
        assert capacity.find_lost_nodes({"dead"}, 0.05) == {"dead": capacity.NodeSpec({"CPU": 8.0}, {"for": "dead"})}
        assert capacity.find_lost_nodes({"here", "of another cluster"}, 60) == {}
        # A lost node is no capacity for the next attempt, although Ray still reports it as alive.
        monkeypatch.setattr(ray_internals, "draining_node_ids", set)
        assert sorted(capacity.live_nodes_by_id()) == ["here", "there"]
        nodes[3]["NodeManagerPort"] = listener.getsockname()[1]
        assert sorted(capacity.live_nodes_by_id()) == ["here", "silent", "there"]
        threading.Timer(0.05, lambda: nodes[1].update(Alive=False)).start()
        assert set(capacity.find_lost_nodes({"here", "there"}, 60)) == {"there"}


def test_the_head_leaves_its_jobs_the_autoscaler_s_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And misses nodes sooner, if it is not told when."""
    name, value = connection.HEALTH_CHECK_SETTING
    for item in (capacity.AUTOSCALER_FILE_VARIABLE, name):
        monkeypatch.delenv(item, raising=False)
    connection.on_node_start(SimpleNamespace(ray_client_server_port=1, autoscaling_config=None), head=False)
    assert not {capacity.AUTOSCALER_FILE_VARIABLE, name} & os.environ.keys()
    parameters = SimpleNamespace(ray_client_server_port=1, autoscaling_config="~/bootstrap.yaml")
    connection.on_node_start(parameters, head=True)
    assert parameters.ray_client_server_port is None  # nobody uses Ray's client
    assert os.environ.pop(capacity.AUTOSCALER_FILE_VARIABLE) == str(Path.home() / "bootstrap.yaml")
    assert os.environ.pop(name) == value
    monkeypatch.setenv(name, "20000")
    connection.on_node_start(SimpleNamespace(ray_client_server_port=1, autoscaling_config=None), head=True)
    assert os.environ[name] == "20000"


def test_each_address_of_a_head_has_a_part_of_its_own_in_a_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of KubeRay set the namespace themselves: their nodes find a new head by its name."""
    names = ("RAY_REDIS_ADDRESS", "RAY_external_storage_namespace", connection.HEALTH_CHECK_SETTING[0])
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def started(head: bool, **arguments: object) -> object:
        usual: dict[str, Any] = {"node_ip_address": None, "_system_config": {}, "autoscaling_config": None}
        parameters = SimpleNamespace(ray_client_server_port=1, **{**usual, **arguments})
        connection.on_node_start(parameters, head)
        return parameters._system_config

    assert started(head=True) == {}
    monkeypatch.setenv("RAY_REDIS_ADDRESS", "10.0.0.9:6379")
    assert started(head=False) == {}
    assert started(head=True, node_ip_address="10.0.0.5") == {"external_storage_namespace": "head-10.0.0.5"}
    assert started(head=True, _system_config={"a": 1}) == {
        "external_storage_namespace": f"head-{ray.util.get_node_ip_address()}",
        "a": 1,
    }
    monkeypatch.setenv("RAY_external_storage_namespace", "mine")
    assert started(head=True, node_ip_address="10.0.0.5") == {}
    del os.environ[connection.HEALTH_CHECK_SETTING[0]]


SCRIPT = '''
import json, subprocess, sys
from pathlib import Path
from rtrain.core import env
from rtrain.core.errors import UserError
env.set_env_defaults()
import ray
from ray.util.placement_group import placement_group
from tests.support.trained import settings
from rtrain.cluster import capacity
from rtrain.core import events
from rtrain.runs import controller, prepare
folder = Path(sys.argv[1])
ray.init(
    address="local", num_cpus=6, num_gpus=1, labels={"for": "data"}, include_dashboard=False, log_to_driver=False
)
others = placement_group([{"CPU": 2}])
ray.get(others.ready())
chosen = settings(folder, **{"train.workers": 24, "train.min_workers": 1, "train.epochs": 1,
                            "cluster.data_labels": {"for": "data"}})
said = []
found = controller.fit(prepare.prepare_run(chosen, folder / "run"), on_event=said.append)
try:
    prepare.prepare_run(settings(folder, **{"train.device": "gpu"}), folder / "refused")
except UserError as error:
    refused = str(error)



TASK = """
import sys, ray, ray.data
from rtrain.cluster import data_tasks
ray.init(address=sys.argv[1], log_to_driver=False)
with data_tasks.restrict_data_tasks({"for": sys.argv[2]}):
    dataset = ray.data.range(1, override_num_blocks=1).map_batches(lambda batch: batch)
print("begins", flush=True)
dataset.take_all()
"""


def comes(label, seconds):  # whether a data task ends that needs a node with the label; in a driver of its own
    command = [sys.executable, "-c", TASK, ray.get_runtime_context().gcs_address, label]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        driver.stdout.readline()
        try:
            return driver.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            driver.kill()


tasks = [comes("data", 60), comes("training", 5)]
log = events.read_events(folder / "run")
print(json.dumps({
    "tasks": tasks,
    "most": [capacity.max_accelerators("cpu"), capacity.max_accelerators("gpu")],
    "free": capacity.ResourceRequest().capacity_of(capacity.available_nodes()).worker_slots,
    "reason": [event["reason"] for event in log if event["kind"] == "device"],
    "started": [(event["workers"], event["device"]) for event in log if event["kind"] == "started"],
    "waited": [event for event in said if event["kind"] == "waiting"],
    "status": found["status"],
    "device": found["device"],
    "refused": refused,
    "report": "2 workers on cpu in fp32" in (folder / "run" / "report.html").read_text(),
}))
ray.shutdown()
'''


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_takes_what_is_free_and_says_why_a_gpu_is_left_alone(tmp_path: Path) -> None:
    """Six CPUs, two of them taken, and a GPU that a CPU build of torch cannot use: an elastic run of up
    to 24 workers starts with two, beside their data tasks. It neither takes four, which could never be placed, nor
    waits until there are CPUs for the data tasks of 24."""
    from rtrain.models import device

    if device.can_use_gpus():
        pytest.fail("this test is for a CPU build of torch, which the project's tests are run with")
    file = tmp_path / "autoscaler.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": f"{ROOT}:{STARTUP}",
        capacity.AUTOSCALER_FILE_VARIABLE: str(file),
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["most"] == [28, 8]
    assert document["free"] == 4
    assert document["tasks"] == [True, False]
    assert document["started"] == [[2, "cpu"]]
    assert (document["status"], document["device"], document["report"]) == ("finished", "cpu", True)
    assert len(document["reason"]) == 1
    assert "train.device=gpu" in document["refused"]
