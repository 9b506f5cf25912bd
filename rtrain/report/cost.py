"""Cost of a run from its log: hours of workers, cores and GPUs, cost, tokens per unit of cost, utilization of the
cores.

A command is billed from its first event to its last, with the machines of its workers and the head. After a restart of
the workers, the new machines count. Prices are those of a plan (`cluster.prices`). Unknown values are None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rtrain.cluster import pricing
from rtrain.cluster.pricing import Price

MACHINES_EVENT = "machines"
"""Event of an attempt with its machines, the head, and `price`, the price of a worker's hour, if set."""
PRICES_EVENT = "prices"
"""Event of a command with prices by machine type, from `cluster.prices` or from the cluster's file."""
SETTING_PRICE, FILE_PRICE, LIST_PRICE, UNKNOWN = (
    "tune.worker_cost_per_hour",
    "prices of a file",
    "list prices on demand",
    "unknown",
)
ASSUMED_SPOT_PRICE: Final = f"spot prices assumed to be {pricing.DEFAULT_SPOT_RATIO:g} of those on demand"
Event = Mapping[str, Any]


@dataclass(frozen=True)
class UsageSegment:
    """Machines in use for some hours."""

    machines: Sequence[Mapping[str, Any]]
    """Machines of the workers."""
    head: Mapping[str, Any] | None
    """Machine of the head, if it has no worker."""
    price: float | None
    """Price of a worker's hour."""
    hours: float
    file_prices: Mapping[str, Price]
    """Prices of a file by machine type."""

    def hours_of(self, unit: str) -> float:
        """Hours times `workers`, `cores` or `gpus`."""
        return self.hours * float(sum(machine[unit] for machine in self.machines))

    def compute_cost(self) -> float | None:
        """Cost in dollars, or in the currency of `price`; None if a machine's price is unknown."""
        if self.price is not None:
            return self.price * self.hours_of("workers")
        table = {**pricing.load_price_table(), **self.file_prices}
        prices = [(table.get(machine["instance"]), _is_spot(machine)) for machine in self._machines_and_head]
        hourly_prices = [price.hourly_price(is_spot=is_spot) for price, is_spot in prices if price is not None]
        return self.hours * sum(hourly_prices) if len(hourly_prices) == len(prices) else None

    @property
    def price_sources(self) -> set[str]:
        """Sources of the prices."""
        if self.price is not None:
            return {SETTING_PRICE}
        return {
            FILE_PRICE
            if machine["instance"] in self.file_prices
            else ASSUMED_SPOT_PRICE
            if _is_spot(machine)
            else LIST_PRICE
            for machine in self._machines_and_head
        }

    @property
    def _machines_and_head(self) -> list[Mapping[str, Any]]:
        return [*self.machines, *([self.head] if self.head else [])]


def _is_spot(machine: Mapping[str, Any]) -> bool:
    return bool(machine.get("spot"))  # a head is on demand


def usage_segments(commands: Sequence[Sequence[Event]]) -> list[UsageSegment]:
    """List the machine usage of a run's attempts; `commands`: events of each command."""
    segments = []
    for events in commands:
        machine_events = [place for place, event in enumerate(events) if event["kind"] == MACHINES_EVENT]
        logged: Mapping[str, Any] = next((event["prices"] for event in events if event["kind"] == PRICES_EVENT), {})
        file_prices = {name: Price(**price) for name, price in logged.items()}
        for index, place in enumerate(machine_events):
            start_time = events[0 if index == 0 else place]["time"]
            end_time = events[machine_events[index + 1] if index + 1 < len(machine_events) else -1]["time"]
            event, head = events[place], events[place].get("head")
            if head and head["host"] in [machine["host"] for machine in event["machines"]]:
                head = None
            segments.append(
                UsageSegment(event["machines"], head, event["price"], (end_time - start_time) / 3600, file_prices)
            )
    return segments


def summarize_cost(commands: Sequence[Sequence[Event]], real_tokens: int) -> dict[str, Any] | None:
    """Build the cost document of a run; None if the log has no machines."""
    segments = usage_segments(commands)
    if not segments:
        return None
    sums = [segment.compute_cost() for segment in segments]
    total_cost = None if None in sums else sum(segment_cost for segment_cost in sums if segment_cost is not None)
    prices = set().union(*(segment.price_sources for segment in segments))
    return {
        **{
            f"{unit[:-1]}_hours": round(sum(segment.hours_of(unit) for segment in segments), 6)
            for unit in ("workers", "cores", "gpus")
        },
        "cost": None if total_cost is None else round(total_cost, 6),
        "price": UNKNOWN if total_cost is None else " and ".join(sorted(prices)),
        "tokens_per_cost": round(real_tokens / total_cost) if total_cost else None,
        "utilization": _compute_utilization(commands),
    }


def _compute_utilization(commands: Sequence[Sequence[Event]]) -> float | None:
    """Share of busy cores during training in the newest finished attempt; None for GPU workers, whose cores mostly
    wait."""
    log = [event for events in commands for event in events]
    trained_positions = [place for place, event in enumerate(log) if event["kind"] == "trained" and event.get("stages")]
    machines = (
        [event["machines"] for event in log[: trained_positions[-1]] if event["kind"] == MACHINES_EVENT]
        if trained_positions
        else []
    )
    if not machines or any(machine["gpus"] for machine in machines[-1]):
        return None
    busy = sum(float(worker["cores_busy"]) for worker in log[trained_positions[-1]]["stages"])
    return round(busy / sum(int(machine["cores"]) for machine in machines[-1]), 4)


def format_cost(document: Mapping[str, Any]) -> str:
    """Format `0.12 core-hours, 0.004 at list prices on demand (1,234,567 tokens for 1), cores 71 % busy`."""
    parts = [f"{format_figure(document['core_hours'])} core-hours"]
    if document["gpu_hours"]:
        parts.append(f"{format_figure(document['gpu_hours'])} GPU-hours")
    if document["cost"] is None:
        parts.append("price unknown (set it in a file: --set cluster.prices=FILE)")
    else:
        tokens = f" ({document['tokens_per_cost']:,} tokens for 1)" if document["tokens_per_cost"] else ""
        parts.append(f"{format_figure(document['cost'])} at {document['price']}{tokens}")
    if document["utilization"] is not None:
        parts.append(f"cores {document['utilization']:.0%} busy while training")
    return ", ".join(parts)


def format_figure(value: float) -> str:
    """Format three digits: 12.3, 0.00123."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
