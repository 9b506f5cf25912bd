"""What a run cost: hours and money that can be added up by hand, and nothing that is not known."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster import pricing
from rtrain.cluster.instance_types import INSTANCES_BY_NAME
from rtrain.planning import placement, plan
from rtrain.report import cost
from rtrain.report.summary import split_commands
from rtrain.runs import node_info
from tests.support.root import ROOT

HOUR = 3600.0


def machine(
    name: str | None = None, *, workers: int = 2, cores: int = 4, gpus: int = 0, spot: bool = False
) -> dict[str, Any]:
    has = {"workers": workers, "cores": cores, "gpus": gpus, "gpu": None}
    return {"host": "h", **has, "instance": name, "spot": spot}


def log(*events: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Events at hours since the first."""
    return [{"time": at * HOUR, "kind": kind, **fields} for at, kind, fields in events]


def trained(at: float, busy: float = 0.5) -> tuple[float, str, dict[str, Any]]:
    return at, "trained", {"stages": [{"cores_busy": busy}, {"cores_busy": busy}]}


def told(
    at: float, *found: dict[str, Any], price: float | None = None, head: dict[str, Any] | None = None
) -> tuple[float, str, dict[str, Any]]:
    return at, cost.MACHINES_EVENT, {"machines": list(found), "head": head, "price": price}


def filed(**dollars: float) -> tuple[float, str, dict[str, Any]]:
    return (
        0.0,
        cost.PRICES_EVENT,
        {"prices": {name: asdict(pricing.make_price(price)) for name, price in dollars.items()}},
    )


def test_a_command_is_paid_for_from_its_first_line_to_its_last() -> None:
    events = log((0, "created", {}), (0, "tokenized", {}), told(0.5, machine()), trained(2), (2, "finished", {}))
    result = cost.summarize_cost(split_commands(events), 1000)
    assert result is not None
    assert (result["worker_hours"], result["core_hours"], result["gpu_hours"]) == (4.0, 8.0, 0.0)
    assert result["utilization"] == 0.25  # two workers, half a core each, of four


def test_the_time_between_two_commands_costs_nothing() -> None:
    first = [(0, "created", {}), (0, "tokenized", {}), told(0.0, machine()), trained(1.0)]
    second = [(9.0, "tokens_reused", {}), told(9.0, machine()), trained(10.0)]
    result = cost.summarize_cost(split_commands(log(*first, *second)), 0)
    assert result is not None
    assert result["core_hours"] == 8.0


def test_workers_that_are_started_again_have_the_machines_of_their_start() -> None:
    events = log(
        (0, "tokenized", {}),
        told(0.5, machine(workers=2, cores=4)),
        (1, "crashed", {}),
        told(1.0, machine(workers=1, cores=4)),
        trained(3.0),
    )
    result = cost.summarize_cost(split_commands(events), 0)
    assert result is not None
    assert (result["worker_hours"], result["core_hours"]) == (2 * 1 + 1 * 2, 4 * 3)


def test_money_is_the_price_of_a_workers_hour_where_that_is_set() -> None:
    events = log((0, "tokenized", {}), told(0, machine("m7i.large"), price=0.3), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 1200)
    assert result is not None
    assert (result["cost"], result["price"], result["tokens_per_cost"]) == (
        pytest.approx(1.2),
        "tune.worker_cost_per_hour",
        1000,
    )


def test_else_it_is_that_of_the_machines_as_listed() -> None:
    events = log((0, "tokenized", {}), told(0, machine("m7i.large"), machine("c7i.2xlarge")), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert result["cost"] == pytest.approx(
        2 * (INSTANCES_BY_NAME["m7i.large"].dollars_per_hour + INSTANCES_BY_NAME["c7i.2xlarge"].dollars_per_hour)
    )
    assert result["price"] == "list prices on demand"


def test_the_prices_of_a_file_are_those_of_its_command_alone() -> None:
    """Two hours of a machine at 3 by the file and of one that the file does not name, then one hour without a file."""
    started = told(0, machine("m7i.large"), machine("c7i.2xlarge"))
    first = [(0, "tokenized", {}), filed(**{"c7i.2xlarge": 3.0}), started, trained(2.0)]
    second = [(9.0, "tokens_reused", {}), told(9.0, machine("c7i.2xlarge")), trained(10.0)]
    result = cost.summarize_cost(split_commands(log(*first, *second)), 10)
    assert result is not None
    listed = 2 * INSTANCES_BY_NAME["m7i.large"].dollars_per_hour + INSTANCES_BY_NAME["c7i.2xlarge"].dollars_per_hour
    assert result["cost"] == pytest.approx(2 * 3.0 + listed)
    assert result["price"] == "list prices on demand and prices of a file"


def test_a_file_may_price_machines_that_no_list_has() -> None:
    values = filed(**{"a machine of our own": 0.5})
    events = log((0, "tokenized", {}), values, told(0, machine("a machine of our own")), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert (result["cost"], result["price"]) == (pytest.approx(1.0), "prices of a file")


@pytest.mark.parametrize("own", [{}, {"c7i.2xlarge": 3.0}, {"m7i.large": 0.5}])
def test_a_run_costs_what_its_plan_says(own: dict[str, float]) -> None:
    """Two spot nodes and the head of the cluster's file, for two hours without an interruption."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    table = {
        name: replace(price, interruptions=0.0)
        for name, price in pricing.load_price_table(None, {"prices": own}).items()
    }
    planned = plan.plan_cost(placement.parse_cluster(document), {"worker": 2}, table, 2.0, 0.0)
    workers = [machine("c7i.2xlarge", spot=True), machine("c7i.2xlarge", spot=True)]
    started = [(0, "tokenized", {}), *([filed(**own)] if own else [])]
    events = log(*started, told(0, *workers, head={"host": "head", "instance": "m7i.large"}), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert planned is not None
    assert result["cost"] == pytest.approx(planned.spot_dollars)


def test_a_head_with_workers_is_paid_for_once() -> None:
    events = log((0, "tokenized", {}), told(0, machine("m7i.large"), head={"host": "h", "instance": "m7i.large"}))
    events += log((1.0, "finished", {}))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert result["cost"] == pytest.approx(INSTANCES_BY_NAME["m7i.large"].dollars_per_hour)


def test_a_head_whose_type_is_unknown_makes_the_money_unknown() -> None:
    head = {"host": "head", "instance": None}
    events = log((0, "tokenized", {}), told(0, machine("m7i.large"), head=head), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert (result["cost"], result["price"]) == (None, "unknown")


@pytest.mark.parametrize("name", [None, "a machine of our own"])
def test_a_price_that_is_not_known_is_not_made_up(name: str | None) -> None:
    events = log((0, "tokenized", {}), told(0, machine("m7i.large"), machine(name)), trained(2.0))
    result = cost.summarize_cost(split_commands(events), 10)
    assert result is not None
    assert (result["cost"], result["price"], result["tokens_per_cost"]) == (None, "unknown", None)
    assert "price unknown (set it in a file: --set cluster.prices=FILE)" in cost.format_cost(result)
    assert "16 core-hours" in cost.format_cost(result)


def test_a_log_that_tells_no_machines_has_no_cost() -> None:
    assert cost.summarize_cost(split_commands(log((0, "tokenized", {}), (0, "started", {}), trained(2.0))), 10) is None
    assert cost.summarize_cost([], 0) is None


def test_a_start_that_has_just_begun_has_no_utilisation_yet() -> None:
    result = cost.summarize_cost(split_commands(log((0, "tokenized", {}), told(0, machine()))), 0)
    assert result is not None
    assert (result["core_hours"], result["utilization"]) == (0.0, None)


# ------------------------------------------------------------------------------------------------------------ machines


def test_machines_are_told_once_with_all_of_their_workers() -> None:
    workers = [
        {"host": host, "cores": 8, "gpus": gpus, "gpu": None, "instance": None}
        for host, gpus in (("a", 1), ("a", 1), ("b", 0))
    ]
    result = node_info.merge_by_host(workers)
    assert [(item["host"], item["workers"], item["gpus"], item["cores"]) for item in result] == [
        ("a", 2, 2, 8),
        ("b", 1, 0, 8),
    ]


def test_the_type_of_a_machine_is_read_where_its_firmware_tells_it(tmp_path: Path) -> None:
    assert node_info.instance_type(tmp_path) is None
    (tmp_path / "product_name").write_text("m7i.large\n")
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert node_info.instance_type(tmp_path) == "m7i.large"
    (tmp_path / "sys_vendor").write_text("A maker of laptops\n")
    assert node_info.instance_type(tmp_path) is None
