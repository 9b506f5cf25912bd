"""Figures of `benchmarks.compress` by name, with floor and goal. Pure."""

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


def iter_figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Each figure with an aim that the parts have measured."""
    for part in results.values():
        yield from _set_figures(part, "")
        for set_name, values in part.get("sets", {}).items():
            yield from _set_figures(values, set_name)


def _set_figures(values: Mapping[str, Any], set_name: str) -> Iterator[Figure]:
    for name, value in values.items():
        if name in AIMS and isinstance(value, int | float):
            yield Figure(name, set_name, float(value))


def table(results: Mapping[str, Any]) -> str:
    """Markdown: each figure beside floor and goal, and which of them it has reached."""
    lines = ["| figure | set | measured | floor | goal | reached |", "|---|---|---|---|---|---|"]
    for figure_row in sorted(iter_figures(results), key=lambda figure: list(AIMS).index(figure.name)):
        aim = AIMS[figure_row.name]
        shown = " | ".join(f"{value:.4g} {aim.unit}".strip() for value in (figure_row.value, aim.floor, aim.goal))
        lines.append(f"| `{figure_row.name}` | {figure_row.set} | {shown} | {aim.word(figure_row.value)} |")
    return "\n".join(lines)


def engines(part: Mapping[str, Any]) -> str:
    """Markdown: the same float student in each engine."""
    batches = list(part["batches"])
    heads = [f"ms, batch {batch}: {kind}" for batch in batches for kind in ("median", "least")]
    lines = [f"| engine | score ratio | MB | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(heads)]
    for name, engine in part["engines"].items():
        ratio = "" if engine.get("score_ratio") is None else f"{engine['score_ratio']:.4f}"
        size = "" if engine.get("mb") is None else f"{engine['mb']:.1f}"
        times = [f"{part['batches'][batch][kind][name]:.2f}" for batch in batches for kind in ("ms", "least_ms")]
        lines.append(f"| {name} | {ratio} | {size} | {' | '.join(times)} |")
    return "\n".join(lines)
