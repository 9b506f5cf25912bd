"""The figures of `benchmarks.compress` by name, beside what they must reach and what they should. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Aim:
    floor: float
    goal: float
    more: bool = True
    """Whether more is better."""
    unit: str = ""

    def word(self, value: float) -> str:
        """`goal`, `floor`, or `below`: which of them a figure has reached."""
        sign = 1 if self.more else -1
        if sign * value >= sign * self.goal:
            return "goal"
        return "floor" if sign * value >= sign * self.floor else "below"


AIMS: Mapping[str, Aim] = {
    "int8_score_ratio": Aim(0.99, 0.998),
    "student_score_ratio": Aim(0.98, 0.995),
    "served_mb": Aim(8.2, 6.0, more=False, unit="MB"),
    "trimmed_score_ratio": Aim(0.995, 0.999),
    "latency_vs_hf_b1": Aim(1 / 9, 1 / 14, more=False),
    "latency_vs_hf_b8": Aim(1 / 8, 1 / 12, more=False),
    "cold_start_s": Aim(0.7, 0.45, more=False, unit="s"),
    "serve_start_s": Aim(8, 5, more=False, unit="s"),
    "few_rows_accuracy": Aim(0.84, 0.87),
    "fallback_points": Aim(0.5, 0.1, more=False),
    "fallback_s": Aim(120, 60, more=False, unit="s"),
}


class Figure(NamedTuple):
    name: str
    set: str
    """The set that it was measured on; empty where that is banking77 alone."""
    value: float
    limit: float | None
    """What it cannot go beyond, where that was measured too."""


def found(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Each figure with an aim that the parts have measured."""
    for part in results.values():
        yield from _of(part, "")
        for set_name, own in part.get("sets", {}).items():
            yield from _of(own, set_name)


def _of(values: Mapping[str, Any], set_name: str) -> Iterator[Figure]:
    limits = values.get("limits", {})
    for name, value in values.items():
        if name in AIMS and isinstance(value, int | float):
            yield Figure(name, set_name, float(value), limits.get(name))


def table(results: Mapping[str, Any]) -> str:
    """Markdown: each figure beside floor, goal and limit, and which of the first two it has reached."""
    lines = ["| figure | set | measured | floor | goal | limit | reached |", "|---|---|---|---|---|---|---|"]
    for one in sorted(found(results), key=lambda one: list(AIMS).index(one.name)):
        aim = AIMS[one.name]
        values = (one.value, aim.floor, aim.goal, one.limit)
        shown = " | ".join("" if value is None else f"{value:.4g} {aim.unit}".strip() for value in values)
        lines.append(f"| `{one.name}` | {one.set} | {shown} | {aim.word(one.value)} |")
    return "\n".join(lines)


def engines(part: Mapping[str, Any]) -> str:
    """Markdown: the same float student in each engine."""
    batches = list(part["batches"])
    heads = [f"ms, batch {batch}: {kind}" for batch in batches for kind in ("median", "least")]
    lines = [f"| engine | score ratio | MB | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(heads)]
    for name, own in part["engines"].items():
        ratio = "" if own.get("score_ratio") is None else f"{own['score_ratio']:.4f}"
        size = "" if own.get("mb") is None else f"{own['mb']:.1f}"
        times = [f"{part['batches'][batch][kind][name]:.2f}" for batch in batches for kind in ("ms", "least_ms")]
        lines.append(f"| {name} | {ratio} | {size} | {' | '.join(times)} |")
    least = [text for batch in batches for text in ("", f"{part['batches'][batch]['limit_ms']:.2f}")]
    lines.append(f"| the least that this machine allows | | | {' | '.join(least)} |")
    return "\n".join(lines)
