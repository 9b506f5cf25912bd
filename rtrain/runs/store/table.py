"""Runs and removals for a person: a table, its totals, and what to do next; and the same as one JSON document."""

import time
from collections.abc import Sequence
from typing import Any

from rtrain.core.run_folder import shown
from rtrain.runs.store import clean_plan, disk_usage
from rtrain.runs.store.clean_plan import Removal
from rtrain.runs.store.run_info import Known
from rtrain.runs.store.scan import Inventory

HEADS = ("run", "status", "score", "begun", "took", "size", "recipe", "from")
RIGHT = ("begun", "took", "size")
MONTH_S = 30 * 86400


def text(inventory: Inventory, every: bool = False, now: float | None = None) -> str:
    """The table, what runs share, what cannot be read, and the totals. With `every` each trial has its line."""
    moment = time.time() if now is None else now
    lines = []
    for known in newest_first(inventory.runs):
        lines.append(_line(known, inventory, moment))
        lines += [_line(trial, inventory, moment, known.winner) for trial in known.trials if every]
    found = _columns([dict(zip(HEADS, HEADS, strict=True)), *lines]) if lines else ["no runs here"]
    found += ["", *_shared(inventory)] if inventory.shared else []
    found += [_safe(f"{name}: cannot be read") for name in inventory.unread]
    return "\n".join([*found, "", *_totals(inventory)])


def newest_first(runs: Sequence[Known]) -> list[Known]:
    """Runs of which nobody knows when they began come last."""
    return sorted(runs, key=lambda known: known.began or 0.0, reverse=True)


def document(inventory: Inventory) -> dict[str, Any]:
    """All of it for programs; sizes in bytes, times in seconds since 1970."""
    return {
        "root": str(inventory.root),
        "runs": [_document(known, inventory) for known in newest_first(inventory.runs)],
        "shared": [
            {"name": one.name, "what": one.what, "bytes": one.size, "users": [user.name for user in one.users]}
            for one in inventory.shared
        ],
        "unread": list(inventory.unread),
        "bytes": inventory.size,
        "clean_frees": freed(inventory),
    }


def freed(inventory: Inventory) -> int:
    """Bytes that `rtrain clean ROOT` would free."""
    return sum(removal.size for removal in clean_plan.of_root(inventory, "artifact"))


# ------------------------------------------------------------------------------------------------------------ a run


def origin(known: Known, inventory: Inventory) -> str:
    """What a run came from: its teacher, the run whose weights it started from, or a model by its name."""
    others = [one for one in inventory.every() if one.run.folder != known.run.folder]
    if (teacher := known.teacher) is not None:
        found = next((one.name for one in others if teacher in one.versions), None)
        return f"student of {found or f'artefact {teacher}'}"
    if (place := known.weights) is None:
        return known.model
    holders = [one.name for one in others if place.is_relative_to(one.place)]
    return f"weights of {max(holders, key=len)}" if holders else place.name


def _line(known: Known, inventory: Inventory, now: float, winner: str | None = None) -> dict[str, str]:
    chosen = "  <- best" if known.kind == "trial" and known.run.name == winner else ""
    what = f" ({len(known.trials)} trial{'' if len(known.trials) == 1 else 's'})" if known.kind == "search" else ""
    cleaned = f", cleaned ({known.cleaned} kept)" if known.cleaned == "artifact" else ""
    cut_short = ", half removed: clean it again" if known.cleaned == "none" else ""
    return {
        "run": f"{'  ' if known.kind == 'trial' else ''}{known.name}{what}{chosen}",
        "status": known.flaw or f"{known.status}{cleaned}{cut_short}",
        "score": str(known.score or "-"),
        "begun": "-" if known.began is None else _since(known.began, now),
        "took": "-" if known.seconds is None else duration(known.seconds),
        "size": disk_usage.text(known.size),
        "recipe": str(known.settings.get("name") or "-"),
        "from": origin(known, inventory),
    }


def _document(known: Known, inventory: Inventory) -> dict[str, Any]:
    score = known.score
    return {
        "name": known.name,
        "folder": str(known.run.folder),
        "kind": known.kind,
        "status": known.status,
        "flaw": known.flaw,
        "recipe": known.settings.get("name"),
        "task": known.settings.get("task"),
        "score": None if score is None else {"name": score.name, "value": score.value, "split": score.split},
        "began": known.began,
        "seconds": known.seconds,
        "bytes": {**known.parts, "total": known.size},
        "from": origin(known, inventory),
        "store": None if known.store is None else known.store.name,
        "cleaned": known.cleaned,
        **({"winner": known.winner} if known.kind == "search" else {}),
        **({"trials": [_document(trial, inventory) for trial in known.trials]} if known.trials else {}),
    }


def _since(began: float, now: float) -> str:
    """How long ago, and past a month the day."""
    if now - began > MONTH_S:
        return time.strftime("%Y-%m-%d", time.localtime(began))
    return f"{duration(now - began)} ago"


def duration(seconds: float) -> str:
    """Seconds in two digits or so: 40 s, 12 min, 3 h, 5 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _columns(rows: Sequence[dict[str, str]]) -> list[str]:
    rows = [{head: _safe(cell) for head, cell in row.items()} for row in rows]
    wide = {head: max(len(row[head]) for row in rows) for head in HEADS}
    return [
        "  ".join(
            row[head].rjust(wide[head]) if head in RIGHT else row[head].ljust(wide[head]) for head in HEADS
        ).rstrip()
        for row in rows
    ]


def _safe(text: str) -> str:
    """A folder's name may hold anything, a terminal's control codes too."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# -------------------------------------------------------------------------------------------------------- the totals


def _shared(inventory: Inventory) -> list[str]:
    lines = []
    for one in inventory.shared:
        names = list(dict.fromkeys(clean_plan.short_name(user) for user in one.users))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        users = f"used by {', '.join(names[:4])}{more}" if names else "used by no run"
        lines.append(_safe(f"{one.name}: {one.what}, {disk_usage.text(one.size)}, {users}"))
    return lines


def _totals(inventory: Inventory) -> list[str]:
    trials = sum(len(known.trials) for known in inventory.runs)
    count = f"{len(inventory.runs)} run{'' if len(inventory.runs) == 1 else 's'}"
    size = _safe(f"{disk_usage.text(inventory.size)} in {inventory.root}")
    lines = [f"{count}{f' and {trials} trials' if trials else ''}, {size}"]
    if may_go := freed(inventory):
        lines.append(f"rtrain clean would free {disk_usage.text(may_go)}")
        lines.append(f"next: rtrain clean {shown(inventory.root)} --dry-run")
    elif usable := next((known for known in newest_first(inventory.runs) if known.ended), None):
        lines.append(f"next: rtrain predict {shown(usable.run.folder)} 'a text'")
    return lines


def removals_text(removals: Sequence[Removal], dry: bool) -> str:
    """What goes, in bytes and words; what is lost by it; what stays although it was asked for."""
    lines = []
    for removal in removals:
        if not (removal.size or removal.stays):
            continue
        lines.append(
            _safe(f"{removal.name}: {disk_usage.text(removal.size) if removal.size else 'nothing'} {_goes(dry)}")
        )
        of_kind: dict[str, int] = {}
        for part in removal.parts:
            of_kind[part.what] = of_kind.get(part.what, 0) + part.size
        lines += [_safe(f"  {what}: {disk_usage.text(size)}") for what, size in of_kind.items() if size]
        lines += [_safe(f"  lost: {what}") for what in removal.lost]
        lines += [_safe(f"  stays: {what}") for what in removal.stays]
    total = sum(removal.size for removal in removals)
    return "\n".join([*lines, f"{disk_usage.text(total)} {_goes(dry)}" if total else "nothing to remove"])


def _goes(dry: bool) -> str:
    return "would go" if dry else "goes"


def removals_document(removals: Sequence[Removal], dry: bool) -> dict[str, Any]:
    return {
        "dry_run": dry,
        "bytes": sum(removal.size for removal in removals),
        "removed": [
            {
                "name": removal.name,
                "keep": removal.keep,
                "parts": [{"path": str(part.path), "bytes": part.size, "what": part.what} for part in removal.parts],
                "lost": list(removal.lost),
                "stays": list(removal.stays),
            }
            for removal in removals
            if removal.parts or removal.stays
        ],
    }
