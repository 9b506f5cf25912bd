"""The figures of `benchmarks.train`: those of one round, their medians and spreads, and the table. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    default: bool = True
    """Whether a call that names no keys measures it."""


def rate(side: Side) -> float:
    """Rows per second."""
    return side["rows"] / side["seconds"]


def ratio(key: str, ours: str, theirs: str, floor: float | None = None, goal: float | None = None) -> Figure:
    """The speed of side `ours` over that of side `theirs`."""
    return Figure(key, (ours, theirs), lambda found: rate(found[ours]) / rate(found[theirs]), floor, goal)


def sooner(key: str, theirs: str, floor: float, goal: float) -> Figure:
    """The time that side `theirs` takes to get there, over the time of side `ours`."""
    return Figure(key, ("ours", theirs), lambda found: found[theirs]["seconds"] / found["ours"]["seconds"], floor, goal)


def own(key: str, side: str, floor: float | None = None, goal: float | None = None, lower: bool = True) -> Figure:
    """A measurement of one side, which the side reports under the name `key`."""
    return Figure(key, (side,), lambda found: found[side][key], floor, goal, lower)


def linear_flops(probe: Side, tokens: float, rows: float) -> float:
    """Floating-point operations of training the linear layers.

    Each weight that a token (or a row) meets takes a multiplication and an addition, three times: for the outputs, for
    the gradients of the inputs and for the gradients of the weights.
    """
    return 6 * (probe["weights_per_token"] * tokens + probe["weights_per_row"] * rows)


def peak_share(found: Round) -> float:
    """Operations per second of the linear layers, over those of the best matrix product; both for one core."""
    ours, probe = found["ours"], found["probe"]
    flops = linear_flops(probe, ours["real_tokens"], ours["rows"]) / ours["seconds"] / probe["processes"]
    return flops / probe["gemm_flops"]


def figures(techniques: Iterable[str], options: Iterable[str] = ()) -> tuple[Figure, ...]:
    """All figures. Each technique has its gain: the speed of the full loop over that of the loop without it.

    Each option, which is off in the full loop, has its gain too: the speed of the loop with it over the full loop's.
    """
    names = tuple(techniques)
    # If there is only one technique, the loop without it is the plain loop.
    without = {name: "harness" if len(names) == 1 else f"without_{name}" for name in names}
    return (
        ratio("vs_hf_default", "ours", "hf_default", 2.0, 2.8),
        ratio("vs_hf_grouped", "ours", "hf_grouped", 1.15, 1.5),
        ratio("vs_hf_grouped_k4", "ours_k4", "hf_grouped_k4", 1.15, 1.4),
        ratio("vs_ray_documented", "ours", "ray_documented", 2.5, 3.5),
        # A handwritten loop with Accelerate pads as HF Trainer does by default, and is as fast.
        replace(ratio("vs_accelerate", "ours", "accelerate"), default=False),
        ratio("harness_vs_ddp", "harness", "ddp", 0.97, 1.0),
        ratio("vs_ddp", "ours", "ddp", 1.1, 1.25),
        ratio("scaling_2_over_1_k1", "ours", "apart", 0.80, 0.90),
        ratio("scaling_2_over_1_k4", "ours_k4", "apart_k4", 0.90, 0.97),
        own("input_wait_share", "ours", 0.01, 0.003),
        own("first_batch_s", "ours", 4.0, 2.0),
        own("pad_ratio", "ours", 1.15, 1.02),
        own("exchange_ms", "probe"),
        own("exchange_ms_gloo", "probe"),
        Figure("peak_share", ("ours", "probe"), peak_share),
        ratio("equal_length_vs_hf", "ours_equal", "hf_equal", 1.0, 1.15),
        *(replace(ratio(f"gain_{name}", "ours", side), default=False) for name, side in without.items()),
        *(replace(ratio(f"gain_{name}", f"with_{name}", "ours"), default=False) for name in options),
    )


TIMES = (
    sooner("time_to_090_vs_hf_grouped", "hf_grouped", 1.3, 1.8),
    sooner("time_to_090_vs_hf_grouped_mean", "hf_grouped_mean", 1.2, 1.4),
)
"""The figures of times to an accuracy. Their rounds are seeds."""


def sides(chosen: Iterable[Figure]) -> list[str]:
    """The sides that the chosen figures need, each once."""
    return list(dict.fromkeys(side for figure in chosen for side in figure.sides))


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


def verdict(figure: Figure, found: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with its floor and goal. The worst round must meet the floor, the median must meet the goal."""
    worst, median = found["max" if figure.lower else "min"], found["median"]

    def met(value: float, bound: float | None) -> bool | None:
        return None if bound is None else value <= bound if figure.lower else value >= bound

    bounds = {"floor": figure.floor, "goal": figure.goal}
    return {**found, **bounds, "floor_met": met(worst, figure.floor), "goal_met": met(median, figure.goal)}


def evaluate(chosen: Iterable[Figure], rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """The summary of every figure, by its key."""
    return {figure.key: verdict(figure, summary([figure.value(one) for one in rounds])) for figure in chosen}


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the figures, as Markdown that a terminal shows well."""
    lines = ["| key | median | min .. max | rounds | floor | goal |", "|---|---|---|---|---|---|"]
    for key, one in found.items():
        spread = f"{one['min']:.4g} .. {one['max']:.4g}"
        bounds = " | ".join("" if one[name] is None else f"{one[name]:.4g}" for name in ("floor", "goal"))
        lines.append(f"| {key} | {one['median']:.4g} | {spread} | {one['rounds']} | {bounds} |")
    return "\n".join(lines)


def side_table(found: Mapping[str, Sequence[Side]]) -> str:
    """The medians of each side's measurements over the rounds."""
    lines = ["| side | rows/s | loss of the last quarter | rows |", "|---|---|---|---|"]
    for name, rounds in found.items():
        if "rows" in rounds[0]:
            speed, loss = (
                statistics.median(values) for values in ([rate(s) for s in rounds], [s["loss"] for s in rounds])
            )
            lines.append(f"| {name} | {speed:.1f} | {loss:.3f} | {rounds[0]['rows']:.0f} |")
    return "\n".join(lines)
