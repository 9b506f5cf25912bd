"""What an elastic run asks an autoscaler for: the places it lacks, never more than may come, and nothing once they are
there."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies

from rtrain.cluster import capacity
from rtrain.cluster.autoscaler_requests import EXPIRE_S, REPEAT_S, Demand, Place, places
from rtrain.cluster.capacity import Host, Needs, Node
from tests.root import ROOT

NODES = strategies.lists(
    strategies.fixed_dictionaries({"CPU": strategies.integers(0, 8), "GPU": strategies.integers(0, 4)}).map(
        lambda node: {name: float(amount) for name, amount in node.items()}
    ),
    max_size=5,
)


@given(
    most=strategies.integers(1, 20),
    spare=strategies.none() | strategies.integers(0, 4),
    device=strategies.sampled_from(["cpu", "gpu"]),
    may=NODES,
)
def test_what_is_asked_for_is_the_whole_run_and_fits_what_may_come(
    most: int, spare: int | None, device: str, may: list[Node]
) -> None:
    workers = min(most, capacity.fits(may, device, spare))
    asked = places(most, Needs(device, spare), list(map(Host, may)), NOTHING)
    assert len(asked) == (workers + capacity.data_cpus(spare, workers) if workers else 0)
    for name in ("CPU", "GPU"):
        assert sum(place.resource == name for place in asked) <= sum(node[name] for node in may)


NOTHING = capacity.startable({})
EIGHT = Host({"CPU": 8.0})
CPU, GPU = Place("CPU"), Place("GPU")


def test_workers_and_data_tasks_have_places_of_their_own() -> None:
    assert places(8, Needs("cpu", 2), [EIGHT] * 4, NOTHING) == [CPU] * 10  # two nodes, and no third
    assert places(2, Needs("gpu", 2), [Host({"CPU": 8.0, "GPU": 4.0})], NOTHING) == [GPU] * 2 + [CPU] * 2
    assert places(4, Needs("cpu", 2), [Host({"CPU": 2.0})], NOTHING) == []
    # Data tasks of 2 workers, and not of the 32 that it would rather have: those take 6 of the 4 CPUs.
    assert places(32, Needs("cpu"), [Host({"CPU": 4.0})], NOTHING) == [CPU] * 4


def test_data_tasks_are_not_asked_for_on_the_workers_nodes_unless_that_is_said() -> None:
    hosts, training = [Host({"CPU": 1.0, "GPU": 2.0}, {"for": "training"}), EIGHT], {"for": "training"}
    assert places(2, Needs("gpu", 2, training), hosts, NOTHING) == [Place("GPU", training)] * 2 + [CPU] * 2
    assert places(2, Needs("gpu", 1, training, training), hosts, NOTHING) == [
        *[Place("GPU", training)] * 2,
        Place("CPU", training),
    ]
    assert places(2, Needs("gpu", 2, training, training), hosts, NOTHING) == []


def test_a_node_less_is_asked_for_where_all_of_one_type_leave_no_place_for_another() -> None:
    kinds = {"gpu": {"resources": {"GPU": 1}}, "cpu": {"resources": {"CPU": 8}}}
    may = capacity.startable({"max_workers": 4, "available_node_types": kinds})
    assert places(4, Needs("gpu"), [], may) == [GPU] * 3 + [CPU] * 2


class Book:
    """Takes requests, and keeps them."""

    def __init__(self) -> None:
        self.given: list[tuple[list[dict[str, float]], float]] = []
        self.labels: list[list[dict[str, str]]] = []
        self.taken_back = 0

    def ask(self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float) -> None:
        self.given.append((list(bundles), expire_s))
        self.labels.append(list(labels))

    def take_back(self) -> None:
        self.taken_back += 1


def test_a_request_is_repeated_before_it_expires_changed_at_once_and_taken_back_once() -> None:
    book, now = Book(), [100.0]
    demand = Demand(book, lambda: now[0])
    one, two = [Place("CPU", {"for": "training"})], [Place("CPU", {"for": "training"}), CPU]
    for second in range(40):
        now[0] = 100.0 + second
        demand.want(one)
    assert REPEAT_S < EXPIRE_S
    assert book.given == [([{"CPU": 1.0}], EXPIRE_S)] * 3  # at 0, 15 and 30 s
    demand.want(two)
    assert book.given[-1] == ([{"CPU": 1.0}] * 2, EXPIRE_S)
    assert demand.places == two
    demand.want([])
    demand.end()
    assert (book.taken_back, demand.places) == (1, [])
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
    monkeypatch.setattr(capacity, "up", lambda: [Host({"CPU": 0.0})])
    for value in (json.dumps(document), str(tmp_path / "file.yaml")):
        monkeypatch.setenv(capacity.AUTOSCALER_FILE, value)
        assert capacity.types() == {"big": {"CPU": 16.0}}
        assert capacity.may("cpu") == [{"CPU": 0.0}, {"CPU": 16.0}, {"CPU": 16.0}]
        assert capacity.most("cpu") == 32
    monkeypatch.setattr(capacity, "up", lambda: [Host({"CPU": 64.0})])
    assert capacity.may("cpu") == [{"CPU": 64.0}]


SCRIPT = """
import json, os, time
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_enable_autoscaler_v2"] = "1"  # as `ray up` and KubeRay have it
import ray
from ray.core.generated import autoscaler_pb2
from rtrain import ray_internals
from rtrain.cluster import supply
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)

none = supply.autoscaler()
config = autoscaler_pb2.ClusterConfig()
group = config.node_group_configs.add(name="big", max_count=3)
group.resources["CPU"] = 4
client.report_cluster_config(config.SerializeToString())
print(json.dumps({"none": none, "groups": ray_internals.cluster_config(),
                  "most": supply.most("cpu"), "types": supply.types()}))
ray.shutdown()
"""


@pytest.mark.ray
def test_the_cluster_s_own_word_of_what_it_may_have_is_read() -> None:
    environ = {name: value for name, value in os.environ.items() if name != capacity.AUTOSCALER_FILE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["none"] is None
    assert found["groups"] == [["big", {"CPU": 4.0}, 3]]
    assert (found["most"], found["types"]) == (12, {"big": {"CPU": 4.0}})
