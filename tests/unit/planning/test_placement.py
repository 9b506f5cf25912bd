"""Whether a run has room on a cluster that does not run yet: the verdict beside that of a start on the cluster."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain import config as configuration
from rtrain.cluster import autoscaler_requests, capacity, pricing
from rtrain.config import Config
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.models import device
from rtrain.planning import placement
from rtrain.runs import prepare
from tests.support.root import ROOT
from tune import trial_pool


def document(kinds: dict[str, tuple[dict[str, int], int]], limit: int = 4, head: int = 0) -> dict[str, Any]:
    """A cluster's file: by name of the type its resources and how many there may be. Each type has its name for a
    label."""
    types = {
        name: {"resources": has, "max_workers": most, "labels": {"type": name}} for name, (has, most) in kinds.items()
    }
    return {
        "max_workers": limit,
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {"CPU": head}}, **types},
    }


CPUS = document({"worker": ({"CPU": 8}, 4)})
GPUS = document({"worker": ({"CPU": 8, "GPU": 1}, 4)})
MIXED = document({"cpu": ({"CPU": 4}, 2), "gpu": ({"CPU": 8, "GPU": 4}, 1)}, limit=3)
BARE = document({"gpu": ({"CPU": 1, "GPU": 2}, 2)}, limit=2)
NONE = document({}, limit=0, head=4)
SEPARATE_NODES = document({"gpu": ({"GPU": 1}, 4), "cpu": ({"CPU": 8}, 4)})
SINGLE = document({"both": ({"CPU": 1, "GPU": 1}, 1), "cpu": ({"CPU": 8}, 1)}, limit=1)

LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any], bool, bool]] = [
    # name, cluster, settings, whether of a search, whether it fits
    ("2 workers", CPUS, {"train.workers": 2}, False, True),
    ("all but the data's CPUs", CPUS, {"train.workers": 27}, False, True),
    ("one more for 8 workers", CPUS, {"train.workers": 28}, False, False),
    ("own data CPUs", CPUS, {"train.workers": 28, "cluster.data_cpus": 4}, False, True),
    ("too many data CPUs", CPUS, {"train.workers": 28, "cluster.data_cpus": 5}, False, False),
    ("64 workers", CPUS, {"train.workers": 64}, False, False),
    ("64 workers, at least 8", CPUS, {"train.workers": 64, "train.min_workers": 8}, False, True),
    ("GPUs by themselves", GPUS, {"train.workers": 4}, False, True),
    ("fewer GPUs than workers", GPUS, {"train.workers": 9}, False, True),
    ("too few GPUs for the least", GPUS, {"train.workers": 9, "train.min_workers": 6}, False, False),
    ("GPUs asked for, none there", CPUS, {"train.workers": 2, "train.device": "gpu"}, False, False),
    ("CPUs of GPU nodes", GPUS, {"train.workers": 20, "train.device": "cpu"}, False, True),
    ("too many for CPUs of GPU nodes", GPUS, {"train.workers": 30, "train.device": "cpu"}, False, False),
    ("mixed types, GPUs", MIXED, {"train.workers": 4}, False, True),
    ("mixed types, CPUs", MIXED, {"train.workers": 13, "train.device": "cpu"}, False, True),
    ("mixed types, one CPU short", MIXED, {"train.workers": 14, "train.device": "cpu"}, False, False),
    ("GPU nodes with a CPU each", BARE, {"train.workers": 4}, False, True),
    ("no CPU left for data", BARE, {"train.workers": 4, "cluster.data_cpus": 3}, False, False),
    ("the head alone", NONE, {"train.workers": 2}, False, True),
    ("the head alone, too small", NONE, {"train.workers": 3}, False, False),
    ("a search as it fits", CPUS, {"train.workers": 6}, True, True),
    ("4 trials", CPUS, {"train.workers": 6, "tune.max_concurrent_trials": 4}, True, True),
    ("5 trials", CPUS, {"train.workers": 6, "tune.max_concurrent_trials": 5}, True, False),
    ("a GPU node less, for the CPUs", SEPARATE_NODES, {"train.workers": 4}, False, True),
    ("all GPU nodes, and no CPUs", SEPARATE_NODES, {"train.workers": 4, "train.min_workers": 4}, False, False),
    ("GPU or CPUs, not both", SINGLE, {"train.workers": 1}, False, False),
    ("trials on GPUs, CPUs elsewhere", SEPARATE_NODES, {"train.workers": 1}, True, True),
    ("4 trials on GPUs", SEPARATE_NODES, {"train.workers": 1, "tune.max_concurrent_trials": 4}, True, False),
    (
        "labels, data elsewhere",
        BARE | {"max_workers": 3},
        {"train.workers": 4, "cluster.labels": {"type": "gpu"}},
        False,
        True,
    ),
    (
        "labels, data elsewhere by its own",
        SEPARATE_NODES,
        {"train.workers": 3, "cluster.labels": {"type": "gpu"}, "cluster.data_labels": {"type": "cpu"}},
        False,
        True,
    ),
    (
        "labels of nodes without CPUs",
        SEPARATE_NODES,
        {"train.workers": 3, "cluster.data_labels": {"type": "gpu"}},
        False,
        False,
    ),
    (
        "labels of too few CPUs",
        MIXED,
        {"train.workers": 9, "train.device": "cpu", "cluster.labels": {"type": "cpu"}},
        False,
        False,
    ),
]


def configured(settings: dict[str, Any]) -> Config:
    return configuration.load_config("intent", settings)


def verdict(cluster: dict[str, Any], settings: dict[str, Any], searches: bool) -> placement.PlacementPlan | str:
    try:
        return placement.plan_placement(configured(settings), placement.parse_cluster(cluster), is_search=searches)
    except ConfigError as error:
        return str(error)


def started(config: Config, searches: bool, run: Run) -> tuple[str, int] | str:
    """The verdict of a start on the cluster itself, by its own code; no node is up yet."""
    try:
        device_choice = prepare.choose_device(config, run)
        if problems := prepare.check_capacity(config, device_choice.device):
            raise ConfigError(problems)
        if searches:
            return device_choice.device, trial_pool.count_slots(config, device_choice.device)
    except ConfigError as error:
        return str(error)
    return device_choice.device, device_choice.workers


@pytest.mark.parametrize(("name", "cluster", "settings", "searches", "fits"), LAYOUTS)
def test_the_verdict_is_that_of_a_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cluster: dict[str, Any],
    settings: dict[str, Any],
    searches: bool,
    fits: bool,
) -> None:
    assert len(LAYOUTS) >= 20
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, str(file))
    # The head is up, and nothing else: Ray itself is not asked.
    head = cluster["available_node_types"]["head"]["resources"]
    monkeypatch.setattr(capacity, "live_nodes", lambda: [capacity.NodeSpec(head)])
    monkeypatch.setattr(device, "can_use_gpus", lambda: True)
    config = configured(settings)
    foretold, real = verdict(cluster, settings, searches), started(config, searches, Run(tmp_path / "run"))
    assert isinstance(foretold, placement.PlacementPlan) == (not isinstance(real, str)) == fits, name
    if isinstance(foretold, placement.PlacementPlan) and not isinstance(real, str):
        assert (foretold.device, foretold.concurrent_trials if searches else foretold.workers) == real
        # The run's resource request fits the limits, so that it does not hang.
        needs = foretold.request
        bundles = autoscaler_requests.run_bundles(
            foretold.workers, needs, capacity.live_nodes(), capacity.autoscaler_limits()
        )
        assert len(bundles) >= foretold.min_workers + needs.capacity_for(foretold.min_workers).data_cpus
        assert (
            placement.cheapest_nodes(placement.parse_cluster(cluster), needs, needs.capacity_for(foretold.min_workers))
            is not None
        )
    else:
        assert isinstance(foretold, str)
        assert any(mend in foretold for mend in ("write", "start nodes", "raise max_workers", "add a node type"))


def test_what_no_nodes_have_together_is_refused_although_each_is_there() -> None:
    """One node at a time: it has the GPU and no CPU, or CPUs and no GPU."""
    separate = document({"gpu": ({"CPU": 0, "GPU": 1}, 1), "cpu": ({"CPU": 8}, 1)}, limit=1)
    result = verdict(separate, {"train.workers": 1}, False)
    assert isinstance(result, str)
    assert "raise max_workers" in result
    separate["max_workers"] = 2
    assert isinstance(verdict(separate, {"train.workers": 1}, False), placement.PlacementPlan)


def test_a_refusal_names_the_nearest_that_fits() -> None:
    result = verdict(CPUS, {"train.workers": 64, "cluster.data_cpus": 2}, False)
    assert "write --workers 30" in str(result)
    assert isinstance(verdict(CPUS, {"train.workers": 30, "cluster.data_cpus": 2}, False), placement.PlacementPlan)


def test_the_cheapest_nodes_with_room_are_taken() -> None:
    cluster = placement.parse_cluster(document({"small": ({"CPU": 4}, 8), "large": ({"CPU": 16}, 2)}, limit=8))
    prices = {"small": 1.0, "large": 3.0}

    def price(kind: placement.NodeType) -> float:
        return prices[kind.name]

    prices["large"] = 2.5
    needs = capacity.ResourceRequest("cpu", 2)
    assert placement.cheapest_nodes(cluster, needs, needs.capacity_for(10), price) == {"large": 1}
    prices["large"] = 3.5
    assert placement.cheapest_nodes(cluster, needs, needs.capacity_for(10), price) == {"small": 3}
    assert placement.cheapest_nodes(cluster, needs, needs.capacity_for(60), price) is None


def test_nodes_hold_no_more_workers_than_their_memory() -> None:
    cluster = placement.parse_cluster(document({"worker": ({"CPU": 8}, 4)}))
    needs = capacity.ResourceRequest("cpu", 2)
    need = needs.capacity_for(6)
    assert placement.cheapest_nodes(cluster, needs, need, slots_in_memory=lambda kind: 8) == {"worker": 1}
    assert placement.cheapest_nodes(
        cluster, needs, need, slots_in_memory=lambda kind: 2 if kind.name == "worker" else 0
    ) == {"worker": 3}
    assert placement.cheapest_nodes(cluster, needs, need, slots_in_memory=lambda kind: 0) is None


def test_the_project_s_own_file_has_its_instances() -> None:
    cluster = placement.parse_cluster(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    [worker] = cluster.node_types
    assert worker.instance is not None
    assert (worker.instance.name, worker.is_spot, worker.max_nodes) == ("c7i.2xlarge", True, 4)
    assert [kind.instance.name for kind in cluster.head_types if kind.instance] == ["m7i.large"]


def test_an_instance_s_processors_are_filled_in() -> None:
    result = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    del result["available_node_types"]["worker"]["resources"]
    assert placement.parse_cluster(result).node_types[0].resources == {"CPU": 8.0}


@pytest.mark.parametrize("broken", [{}, {"available_node_types": []}, {"available_node_types": {"a": 1}}])
def test_what_is_no_cluster_s_file_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        placement.parse_cluster(broken)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("--cluster", "invalid_cluster_file")
    ]


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (("available_node_types", "worker", "resources"), [8], "worker.resources of the cluster's file"),
        (("available_node_types", "worker", "labels"), ["a"], "worker.labels of the cluster's file"),
        (("provider",), "aws", "provider of the cluster's file"),
        (("provider", "type"), ["aws"], "provider.type of the cluster's file"),
        (("metadata",), ["a"], "metadata of the cluster's file"),
        (("metadata",), {"prices": ["a"]}, "metadata.prices of the cluster's file"),
    ],
)
def test_what_is_no_map_of_a_file_is_named(place: tuple[str, ...], value: Any, field: str) -> None:
    result = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ConfigError) as error:
        pricing.load_price_table(None, placement.parse_cluster(result).document.get("metadata"))
    assert [problem.field for problem in error.value.problems] == [field]


def test_a_refusal_comes_without_torch_and_at_once() -> None:
    """In a fresh process, by the command line: the time that a user waits for it is not spent on libraries."""
    script = (
        "import sys\nfrom rtrain.cli import app\n"
        "try:\n    app.main(['plan', 'intent', '--workers', '999', '--cluster', 'cluster.yaml'])\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "print(code, sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "2 []"
    assert "train.workers=999" in done.stderr


def test_nodes_without_the_labels_have_no_workers() -> None:
    result = document({"small": ({"CPU": 4}, 8), "large": ({"CPU": 16}, 1)}, limit=8)
    settings = {"train.workers": 16, "cluster.labels": {"type": "large"}}
    layout = placement.plan_placement(configured(settings), placement.parse_cluster(result))
    assert placement.cheapest_nodes(placement.parse_cluster(result), layout.request, layout.required) == {
        "large": 1,
        "small": 1,
    }
    for other in ({"cluster.labels": {"type": "none"}}, {"train.workers": 17}):
        with pytest.raises(ConfigError):
            placement.plan_placement(configured(settings | other), placement.parse_cluster(result))
