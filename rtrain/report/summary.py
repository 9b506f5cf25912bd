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
AFTERWARDS = ("cleaned", "imported")
"""Events that are logged when the training is long over: its time does not go on until then."""
ROWS_READ = ("tokenised", "tokens_reused")
"""The first events of a start; that of a new run comes after `created`."""
SECONDS = ("setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait")


def status(log: list[dict[str, Any]]) -> str:
    """How the newest start of a run ended, or `running`."""
    for event in reversed(log):
        if event["kind"] in STATUSES:
            return str(event["kind"])
        if event["kind"] == "started":
            break
    return "running"


def reached(log: list[dict[str, Any]]) -> int:
    """Updates after which the run stands by its newest start: at its end, or at the last progress that it logged."""
    name = {"progress": "update", "trained": "updates"}
    return next((int(event[name[event["kind"]]]) for event in reversed(log) if event["kind"] in name), 0)


def cut_short(log: list[dict[str, Any]], name: str) -> int:
    """Rows or tokens, by their `name` in a progress, of the starts that did not come to an end: up to the last progress
    that each one logged."""
    total = open_start = 0
    for event in [*log, {"kind": "started"}]:
        if event["kind"] == "started":
            total, open_start = total + open_start, 0
        elif event["kind"] == "progress":
            open_start = event.get(name, 0)
        elif event["kind"] == "trained":
            open_start = 0
    return total


def commands(log: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each command that trained the run, to its end or to the last that the log has of it: what lies
    between an end and a resume, minutes or days, is no part of the training."""
    found: list[list[dict[str, Any]]] = []
    before = None
    for event in log:
        if event["kind"] in AFTERWARDS:
            continue
        if not found or (event["kind"] in ROWS_READ and before != "created"):
            found.append([])
        found[-1].append(event)
        before = event["kind"]
    return found


def spent(log: list[dict[str, Any]]) -> float:
    """Seconds of all commands."""
    return float(sum(events[-1]["time"] - events[0]["time"] for events in commands(log)))


def summarise(run: Run) -> dict[str, Any]:
    """What a run did, over all of its starts. `seconds` are sums over the starts; rates are over training time."""
    log = run.events()
    created = next((event for event in log if event["kind"] == "created"), {})
    starts = [event for event in log if event["kind"] == "started"]
    evaluations = [event for event in log if event["kind"] == "evaluated"]
    ends = [event for event in log if event["kind"] == "trained"]
    end = ends[-1] if ends else {}
    seconds = {name: round(sum(event["seconds"].get(name, 0.0) for event in ends), 3) for name in SECONDS}
    total = round(spent(log), 3)
    rows, real, padded = (
        sum(event.get(name, 0) for event in ends) for name in ("rows_seen", "real_tokens", "padded_tokens")
    )
    all_real = real + cut_short(log, "real_tokens")
    train = seconds["train"] or float("inf")
    valid = [event for event in evaluations if event["split"] == "valid"]
    best = end.get("best_update")
    test = next((event["scores"] for event in reversed(evaluations) if event["split"] == "test"), None)
    return {
        "run": created.get("run", run.name),
        "task": created.get("task"),
        "recipe": created.get("recipe"),
        "status": status(log),
        "workers": starts[-1]["workers"] if starts else None,
        "device": starts[-1].get("device") if starts else None,
        "precision": starts[-1]["precision"] if starts else None,
        "exchange": exchange(log),
        "rows_per_update": starts[-1].get("rows_per_update") if starts else None,
        "noise_scale": None if (scale := gradient_noise.of_run(log)) is None else asdict(scale),
        "updates": reached(log),
        "skipped": sum(event["kind"] == "skipped" for event in log),
        "loss_scale": end.get("loss_scale"),
        "passes_per_update": end.get("passes_per_update"),
        "rows_seen": rows + cut_short(log, "rows"),
        "real_tokens": all_real,
        "padded_tokens": padded + cut_short(log, "padded_tokens"),
        "seconds": {"total": total, **seconds},
        "cost": cost.cost(commands(log), all_real),
        "stages": next((event["stages"] for event in reversed(ends) if event.get("stages")), None),
        "rows_per_second": round(rows / train, 2),
        "real_tokens_per_second": round(real / train, 1),
        "metrics": {
            "valid": next((event["scores"] for event in reversed(valid) if event["update"] == best), None),
            "test": test,
        },
        "overlap": overlap(log),
        "slices": {event["split"]: event["slices"] for event in log if event["kind"] == "sliced"},
        "classes": {event["split"]: event.get("classes", []) for event in log if event["kind"] == "sliced"},
        "running_text": next((event["scores"] for event in reversed(log) if event["kind"] == "running_text"), None),
        "best_update": best,
        "restarts": max(0, len(starts) - 1),
        "interrupted_by": interrupted_by(log),
        "data_digest": created.get("data_digest"),
        "order_digest": end.get("order_digest"),
        "certificate": next((event["certificate"] for event in reversed(log) if event["kind"] == "drilled"), None),
    }


def interrupted_by(log: list[dict[str, Any]]) -> dict[str, int]:
    """How often starts ended before their time, by what ended them: crash, memory, lost (a node that was gone without
    notice), preemption, resize."""
    ends = {"crashed": "cause", "yielded": "reason"}
    return dict(Counter(event[ends[event["kind"]]] for event in log if event["kind"] in ends))


def overlap(log: list[dict[str, Any]]) -> dict[str, Any]:
    """By split: how many of its rows are training rows too (`seen`), and the scores `without` them once there are any.
    Splits that have none are left out."""
    told = {event["split"]: event for event in log if event["kind"] == "overlap"}
    scored = {event["split"]: event["scores"] for event in log if event["kind"] == "unseen"}
    return {
        split: {"rows": event["rows"], "seen": event["seen"], "without": scored.get(split)}
        for split, event in told.items()
    }


def exchange(log: list[dict[str, Any]]) -> dict[str, Any]:
    """How the newest start exchanged gradients: what compressing them loses (relative to their norm),
    and, where the optimizer's state is sharded, the bytes of it on each worker."""
    starts = [place for place, event in enumerate(log) if event["kind"] == "started"]
    # A start logs its shards before its `started`: they lie between the last two events of that kind.
    found = {event["kind"]: event for event in log[starts[-2] if len(starts) > 1 else 0 :]}
    return {
        "gradient_error": found.get("compressed", {}).get("error"),
        "state_bytes": found.get("sharded", {}).get("state_bytes"),
    }


def write(run: Run) -> dict[str, Any]:
    summary = summarise(run)
    atomic_write.write_text(run.summary, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return summary
