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
from tests.root import ROOT
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
APART = document({"gpu": ({"GPU": 1}, 4), "cpu": ({"CPU": 8}, 4)})
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
    ("4 trials", CPUS, {"train.workers": 6, "tune.concurrent": 4}, True, True),
    ("5 trials", CPUS, {"train.workers": 6, "tune.concurrent": 5}, True, False),
    ("a GPU node less, for the CPUs", APART, {"train.workers": 4}, False, True),
    ("all GPU nodes, and no CPUs", APART, {"train.workers": 4, "train.min_workers": 4}, False, False),
    ("GPU or CPUs, not both", SINGLE, {"train.workers": 1}, False, False),
    ("trials on GPUs, CPUs elsewhere", APART, {"train.workers": 1}, True, True),
    ("4 trials on GPUs", APART, {"train.workers": 1, "tune.concurrent": 4}, True, False),
    (
        "labels, data elsewhere",
        BARE | {"max_workers": 3},
        {"train.workers": 4, "cluster.labels": {"type": "gpu"}},
        False,
        True,
    ),
    (
        "labels, data elsewhere by its own",
        APART,
        {"train.workers": 3, "cluster.labels": {"type": "gpu"}, "cluster.data_labels": {"type": "cpu"}},
        False,
        True,
    ),
    ("labels of nodes without CPUs", APART, {"train.workers": 3, "cluster.data_labels": {"type": "gpu"}}, False, False),
    (
        "labels of too few CPUs",
        MIXED,
        {"train.workers": 9, "train.device": "cpu", "cluster.labels": {"type": "cpu"}},
        False,
        False,
    ),
]


def configured(settings: dict[str, Any]) -> Config:
    return configuration.load("intent", settings)


def verdict(cluster: dict[str, Any], settings: dict[str, Any], searches: bool) -> placement.Layout | str:
    try:
        return placement.laid_out(configured(settings), placement.of_document(cluster), searches=searches)
    except ConfigError as error:
        return str(error)


def started(config: Config, searches: bool, run: Run) -> tuple[str, int] | str:
    """What a start on the cluster itself says, by the code that every start goes through; no node is up yet."""
    try:
        chosen = prepare.device_of(config, run)
        if problems := prepare.capacity(config, chosen.device):
            raise ConfigError(problems)
        if searches:
            return chosen.device, trial_pool.number(config, chosen.device)
    except ConfigError as error:
        return str(error)
    return chosen.device, chosen.workers


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
    monkeypatch.setenv(capacity.AUTOSCALER_FILE, str(file))
    # The head is up, and nothing else: Ray itself is not asked.
    head = cluster["available_node_types"]["head"]["resources"]
    monkeypatch.setattr(capacity, "up", lambda: [capacity.Host(head)])
    monkeypatch.setattr(device, "usable", lambda: True)
    config = configured(settings)
    foretold, real = verdict(cluster, settings, searches), started(config, searches, Run(tmp_path / "run"))
    assert isinstance(foretold, placement.Layout) == (not isinstance(real, str)) == fits, name
    if isinstance(foretold, placement.Layout) and not isinstance(real, str):
        assert (foretold.device, foretold.trials if searches else foretold.workers) == real
        # What the run would ask the autoscaler for is what it can have, so that it does not wait for ever.
        needs = foretold.needs
        asked = autoscaler_requests.places(foretold.workers, needs, capacity.up(), capacity.may_start())
        assert len(asked) >= foretold.least + needs.of(foretold.least).data
        assert placement.fewest(placement.of_document(cluster), needs, needs.of(foretold.least)) is not None
    else:
        assert isinstance(foretold, str)
        assert any(mend in foretold for mend in ("write", "start nodes", "raise max_workers", "add a node type"))


def test_what_no_nodes_have_together_is_refused_although_each_is_there() -> None:
    """One node at a time: it has the GPU and no CPU, or CPUs and no GPU."""
    apart = document({"gpu": ({"CPU": 0, "GPU": 1}, 1), "cpu": ({"CPU": 8}, 1)}, limit=1)
    found = verdict(apart, {"train.workers": 1}, False)
    assert isinstance(found, str)
    assert found.endswith(
        "no nodes that may be up together have 1 GPUs for workers and 2 CPUs for their data tasks; there may be "
        "gpu (1 GPU), cpu (8 CPU); max_workers: 1 over all types; raise max_workers, 1 over all types, in the "
        "cluster's file"
    )
    apart["max_workers"] = 2
    assert isinstance(verdict(apart, {"train.workers": 1}, False), placement.Layout)


def test_a_refusal_names_the_nearest_that_fits() -> None:
    found = verdict(CPUS, {"train.workers": 64, "cluster.data_cpus": 2}, False)
    assert "write --workers 30" in str(found)
    assert isinstance(verdict(CPUS, {"train.workers": 30, "cluster.data_cpus": 2}, False), placement.Layout)


def test_the_cheapest_nodes_with_room_are_taken() -> None:
    cluster = placement.of_document(document({"small": ({"CPU": 4}, 8), "large": ({"CPU": 16}, 2)}, limit=8))
    prices = {"small": 1.0, "large": 3.0}

    def price(kind: placement.Kind) -> float:
        return prices[kind.name]

    prices["large"] = 2.5
    needs = capacity.Needs("cpu", 2)
    assert placement.fewest(cluster, needs, needs.of(10), price) == {"large": 1}
    prices["large"] = 3.5
    assert placement.fewest(cluster, needs, needs.of(10), price) == {"small": 3}
    assert placement.fewest(cluster, needs, needs.of(60), price) is None


def test_nodes_hold_no_more_workers_than_their_memory() -> None:
    cluster = placement.of_document(document({"worker": ({"CPU": 8}, 4)}))
    needs = capacity.Needs("cpu", 2)
    need = needs.of(6)
    assert placement.fewest(cluster, needs, need, holds=lambda kind: 8) == {"worker": 1}
    assert placement.fewest(cluster, needs, need, holds=lambda kind: 2 if kind.name == "worker" else 0) == {"worker": 3}
    assert placement.fewest(cluster, needs, need, holds=lambda kind: 0) is None


def test_the_project_s_own_file_has_its_instances() -> None:
    cluster = placement.of_document(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    [worker] = cluster.kinds
    assert worker.instance is not None
    assert (worker.instance.name, worker.is_spot, worker.most) == ("c7i.2xlarge", True, 4)
    assert [kind.instance.name for kind in cluster.heads if kind.instance] == ["m7i.large"]


def test_an_instance_s_processors_are_filled_in() -> None:
    found = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    del found["available_node_types"]["worker"]["resources"]
    assert placement.of_document(found).kinds[0].node == {"CPU": 8.0}


@pytest.mark.parametrize("broken", [{}, {"available_node_types": []}, {"available_node_types": {"a": 1}}])
def test_what_is_no_cluster_s_file_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        placement.of_document(broken)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [("--cluster", "malformed")]


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
    found = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ConfigError) as error:
        pricing.table(None, placement.of_document(found).document.get("metadata"))
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
    found = document({"small": ({"CPU": 4}, 8), "large": ({"CPU": 16}, 1)}, limit=8)
    settings = {"train.workers": 16, "cluster.labels": {"type": "large"}}
    layout = placement.laid_out(configured(settings), placement.of_document(found))
    assert placement.fewest(placement.of_document(found), layout.needs, layout.need) == {"large": 1, "small": 1}
    for other in ({"cluster.labels": {"type": "none"}}, {"train.workers": 17}):
        with pytest.raises(ConfigError):
            placement.laid_out(configured(settings | other), placement.of_document(found))
