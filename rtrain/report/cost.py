"""What a run cost, from its log alone: hours of workers, cores and GPUs, money, tokens for it, how busy the cores were.

A command is paid for from its first line in the log to its last, with the machines of its workers and the head's; where
workers are started again, from then on with theirs. Prices are those by which a plan counts (`cluster.prices`). Nothing
is guessed: what the log does not tell is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rtrain.cluster import pricing as pricing
from rtrain.cluster.pricing import Price

KIND = "machines"
"""The event of a start that tells its machines, the head's, and `price`, that of a worker's hour, where it is set."""
PRICES = "prices"
"""The event of a command whose machines have prices in a file (`cluster.prices`, or the cluster's own): by type."""
OWN, FILED, LISTED, UNKNOWN = "tune.price", "prices of a file", "list prices on demand", "unknown"
ASSUMED: Final = f"spot prices assumed to be {pricing.SPOT:g} of those on demand"
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Paid:
    """Machines for some time."""

    machines: Sequence[Mapping[str, Any]]
    """Those of the workers."""
    head: Mapping[str, Any] | None
    """The head's machine, where no worker is on it."""
    price: float | None
    """What a worker's hour costs."""
    hours: float
    filed: Mapping[str, Price]
    """Prices of a file, by type of machine."""

    def of(self, what: str) -> float:
        """Hours times `workers`, `cores` or `gpus`."""
        return self.hours * float(sum(one[what] for one in self.machines))

    def money(self) -> float | None:
        """Dollars, or whatever the price of a worker's hour is in; None where a machine's price is not known."""
        if self.price is not None:
            return self.price * self.of("workers")
        table = {**pricing.table(), **self.filed}
        prices = [(table.get(one["instance"]), _is_spot(one)) for one in self._machines_and_head]
        known = [price.hourly(is_spot=is_spot) for price, is_spot in prices if price is not None]
        return self.hours * sum(known) if len(known) == len(prices) else None

    @property
    def by(self) -> set[str]:
        """Which prices these are."""
        if self.price is not None:
            return {OWN}
        return {
            FILED if one["instance"] in self.filed else ASSUMED if _is_spot(one) else LISTED
            for one in self._machines_and_head
        }

    @property
    def _machines_and_head(self) -> list[Mapping[str, Any]]:
        return [*self.machines, *([self.head] if self.head else [])]


def _is_spot(machine: Mapping[str, Any]) -> bool:
    return bool(machine.get("spot"))  # a head is on demand


def paid(starts: Sequence[Sequence[Event]]) -> list[Paid]:
    """What the starts of a run have held, each the events of one command."""
    found = []
    for events in starts:
        told = [place for place, event in enumerate(events) if event["kind"] == KIND]
        logged: Mapping[str, Any] = next((event["prices"] for event in events if event["kind"] == PRICES), {})
        filed = {name: Price(**price) for name, price in logged.items()}
        for one, place in enumerate(told):
            begin = events[0 if one == 0 else place]["time"]
            end = events[told[one + 1] if one + 1 < len(told) else -1]["time"]
            event, head = events[place], events[place].get("head")
            if head and head["host"] in [machine["host"] for machine in event["machines"]]:
                head = None
            found.append(Paid(event["machines"], head, event["price"], (end - begin) / 3600, filed))
    return found


def cost(starts: Sequence[Sequence[Event]], real_tokens: int) -> dict[str, Any] | None:
    """The document of a run's cost; None where the log tells nothing of its machines."""
    found = paid(starts)
    if not found:
        return None
    sums = [one.money() for one in found]
    money = None if None in sums else sum(one for one in sums if one is not None)
    prices = set().union(*(one.by for one in found))
    return {
        **{f"{what[:-1]}_hours": round(sum(one.of(what) for one in found), 6) for what in ("workers", "cores", "gpus")},
        "money": None if money is None else round(money, 6),
        "price": UNKNOWN if money is None else " and ".join(sorted(prices)),
        "tokens_per_money": round(real_tokens / money) if money else None,
        "utilisation": _utilisation(starts),
    }


def _utilisation(starts: Sequence[Sequence[Event]]) -> float | None:
    """The share of their machines' cores that the workers kept busy while they trained, by the newest start that came
    to an end; None for workers with GPUs, whose cores mostly wait."""
    log = [event for events in starts for event in events]
    ended = [place for place, event in enumerate(log) if event["kind"] == "trained" and event.get("stages")]
    machines = [event["machines"] for event in log[: ended[-1]] if event["kind"] == KIND] if ended else []
    if not machines or any(one["gpus"] for one in machines[-1]):
        return None
    busy = sum(float(worker["cores_busy"]) for worker in log[ended[-1]]["stages"])
    return round(busy / sum(int(one["cores"]) for one in machines[-1]), 4)


def sentence(found: Mapping[str, Any]) -> str:
    """`0.12 core-hours, 0.004 at list prices on demand (1,234,567 tokens for 1), cores 71 % busy`."""
    parts = [f"{figure(found['core_hours'])} core-hours"]
    if found["gpu_hours"]:
        parts.append(f"{figure(found['gpu_hours'])} GPU-hours")
    if found["money"] is None:
        parts.append("its price is unknown (name it in a file: --set cluster.prices=FILE)")
    else:
        tokens = f" ({found['tokens_per_money']:,} tokens for 1)" if found["tokens_per_money"] else ""
        parts.append(f"{figure(found['money'])} at {found['price']}{tokens}")
    if found["utilisation"] is not None:
        parts.append(f"cores {found['utilisation']:.0%} busy while training")
    return ", ".join(parts)


def figure(value: float) -> str:
    """Three digits: 12.3, 0.00123."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
