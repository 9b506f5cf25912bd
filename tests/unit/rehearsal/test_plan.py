"""Rehearsal of a cluster file: the plan, and the start commands of its machines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster import capacity
from rtrain.core import env
from rtrain.core.errors import ConfigError
from rtrain.rehearsal import local_cluster as starts, plan as plans, provider, rehearse
from rtrain.rehearsal.machine import MachineRecord
from tests.support.root import ROOT

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.parse_plan(TEXT)


def test_the_file_s_types_limits_prices_and_options_are_taken() -> None:
    [worker] = PLAN.node_types
    assert (PLAN.head.name, PLAN.head.resources, PLAN.head.max_workers) == ("head", {"CPU": 0.0}, 0)
    assert (worker.name, worker.resources, worker.min_workers, worker.max_workers) == ("worker", {"CPU": 8.0}, 0, 4)
    assert (worker.is_spot, worker.instance_type, worker.dollars_per_hour) == (True, "c7i.2xlarge", 0.357)
    assert (PLAN.max_workers, PLAN.idle_timeout_s, PLAN.rehearsal_idle_timeout_s, PLAN.watcher) == (
        4,
        300.0,
        plans.MAX_IDLE_S,
        "aws",
    )
    assert PLAN.head_options == ("--dashboard-host=127.0.0.1",)
    assert PLAN.start_hook == "rtrain.cluster.connection.on_node_start"


def test_the_autoscaler_gets_the_same_cluster_of_another_cloud() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    document = PLAN.autoscaler_config("/tmp/book")
    prepared = prepare_config(json.loads(json.dumps(document)))
    validate_config(prepared)
    heads, kinds, limit = capacity.parse_autoscaler_limits(document)
    assert ([host.resources for host in heads], limit) == ([{"CPU": 0.0}], 4)
    assert [(host.resources, most) for host, most in kinds.values()] == [({"CPU": 8.0}, 4)]
    assert document["provider"]["module"] == f"{provider.__name__}.{provider.RehearsalNodeProvider.__name__}"
    assert not [name for name, commands in prepared.items() if name.endswith("_commands") and commands]
    assert document["provider"]["disable_node_updaters"]


def refusals(text: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as refused:
        plans.parse_plan(text)
    return [(problem.field, problem.code) for problem in refused.value.problems]


def changed(**settings: Any) -> str:
    """cluster.yaml with other top-level settings."""
    return yaml.safe_dump({**yaml.safe_load(TEXT), **settings})


def test_declared_gpus_labels_and_own_prices_are_taken() -> None:
    kind = {"node_config": {"InstanceType": "x9.large"}, "labels": {"for": "training"}, "min_workers": 1}
    types = {"head": {"resources": {"CPU": 0}, "node_config": {}}, "gpu": {**kind, "resources": {"CPU": 8, "GPU": 1}}}
    plan = plans.parse_plan(changed(available_node_types=types, metadata={"prices": {"x9.large": 2.5}}))
    [gpu] = plan.node_types
    assert (gpu.resources, gpu.labels, gpu.min_workers, gpu.dollars_per_hour) == (
        {"CPU": 8.0, "GPU": 1.0},
        {"for": "training"},
        1,
        2.5,
    )
    assert plan.head.dollars_per_hour is None
    without = plans.parse_plan(changed(available_node_types=types, metadata={"prices": None}))
    assert [kind.dollars_per_hour for kind in without.node_types] == [None]
    unpriced = changed(available_node_types=types, metadata={"prices": {"x9.large": "two"}})
    assert refusals(unpriced) == [("metadata.prices.x9.large of the cluster's file", "wrong_type")]
    assert plan.min_workers == 1


def test_resources_that_are_not_said_are_those_of_the_instance_or_asked_for() -> None:
    types = yaml.safe_load(TEXT)["available_node_types"]
    del types["worker"]["resources"]
    assert plans.parse_plan(changed(available_node_types=types)).node_types[0].resources == {"CPU": 8.0}
    types["worker"]["node_config"]["InstanceType"] = "x9.large"
    assert refusals(changed(available_node_types=types)) == [("--file", "no_resources")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: [", "unreadable"),
        ("- a\n- b\n", "not_a_cluster_file"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\n", "not_a_cluster_file"),
        ("cluster_name: x\nprovider: {type: local}\n", "no_node_types"),
        ("available_node_types: {a: {resources: {CPU: 1}}}\nhead_node_type: b\n", "unknown_name"),
    ],
)
def test_a_file_that_cannot_be_rehearsed_is_refused(text: str, code: str) -> None:
    assert refusals(text) == [("--file", code)]


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rehearse.check_request(["tune", "intent", "--data", "/shared/nowhere.csv"], "a: [")
    assert [problem.field for problem in refused.value.problems] == ["verb", "path", "--file"]
    (tmp_path / "rows.csv").touch()
    words = ["train", "--data", str(tmp_path / "rows.csv"), "--model", "a/hub-name"]
    assert rehearse.check_request(words, TEXT) == (PLAN, words)


@pytest.mark.parametrize(("workers", "data", "needed"), [(6, 2, 1), (7, 2, 2), (30, 2, 4), (31, 2, None)])
def test_the_nodes_that_a_run_needs_are_counted_by_what_they_hold(workers: int, data: int, needed: int | None) -> None:
    assert PLAN.required_nodes(workers, capacity.ResourceRequest("cpu", data)) == needed


def test_resources_that_are_no_whole_numbers_are_refused_as_ray_s_launcher_does() -> None:
    types = yaml.safe_load(TEXT)["available_node_types"]
    types["worker"]["resources"] = {"CPU": 8, "bandwidth": 0.5}
    assert refusals(changed(available_node_types=types)) == [("--file", "not_integer")]


def test_a_machine_starts_ray_as_the_file_does_on_ports_that_are_free(tmp_path: Path) -> None:
    token = tmp_path / "token"
    nodes = starts.NodeCommandFactory(
        PLAN, tmp_path, token, tmp_path / "a.yaml", "10.0.0.1:6379", 8265, "http://127.0.0.1:1", (1, 2)
    )
    labels = {"for": "training"}
    head, worker = (
        nodes(MachineRecord(f"{kind}-1", kind, {"CPU": 3.0}, labels, {}, 0.0)) for kind in ("head", "worker")
    )
    [command] = head.commands
    assert {"--head", "--port=6379", "--dashboard-port=8265", "--dashboard-host=127.0.0.1"} <= set(command)
    first, spot = worker.commands
    assert {"--address=10.0.0.1:6379", *starts.RANDOM_PORTS} <= set(first)
    assert "--head" not in first
    assert {"rtrain.cluster.spot_watcher", "aws", "--metadata=http://127.0.0.1:1/worker-1"} <= set(spot)
    assert worker.environment["RAY_CLOUD_INSTANCE_ID"] == "worker-1"
    assert json.loads(worker.environment["RAY_OVERRIDE_RESOURCES"]) == {"CPU": 3.0}
    assert json.loads(worker.environment["RAY_OVERRIDE_LABELS"]) == labels
    assert (worker.environment["RAY_AUTH_MODE"], worker.environment["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
    assert len([word for word in command if word.startswith("--temp-dir=")]) == 1
    assert not env.uses_fake_gpus(worker.environment)
    counting = replace(PLAN, node_types=(replace(PLAN.node_types[0], resources={"GPU": 1.0}),))
    assert env.uses_fake_gpus(replace(nodes, plan=counting)(MachineRecord("a", "worker", {}, {}, {}, 0.0)).environment)
