"""summary.json, computed from events.jsonl alone, with the cost of the run.

A command is billed from its first event to its last, with the machines of its workers and the head. After a restart of
the workers, the new machines count. Prices are those of a plan (`cluster.prices`). Unknown values are None.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rtrain.cluster import pricing
from rtrain.cluster.pricing import Price
from rtrain.core import atomic_write
from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise

STATUSES = ("finished", "paused", "stopped", "failed", "interrupted")
LATE_EVENTS = ("cleaned", "imported")
"""Events after the end of the training; their time does not count."""
ROWS_READ_EVENTS = ("tokenized", "tokens_reused")
"""First events of a command; in a new run they follow `created`."""
TIMED_PHASES = ("setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait")
EARLY_STOP_FIELDS = ("step", "total_steps", "patience", "best_step")
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


def write_summary(run: Run) -> dict[str, Any]:
    summary = summarize(run)
    atomic_write.write_text(run.summary, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return summary


def summarize(run: Run) -> dict[str, Any]:
    """Build summary.json over all attempts. `seconds` are sums over attempts; rates are over training time."""
    log = run.events()
    created = next((event for event in log if event["kind"] == "created"), {})
    starts = [event for event in log if event["kind"] == "started"]
    evaluations = [event for event in log if event["kind"] == "evaluated"]
    ends = [event for event in log if event["kind"] == "trained"]
    end = ends[-1] if ends else {}
    seconds = {name: round(sum(event["seconds"].get(name, 0.0) for event in ends), 3) for name in TIMED_PHASES}
    total = round(total_command_seconds(log), 3)
    rows, real_tokens, padded_tokens = (
        sum(event.get(name, 0) for event in ends) for name in ("rows_seen", "real_tokens", "padded_tokens")
    )
    all_real = real_tokens + sum_unfinished(log, "real_tokens")
    train = seconds["train"] or float("inf")
    valid = [event for event in evaluations if event["split"] == "valid"]
    best = end.get("best_step")
    test = next((event["scores"] for event in reversed(evaluations) if event["split"] == "test"), None)
    return {
        "run": created.get("run", run.name),
        "task": created.get("task"),
        "recipe": created.get("recipe"),
        "status": run_status(log),
        "workers": starts[-1]["workers"] if starts else None,
        "device": starts[-1].get("device") if starts else None,
        "precision": starts[-1]["precision"] if starts else None,
        "gradient_sync": summarize_gradient_sync(log),
        "global_batch_size": starts[-1].get("global_batch_size") if starts else None,
        "noise_scale": None if (scale := gradient_noise.estimate_from_log(log)) is None else asdict(scale),
        "steps": last_step(log),
        "skipped_steps": sum(event["kind"] == "step_skipped" for event in log),
        "loss_scale": end.get("loss_scale"),
        "micro_batches_per_step": end.get("micro_batches_per_step"),
        "rows_seen": rows + sum_unfinished(log, "rows"),
        "real_tokens": all_real,
        "padded_tokens": padded_tokens + sum_unfinished(log, "padded_tokens"),
        "seconds": {"total": total, **seconds},
        "cost": summarize_cost(split_commands(log), all_real),
        "stages": next((event["stages"] for event in reversed(ends) if event.get("stages")), None),
        "rows_per_second": round(rows / train, 2),
        "real_tokens_per_second": round(real_tokens / train, 1),
        "metrics": {
            "valid": next((event["scores"] for event in reversed(valid) if event["step"] == best), None),
            "test": test,
        },
        "overlap": summarize_overlap(log),
        "slices": {event["split"]: event["slices"] for event in log if event["kind"] == "sliced"},
        "classes": {event["split"]: event.get("classes", []) for event in log if event["kind"] == "sliced"},
        "running_text": next((event["scores"] for event in reversed(log) if event["kind"] == "running_text"), None),
        "best_step": best,
        **summarize_decisions(log),
        "restarts": max(0, len(starts) - 1),
        "interruptions": count_interruptions(log),
        "data_digest": created.get("data_digest"),
        "order_digest": end.get("order_digest"),
        "certificate": next((event["report"] for event in reversed(log) if event["kind"] == "drill_report"), None),
    }


def run_status(log: list[dict[str, Any]]) -> str:
    """Status of the newest attempt: one of `STATUSES`, or `running`."""
    for event in reversed(log):
        if event["kind"] in STATUSES:
            return str(event["kind"])
        if event["kind"] == "started":
            break
    return "running"


def last_step(log: list[dict[str, Any]]) -> int:
    """Last step of the newest attempt: at its end, or at its last progress event."""
    name = {"progress": "step", "trained": "steps"}
    return next((int(event[name[event["kind"]]]) for event in reversed(log) if event["kind"] in name), 0)


def sum_unfinished(log: list[dict[str, Any]], name: str) -> int:
    """Sum the field `name` (rows or tokens) of unfinished attempts, each up to its last progress event."""
    total = open_start = 0
    for event in [*log, {"kind": "started"}]:
        if event["kind"] == "started":
            total, open_start = total + open_start, 0
        elif event["kind"] == "progress":
            open_start = event.get(name, 0)
        elif event["kind"] == "trained":
            open_start = 0
    return total


def total_command_seconds(log: list[dict[str, Any]]) -> float:
    return float(sum(events[-1]["time"] - events[0]["time"] for events in split_commands(log)))


def split_commands(log: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the log into the events of each command; the time between an end and a resume is not part of the
    training."""
    event_lists: list[list[dict[str, Any]]] = []
    previous_kind = None
    for event in log:
        if event["kind"] in LATE_EVENTS:
            continue
        if not event_lists or (event["kind"] in ROWS_READ_EVENTS and previous_kind != "created"):
            event_lists.append([])
        event_lists[-1].append(event)
        previous_kind = event["kind"]
    return event_lists


def count_interruptions(log: list[dict[str, Any]]) -> dict[str, int]:
    """Count interrupted attempts by cause: crash, memory, lost (a node without a preemption notice), preemption,
    resize."""
    ends = {"crashed": "cause", "restart_requested": "reason"}
    return dict(Counter(event[ends[event["kind"]]] for event in log if event["kind"] in ends))


def summarize_overlap(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Overlap by split: `training_rows`, the rows that are training rows too, and `scores_without` them.

    Splits without overlap are omitted.
    """
    overlap_events = {event["split"]: event for event in log if event["kind"] == "overlap"}
    scores_by_split = {event["split"]: event["scores"] for event in log if event["kind"] == "unseen"}
    return {
        split: {
            "rows": event["rows"],
            "training_rows": event["trained_rows"],
            "scores_without": scores_by_split.get(split),
        }
        for split, event in overlap_events.items()
    }


def summarize_decisions(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Early end and operating points, where the settings ask for them: `early_stop`, {step, total_steps, patience,
    best_step}, and `operating_points` by split (`rtrain.metrics.operating_points`)."""
    stops = [{name: event[name] for name in EARLY_STOP_FIELDS} for event in log if event["kind"] == "early_stop"]
    document: dict[str, Any] = {"early_stop": stops[-1]} if stops else {}
    newest = {(event["split"], event["label"]): event for event in log if event["kind"] == "operating_point"}
    for (split, _), event in newest.items():
        fields = {name: value for name, value in event.items() if name not in ("kind", "time", "split")}
        document.setdefault("operating_points", {}).setdefault(split, []).append(fields)
    return document


def summarize_gradient_sync(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Gradient synchronization of the newest attempt: relative compression error, and bytes of sharded optimizer state
    per worker."""
    starts = [place for place, event in enumerate(log) if event["kind"] == "started"]
    # An attempt logs its shards before its `started`, i.e. after the previous `started`.
    last_events = {event["kind"]: event for event in log[starts[-2] if len(starts) > 1 else 0 :]}
    return {
        "gradient_error": last_events.get("gradient_compression", {}).get("error"),
        "state_bytes": last_events.get("optimizer_sharding", {}).get("state_bytes"),
    }


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
