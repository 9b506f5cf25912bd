"""summary.json, computed from events.jsonl alone."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rtrain.core import atomic_write
from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise
from rtrain.report import cost

STATUSES = ("finished", "paused", "stopped", "failed", "interrupted")
LATE_EVENTS = ("cleaned", "imported")
"""Events after the end of the training; their time does not count."""
ROWS_READ_EVENTS = ("tokenized", "tokens_reused")
"""First events of a command; in a new run they follow `created`."""
TIMED_PHASES = ("setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait")


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


def total_command_seconds(log: list[dict[str, Any]]) -> float:
    """Sum the seconds of all commands."""
    return float(sum(events[-1]["time"] - events[0]["time"] for events in split_commands(log)))


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
        "cost": cost.summarize_cost(split_commands(log), all_real),
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
        "restarts": max(0, len(starts) - 1),
        "interruptions": count_interruptions(log),
        "data_digest": created.get("data_digest"),
        "order_digest": end.get("order_digest"),
        "certificate": next((event["report"] for event in reversed(log) if event["kind"] == "drill_report"), None),
    }


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


def write_summary(run: Run) -> dict[str, Any]:
    summary = summarize(run)
    atomic_write.write_text(run.summary, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return summary
