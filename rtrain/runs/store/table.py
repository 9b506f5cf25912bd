"""Runs and removals for a person: a table, its totals, and what to do next; and the same as one JSON document."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rtrain.core.errors import escape
from rtrain.core.run_folder import quote_path
from rtrain.runs.store import clean
from rtrain.runs.store.clean import Removal
from rtrain.runs.store.run_info import RunInfo, format_bytes
from rtrain.runs.store.scan import Inventory

HEADERS = ("run", "status", "score", "begun", "took", "size", "recipe", "from")
RIGHT_ALIGNED = ("begun", "took", "size")
MONTH_S = 30 * 86400


def format_inventory(inventory: Inventory, with_trials: bool = False, now: float | None = None) -> str:
    """Format the table of runs, the shared items, unreadable folders and totals. `with_trials` adds a line per
    trial."""
    moment = time.time() if now is None else now
    lines = []
    for info in sort_newest_first(inventory.runs):
        lines.append(_run_cells(info, inventory, moment))
        lines += [_run_cells(trial, inventory, moment, info.winner) for trial in info.trials if with_trials]
    output = _align_columns([dict(zip(HEADERS, HEADERS, strict=True)), *lines]) if lines else ["no runs here"]
    output += ["", *_format_shared(inventory)] if inventory.shared else []
    output += [escape(f"{name}: cannot be read") for name in inventory.unreadable]
    return "\n".join([*output, "", *_format_totals(inventory)])


def sort_newest_first(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """Sort by the time of creation; runs with unknown times come last."""
    return sorted(runs, key=lambda run: run.started_at or 0.0, reverse=True)


def inventory_document(inventory: Inventory) -> dict[str, Any]:
    """Return the document of `rtrain runs --json`; sizes in bytes, times in seconds since 1970."""
    return {
        "root": str(inventory.root),
        "runs": [_run_document(value, inventory) for value in sort_newest_first(inventory.runs)],
        "shared": [
            {
                "name": item.name,
                "category": item.category,
                "bytes": item.size,
                "users": [user.name for user in item.users],
            }
            for item in inventory.shared
        ],
        "unreadable": list(inventory.unreadable),
        "bytes": inventory.size,
        "clean_frees": freed_bytes(inventory),
    }


def freed_bytes(inventory: Inventory) -> int:
    """Return the bytes that `rtrain clean ROOT` would free."""
    return sum(removal.size for removal in clean.plan_root_removal(inventory, "artifact"))


# ------------------------------------------------------------------------------------------------------------ a run


def describe_origin(info: RunInfo, inventory: Inventory) -> str:
    """Return the origin of a run: its teacher, the run with its initial weights, or the name of its model."""
    other_runs = [run for run in inventory.iter_runs() if run.run.folder != info.run.folder]
    if (teacher := info.teacher) is not None:
        teacher_run = next((run.name for run in other_runs if teacher in run.versions), None)
        return f"student of {teacher_run or f'artifact {teacher}'}"
    if (weights := info.weights_path) is None:
        return info.model
    ancestors = [run.name for run in other_runs if weights.is_relative_to(run.real_path)]
    return f"weights of {max(ancestors, key=len)}" if ancestors else weights.name


def _run_cells(info: RunInfo, inventory: Inventory, now: float, winner_name: str | None = None) -> dict[str, str]:
    winner_mark = "  <- best" if info.kind == "trial" and info.run.name == winner_name else ""
    trial_count = f" ({len(info.trials)} trial{'' if len(info.trials) == 1 else 's'})" if info.kind == "search" else ""
    cleaned_note = f", cleaned ({info.kept_by_clean} kept)" if info.kept_by_clean == "artifact" else ""
    incomplete_note = ", half removed: clean it again" if info.kept_by_clean == "none" else ""
    return {
        "run": f"{'  ' if info.kind == 'trial' else ''}{info.name}{trial_count}{winner_mark}",
        "status": info.problem or f"{info.status}{cleaned_note}{incomplete_note}",
        "score": str(info.score or "-"),
        "begun": "-" if info.started_at is None else _format_age(info.started_at, now),
        "took": "-" if info.seconds is None else format_duration(info.seconds),
        "size": format_bytes(info.size),
        "recipe": str(info.settings.get("name") or "-"),
        "from": describe_origin(info, inventory),
    }


def _run_document(info: RunInfo, inventory: Inventory) -> dict[str, Any]:
    score = info.score
    return {
        "name": info.name,
        "folder": str(info.run.folder),
        "kind": info.kind,
        "status": info.status,
        "problem": info.problem,
        "recipe": info.settings.get("name"),
        "task": info.settings.get("task"),
        "score": None if score is None else {"name": score.name, "value": score.value, "split": score.split},
        "started_at": info.started_at,
        "seconds": info.seconds,
        "bytes": {**info.bytes_by_part, "total": info.size},
        "from": describe_origin(info, inventory),
        "store": None if info.store is None else info.store.name,
        "cleaned": info.kept_by_clean,
        **({"winner": info.winner} if info.kind == "search" else {}),
        **({"trials": [_run_document(trial, inventory) for trial in info.trials]} if info.trials else {}),
    }


def _format_age(started_at: float, now: float) -> str:
    """Format how long ago; after a month, the date."""
    if now - started_at > MONTH_S:
        return time.strftime("%Y-%m-%d", time.localtime(started_at))
    return f"{format_duration(now - started_at)} ago"


def format_duration(seconds: float) -> str:
    """Format seconds: 40 s, 12 min, 3 h, 5 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _align_columns(rows: Sequence[dict[str, str]]) -> list[str]:
    rows = [{head: escape(cell) for head, cell in row.items()} for row in rows]
    widths = {head: max(len(row[head]) for row in rows) for head in HEADERS}
    return [
        "  ".join(
            row[head].rjust(widths[head]) if head in RIGHT_ALIGNED else row[head].ljust(widths[head])
            for head in HEADERS
        ).rstrip()
        for row in rows
    ]


# -------------------------------------------------------------------------------------------------------- the totals


def _format_shared(inventory: Inventory) -> list[str]:
    lines = []
    for item in inventory.shared:
        names = list(dict.fromkeys(clean.short_name(user) for user in item.users))
        more_text = f" and {len(names) - 4} more" if len(names) > 4 else ""
        users = f"used by {', '.join(names[:4])}{more_text}" if names else "used by no run"
        lines.append(escape(f"{item.name}: {item.category}, {format_bytes(item.size)}, {users}"))
    return lines


def _format_totals(inventory: Inventory) -> list[str]:
    trials = sum(len(run.trials) for run in inventory.runs)
    count = f"{len(inventory.runs)} run{'' if len(inventory.runs) == 1 else 's'}"
    size = escape(f"{format_bytes(inventory.size)} in {inventory.root}")
    lines = [f"{count}{f' and {trials} trials' if trials else ''}, {size}"]
    if freeable := freed_bytes(inventory):
        lines.append(f"rtrain clean would free {format_bytes(freeable)}")
        lines.append(f"next: rtrain clean {quote_path(inventory.root)} --dry-run")
    elif servable_run := next((value for value in sort_newest_first(inventory.runs) if value.is_complete), None):
        lines.append(f"next: rtrain predict {quote_path(servable_run.run.folder)} 'a text'")
    return lines


def format_removals(removals: Sequence[Removal], is_dry_run: bool) -> str:
    """Format removed bytes, consequences, and reasons of kept parts."""
    lines, verb = [], "would go" if is_dry_run else "goes"
    for removal in removals:
        if not (removal.size or removal.kept_reasons):
            continue
        lines.append(escape(f"{removal.name}: {format_bytes(removal.size) if removal.size else 'nothing'} {verb}"))
        bytes_by_category: Counter[str] = Counter()
        for item in removal.items:
            bytes_by_category[item.category] += item.size
        lines += [escape(f"  {item}: {format_bytes(size)}") for item, size in bytes_by_category.items() if size]
        lines += [escape(f"  lost: {consequence}") for consequence in removal.consequences]
        lines += [escape(f"  stays: {reason}") for reason in removal.kept_reasons]
    total = sum(removal.size for removal in removals)
    return "\n".join([*lines, f"{format_bytes(total)} {verb}" if total else "nothing to remove"])


def removals_document(removals: Sequence[Removal], is_dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": is_dry_run,
        "bytes": sum(removal.size for removal in removals),
        "removed": [
            {
                "name": removal.name,
                "keep": removal.keep,
                "parts": [
                    {"path": str(part.path), "bytes": part.size, "category": part.category} for part in removal.items
                ],
                "consequences": list(removal.consequences),
                "kept_reasons": list(removal.kept_reasons),
            }
            for removal in removals
            if removal.items or removal.kept_reasons
        ],
    }
