"""A surface over two axes, drawn as filled bands, with the points that it was estimated from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from rtrain.report.drawing.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Logarithmic,
    Scale,
    axes,
    number,
    rect,
    svg,
    tag,
    text,
    ticks,
)

Floats = npt.NDArray[np.float64]
Corner = tuple[float, float, float]
"""x, y and height."""
LEVELS = 8
MANY = 60
"""Points from which on they are drawn smaller."""
STEP = 0.11
"""Opacity of a band; bands lie on each other, so that the higher ones have the stronger colour."""


@dataclass(frozen=True)
class Spot:
    x: float
    y: float
    name: str
    hint: str
    scored: bool = True
    """One that came to no value is drawn dashed."""
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """The axes' extents, and the surface where there is one."""

    xs: Floats
    """Ascending, evenly spread over the axis."""
    ys: Floats
    heights: Floats | None
    """[ys, xs]"""


def contour(
    grid: Grid, spots: Sequence[Spot], x_label: str, y_label: str, unit: str, *, log: tuple[bool, bool], sign: int = 1
) -> Markup:
    """Bands of equal height under points with their names, where these have room. `unit` is what the height is, `sign`
    what its figures are multiplied by (an error is drawn by its negative)."""
    x = _scale([*grid.xs], [spot.x for spot in spots], LEFT, WIDTH - RIGHT, log[0])
    y = _scale([*grid.ys], [spot.y for spot in spots], HEIGHT - BOTTOM, TOP, log[1])
    parts = []
    if grid.heights is not None:
        levels = ticks(float(grid.heights.min()), float(grid.heights.max()), LEVELS)
        px, py = np.array([x(value) for value in grid.xs]), np.array([y(value) for value in grid.ys])
        for level in levels:
            inside, hint = area(px, py, grid.heights, level), f"{unit} {_beyond(sign)} {number(sign * level)}"
            parts.append(tag("path", tag("title", hint), d=inside, class_="band", fill_opacity=STEP))
        parts.append(_key(levels, sign))
    parts.append(axes(x, y, x_label, y_label))
    size = 4 if len(spots) <= MANY else 2.5
    for spot in sorted(spots, key=lambda spot: spot.best):  # the best one lies on the others
        css = "spot best" if spot.best else "spot" if spot.scored else "spot none"
        hint, r = tag("title", spot.hint), 5 if spot.best else size
        parts.append(tag("circle", hint, cx=x(spot.x), cy=y(spot.y), r=r, class_=css))
    parts += _names([(x(spot.x), y(spot.y), spot) for spot in spots], size)
    return svg(*parts, label=f"{unit} over {x_label} and {y_label}, {len(spots)} points")


def _names(places: Sequence[tuple[float, float, Spot]], size: float) -> Iterator[Markup]:
    """Beside their points: the best one's, and of the others those that lie on no point and no name."""
    taken = [(at - size, at + size, up) for at, up, _ in places]  # from, to, middle
    for at, up, spot in sorted(places, key=lambda place: not place[2].best):
        wide = LETTER * len(spot.name)
        left = at + 7 if at + 7 + wide < WIDTH else at - 7 - wide
        free = all(left + wide <= begin or end <= left or abs(up - middle) > 10 for begin, end, middle in taken)
        if free or spot.best:
            taken.append((left, left + wide, up))
            yield text(left, up + 4, spot.name, css="halo")


def _scale(ends: Sequence[float], values: Sequence[float], start: float, stop: float, log: bool) -> Scale:
    if log:
        return Logarithmic(ends[0], ends[-1], start, stop, tuple(sorted(set(values))))
    return Scale(ends[0], ends[-1], start, stop)


def _beyond(sign: int) -> str:
    return "above" if sign > 0 else "below"


def _key(levels: Sequence[float], sign: int) -> Markup:
    """The bands' colours with the lowest and the highest level, right-aligned above the plot."""
    low, high = (number(sign * level) for level in (levels[0], levels[-1]))
    x = WIDTH - RIGHT - LETTER * len(high)
    parts, x = [text(x, 11, high)], x - 4 - 9 * len(levels)
    for place in range(len(levels)):
        parts.append(rect(x + 9 * place, 3, 9, 9, "band", fill_opacity=1 - (1 - STEP) ** (place + 1)))
    return Markup("").join([*parts, text(x - 4, 11, low, anchor="end")])


def area(xs: Floats, ys: Floats, heights: Floats, level: float) -> str:
    """The path of all places that are at least `level` high, between whose grid points the height changes evenly.
    Whole cells that lie side by side are one rectangle; the others are cut at the level (Sutherland and Hodgman 1974,
    "Reentrant polygon clipping")."""
    whole, parts = np.min([heights[:-1, :-1], heights[1:, :-1], heights[:-1, 1:], heights[1:, 1:]], axis=0) >= level, []
    for row in range(len(ys) - 1):
        low, high = float(ys[row]), float(ys[row + 1])
        for begin, end in _runs(whole[row]):
            left, right = float(xs[begin]), float(xs[end])
            parts.append(f"M{left:.1f} {low:.1f}H{right:.1f}V{high:.1f}H{left:.1f}Z")
        for column in np.flatnonzero(~whole[row]):
            corners = [(column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1)]
            cell = [(float(xs[i]), float(ys[j]), float(heights[j, i])) for i, j in corners]
            if inside := list(_cut(cell, level)):
                parts.append("M" + "L".join(f"{at:.1f} {up:.1f}" for at, up in inside) + "Z")
    return "".join(parts)


def _runs(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each stretch that is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _cut(cell: Sequence[Corner], level: float) -> Iterator[tuple[float, float]]:
    for (x1, y1, h1), (x2, y2, h2) in zip(cell, [*cell[1:], cell[0]], strict=True):
        if h1 >= level:
            yield x1, y1
        if (h1 >= level) != (h2 >= level):
            share = (level - h1) / (h2 - h1)
            yield x1 + share * (x2 - x1), y1 + share * (y2 - y1)
