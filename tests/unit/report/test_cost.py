"""Cost of a run: hours and money that can be added up by hand; unknown values stay unknown."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster import pricing
from rtrain.cluster.cluster_file import INSTANCES_BY_NAME
from rtrain.planning import placement, plan
from rtrain.report import summary
from rtrain.runs import nodes
from tests.support.root import ROOT

LogEntry = tuple[float, str, dict[str, Any]]
"""(hours since the first event, kind, fields)."""
M7I, C7I = (INSTANCES_BY_NAME[name].dollars_per_hour for name in ("m7i.large", "c7i.2xlarge"))
READ: LogEntry = (0, "tokenized", {})
OWN = "a machine of our own"


def machine(name: str | None = None, *, workers: int = 2, spot: bool = False) -> dict[str, Any]:
    return {"host": "h", "workers": workers, "cores": 4, "gpus": 0, "gpu": None, "instance": name, "spot": spot}


def trained(at: float) -> LogEntry:
    return at, "trained", {"stages": [{"cores_busy": 0.5}] * 2}


def started(
    at: float, *machines: dict[str, Any], price: float | None = None, head: dict[str, Any] | None = None
) -> LogEntry:
    return at, summary.MACHINES_EVENT, {"machines": list(machines), "head": head, "price": price}


def filed(**dollars: float) -> LogEntry:
    prices = {name: asdict(pricing.make_price(price)) for name, price in dollars.items()}
    return 0, summary.PRICES_EVENT, {"prices": prices}


def cost_of(*log: LogEntry, tokens: int = 10) -> dict[str, Any]:
    events = [{"time": 3600 * at, "kind": kind, **fields} for at, kind, fields in log]
    return summary.summarize_cost(summary.split_commands(events), tokens) or {}


AGAIN: list[LogEntry] = [(9, "tokens_reused", {})]
HOURS: dict[str, tuple[list[LogEntry], dict[str, Any]]] = {
    "first line to last": (
        [(0, "created", {}), READ, started(0.5, machine()), trained(2), (2, "finished", {})],
        {"worker_hours": 4.0, "core_hours": 8.0, "gpu_hours": 0.0, "utilization": 0.25},
    ),
    "nothing between two commands": (
        [READ, started(0, machine()), trained(1), *AGAIN, started(9, machine()), trained(10)],
        {"core_hours": 8.0},
    ),
    "other machines after a restart": (
        [READ, started(0.5, machine(workers=2)), (1, "crashed", {}), started(1, machine(workers=1)), trained(3)],
        {"worker_hours": 4.0, "core_hours": 12.0},
    ),
    "just begun": ([READ, started(0, machine())], {"core_hours": 0.0, "utilization": None}),
}
TWO = started(0, machine("m7i.large"), machine("c7i.2xlarge"))
PRICES: dict[str, tuple[list[LogEntry], float | None, str]] = {
    "set": ([READ, started(0, machine("m7i.large"), price=0.3), trained(2)], 1.2, "tune.worker_cost_per_hour"),
    "listed": ([READ, TWO, trained(2)], 2 * (M7I + C7I), "list prices on demand"),
    # Two hours by a file that names one of the machines, then one hour without the file.
    "file of one command": (
        [
            *(READ, filed(**{"c7i.2xlarge": 3.0}), TWO, trained(2)),
            *(*AGAIN, started(9, machine("c7i.2xlarge")), trained(10)),
        ],
        2 * 3.0 + 2 * M7I + C7I,
        "list prices on demand and prices of a file",
    ),
    "file of a machine that no list has": (
        [READ, filed(**{OWN: 0.5}), started(0, machine(OWN)), trained(2)],
        1.0,
        "prices of a file",
    ),
    "head with workers, once": (
        [READ, started(0, machine("m7i.large"), head={"host": "h", "instance": "m7i.large"}), (1, "finished", {})],
        M7I,
        "list prices on demand",
    ),
    "head of unknown type": (
        [READ, started(0, machine("m7i.large"), head={"host": "head", "instance": None}), trained(2)],
        None,
        "unknown",
    ),
    **{
        f"worker of type {name}": ([READ, started(0, machine("m7i.large"), machine(name)), trained(2)], None, "unknown")
        for name in (None, OWN)
    },
}


@pytest.mark.parametrize("case", HOURS)
def test_hours(case: str) -> None:
    log, expected = HOURS[case]
    assert cost_of(*log).items() >= expected.items()


@pytest.mark.parametrize("case", PRICES)
def test_money(case: str) -> None:
    log, cost, price = PRICES[case]
    result = cost_of(*log, tokens=1200)
    assert (result["cost"], result["price"]) == (None if cost is None else pytest.approx(cost), price)
    assert result["tokens_per_cost"] == (None if cost is None else round(1200 / cost))
    assert ("price unknown" in summary.format_cost(result)) == (cost is None)


@pytest.mark.parametrize("own", [{}, {"c7i.2xlarge": 3.0}, {"m7i.large": 0.5}])
def test_a_run_costs_what_its_plan_forecasts(own: dict[str, float]) -> None:
    """Two spot nodes and the head of the cluster's file, for two hours without an interruption."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    table = {
        name: replace(price, interruptions=0.0)
        for name, price in pricing.load_price_table(None, {"prices": own}).items()
    }
    planned = plan.plan_cost(placement.parse_cluster(document), {"worker": 2}, table, 2.0, 0.0)
    workers = [machine("c7i.2xlarge", spot=True)] * 2
    head = {"host": "head", "instance": "m7i.large"}
    result = cost_of(READ, *([filed(**own)] if own else []), started(0, *workers, head=head), trained(2))
    assert planned is not None
    assert result["cost"] == pytest.approx(planned.spot_dollars)


def test_a_log_without_machines_has_no_cost() -> None:
    assert cost_of(READ, (0, "started", {}), trained(2)) == {}
    assert cost_of() == {}


# ------------------------------------------------------------------------------------------------------------ machines


def test_a_machine_is_listed_once_with_all_of_its_workers() -> None:
    workers = [
        {"host": host, "cores": 8, "gpus": gpus, "gpu": None, "instance": None}
        for host, gpus in (("a", 1), ("a", 1), ("b", 0))
    ]
    machines = [(item["host"], item["workers"], item["gpus"], item["cores"]) for item in nodes.merge_by_host(workers)]
    assert machines == [("a", 2, 2, 8), ("b", 1, 0, 8)]


def test_the_type_of_a_machine_is_read_from_its_firmware(tmp_path: Path) -> None:
    assert nodes.instance_type(tmp_path) is None
    (tmp_path / "product_name").write_text("m7i.large\n")
    for vendor, kind in (("Amazon EC2", "m7i.large"), ("A maker of laptops", None)):
        (tmp_path / "sys_vendor").write_text(f"{vendor}\n")
        assert nodes.instance_type(tmp_path) == kind
