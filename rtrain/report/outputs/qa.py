"""Questions: scores by length of the answer, and by threshold for no answer."""

from collections.abc import Mapping
from typing import Any

from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Table
from rtrain.report.drawing.charts import LineSeries, VerticalMark


def build_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    question_blocks: list[Block] = []
    if tables["by_length"]:
        question_blocks.append(_build_length_table(tables["by_length"]))
    if "no_answer" in tables:
        assert run.scores is not None  # by `answers.build_section`
        question_blocks.append(_build_no_answer_chart(tables["no_answer"], run.scores["scores"]["f1"]))
    return question_blocks


def _build_length_table(groups: list[dict[str, Any]]) -> Table:
    names = [
        str(group["low"]) if group["low"] == group["high"] else f"{group['low']} to {group['high']}" for group in groups
    ]
    return Table(
        "Scores by the length of the answer",
        ("tokens", "questions", "F1", "exact match"),
        [
            (name, group["rows"], f"{group['f1']:.3f}", f"{group['exact_match']:.3f}")
            for name, group in zip(names, groups, strict=True)
        ],
        "F1 of tokens, 0 to 1. Partial answers count in F1 but not in exact match.",
    )


def _build_no_answer_chart(no_answer: Mapping[str, Any], f1: float) -> Figure:
    curve = no_answer["curve"]
    xs = [point["threshold"] for point in curve]
    series = [
        LineSeries(name, xs, [point[key] for point in curve])
        for name, key in (("F1", "f1"), ("exact match", "exact_match"), ("answered", "answered"))
    ]
    best = max(curve, key=lambda point: float(point["f1"]))
    # The threshold was chosen on other rows and may lie outside of the curve.
    place = min(max(no_answer["threshold"], min(xs)), max(xs))
    chart = charts.draw_lines(series, "threshold", "share", [VerticalMark(place, "chosen", "best")])
    unanswered_note = (
        ""
        if no_answer["unanswered_share"] is None
        else f" {100 * no_answer['unanswered_share']:.0f} % of them got no answer."
    )
    note = (
        "An answer is given if it beats the score of no answer by more than the threshold, which was chosen on the "
        f"validation rows (green line: {no_answer['threshold']:.2f}). {no_answer['rows']:,} questions have no "
        f"answer.{unanswered_note} "
        f"The best F1 of any threshold here is {best['f1']:.3f}, at {best['threshold']:.2f}."
    )
    return Figure(f"F1 {f1:.3f} at the chosen threshold for no answer", chart, note)
