"""The report's charts: pure functions from numbers to one inline SVG each.

Axis labels carry the unit. `label` says what a screen reader is told; a pointer over a bar, a cell or a point shows its
figures. Callers bound the number of points (`stats.thin`, `stats.sample`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from rtrain.report.drawing.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SERIES,
    TOP,
    WIDTH,
    Logarithmic,
    Scale,
    axes,
    bottom_axis,
    compact,
    legend,
    line,
    number,
    points,
    rect,
    short,
    svg,
    tag,
    text,
    text_width,
)

Floats = npt.NDArray[np.float64]
ROW = 17.0
"""Height of a bar with its name."""
KEYS = 4
"""Names of series on a line of a long legend."""
CELLS = 4000
"""Most cells of a heat map; the faintest are left out."""
NUMBERED, NUMBERED_CELL, LARGEST_CELL = 20, 24.0, 60.0
"""Labels up to which the cells of a heat map have their numbers, and the sizes of such cells."""
NAMES_WIDTH, MOST_LETTERS = 155.0, 23
"""Width, and letters, of the longest name beside a chart."""
MEASURED_BIN = 5
"""Rows of a bin below which the line of a calibration leaves it out: it would jump between 0 and 1."""


LINE_OF = {"epoch": 9, "crash": 21, "restart": 21, "best": 33}
"""Baseline of a mark's name below the top of the plot, by its kind."""


@dataclass(frozen=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    """For few points, each of which is a measurement of its own."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`: the end of an epoch, a restart, a crash, the best update."""

    x: float
    name: str
    kind: Literal["epoch", "restart", "crash", "best"]


def _plane(
    xs: Sequence[float], ys: Sequence[float], *, pad: float = 0.04, from_zero: bool = False
) -> tuple[Scale, Scale]:
    low = [0.0] if from_zero else []
    y = Scale.over([*ys, *low], HEIGHT - BOTTOM, TOP, pad=0.0 if from_zero else pad)
    return Scale.over(xs, LEFT, WIDTH - RIGHT), y


def lines(
    series: Sequence[Line],
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    ticks_at: Sequence[float] = (),
) -> Markup:
    """Curves over a common axis. `ticks_at`: small ticks on the axis, e.g. checkpoints."""
    x, y = _plane(
        [v for one in series for v in one.xs] + [mark.x for mark in marks], [v for one in series for v in one.ys]
    )
    parts = [axes(x, y, x_label, y_label), legend([one.name for one in series])]
    parts += [line(x(at), y.start, x(at), y.start - 5, "tick") for at in ticks_at]
    taken: dict[float, list[tuple[float, float]]] = {}
    for mark in sorted(marks, key=lambda mark: -mark.x):  # the last one's name is kept
        parts.append(line(x(mark.x), y.start, x(mark.x), y.stop, f"mark {mark.kind}"))
        wide = text_width(mark.name)
        anchor, left = ("end", x(mark.x) - 5 - wide) if x(mark.x) > x.stop - wide else ("start", x(mark.x) + 4)
        place = y.stop + LINE_OF[mark.kind]  # a row per kind: several may lie at one update
        row = taken.setdefault(place, [])
        if mark.name and all(left + wide <= low or high <= left for low, high in row):
            row.append((left, left + wide))
            at_x = left if anchor == "start" else left + wide
            parts.append(text(at_x, place, mark.name, anchor=anchor, css=f"mute {mark.kind}"))
    for place, one in enumerate(series):
        px, py = [x(v) for v in one.xs], [y(v) for v in one.ys]
        parts.append(tag("polyline", points=points(px, py), class_=f"line s{place % SERIES}"))
        if one.dots:
            parts += [
                tag(
                    "circle",
                    tag("title", f"{number(vx)}: {number(vy)}"),
                    cx=cx,
                    cy=cy,
                    r=3,
                    class_=f"s{place % SERIES}",
                )
                for cx, cy, vx, vy in zip(px, py, one.xs, one.ys, strict=True)
            ]
    names = ", ".join(one.name for one in series)
    return svg(*parts, label=f"{names}: {y_label} over {x_label}")


def histogram(
    edges: Sequence[float],
    counts: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    at: tuple[float, str] | None = None,
) -> Markup:
    """Bars of the first series, outlines of the others; `at` is a named vertical line."""
    highest = max((v for values in counts.values() for v in values), default=0.0)
    room = 1.1 * highest if at else highest  # for the line's name, above the bars
    x, y = _plane([*edges, *([at[0]] if at else [])], [highest, room], from_zero=True)
    parts = [axes(x, y, x_label, y_label), legend(list(counts))]
    for place, (name, values) in enumerate(counts.items()):
        if place == 0:
            for low, high, value in zip(edges[:-1], edges[1:], values, strict=True):
                hint = f"{name}, {number(low)} to {number(high)}: {number(value)}"
                parts.append(rect(x(low), y(value), x(high) - x(low) - 0.6, y.start - y(value), "s0", hint))
            continue
        px = [x(edge) for edge in edges for _ in (0, 1)]
        py = [y.start, *(y(value) for value in values for _ in (0, 1)), y.start]
        parts.append(tag("polyline", points=points(px, py), class_=f"line s{place % SERIES}"))
    if at is not None:
        parts.append(line(x(at[0]), y.start, x(at[0]), y.stop, "mark best"))
        left = x(at[0]) - text_width(at[1]) > x.start
        parts.append(
            text(x(at[0]) + (-3 if left else 3), y.stop + 9, at[1], anchor="end" if left else "start", css="mute")
        )
    return svg(*parts, label=f"histogram: {y_label} by {x_label}")


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
    return next(cut for most in range(MOST_LETTERS, 0, -1) if text_width(cut := short(name, most)) <= NAMES_WIDTH)


def bars(items: Sequence[Bar], x_label: str) -> Markup:
    """One horizontal bar per name, from 0."""
    left, height = _names_width([bar.name for bar in items]), ROW * len(items)
    ends = [end for bar in items for end in (bar.value, *(bar.interval or ()))]
    x = Scale.over([0.0, *ends], left, WIDTH - 46)
    parts = [bottom_axis(x, TOP + height, TOP, x_label)]
    for place, bar in enumerate(items):
        top, end = TOP + place * ROW, x(bar.value)
        parts.append(text(left - 6, top + 12, _fit_name(bar.name), anchor="end", full=bar.name))
        parts.append(rect(min(x(0), end), top + 3, abs(end - x(0)), ROW - 6, "s0", bar.hint or bar.name))
        if bar.interval:
            low, end = x(bar.interval[0]), x(bar.interval[1])
            parts.append(line(low, top + ROW / 2, end, top + ROW / 2, "whisker"))
        figure = number(float(f"{bar.value:.3g}")) if bar.value % 1 else number(bar.value)
        parts.append(text(max(end, x(0)) + 4, top + 12, figure))
    return svg(*parts, label=f"{x_label} of {len(items)} groups", height=TOP + height + BOTTOM)


def scatter(xs: Floats, ys: Floats, x_label: str, y_label: str, *, diagonal: bool = False) -> Markup:
    """A point per row; with `diagonal`, both axes have one range and the line of equality is drawn."""
    both = [*xs.tolist(), *ys.tolist()]
    x, y = _plane(both if diagonal else xs.tolist(), both if diagonal else ys.tolist())
    if diagonal:
        x = Scale(y.low, y.high, LEFT, WIDTH - RIGHT)
    parts = [axes(x, y, x_label, y_label)]
    if diagonal:
        parts.append(line(x(x.low), y(x.low), x(x.high), y(x.high), "mark epoch"))
    parts += [
        tag("circle", cx=round(x(a), 1), cy=round(y(b), 1), r=2, class_="dot s0") for a, b in zip(xs, ys, strict=True)
    ]
    return svg(*parts, label=f"{y_label} against {x_label}, {len(xs)} points")


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    series: int
    """Place of its name in the legend."""
    name: str
    hint: str = ""


def dots(
    items: Sequence[Dot],
    names: Sequence[str],
    x_label: str,
    y_label: str,
) -> Markup:
    """A named point per item over a logarithmic axis, coloured by series. A name that would lie on another one is left
    to the pointer."""
    _, y = _plane([], [dot.y for dot in items], pad=0.1)
    x = Logarithmic.over([dot.x for dot in items], LEFT + 14, WIDTH - RIGHT - 14, pad=0.04)
    parts, taken = [axes(x, y, x_label, y_label), legend(names)], list[tuple[float, float]]()
    for dot in items:
        at, up, wide = x(dot.x), y(dot.y), text_width(dot.name)
        css = f"bubble s{dot.series % SERIES}"
        parts.append(tag("circle", tag("title", dot.hint or dot.name), cx=at, cy=up, r=5, class_=css))
        left = at + 8 if at + 8 + wide < WIDTH else at - 8 - wide
        if all(abs(left - other) > wide + 4 or abs(up - height) > 11 for other, height in taken):
            taken.append((left, up))
            parts.append(text(left, up + 4, dot.name, css="mute"))
    return svg(*parts, label=f"{y_label} over {x_label}, {len(items)} points")


def stack(parts_of: Sequence[tuple[str, float]], unit: str) -> Markup:
    """One bar cut into shares of a whole, with a legend that has their figures."""
    total = sum(value for _, value in parts_of) or 1.0
    x, parts = 0.0, []
    for place, (name, value) in enumerate(parts_of):
        width, share = WIDTH * value / total, 100 * value / total
        parts.append(rect(x, 4, width, 26, f"s{place % SERIES}", f"{name}: {number(value)} {unit}, {share:.1f} %"))
        x += width
        top = 46 + ROW * place
        parts.append(rect(4, top, 10, 10, f"s{place % SERIES}"))
        parts.append(text(20, top + 9, name))
        parts.append(text(WIDTH - 80, top + 9, f"{number(round(value, 1))} {unit}", anchor="end"))
        parts.append(text(WIDTH - 10, top + 9, f"{share:.1f} %", anchor="end"))
    return svg(*parts, label=f"shares of {number(total)} {unit}", height=50 + ROW * len(parts_of))


@dataclass(frozen=True)
class Stacked:
    name: str
    values: Sequence[float]
    """By series; none is below 0."""


def stacked(items: Sequence[Stacked], names: Sequence[str], x_label: str) -> Markup:
    """One horizontal bar per item, cut into its values, with a key of the series above; all on one scale."""
    starts = range(0, len(names), KEYS)
    keys = [legend(names[one : one + KEYS], down=ROW * line, first=one) for line, one in enumerate(starts)]
    top = TOP + ROW * max(0, len(keys) - 1)
    left, height = _names_width([item.name for item in items]), ROW * len(items)
    x = Scale.over([0.0, *(sum(item.values) for item in items)], left, WIDTH - 46)
    parts = [*keys, bottom_axis(x, top + height, top, x_label)]
    for place, item in enumerate(items):
        up, whole, done = top + place * ROW, sum(item.values), 0.0
        parts.append(text(left - 6, up + 12, _fit_name(item.name), anchor="end", full=item.name))
        for series, value in enumerate(item.values):
            hint = f"{item.name}, {names[series]}: {number(round(value, 3))}, {100 * value / (whole or 1.0):.1f} %"
            wide = x(done + value) - x(done)
            parts.append(rect(x(done), up + 3, wide, ROW - 6, f"s{series % SERIES}", hint))
            done += value
        parts.append(text(x(whole) + 4, up + 12, number(float(f"{whole:.4g}"))))
    return svg(*parts, label=f"{x_label} of {len(items)} bars: {', '.join(names)}", height=top + height + BOTTOM)


def reliability(confidence: Floats, accuracy: Floats, rows: Sequence[int]) -> Markup:
    """Accuracy over confidence, a dot per bin with an area by its rows, against the line where both are equal."""
    x, y = Scale(0, 1, LEFT, WIDTH - RIGHT), Scale(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [axes(x, y, "confidence of the answer (mean of the bin)", "share that was right")]
    parts.append(line(x(0), y(0), x(1), y(1), "mark epoch"))
    most = max(rows, default=1)
    px, py = [x(v) for v in confidence], [y(v) for v in accuracy]
    kept = [place for place, count in enumerate(rows) if count >= MEASURED_BIN]
    line_of = points([px[place] for place in kept], [py[place] for place in kept])
    parts.append(tag("polyline", points=line_of, class_="line s0"))
    for at, up, said, true, count in zip(px, py, confidence, accuracy, rows, strict=True):
        hint = f"{count:,} rows: confidence {said:.2f}, right {true:.2f}"
        parts.append(
            tag("circle", tag("title", hint), cx=at, cy=up, r=2.5 + 7 * (count / most) ** 0.5, class_="bubble s0")
        )
    return svg(*parts, label="share of right answers over their confidence")


def heat(counts: npt.NDArray[np.int64], names: Sequence[str], unit: str = "label") -> Markup:
    """Counts [true, predicted] as cells, each row relative to its sum. Rows and columns have the same order."""
    has_numbers = len(names) <= NUMBERED
    left, top = _names_width(names) * (1.0 if has_numbers else 0.85), 18.0
    # Few labels fill a phone's column, in which nobody points at a cell; more are scrolled.
    size = min(LARGEST_CELL, max(NUMBERED_CELL, (WIDTH - left - 4) / len(names))) if has_numbers else 11.0
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    rows, columns = np.nonzero(counts)
    strongest = np.argsort(-share[rows, columns], kind="stable")[:CELLS]
    parts = []
    for row, column in zip(rows[strongest], columns[strongest], strict=True):
        hint = (
            f"{names[row]} answered as {names[column]}: {counts[row, column]:,} rows, {100 * share[row, column]:.0f} %"
        )
        css, opacity = "s0" if row == column else "s1", round(0.12 + 0.88 * float(share[row, column]) ** 0.5, 2)
        at = left + size * column, top + size * row
        parts.append(rect(*at, size - 1, size - 1, css, hint, fill_opacity=opacity))
        if has_numbers:
            shown = compact(int(counts[row, column]))
            middle = at[0] + (size - 1) / 2, at[1] + size / 2 + 3
            parts.append(text(*middle, shown, anchor="middle", css="fine halo"))
    for place, name in enumerate(names):
        parts.append(
            text(
                left - 6,
                top + size * (place + 0.5) + 3.5,
                _fit_name(name),
                anchor="end",
                css=None if has_numbers else "fine",
                full=name,
            )
        )
    edge = size * len(names)
    parts.append(rect(left - 1, top - 1, edge + 1, edge + 1, "outline"))
    parts.append(text(left, 11, f"predicted {unit}, in the order of the rows →", css="label"))
    width, height = max(WIDTH, left + edge + 4), top + edge + 6
    return svg(*parts, label=f"confusion matrix of {len(names)} labels", width=width, height=height, wide=width > WIDTH)
