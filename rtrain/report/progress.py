"""Progress of a command on stderr: one live line on a terminal, else plain lines."""

import math
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from rtrain.core import plugins
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.metrics import per_class
from rtrain.report import PhaseTimer, event_messages
from rtrain.report.summary import ROWS_READ_EVENTS, format_cost


def print_message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def format_next_command(*arguments: object) -> str:
    """Format the line `next: ` with a command to paste."""
    return f"next: {shlex.join(['rtrain', *map(str, arguments), *plugins.format_options()])}"


class SearchProgress(Protocol):
    """Progress of a followed search; it gets each of its events (`kind` "search") once."""

    def format_event(self, event: dict[str, Any]) -> str:
        """Format the line of an event; empty for none."""

    @property
    def progress_line(self) -> str:
        """Progress of the search in one line."""


SCORE_EVENTS = (
    *("evaluated", "best", "operating_point", "unseen", "sliced", "running_text", "collapsed", "words_without_tokens"),
)
"""Kinds of trial events that a search summarizes itself."""
SHARED_EVENTS = (
    *ROWS_READ_EVENTS,
    *("quarantined_rows", "selected_rows", "unlabeled", "head", "labels", "overlap", "texts", "conflicts"),
    *("device", "micro_batch_size_decided", "speeds", "threads"),
)
"""Kinds of events that are equal in all trials and attempts; only the first of trial 0 is printed."""
PHASES = {"phase_started": None, "started": "training", "writing": "writing"}
"""Phase of the command that an event begins; None: the event has its name."""
WAITING_REPEAT_S = 25.0
"""Seconds between two messages that trials wait for nodes; each trial logs one every 30 s."""
STATUS_INTERVAL_S = 60.0
"""Seconds without a line after which a search prints its progress, without a terminal."""
MIN_PROGRESS_INTERVAL_S = 1.0
"""Least seconds between two progress lines without a terminal: trials log every step, hundreds of lines otherwise."""


class ProgressLine:
    """Prints a run's events as progress. Use it as a context manager and call it with each event.

    `phase_timer` has the start time of the command for the times of the lines.
    """

    def __init__(self, phase_timer: PhaseTimer | None = None) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._phase_timer = phase_timer or PhaseTimer()
        self._search: SearchProgress | None = None
        self._reported_events: set[tuple[str, Any]] = set()
        """Printed shared events of a search."""
        self._waiting_reported_at = -math.inf
        """Time of the last message that trials wait for nodes."""
        self._last_line_at = 0.0
        self._last_progress_at = -math.inf
        """Time of the last progress line without a terminal."""
        self._lock = threading.Lock()
        """A search's own events and those of its trials come from different threads."""
        self._trial: int | None = None
        self._first_progress: dict[int | None, dict[str, Any]] = {}
        """First progress event of each trial; trials run concurrently."""
        self._attempts: Counter[int | None] = Counter()

    def __enter__(self) -> "ProgressLine":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    @contextmanager
    def follow_search(self, search: SearchProgress) -> Iterator[None]:
        """Follow a search within the context: print its own events, and only problems of its trials."""
        self._search = search
        try:
            yield
        finally:
            self._search = None

    def __call__(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        self._trial = event.get("trial")
        if self._search and self._trial is not None and self._is_repeated(event):
            return
        if kind in PHASES:
            self._phase_timer.enter_phase(PHASES[kind] or event["phase"])
        if kind == "started":
            self._first_progress.pop(self._trial, None)
            self._attempts[self._trial] += 1
        elif kind in ROWS_READ_EVENTS or (kind == "phase_started" and event["phase"] == "folds"):
            self._attempts[self._trial] = 0  # logged once per run: the next stage of the demo is not a restart
        if kind == "search":
            self._handle_search_event(event)
        elif kind == "progress":
            self._on_progress(event)
        elif kind in event_messages.STATUS_FORMATTERS:
            self._update_status(event_messages.STATUS_FORMATTERS[kind](event))
        elif text := event_messages.format_event(event):
            self._print_line(text)

    def _is_repeated(self, event: dict[str, Any]) -> bool:
        """Whether an event of a trial is already printed or summarized by the search."""
        kind = event["kind"]
        if kind in SCORE_EVENTS:
            return True
        if kind == "waiting":  # one message for all trials, which wait for the same nodes
            is_recent: bool = event["time"] - self._waiting_reported_at < WAITING_REPEAT_S
            self._waiting_reported_at = self._waiting_reported_at if is_recent else event["time"]
            return is_recent
        if kind not in SHARED_EVENTS:
            return False
        event_key = ("rows" if kind in ROWS_READ_EVENTS else kind, event.get("split"))
        is_repeated = bool(self._trial) or event_key in self._reported_events
        if not self._trial:
            self._reported_events.add(event_key)
        return is_repeated

    def _handle_search_event(self, event: dict[str, Any]) -> None:
        """Print an event of the search itself; its line has the trial."""
        self._trial = None
        if self._search is None:
            return
        if text := self._search.format_event(event):
            self._print_line(text)
        if self._status:
            self._update_status(self._search.progress_line)

    def _on_progress(self, event: dict[str, Any]) -> None:
        is_due = (
            event["time"] - self._last_progress_at >= MIN_PROGRESS_INTERVAL_S or event["step"] == event["total_steps"]
        )
        if self._status or self._search or is_due:
            self._last_progress_at = event["time"]
            self._update_status(
                f"step {event['step']}/{event['total_steps']}  loss {event['loss']:.4f}{self._format_pace(event)}"
            )

    def _format_pace(self, event: dict[str, Any]) -> str:
        """Speed and time left by the wall clock since this start's first progress, which follows its first batch."""
        restarts = self._attempts[self._trial] - 1
        restarts_text = f"  {restarts} restart{'s' if restarts > 1 else ''}" if restarts > 0 else ""
        if self._search:  # a resumed trial is a new attempt too
            restarts_text = ""
        first = self._first_progress.setdefault(self._trial, event)
        seconds, steps = event["time"] - first["time"], event["step"] - first["step"]
        if steps <= 0 or seconds <= 0:
            return restarts_text
        speeds = ""
        if "rows" in event:
            rows, tokens = ((event[name] - first[name]) / seconds for name in ("rows", "real_tokens"))
            speeds = f"  {rows:,.0f} rows/s, {tokens:,.0f} tokens/s"
        return f"{speeds}  {seconds / steps * (event['total_steps'] - event['step']):.0f} s left{restarts_text}"

    def _with_trial(self, text: str) -> str:
        return text if self._trial is None else f"trial {self._trial}: {text}"

    def _update_status(self, text: str) -> None:
        if self._search and self._trial is not None:
            text, self._trial = f"{self._search.progress_line}  {self._with_trial(text)}", None
            if not self._status and self._phase_timer.elapsed_seconds - self._last_line_at < STATUS_INTERVAL_S:
                return
        if self._status:
            status_text = Text(self._with_trial(text))  # a str would be read as markup
            status_text.truncate(
                self._console.width - 2, overflow="ellipsis"
            )  # beside the spinner: one line on any width
            self._status.update(status_text)
        else:
            self._print_line(text)

    def _print_line(self, text: str) -> None:
        """Print a permanent line. Text of the user's data is escaped, not interpreted as markup or control codes."""
        self._last_line_at = self._phase_timer.elapsed_seconds
        line = f"{self._last_line_at:6.1f} s  {self._with_trial(text)}"
        printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
        self._console.print("".join(printable), soft_wrap=True)


def format_summary(summary: dict[str, Any], run: Run) -> str:
    seconds, test, classes = summary["seconds"], summary["metrics"]["test"] or {}, summary["classes"]
    running_scores = summary.get("running_text")
    scores = ", ".join(f"{name} {value:.4f}" for name, value in test.items() if name != "rows")
    padding = summary["padded_tokens"] / summary["real_tokens"] if summary["real_tokens"] else 1.0
    lines = [
        f"{summary['status']}: {summary['steps']} steps, {summary['rows_seen']:,} rows in "
        f"{seconds['train']:.0f} s of training ({summary['rows_per_second']:.0f} rows/s), "
        f"input wait {seconds['input_wait']:.2f} s, padded/real tokens {padding:.2f}",
        f"test ({test.get('rows', 0)} rows): {scores}" if test else "no test score yet",
        *per_class.format_classes(classes.get("test") or classes.get("valid") or []),
        *([f"on running text, as in requests: F1 {running_scores['f1']:.4f}"] if running_scores else []),
        f"run: {run}",
    ]
    if scale := summary["noise_scale"]:
        high = "more" if scale["high"] is None else f"{scale['high']:,.0f}"
        rows = f"{scale['rows']:,.0f} rows ({scale['low']:,.0f} to {high})"
        lines.insert(1, f"noise scale of the gradient: {rows}; a step has {summary['global_batch_size']:,}")
    if cost_document := summary.get("cost"):
        lines.insert(-1, f"cost: {format_cost(cost_document)}")
    if run.report.is_file():
        lines.append(f"report: {run.report}")
    return "\n".join(lines)


def next_artifact_command(folder: Path, name: object = None) -> str:
    """Next command for an artifact, which the user knows as `name`; `rtrain inspect` for an unreadable one."""
    try:
        verb, *options = artifact.next_command(artifact.read_artifact(folder, verify=False))
    except UserError:
        verb, options = "inspect", []
    return format_next_command(verb, name or folder, *options)


def next_run_command(run: Run, *arguments: object) -> str:
    """Next command for a run: resume an unfinished run by the command `arguments`, else use its artifact."""
    created = run.first_event("created") or {}
    if not run.is_finished:
        return format_next_command(*arguments, "--resume", "--out", run)
    next_command = next_artifact_command(run.artifact)
    if created.get("task") == "masked_lm" and next_command == format_next_command("serve", run.artifact):
        return format_next_command("train", "intent", "--data", "FILE", "--model", run.artifact)
    return next_command
