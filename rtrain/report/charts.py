"""The report's charts: pure functions from numbers to one inline SVG each.

Axis labels have the unit. `label` is the text for screen readers; bars, cells and points have their figures as
tooltips. Callers bound the number of points (`stats.thin_curve`, `stats.sample_rows`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from rtrain.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SERIES_COLORS,
    TOP,
    WIDTH,
    AxisScale,
    LogScale,
    draw_axes,
    draw_bottom_axis,
    draw_legend,
    draw_line,
    draw_rect,
    draw_text,
    format_compact,
    format_number,
    format_points,
    make_element,
    make_svg,
    text_width,
    truncate,
)

Floats = npt.NDArray[np.float64]
ROW_HEIGHT = 17.0
"""Height of a bar with its name."""
LEGEND_NAMES_PER_LINE = 4
"""Names of series on a line of a long legend."""
MAX_CELLS = 4000
"""Most cells of a heat map; the faintest are left out."""
MAX_NUMBERED_LABELS, MIN_NUMBERED_CELL_SIZE, MAX_CELL_SIZE = 20, 24.0, 60.0
"""Labels up to which the cells of a heat map have their numbers, and the sizes of such cells."""
MAX_NAMES_WIDTH, MAX_NAME_LETTERS = 155.0, 23
"""Width, and letters, of the longest name beside a chart."""
MIN_BIN_ROWS = 5
"""Rows of a bin below which the line of a calibration leaves it out: it would jump between 0 and 1."""
MARK_OFFSETS = {"epoch": 9, "crash": 21, "restart": 21, "best": 33}
"""Baseline of a mark's name below the top of the plot, by its kind."""


@dataclass(frozen=True)
class LineSeries:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_dots: bool = False
    """Draw a dot per point; for few points."""


@dataclass(frozen=True)
class VerticalMark:
    """A vertical line at `x`: the end of an epoch, a restart, a crash, the best step."""

    x: float
    name: str
    kind: Literal["epoch", "restart", "crash", "best"]


def _make_scales(
    xs: Sequence[float], ys: Sequence[float], *, pad: float = 0.04, from_zero: bool = False
) -> tuple[AxisScale, AxisScale]:
    low = [0.0] if from_zero else []
    y = AxisScale.from_values([*ys, *low], HEIGHT - BOTTOM, TOP, padding_share=0.0 if from_zero else pad)
    return AxisScale.from_values(xs, LEFT, WIDTH - RIGHT), y


def draw_lines(
    series: Sequence[LineSeries],
    x_label: str,
    y_label: str,
    marks: Sequence[VerticalMark] = (),
    ticks_at: Sequence[float] = (),
) -> Markup:
    """Curves over a common axis. `ticks_at`: small ticks on the axis, e.g. checkpoints."""
    x, y = _make_scales(
        [v for one in series for v in one.xs] + [mark.x for mark in marks],
        [v for line_series in series for v in line_series.ys],
    )
    parts = [draw_axes(x, y, x_label, y_label), draw_legend([line_series.name for line_series in series])]
    parts += [draw_line(x(at), y.start, x(at), y.start - 5, "tick") for at in ticks_at]
    label_extents: dict[float, list[tuple[float, float]]] = {}
    for mark in sorted(marks, key=lambda mark: -mark.x):  # the last one's name is kept
        parts.append(draw_line(x(mark.x), y.start, x(mark.x), y.stop, f"mark {mark.kind}"))
        name_width = text_width(mark.name)
        anchor, left = (
            ("end", x(mark.x) - 5 - name_width) if x(mark.x) > x.stop - name_width else ("start", x(mark.x) + 4)
        )
        place = y.stop + MARK_OFFSETS[mark.kind]  # a row per kind: several may lie at one step
        row = label_extents.setdefault(place, [])
        if mark.name and all(left + name_width <= low or high <= left for low, high in row):
            row.append((left, left + name_width))
            at_x = left if anchor == "start" else left + name_width
            parts.append(draw_text(at_x, place, mark.name, anchor=anchor, css=f"mute {mark.kind}"))
    for place, curve in enumerate(series):
        px, py = [x(v) for v in curve.xs], [y(v) for v in curve.ys]
        parts.append(make_element("polyline", points=format_points(px, py), class_=f"line s{place % SERIES_COLORS}"))
        if curve.has_dots:
            parts += [
                make_element(
                    "circle",
                    make_element("title", f"{format_number(vx)}: {format_number(vy)}"),
                    cx=cx,
                    cy=cy,
                    r=3,
                    class_=f"s{place % SERIES_COLORS}",
                )
                for cx, cy, vx, vy in zip(px, py, curve.xs, curve.ys, strict=True)
            ]
    names = ", ".join(line_series.name for line_series in series)
    return make_svg(*parts, label=f"{names}: {y_label} over {x_label}")


def draw_histogram(
    edges: Sequence[float],
    counts: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    marker: tuple[float, str] | None = None,
) -> Markup:
    """Bars of the first series, outlines of the others; `marker` is a named vertical line."""
    max_count = max((v for values in counts.values() for v in values), default=0.0)
    y_max = 1.1 * max_count if marker else max_count  # for the line's name, above the bars
    x, y = _make_scales([*edges, *([marker[0]] if marker else [])], [max_count, y_max], from_zero=True)
    parts = [draw_axes(x, y, x_label, y_label), draw_legend(list(counts))]
    for place, (name, values) in enumerate(counts.items()):
        if place == 0:
            for low, high, value in zip(edges[:-1], edges[1:], values, strict=True):
                hint = f"{name}, {format_number(low)} to {format_number(high)}: {format_number(value)}"
                parts.append(draw_rect(x(low), y(value), x(high) - x(low) - 0.6, y.start - y(value), "s0", hint))
            continue
        px = [x(edge) for edge in edges for _ in (0, 1)]
        py = [y.start, *(y(value) for value in values for _ in (0, 1)), y.start]
        parts.append(make_element("polyline", points=format_points(px, py), class_=f"line s{place % SERIES_COLORS}"))
    if marker is not None:
        parts.append(draw_line(x(marker[0]), y.start, x(marker[0]), y.stop, "mark best"))
        is_left = x(marker[0]) - text_width(marker[1]) > x.start
        parts.append(
            draw_text(
                x(marker[0]) + (-3 if is_left else 3),
                y.stop + 9,
                marker[1],
                anchor="end" if is_left else "start",
                css="mute",
            )
        )
    return make_svg(*parts, label=f"histogram: {y_label} by {x_label}")


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    hint: str = ""
    interval: tuple[float, float] | None = None
    """A whisker, e.g. a confidence interval."""


def _names_width(names: Sequence[str]) -> float:
    return 10 + max((text_width(_fit_name(name)) for name in names), default=0.0)


def _fit_name(name: str) -> str:
    """The name, cut to the width that charts leave for names."""
    return next(
        cut
        for letters in range(MAX_NAME_LETTERS, 0, -1)
        if text_width(cut := truncate(name, letters)) <= MAX_NAMES_WIDTH
    )


def draw_bars(items: Sequence[Bar], x_label: str) -> Markup:
    """One horizontal bar per name, from 0."""
    left, height = _names_width([bar.name for bar in items]), ROW_HEIGHT * len(items)
    ends = [end for bar in items for end in (bar.value, *(bar.interval or ()))]
    x = AxisScale.from_values([0.0, *ends], left, WIDTH - 46)
    parts = [draw_bottom_axis(x, TOP + height, TOP, x_label)]
    for place, bar in enumerate(items):
        top, end = TOP + place * ROW_HEIGHT, x(bar.value)
        parts.append(draw_text(left - 6, top + 12, _fit_name(bar.name), anchor="end", full_text=bar.name))
        parts.append(draw_rect(min(x(0), end), top + 3, abs(end - x(0)), ROW_HEIGHT - 6, "s0", bar.hint or bar.name))
        if bar.interval:
            low, end = x(bar.interval[0]), x(bar.interval[1])
            parts.append(draw_line(low, top + ROW_HEIGHT / 2, end, top + ROW_HEIGHT / 2, "whisker"))
        value_text = format_number(float(f"{bar.value:.3g}")) if bar.value % 1 else format_number(bar.value)
        parts.append(draw_text(max(end, x(0)) + 4, top + 12, value_text))
    return make_svg(*parts, label=f"{x_label} of {len(items)} groups", height=TOP + height + BOTTOM)


def draw_scatter(xs: Floats, ys: Floats, x_label: str, y_label: str, *, diagonal: bool = False) -> Markup:
    """A point per row; with `diagonal`, both axes have one range and the line of equality is drawn."""
    all_values = [*xs.tolist(), *ys.tolist()]
    x, y = _make_scales(all_values if diagonal else xs.tolist(), all_values if diagonal else ys.tolist())
    if diagonal:
        x = AxisScale(y.low, y.high, LEFT, WIDTH - RIGHT)
    parts = [draw_axes(x, y, x_label, y_label)]
    if diagonal:
        parts.append(draw_line(x(x.low), y(x.low), x(x.high), y(x.high), "mark epoch"))
    parts += [
        make_element("circle", cx=round(x(a), 1), cy=round(y(b), 1), r=2, class_="dot s0")
        for a, b in zip(xs, ys, strict=True)
    ]
    return make_svg(*parts, label=f"{y_label} against {x_label}, {len(xs)} points")


@dataclass(frozen=True)
class ScatterPoint:
    x: float
    y: float
    series: int
    """Place of its name in the legend."""
    name: str
    hint: str = ""


def draw_named_points(items: Sequence[ScatterPoint], names: Sequence[str], x_label: str, y_label: str) -> Markup:
    """A named point per item over a logarithmic axis, colored by series. A name that would lie on another one is left
    to the pointer."""
    _, y = _make_scales([], [dot.y for dot in items], pad=0.1)
    x = LogScale.from_values([dot.x for dot in items], LEFT + 14, WIDTH - RIGHT - 14, padding_share=0.04)
    parts, label_positions = [draw_axes(x, y, x_label, y_label), draw_legend(names)], list[tuple[float, float]]()
    for dot in items:
        center_x, center_y, name_width = x(dot.x), y(dot.y), text_width(dot.name)
        css = f"bubble s{dot.series % SERIES_COLORS}"
        parts.append(
            make_element(
                "circle", make_element("title", dot.hint or dot.name), cx=center_x, cy=center_y, r=5, class_=css
            )
        )
        left = center_x + 8 if center_x + 8 + name_width < WIDTH else center_x - 8 - name_width
        if all(abs(left - other) > name_width + 4 or abs(center_y - height) > 11 for other, height in label_positions):
            label_positions.append((left, center_y))
            parts.append(draw_text(left, center_y + 4, dot.name, css="mute"))
    return make_svg(*parts, label=f"{y_label} over {x_label}, {len(items)} points")


def draw_stack(shares: Sequence[tuple[str, float]], unit: str) -> Markup:
    """One bar cut into shares of a whole, with a legend that has their figures."""
    total = sum(value for _, value in shares) or 1.0
    x, parts = 0.0, []
    for place, (name, value) in enumerate(shares):
        width, share = WIDTH * value / total, 100 * value / total
        parts.append(
            draw_rect(
                x, 4, width, 26, f"s{place % SERIES_COLORS}", f"{name}: {format_number(value)} {unit}, {share:.1f} %"
            )
        )
        x += width
        top = 46 + ROW_HEIGHT * place
        parts.append(draw_rect(4, top, 10, 10, f"s{place % SERIES_COLORS}"))
        parts.append(draw_text(20, top + 9, name))
        parts.append(draw_text(WIDTH - 80, top + 9, f"{format_number(round(value, 1))} {unit}", anchor="end"))
        parts.append(draw_text(WIDTH - 10, top + 9, f"{share:.1f} %", anchor="end"))
    return make_svg(*parts, label=f"shares of {format_number(total)} {unit}", height=50 + ROW_HEIGHT * len(shares))


@dataclass(frozen=True)
class StackedBar:
    name: str
    values: Sequence[float]
    """One value per series, at least 0."""


def draw_stacked_bars(items: Sequence[StackedBar], names: Sequence[str], x_label: str) -> Markup:
    """One horizontal bar per item, cut into its values, with a key of the series above; all on one scale."""
    starts = range(0, len(names), LEGEND_NAMES_PER_LINE)
    keys = [
        draw_legend(names[start : start + LEGEND_NAMES_PER_LINE], y_offset=ROW_HEIGHT * line, first_series=start)
        for line, start in enumerate(starts)
    ]
    top = TOP + ROW_HEIGHT * max(0, len(keys) - 1)
    left, height = _names_width([item.name for item in items]), ROW_HEIGHT * len(items)
    x = AxisScale.from_values([0.0, *(sum(item.values) for item in items)], left, WIDTH - 46)
    parts = [*keys, draw_bottom_axis(x, top + height, top, x_label)]
    for place, item in enumerate(items):
        bar_top, total, drawn_value = top + place * ROW_HEIGHT, sum(item.values), 0.0
        parts.append(draw_text(left - 6, bar_top + 12, _fit_name(item.name), anchor="end", full_text=item.name))
        for series, value in enumerate(item.values):
            hint = (
                f"{item.name}, {names[series]}: {format_number(round(value, 3))}, {100 * value / (total or 1.0):.1f} %"
            )
            bar_width = x(drawn_value + value) - x(drawn_value)
            parts.append(
                draw_rect(x(drawn_value), bar_top + 3, bar_width, ROW_HEIGHT - 6, f"s{series % SERIES_COLORS}", hint)
            )
            drawn_value += value
        parts.append(draw_text(x(total) + 4, bar_top + 12, format_number(float(f"{total:.4g}"))))
    return make_svg(*parts, label=f"{x_label} of {len(items)} bars: {', '.join(names)}", height=top + height + BOTTOM)


def draw_reliability(confidence: Floats, accuracy: Floats, rows: Sequence[int]) -> Markup:
    """Accuracy over confidence, a dot per bin with an area by its rows, against the line where both are equal."""
    x, y = AxisScale(0, 1, LEFT, WIDTH - RIGHT), AxisScale(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [draw_axes(x, y, "confidence of the answer (mean of the bin)", "share that was right")]
    parts.append(draw_line(x(0), y(0), x(1), y(1), "mark epoch"))
    max_rows = max(rows, default=1)
    px, py = [x(v) for v in confidence], [y(v) for v in accuracy]
    measured_bins = [place for place, count in enumerate(rows) if count >= MIN_BIN_ROWS]
    line_of = format_points([px[place] for place in measured_bins], [py[place] for place in measured_bins])
    parts.append(make_element("polyline", points=line_of, class_="line s0"))
    for center_x, center_y, mean_confidence, true, count in zip(px, py, confidence, accuracy, rows, strict=True):
        hint = f"{count:,} rows: confidence {mean_confidence:.2f}, right {true:.2f}"
        parts.append(
            make_element(
                "circle",
                make_element("title", hint),
                cx=center_x,
                cy=center_y,
                r=2.5 + 7 * (count / max_rows) ** 0.5,
                class_="bubble s0",
            )
        )
    return make_svg(*parts, label="share of right answers over their confidence")


def draw_heatmap(counts: npt.NDArray[np.int64], names: Sequence[str], unit: str = "label") -> Markup:
    """Counts [true, predicted] as cells, each row relative to its sum. Rows and columns have the same order."""
    has_numbers = len(names) <= MAX_NUMBERED_LABELS
    left, top = _names_width(names) * (1.0 if has_numbers else 0.85), 18.0
    # Few labels fill a phone's column, in which nobody points at a cell; more are scrolled.
    size = min(MAX_CELL_SIZE, max(MIN_NUMBERED_CELL_SIZE, (WIDTH - left - 4) / len(names))) if has_numbers else 11.0
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    rows, columns = np.nonzero(counts)
    strongest = np.argsort(-share[rows, columns], kind="stable")[:MAX_CELLS]
    parts = []
    for row, column in zip(rows[strongest], columns[strongest], strict=True):
        hint = (
            f"{names[row]} answered as {names[column]}: {counts[row, column]:,} rows, {100 * share[row, column]:.0f} %"
        )
        css, opacity = "s0" if row == column else "s1", round(0.12 + 0.88 * float(share[row, column]) ** 0.5, 2)
        cell_position = left + size * column, top + size * row
        parts.append(draw_rect(*cell_position, size - 1, size - 1, css, hint, fill_opacity=opacity))
        if has_numbers:
            shown = format_compact(int(counts[row, column]))
            cell_center = cell_position[0] + (size - 1) / 2, cell_position[1] + size / 2 + 3
            parts.append(draw_text(*cell_center, shown, anchor="middle", css="fine halo"))
    for place, name in enumerate(names):
        parts.append(
            draw_text(
                left - 6,
                top + size * (place + 0.5) + 3.5,
                _fit_name(name),
                anchor="end",
                css=None if has_numbers else "fine",
                full_text=name,
            )
        )
    edge = size * len(names)
    parts.append(draw_rect(left - 1, top - 1, edge + 1, edge + 1, "outline"))
    parts.append(draw_text(left, 11, f"predicted {unit}, in the order of the rows →", css="label"))
    width, height = max(WIDTH, left + edge + 4), top + edge + 6
    return make_svg(
        *parts, label=f"confusion matrix of {len(names)} labels", width=width, height=height, wide=width > WIDTH
    )
