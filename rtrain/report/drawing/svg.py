"""Inline SVG: escaped elements, scales, ticks, and the frame with labelled axes that the charts are drawn into.

Everything is drawn at the size of a phone's column and scaled up, so that text stays readable on both. Colours come
from the page's style sheet (classes s0 to s7, grid, mute, ...), which has a light and a dark set.
"""

import itertools
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 390, 240
TOP, RIGHT, BOTTOM, LEFT = 22, 12, 38, 48
LETTER = 6.7
"""Width of a letter of the charts' text in a wide font, on average."""
CAPITAL = 9.0
"""Width of a capital letter."""
LINE = 14
"""Height of a line of text with some room."""
SERIES = 8
"""Colours that the style sheet has."""
SPELT = {name: name.upper() for name in ("auc", "bleu", "ece", "em", "f1", "mae", "qwk", "r2", "rmse", "rouge")} | {
    **{f"rouge{kind}": f"ROUGE-{kind}" for kind in "12L"},
    **{name: name.capitalize() for name in ("pearson", "spearman")},
}
"""Parts of scores' names that are no plain words."""
_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji are spelt with; the others of their kind can turn a line of text round."""


def visible(text: str) -> str:
    """`text` with control characters, bidirectional overrides and lone surrogates as their escapes."""
    return "".join(char if _shown(char) else char.encode("unicode_escape").decode() for char in text)


def _shown(char: str) -> bool:
    return char in "\n\t" or char in _JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def short(text: str, most: int = 23) -> str:
    """`text` on one line, cut to `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def text_width(text: str) -> float:
    """Width of a line of the charts' text: capitals are wider, and the characters of Chinese twice as wide."""
    return sum(
        2 * LETTER if unicodedata.east_asian_width(char) in "WF" else CAPITAL if char.isupper() else LETTER
        for char in text
    )


def compact(count: int) -> str:
    """A count in few characters: 999, 1.2k, 12k."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 9950 else f"{count / 1000:.0f}k"


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element. Text and values are escaped, unless they are `Markup`; `_` in a name stands for `-`."""
    given = Markup("").join(
        Markup(' {}="{}"').format(key.strip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(part if isinstance(part, Markup) else visible(part) for part in content)
    return Markup("<{}{}>{}</{}>").format(Markup(name), given, inner, Markup(name))


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else visible(str(value))


def svg(*content: str, label: str, width: float = WIDTH, height: float = HEIGHT, wide: bool = False) -> Markup:
    """The chart itself; `label` is what a screen reader says. A `wide` one is scrolled on a phone, not shrunk."""
    style = f"min-width:{width:.0f}px" if wide else None
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *content, viewBox=box, role="img", aria_label=label, style=style)


def number(value: float) -> str:
    """A figure for a tick, a bar or a table: 1,234 or 0.0123 or 1.2e-07."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:,.3g} M" if size < 1e9 else f"{value:.2e}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.4g}" if size >= 1 else f"{value:.4f}".rstrip("0").rstrip(".")


def rate(value: float) -> str:
    """Something per second: 4.2, 42, 1,234."""
    return f"{value:.2g}" if 0 < value < 9.95 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """90 s, 42 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def three(value: float) -> str:
    """`value` to three significant digits, zeros included: 2.00, 0.0123."""
    return f"{value:#.3g}".removesuffix(".")


def score_name(name: str) -> str:
    """`macro_f1` as a reader writes it."""
    return " ".join(SPELT.get(word, word) for word in name.split("_"))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= 0.75 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


@dataclass(frozen=True)
class Scale:
    """Data [low, high] -> pixels [start, stop]. A range without extent is widened, so that its values lie inside."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, stop: float, *, pad: float = 0.0) -> "Scale":
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if high - low <= 1e-12 * max(1.0, abs(low)):
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
        extra = pad * (high - low)
        return cls(low - extra, high + extra, start, stop)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        return ticks(self.low, self.high, about)


@dataclass(frozen=True)
class Logarithmic(Scale):
    """Equal ratios are equally long; all values are above 0."""

    values: tuple[float, ...] = ()
    """Those that are drawn, each once: where they are few, they are the ticks."""

    @classmethod
    def over(cls, values: Sequence[float], start: float, stop: float, *, pad: float = 0.0) -> "Logarithmic":
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if high <= low:
            low, high = low / 2, high * 2
        extra = (high / low) ** pad
        return cls(low / extra, high * extra, start, stop, tuple(sorted(set(values))))

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """The values, where their figures have room beside each other; else 1, 2 and 5 times the powers of ten, or the
        powers alone."""
        apart = [abs(self(high) - self(low)) for low, high in itertools.pairwise(self.values)]
        room = LETTER * 7 if self.stop > self.start else LINE  # beside an upright axis figures lie over each other
        if 0 < len(self.values) <= about and min(apart, default=room + 1) > room:
            return list(self.values)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1,)):
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) <= about + 1:
                break
        return inside


def text(x: float, y: float, words: str, *, anchor: str = "start", css: str | None = None, full: str = "") -> Markup:
    """A label; `full` is what a pointer over it shows."""
    inner = [words, tag("title", full)] if full and full != words else [words]
    return tag("text", *inner, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=css)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def rect(x: float, y: float, width: float, height: float, css: str, hint: str = "", **more: object) -> Markup:
    inner = [tag("title", hint)] if hint else []
    return tag("rect", *inner, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=css, **more)


def points(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> Markup:
    """Grid, ticks and labels of a chart of two numeric axes."""
    parts = []
    for value in y.ticks():
        parts.append(line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(text(x.start - 5, y(value) + 3.5, number(value), anchor="end"))
    parts += [_bottom(value, x, y.start) for value in x.ticks(6)]
    parts.append(line(x.start, y.start, x.stop, y.start, "axis"))
    parts += [_label(x, x_label, y.start), text(2, 11, y_label, css="label")]
    return Markup("").join(parts)


def bottom_axis(x: Scale, y: float, top: float, label: str) -> Markup:
    """The numeric axis of a chart with one row per name: ticks below, grid lines up to `top`."""
    parts = [line(x(value), y, x(value), top, "grid") + _bottom(value, x, y) for value in x.ticks()]
    return Markup("").join([*parts, _label(x, label, y)])


def _bottom(value: float, x: Scale, y: float) -> Markup:
    figure = number(value)
    at = min(x(value), WIDTH - LETTER * len(figure) / 2)  # of the last tick all digits are seen
    return text(at, y + 14, figure, anchor="middle")


def _label(x: Scale, label: str, y: float) -> Markup:
    return text(x.stop, y + 30, label, anchor="end", css="label")


def legend(names: Sequence[str], right: float = WIDTH - RIGHT, *, down: float = 0.0, first: int = 0) -> Markup:
    """Names of the series, right-aligned above the plot; one series needs none. A long one takes several, each further
    `down`, whose colours begin with that of series `first`."""
    if len(names) + first < 2:
        return Markup("")
    parts, x = [], right
    for place, name in reversed(list(enumerate(names))):
        x -= LETTER * len(name)
        parts.append(text(x, 11 + down, name))
        parts.append(rect(x - 12, 3.5 + down, 9, 9, f"s{(place + first) % SERIES}"))
        x -= 24
    return Markup("").join(parts)
