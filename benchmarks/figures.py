"""The figures of `benchmarks.train`: those of one round, their medians and spreads, and the table. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Side = Mapping[str, float]
Round = Mapping[str, Side]
"""The measurements of each side in one round, by the side's name."""


@dataclass(frozen=True)
class Figure:
    key: str
    sides: tuple[str, ...]
    """The sides that must run for this figure."""
    value: Callable[[Round], float]
    floor: float | None = None
    goal: float | None = None
    lower: bool = False
    """Whether less is better."""


def rate(side: Side) -> float:
    """Rows per second."""
    return side["rows"] / side["seconds"]


def ratio(key: str, ours: str, theirs: str, floor: float | None = None, goal: float | None = None) -> Figure:
    """The speed of side `ours` over that of side `theirs`."""
    return Figure(key, (ours, theirs), lambda sides: rate(sides[ours]) / rate(sides[theirs]), floor, goal)


def absolute(key: str, side: str, floor: float | None = None, goal: float | None = None, lower: bool = True) -> Figure:
    """A measurement of one side, which the side reports under the name `key`."""
    return Figure(key, (side,), lambda sides: sides[side][key], floor, goal, lower)


FIGURES = (
    ratio("vs_hf_default", "ours", "hf_default", 2.0, 2.8),
    ratio("vs_hf_grouped", "ours", "hf_grouped", 1.15, 1.5),
    ratio("vs_hf_grouped_k4", "ours_k4", "hf_grouped_k4", 1.15, 1.4),
    ratio("vs_ray_documented", "ours", "ray_documented", 2.5, 3.5),
    ratio("vs_ddp", "ours", "ddp", 1.1, 1.25),
    ratio("equal_length_vs_hf", "ours_equal", "hf_equal", 1.0, 1.15),
    ratio("scaling_2_over_1_k1", "ours", "apart", 0.80, 0.90),
    ratio("scaling_2_over_1_k4", "ours_k4", "apart_k4", 0.90, 0.97),
    absolute("input_wait_share", "ours", 0.01, 0.003),
    absolute("first_batch_s", "ours", 4.0, 2.0),
    absolute("pad_ratio", "ours", 1.15, 1.02),
)


def sides(figures: Iterable[Figure]) -> list[str]:
    """The sides that the chosen figures need, each once."""
    return list(dict.fromkeys(side for figure in figures for side in figure.sides))


def turn(sides: Sequence[str], number: int) -> list[str]:
    """The order of the sides in round `number`. It alternates, so that a drift of the machine's speed affects both
    sides of a ratio alike."""
    return list(sides if number % 2 == 0 else reversed(sides))


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and number of a figure's rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
        "values": list(values),
    }


def verdict(figure: Figure, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with its floor and goal. The worst round must meet the floor, the median must meet the goal."""
    worst, median = summary["max" if figure.lower else "min"], summary["median"]

    def met(value: float, bound: float | None) -> bool | None:
        return None if bound is None else value <= bound if figure.lower else value >= bound

    bounds = {"floor": figure.floor, "goal": figure.goal}
    return {**summary, **bounds, "floor_met": met(worst, figure.floor), "goal_met": met(median, figure.goal)}


def evaluate(figures: Iterable[Figure], rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """The summary of every figure, by its key."""
    return {figure.key: verdict(figure, summary([figure.value(sides) for sides in rounds])) for figure in figures}


def table(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the figures, as Markdown that a terminal shows well."""
    lines = ["| key | median | min .. max | rounds | floor | goal |", "|---|---|---|---|---|---|"]
    for key, verdict in verdicts.items():
        spread = f"{verdict['min']:.4g} .. {verdict['max']:.4g}"
        bounds = " | ".join("" if verdict[name] is None else f"{verdict[name]:.4g}" for name in ("floor", "goal"))
        lines.append(f"| {key} | {verdict['median']:.4g} | {spread} | {verdict['rounds']} | {bounds} |")
    return "\n".join(lines)


def side_table(sides: Mapping[str, Sequence[Side]]) -> str:
    """The medians of each side's measurements over the rounds."""
    lines = ["| side | rows/s | loss of the last quarter | rows |", "|---|---|---|---|"]
    for name, rounds in sides.items():
        speed, loss = statistics.median(map(rate, rounds)), statistics.median(side["loss"] for side in rounds)
        lines.append(f"| {name} | {speed:.1f} | {loss:.3f} | {rounds[0]['rows']:.0f} |")
    return "\n".join(lines)
