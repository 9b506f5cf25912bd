"""The charts: places that can be computed by hand, and no text that becomes markup."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from markupsafe import Markup

from rtrain.report import charts, svg
from rtrain.report.charts import Bar, LineSeries, ScatterPoint, StackedBar, VerticalMark

HOSTILE = '</text><script>alert("x")</script>&\u202e'


def parse(chart: Markup) -> ET.Element:
    return ET.fromstring(str(chart))


def of_class(chart: Markup, name: str, css: str) -> list[ET.Element]:
    return [result for result in parse(chart).iter(name) if css in result.get("class", "").split()]


def texts(chart: Markup) -> list[str]:
    return [result.text or "" for result in parse(chart).iter("text")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (37, 141, [40, 60, 80, 100, 120, 140]),
        (-0.03, 0.03, [-0.03, -0.02, -0.01, 0, 0.01, 0.02, 0.03]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert svg.choose_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.0, "0"), (12.0, "12"), (1234.5, "1,234"), (2_500_000, "2.5 M"), (0.0123, "0.0123"), (3.14159, "3.142")),
        *((1.2e-7, "1.2e-07"), (float("nan"), "-"), (float("inf"), "-"), (-4.5, "-4.5")),
    ],
)
def test_figures(value: float, shown: str) -> None:
    assert svg.format_number(value) == shown


def test_stacked_bars_are_cut_in_proportion_on_one_scale() -> None:
    names = ["one", "two", HOSTILE, "four", "five"]
    items = [StackedBar("a", [1.0, 3.0, 0.0, 2.0, 2.0]), StackedBar("b", [2.0, 2.0, 0.0, 0.0, 0.0])]
    chart = charts.draw_stacked_bars(items, names, "ms")
    bars = [result for result in parse(chart).iter("rect") if result.find("title") is not None]
    wide = [float(result.get("width", "")) for result in bars]
    assert len(wide) == 10
    unit = wide[0]
    assert wide == pytest.approx([unit * value for item in items for value in item.values], abs=0.1)
    first = [float(result.get("x", "")) for result in bars[:5]]
    assert first == pytest.approx([first[0] + unit * before for before in (0, 1, 4, 4, 6)], abs=0.1)
    assert [result.get("class") for result in bars[:5]] == ["s0", "s1", "s2", "s3", "s4"]
    keys = [result for result in parse(chart).iter("rect") if result.find("title") is None]
    assert len({(result.get("x"), result.get("y")) for result in keys}) == len(names)
    assert "four: 2, 25.0 %" in (bars[3].findtext("title") or "")


def test_a_range_without_extent_still_has_a_place() -> None:
    scale = svg.AxisScale.from_values([3.0, 3.0], 0, 100)
    assert scale(3.0) == pytest.approx(50.0)
    assert svg.AxisScale.from_values([], 0, 1)(0.5) == 0.5


def test_invisible_characters_are_shown_and_emoji_stay() -> None:
    assert svg.escape_controls("a\x1b[2J\u202eb\x00") == r"a\x1b[2J\u202eb\x00"
    assert svg.escape_controls("👩\u200d🔬 größer\n日本") == "👩\u200d🔬 größer\n日本"
    assert svg.escape_controls("\udce9") == r"\udce9"


@pytest.mark.parametrize(
    "chart",
    [
        charts.draw_lines(
            [LineSeries(HOSTILE, [0, 1], [0, 1], has_dots=True)] * 2,
            HOSTILE,
            HOSTILE,
            [VerticalMark(1, HOSTILE, "crash")],
        ),
        charts.draw_histogram([0, 1, 2], {HOSTILE: [1, 2], "b": [2, 1]}, HOSTILE, HOSTILE, (1.0, HOSTILE)),
        charts.draw_bars([Bar(HOSTILE, 1.0, HOSTILE, (0.5, 1.5))], HOSTILE),
        charts.draw_scatter(np.array([1.0]), np.array([2.0]), HOSTILE, HOSTILE, diagonal=True),
        charts.draw_stack([(HOSTILE, 1.0)], HOSTILE),
        charts.draw_heatmap(np.array([[1, 2], [0, 3]]), [HOSTILE, "b"]),
        charts.draw_named_points([ScatterPoint(1.0, 2.0, 0, HOSTILE, HOSTILE)], [HOSTILE, "b"], HOSTILE, HOSTILE),
    ],
)
def test_text_never_becomes_markup(chart: Markup) -> None:
    root = parse(chart)  # well-formed
    allowed = {"svg", "text", "title", "rect", "line", "polyline", "circle", "path"}
    assert {result.tag for result in root.iter()} <= allowed
    assert "<script" not in str(chart)
    assert "\u202e" not in str(chart)
    assert any("<script>" in (result.text or "") for result in root.iter()) or "script" in root.get("aria-label", "")


def test_a_curve_goes_from_corner_to_corner() -> None:
    chart = charts.draw_lines([LineSeries("loss", [0, 10], [1.0, 2.0])], "update", "loss")
    (curve,) = of_class(chart, "polyline", "s0")
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in curve.get("points", "").split())
    assert (x1, x2) == (svg.LEFT, svg.WIDTH - svg.RIGHT)
    assert y1 > y2  # larger values are higher up
    assert {"update", "loss"} <= set(texts(chart))


def test_marks_are_drawn_by_their_kind() -> None:
    marks = [VerticalMark(5, "epoch 1", "epoch"), VerticalMark(7, "crash", "crash"), VerticalMark(10, "best", "best")]
    chart = charts.draw_lines([LineSeries("loss", [0, 10], [1.0, 2.0])], "update", "loss", marks, ticks_at=[2, 4])
    assert [len(of_class(chart, "line", kind)) for kind in ("epoch", "crash", "best", "tick")] == [1, 1, 1, 2]
    (crash,) = of_class(chart, "line", "crash")
    assert float(crash.get("x1", "")) == pytest.approx(svg.LEFT + 0.7 * (svg.WIDTH - svg.RIGHT - svg.LEFT), abs=0.01)


def test_bars_are_as_long_as_their_values() -> None:
    chart = charts.draw_bars([Bar("a", 2.0), Bar("b", 1.0), Bar("c", -1.0)], "rows")
    widths = [float(result.get("width", "")) for result in of_class(chart, "rect", "s0")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.1)
    assert widths[2] == pytest.approx(widths[1], abs=0.1)


def test_heat_map_draws_the_cells_that_have_rows() -> None:
    chart = charts.draw_heatmap(np.array([[9, 1], [0, 4]]), ["yes", "no"])
    right, wrong = of_class(chart, "rect", "s0"), of_class(chart, "rect", "s1")
    assert (len(right), len(wrong)) == (2, 1)
    assert [result.text for result in wrong[0].iter("title")] == ["yes answered as no: 1 rows, 10 %"]
    assert float(wrong[0].get("fill-opacity", "")) == pytest.approx(0.12 + 0.88 * 0.1**0.5, abs=0.01)
    assert float(wrong[0].get("x", "")) > float(wrong[0].get("y", ""))  # to the right of the diagonal


def test_heat_map_of_many_labels_is_bounded() -> None:
    chart = charts.draw_heatmap(np.ones((100, 100), dtype=np.int64), [f"label {code}" for code in range(100)])
    assert len(of_class(chart, "rect", "s0")) + len(of_class(chart, "rect", "s1")) == charts.MAX_CELLS


def test_shares_of_a_stack_add_up_to_its_width() -> None:
    chart = charts.draw_stack([("train", 30.0), ("rest", 10.0)], "s")
    widths = [float(result.get("width", "")) for result in parse(chart).iter("rect") if result.get("height") == "26"]
    assert widths == pytest.approx([svg.WIDTH * 0.75, svg.WIDTH * 0.25], abs=0.01)
    assert {"75.0 %", "25.0 %"} <= set(texts(chart))


def test_the_line_of_a_calibration_leaves_out_bins_of_few_rows() -> None:
    chart = charts.draw_reliability(np.array([0.2, 0.5, 0.9]), np.array([0.3, 1.0, 0.8]), [50, 1, 100])
    (line,) = of_class(chart, "polyline", "s0")
    assert len(line.get("points", "").split()) == 2
    assert len(of_class(chart, "circle", "bubble")) == 3


def test_a_logarithmic_axis_has_its_values_as_ticks_where_they_have_room() -> None:
    scale = svg.LogScale.from_values([1e-4, 1e-3, 1e-3, 1e-2], 0, 300)
    assert [scale(value) for value in (1e-4, 1e-3, 1e-2)] == pytest.approx([0, 150, 300])
    assert scale.ticks() == [1e-4, 1e-3, 1e-2]
    assert svg.LogScale.from_values([2e-5 * 1.1**n for n in range(60)], 0, 300).ticks() == pytest.approx([1e-4, 1e-3])
    assert svg.LogScale.from_values([3.0], 0, 100)(3.0) == pytest.approx(50)
    assert svg.LogScale.from_values([], 0, 100).ticks() == [1.0, 2.0, 5.0, 10.0]
