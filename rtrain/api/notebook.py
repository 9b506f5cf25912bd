"""A notebook's view: the progress of a call in one output that changes in place, and the card of a result.

IPython's own display handles are enough: neither ipywidgets nor another extension of the notebook is needed.
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rtrain.core.run_folder import Run
from rtrain.report.progress import ProgressLine

MAX_LINES = 8
"""Lines of progress that stay visible."""
STYLE = """<style>
.rtrain-card { border: 1px solid #8886; border-radius: 8px; padding: 10px 14px; max-width: 640px; }
.rtrain-card b { margin-right: 4px; } .rtrain-card span { margin-right: 18px; white-space: nowrap; }
.rtrain-card pre { margin: 6px 0 0; font-size: 12px; white-space: pre-wrap; }
.rtrain-card svg { display: block; width: 100%; height: auto; margin-top: 8px; }
.rtrain-card svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.rtrain-card svg line { stroke: #8886; } .rtrain-card svg polyline { fill: none; stroke-width: 1.8; }
.rtrain-card svg .s0 { stroke: #2f6db3; } .rtrain-card svg .s1 { stroke: #d0672a; }
</style>"""


def is_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookProgress(ProgressLine):
    """Shows a run's events as a progress bar above the newest lines."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._status_text, self._progress_share = "", 0.0
        self._display: Any = None

    def __enter__(self) -> "NotebookProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._status_text = ""
        self._render()

    def _on_progress(self, event: dict[str, Any]) -> None:
        self._progress_share = event["step"] / max(1, event["total_steps"])
        super()._on_progress(event)

    def _update_status(self, text: str) -> None:
        self._status_text = self._with_trial(text)
        self._render()

    def _print_line(self, text: str) -> None:
        self._lines.append(f"{self._phase_timer.elapsed_seconds:6.1f} s  {self._with_trial(text)}")
        self._render()

    def _render(self) -> None:
        from IPython import display

        bar = f'<progress value="{self._progress_share:.3f}" style="width: 100%"></progress>'
        lines = escape("\n".join([*self._lines, self._status_text]).rstrip())
        html = display.HTML(f'{STYLE}<div class="rtrain-card">{bar}<pre>{lines}</pre></div>')
        if self._display is None:
            self._display = display.display(html, display_id=True)
        else:
            self._display.update(html)


def render_card(title: str, figures: Mapping[str, object], parts: Sequence[str] = ()) -> str:
    """Return the HTML of a card: a title, named figures, and further HTML."""
    items = "".join(
        f"<span><b>{escape(_format_figure(value))}</b>{escape(name)}</span>" for name, value in figures.items()
    )
    return f'{STYLE}<div class="rtrain-card"><b>{escape(title)}</b><div>{items}</div>{"".join(parts)}</div>'


def _format_figure(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def render_link(path: Path) -> str:
    """Return a link to a file; empty without the file."""
    return f'<a href="{escape(path.as_uri())}">{escape(path.name)}</a>' if path.is_file() else ""


def render_curve(run: Run) -> str:
    """Return the curve of the training loss as SVG; empty for a run without steps."""
    from rtrain.report import charts, stats

    events = run.events("progress")
    if len(events) < 2:
        return ""
    steps, losses = stats.thin_curve([event["step"] for event in events], [event["loss"] for event in events])
    return str(charts.draw_lines([charts.LineSeries("training loss", steps, losses)], "step", "loss"))
