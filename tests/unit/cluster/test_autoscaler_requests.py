"""Resource requests of an elastic run: the missing bundles, never more than the limits, and nothing at the end."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies

from rtrain.cluster import capacity, data_tasks
from rtrain.cluster.autoscaler_requests import (
    RENEW_INTERVAL_S,
    REQUEST_TTL_S,
    ResourceBundle,
    ResourceDemand,
    run_bundles,
)
from rtrain.cluster.capacity import NodeResources, NodeSpec, ResourceRequest
from tests.support.root import ROOT

NODES = strategies.lists(
    strategies.fixed_dictionaries({"CPU": strategies.integers(0, 8), "GPU": strategies.integers(0, 4)}).map(
        lambda node: {name: float(amount) for name, amount in node.items()}
    ),
    max_size=5,
)


@given(
    max_count=strategies.integers(1, 20),
    spare=strategies.none() | strategies.integers(0, 4),
    device=strategies.sampled_from(["cpu", "gpu"]),
    may=NODES,
)
def test_what_is_asked_for_is_the_whole_run_and_fits_what_may_come(
    max_count: int, spare: int | None, device: str, may: list[NodeResources]
) -> None:
    workers = min(
        max_count, capacity.ResourceRequest(device, spare).max_workers([capacity.NodeSpec(node) for node in may])
    )
    bundles = run_bundles(max_count, ResourceRequest(device, spare), list(map(NodeSpec, may)), NOTHING)
    assert len(bundles) == (workers + data_tasks.resolve_data_cpus(spare, workers) if workers else 0)
    for name in ("CPU", "GPU"):
        assert sum(place.resource == name for place in bundles) <= sum(node[name] for node in may)


NOTHING = capacity.parse_autoscaler_limits({})
EIGHT = NodeSpec({"CPU": 8.0})
CPU, GPU = ResourceBundle("CPU"), ResourceBundle("GPU")


def test_workers_and_data_tasks_have_places_of_their_own() -> None:
    assert run_bundles(8, ResourceRequest("cpu", 2), [EIGHT] * 4, NOTHING) == [CPU] * 10  # two nodes, and no third
    gpu_nodes = [NodeSpec({"CPU": 8.0, "GPU": 4.0})]
    assert run_bundles(2, ResourceRequest("gpu", 2), gpu_nodes, NOTHING) == [GPU] * 2 + [CPU] * 2
    assert run_bundles(4, ResourceRequest("cpu", 2), [NodeSpec({"CPU": 2.0})], NOTHING) == []
    # Data tasks of 2 workers, and not of the 32 that it would rather have: those take 6 of the 4 CPUs.
    assert run_bundles(32, ResourceRequest("cpu"), [NodeSpec({"CPU": 4.0})], NOTHING) == [CPU] * 4


def test_data_tasks_are_not_asked_for_on_the_workers_nodes_unless_that_is_said() -> None:
    hosts, training = [NodeSpec({"CPU": 1.0, "GPU": 2.0}, {"for": "training"}), EIGHT], {"for": "training"}
    gpus, cpu = [ResourceBundle("GPU", training)] * 2, ResourceBundle("CPU", training)
    assert run_bundles(2, ResourceRequest("gpu", 2, training), hosts, NOTHING) == [*gpus, CPU, CPU]
    assert run_bundles(2, ResourceRequest("gpu", 1, training, training), hosts, NOTHING) == [*gpus, cpu]
    assert run_bundles(2, ResourceRequest("gpu", 2, training, training), hosts, NOTHING) == []


def test_a_node_less_is_asked_for_where_all_of_one_type_leave_no_place_for_another() -> None:
    kinds = {"gpu": {"resources": {"GPU": 1}}, "cpu": {"resources": {"CPU": 8}}}
    may = capacity.parse_autoscaler_limits({"max_workers": 4, "available_node_types": kinds})
    assert run_bundles(4, ResourceRequest("gpu"), [], may) == [GPU] * 3 + [CPU] * 2


class Book:
    """Takes requests, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[dict[str, float]], float]] = []
        self.labels: list[list[dict[str, str]]] = []
        self.taken_back = 0

    def request_resources(
        self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float
    ) -> None:
        self.requests.append((list(bundles), expire_s))
        self.labels.append(list(labels))

    def cancel_request(self) -> None:
        self.taken_back += 1


def test_a_request_is_repeated_before_it_expires_changed_at_once_and_taken_back_once() -> None:
    book, now = Book(), [100.0]
    demand = ResourceDemand(book, lambda: now[0])
    item, two = [ResourceBundle("CPU", {"for": "training"})], [ResourceBundle("CPU", {"for": "training"}), CPU]
    for second in range(40):
        now[0] = 100.0 + second
        demand.request(item)
    assert RENEW_INTERVAL_S < REQUEST_TTL_S
    assert book.requests == [([{"CPU": 1.0}], REQUEST_TTL_S)] * 3  # at 0, 15 and 30 s
    demand.request(two)
    assert book.requests[-1] == ([{"CPU": 1.0}] * 2, REQUEST_TTL_S)
    assert demand.bundles == two
    demand.request([])
    demand.release()
    assert (book.taken_back, demand.bundles) == (1, [])
    assert book.labels == [[{"for": "training"}]] * 3 + [[{"for": "training"}, {}]]


# ------------------------------------------------------------------------------------------------ what may be started


def test_the_types_come_from_the_file_or_from_the_variable_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "max_workers": 2,
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {"CPU": 0}}, "big": {"resources": {"CPU": 16}}},
    }
    (tmp_path / "file.yaml").write_text(json.dumps(document))
    monkeypatch.setattr(capacity, "live_nodes", lambda: [NodeSpec({"CPU": 0.0})])
    for value in (json.dumps(document), str(tmp_path / "file.yaml")):
        monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, value)
        assert capacity.startable_node_types() == {"big": {"CPU": 16.0}}
        assert capacity.potential_nodes("cpu") == [{"CPU": 0.0}, {"CPU": 16.0}, {"CPU": 16.0}]
        assert capacity.max_accelerators("cpu") == 32
    monkeypatch.setattr(capacity, "live_nodes", lambda: [NodeSpec({"CPU": 64.0})])
    assert capacity.potential_nodes("cpu") == [{"CPU": 64.0}]


SCRIPT = """
import json, os, time
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_enable_autoscaler_v2"] = "1"  # like `ray up` and KubeRay
import ray
from ray.core.generated import autoscaler_pb2
from rtrain import ray_internals
from rtrain.cluster import capacity
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)

none = capacity.load_autoscaler_config()
config = autoscaler_pb2.ClusterConfig()
group = config.node_group_configs.add(name="big", max_count=3)
group.resources["CPU"] = 4
client.report_cluster_config(config.SerializeToString())
print(json.dumps({"none": none, "groups": ray_internals.cluster_config(),
                  "most": capacity.max_accelerators("cpu"), "types": capacity.startable_node_types()}))
ray.shutdown()
"""


@pytest.mark.ray
def test_the_cluster_s_own_word_of_what_it_may_have_is_read() -> None:
    environ = {name: value for name, value in os.environ.items() if name != capacity.AUTOSCALER_FILE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["none"] is None
    assert document["groups"] == [["big", {"CPU": 4.0}, 3]]
    assert (document["most"], document["types"]) == (12, {"big": {"CPU": 4.0}})
