"""Questions: scores by the length of the answer, and at each threshold of giving none."""

from collections.abc import Mapping
from typing import Any

from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Table
from rtrain.report.drawing.charts import Line, Mark


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    found: list[Block] = []
    if tables["by_length"]:
        found.append(_by_length(tables["by_length"]))
    if "no_answer" in tables:
        assert run.scores is not None  # section
        found.append(_no_answer(tables["no_answer"], run.scores["scores"]["f1"]))
    return found


def _by_length(groups: list[dict[str, Any]]) -> Table:
    names = [str(one["low"]) if one["low"] == one["high"] else f"{one['low']} to {one['high']}" for one in groups]
    return Table(
        "Scores by the length of the answer",
        ("tokens", "questions", "F1", "exact match"),
        [
            (name, one["rows"], f"{one['f1']:.3f}", f"{one['exact_match']:.3f}")
            for name, one in zip(names, groups, strict=True)
        ],
        "Of tokens, 0 to 1: an answer that is found in part has an F1, but no exact match.",
    )


def _no_answer(found: Mapping[str, Any], f1: float) -> Figure:
    curve = found["curve"]
    xs = [point["threshold"] for point in curve]
    series = [
        Line(name, xs, [point[key] for point in curve])
        for name, key in (("F1", "f1"), ("exact match", "exact_match"), ("answered", "answered"))
    ]
    best = max(curve, key=lambda point: float(point["f1"]))
    # A threshold that was chosen on other rows may lie beyond all margins of these.
    place = min(max(found["threshold"], min(xs)), max(xs))
    chart = charts.lines(series, "threshold", "share", [Mark(place, "chosen", "best")])
    silent = "" if found["silent"] is None else f" {100 * found['silent']:.0f} % of them were left unanswered."
    note = (
        "An answer is given where it beats the score of none by more than the threshold, which was chosen on the "
        f"validation rows (green line: {found['threshold']:.2f}). {found['rows']:,} questions have no answer.{silent} "
        f"The best F1 of any threshold here is {best['f1']:.3f}, at {best['threshold']:.2f}."
    )
    return Figure(f"F1 {f1:.3f} at the chosen threshold for no answer", chart, note)
