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
}


class Figure(NamedTuple):
    name: str
    set: str
    """The set that it was measured on; empty where that is banking77 alone."""
    value: float


def found(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Each figure with an aim that the parts have measured."""
    for part in results.values():
        yield from _of(part, "")
        for set_name, own in part.get("sets", {}).items():
            yield from _of(own, set_name)


def _of(values: Mapping[str, Any], set_name: str) -> Iterator[Figure]:
    for name, value in values.items():
        if name in AIMS and isinstance(value, int | float):
            yield Figure(name, set_name, float(value))


def table(results: Mapping[str, Any]) -> str:
    """Markdown: each figure beside floor and goal, and which of them it has reached."""
    lines = ["| figure | set | measured | floor | goal | reached |", "|---|---|---|---|---|---|"]
    for one in sorted(found(results), key=lambda one: list(AIMS).index(one.name)):
        aim = AIMS[one.name]
        shown = " | ".join(f"{value:.4g} {aim.unit}".strip() for value in (one.value, aim.floor, aim.goal))
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
    return "\n".join(lines)
