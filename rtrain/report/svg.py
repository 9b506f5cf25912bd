"""Inline SVG: escaped elements, scales, ticks, and the frame with labeled axes that the charts are drawn into.

Everything is drawn at the size of a phone's column and scaled up, so that text stays readable on both. Colors come
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
LETTER_WIDTH = 6.7
"""Width of a letter of the charts' text in a wide font, on average."""
CAPITAL_WIDTH = 9.0
"""Width of a capital letter."""
LINE_HEIGHT = 14
"""Height of a line of text with some room."""
SERIES_COLORS = 8
"""Colors in the style sheet."""
SCORE_WORDS = {
    name: name.upper() for name in ("auc", "bleu", "ece", "em", "f1", "mae", "qwk", "r2", "rmse", "rouge")
} | {
    **{f"rouge{kind}": f"ROUGE-{kind}" for kind in "12L"},
    **{name: name.capitalize() for name in ("pearson", "spearman")},
}
"""Display form of the parts of score names."""
_JOINERS = "\u200c\u200d"
"""Format characters of scripts and emoji. Other format characters can reverse a line of text."""


def escape_controls(text: str) -> str:
    """Escape control characters, bidirectional overrides and lone surrogates."""
    return "".join(char if _is_visible(char) else char.encode("unicode_escape").decode() for char in text)


def _is_visible(char: str) -> bool:
    return char in "\n\t" or char in _JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def truncate(text: str, max_chars: int = 23) -> str:
    """Return the text on one line, cut to `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def text_width(text: str) -> float:
    """Width of a line of the charts' text: capitals are wider, and the characters of Chinese twice as wide."""
    return sum(
        2 * LETTER_WIDTH
        if unicodedata.east_asian_width(char) in "WF"
        else CAPITAL_WIDTH
        if char.isupper()
        else LETTER_WIDTH
        for char in text
    )


def format_compact(count: int) -> str:
    """A count in few characters: 999, 1.2k, 12k."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 9950 else f"{count / 1000:.0f}k"


def make_element(name: str, *content: str, **attributes: object) -> Markup:
    """An element. Text and values are escaped, unless they are `Markup`; `_` in a name stands for `-`."""
    attribute_text = Markup("").join(
        Markup(' {}="{}"').format(key.strip("_").replace("_", "-"), _format_value(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(part if isinstance(part, Markup) else escape_controls(part) for part in content)
    return Markup("<{}{}>{}</{}>").format(Markup(name), attribute_text, inner, Markup(name))


def _format_value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape_controls(str(value))


def make_svg(*content: str, label: str, width: float = WIDTH, height: float = HEIGHT, wide: bool = False) -> Markup:
    """Make the chart's element; `label` is the text for screen readers. A `wide` chart scrolls on a phone."""
    style = f"min-width:{width:.0f}px" if wide else None
    box = f"0 0 {width:.0f} {height:.0f}"
    return make_element("svg", *content, viewBox=box, role="img", aria_label=label, style=style)


def format_number(value: float) -> str:
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


def format_rate(value: float) -> str:
    """Something per second: 4.2, 42, 1,234."""
    return f"{value:.2g}" if 0 < value < 9.95 else f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    """90 s, 42 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def format_significant(value: float) -> str:
    """`value` to three significant digits, zeros included: 2.00, 0.0123."""
    return f"{value:#.3g}".removesuffix(".")


def humanize_score_name(name: str) -> str:
    """`macro_f1` as a reader writes it."""
    return " ".join(SCORE_WORDS.get(word, word) for word in name.split("_"))


def choose_ticks(low: float, high: float, max_count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    if not high > low:
        return [low]
    rough_step = (high - low) / max_count
    power_of_ten = 10.0 ** math.floor(math.log10(rough_step))
    step = next(
        step
        for step in (power_of_ten, 2 * power_of_ten, 5 * power_of_ten, 10 * power_of_ten)
        if step >= 0.75 * rough_step
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


@dataclass(frozen=True)
class AxisScale:
    """Data [low, high] -> pixels [start, stop]. A range without extent is widened, so that its values lie inside."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def from_values(
        cls, values: Sequence[float], start: float, stop: float, *, padding_share: float = 0.0
    ) -> "AxisScale":
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if high - low <= 1e-12 * max(1.0, abs(low)):
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
        padding = padding_share * (high - low)
        return cls(low - padding, high + padding, start, stop)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, max_count: int = 5) -> list[float]:
        return choose_ticks(self.low, self.high, max_count)


@dataclass(frozen=True)
class LogScale(AxisScale):
    """A logarithmic axis; all values are positive."""

    values: tuple[float, ...] = ()
    """Distinct drawn values; a few of them are the ticks."""

    @classmethod
    def from_values(
        cls, values: Sequence[float], start: float, stop: float, *, padding_share: float = 0.0
    ) -> "LogScale":
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if high <= low:
            low, high = low / 2, high * 2
        padding_ratio = (high / low) ** padding_share
        return cls(low / padding_ratio, high * padding_ratio, start, stop, tuple(sorted(set(values))))

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, max_count: int = 5) -> list[float]:
        """The values, where their figures have room beside each other; else 1, 2 and 5 times the powers of ten, or the
        powers alone."""
        gaps = [abs(self(high) - self(low)) for low, high in itertools.pairwise(self.values)]
        min_gap = (
            LETTER_WIDTH * 7 if self.stop > self.start else LINE_HEIGHT
        )  # beside an upright axis figures lie over each other
        if 0 < len(self.values) <= max_count and min(gaps, default=min_gap + 1) > min_gap:
            return list(self.values)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1,)):
            round_values = [step * 10.0**power for power in powers for step in steps]
            visible_ticks = [value for value in round_values if self.low <= value <= self.high]
            if len(visible_ticks) <= max_count + 1:
                break
        return visible_ticks


def draw_text(
    x: float, y: float, words: str, *, anchor: str = "start", css: str | None = None, full_text: str = ""
) -> Markup:
    """Make a text element; `full_text` is its tooltip."""
    inner = [words, make_element("title", full_text)] if full_text and full_text != words else [words]
    return make_element("text", *inner, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=css)


def draw_line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return make_element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def draw_rect(x: float, y: float, width: float, height: float, css: str, hint: str = "", **more: object) -> Markup:
    inner = [make_element("title", hint)] if hint else []
    return make_element("rect", *inner, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=css, **more)


def format_points(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def draw_axes(x: AxisScale, y: AxisScale, x_label: str, y_label: str) -> Markup:
    """Grid, ticks and labels of a chart of two numeric axes."""
    parts = []
    for value in y.ticks():
        parts.append(draw_line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(draw_text(x.start - 5, y(value) + 3.5, format_number(value), anchor="end"))
    parts += [_draw_bottom_tick(value, x, y.start) for value in x.ticks(6)]
    parts.append(draw_line(x.start, y.start, x.stop, y.start, "axis"))
    parts += [_draw_axis_label(x, x_label, y.start), draw_text(2, 11, y_label, css="label")]
    return Markup("").join(parts)


def draw_bottom_axis(x: AxisScale, y: float, top: float, label: str) -> Markup:
    """The numeric axis of a chart with one row per name: ticks below, grid lines up to `top`."""
    parts = [draw_line(x(value), y, x(value), top, "grid") + _draw_bottom_tick(value, x, y) for value in x.ticks()]
    return Markup("").join([*parts, _draw_axis_label(x, label, y)])


def _draw_bottom_tick(value: float, x: AxisScale, y: float) -> Markup:
    value_text = format_number(value)
    label_x = min(x(value), WIDTH - LETTER_WIDTH * len(value_text) / 2)  # of the last tick all digits are seen
    return draw_text(label_x, y + 14, value_text, anchor="middle")


def _draw_axis_label(x: AxisScale, label: str, y: float) -> Markup:
    return draw_text(x.stop, y + 30, label, anchor="end", css="label")


def draw_legend(
    names: Sequence[str], right: float = WIDTH - RIGHT, *, y_offset: float = 0.0, first_series: int = 0
) -> Markup:
    """Names of the series, right-aligned above the plot; one series needs none. A long one takes several, each further
    `y_offset`, whose colors begin with series `first_series`."""
    if len(names) + first_series < 2:
        return Markup("")
    parts, x = [], right
    for place, name in reversed(list(enumerate(names))):
        x -= LETTER_WIDTH * len(name)
        parts.append(draw_text(x, 11 + y_offset, name))
        parts.append(draw_rect(x - 12, 3.5 + y_offset, 9, 9, f"s{(place + first_series) % SERIES_COLORS}"))
        x -= 24
    return Markup("").join(parts)
