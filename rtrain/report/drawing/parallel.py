"""Parallel coordinates: an upright axis for each quantity, a strand through all of them for each item."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rtrain.report.drawing.svg import HEIGHT, LETTER, WIDTH, line, points, rect, short, svg, tag, text

TOP, BOTTOM, SIDE = 46, 14, 54
APART = 94
"""Least distance between two axes; a chart that needs more room than a phone's column is scrolled there."""
SHADES = 9
INK = 60.0
"""Strands beyond so many are the fainter, the more there are."""


@dataclass(frozen=True)
class Upright:
    name: str
    ticks: Sequence[tuple[float, str]]
    """(place from 0, the foot, to 1; figure)"""


@dataclass(frozen=True)
class Strand:
    places: Sequence[float]
    """By axis, from 0 to 1; one that has fewer ends early."""
    shade: float | None
    """From 0, the worst, to 1; None: it came to no value, and is drawn dashed."""
    hint: str
    best: bool = False


def parallel(
    uprights: Sequence[Upright], strands: Sequence[Strand], label: str, ends: tuple[str, str] | None = None
) -> Markup:
    """`ends` are the figures at the worst and the best shade; None where no strand is shaded."""
    width = max(WIDTH, 2 * SIDE + APART * (len(uprights) - 1))
    apart = (width - 2 * SIDE) / max(1, len(uprights) - 1)
    xs = [SIDE + apart * place for place in range(len(uprights))]
    foot, size = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    parts, opacity = [_key(width, *ends)] if ends else [], min(0.8, INK / max(1, len(strands)))
    for strand in sorted(strands, key=lambda one: (one.best, -1.0 if one.shade is None else one.shade)):
        ys = [foot - size * place for place in strand.places]
        css = "strand best" if strand.best else "strand" if strand.shade is not None else "strand none"
        style = None
        if strand.shade is not None and not strand.best:
            style = f"stroke:{_colour(strand.shade)};stroke-opacity:{opacity:.2f}"
        path = points(xs[: len(ys)], ys)
        parts.append(tag("polyline", tag("title", strand.hint), points=path, class_=css, style=style))
    for place, (x, upright) in enumerate(zip(xs, uprights, strict=True)):
        parts.append(line(x, foot, x, TOP, "axis"))
        last = place == len(uprights) - 1
        anchor, at = ("start", 2.0) if place == 0 else ("end", width - 2.0) if last else ("middle", x)
        name = short(upright.name, int((apart - 6) / LETTER))
        parts.append(text(at, TOP - 14, name, anchor=anchor, css="label", full=upright.name))
        for height, figure in upright.ticks:
            y = foot - size * height
            parts.append(line(x - 3, y, x + 3, y, "axis"))
            beside = text(x + 6, y + 3.5, figure) if last else text(x - 6, y + 3.5, figure, anchor="end", css="halo")
            parts.append(beside)
    return svg(*parts, label=label, width=width, wide=width > WIDTH)


def _colour(shade: float) -> str:
    return f"color-mix(in oklab, var(--c0) {round(100 * shade)}%, var(--c1))"


def _key(width: float, low: str, high: str) -> Markup:
    x = width - 2 - LETTER * len(high)
    parts, x = [text(x, 11, high)], x - 4 - 9 * SHADES
    for place in range(SHADES):
        parts.append(rect(x + 9 * place, 3, 9, 9, "shade", style=f"fill:{_colour(place / (SHADES - 1))}"))
    return Markup("").join([*parts, text(x - 4, 11, low, anchor="end")])
