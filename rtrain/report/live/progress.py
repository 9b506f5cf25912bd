"""What a user sees while a command runs: one live line on a terminal, plain lines elsewhere; all of it on stderr."""

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

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.metrics import per_class
from rtrain.report import cost
from rtrain.report.live import event_messages
from rtrain.report.live.phase_timer import Waited


def say(text: str) -> None:
    """One plain line on stderr."""
    print(text, file=sys.stderr, flush=True)


def then(*words: object) -> str:
    """The line that says what to do next: a command of rtrain's that can be pasted."""
    return f"next: {shlex.join(['rtrain', *map(str, words)])}"


class Search(Protocol):
    """A search as it is followed; it is told each of its events (`kind` "search") once."""

    def said(self, event: dict[str, Any]) -> str:
        """The line of an event; empty where there is none."""

    @property
    def standing(self) -> str:
        """How far the search is, in a line."""


SCORES = ("evaluated", "best", "unseen", "sliced", "running_text", "collapsed", "words_without_tokens")
"""Kinds of events of which a search says by itself what came of them."""
ROWS = (
    *("tokenised", "tokens_reused", "bad_rows", "unlabelled", "head", "labels", "overlap"),
    *("texts", "conflicts"),
)
ALIKE = (*ROWS, "device", "pass_size", "speeds", "threads")
"""Kinds of events that are the same in every trial of a search, each time that it goes on: trial 0 tells, once."""
WAITING_S = 25.0
"""Seconds after which a search says again that trials wait for nodes; each trial says so every 30 s."""
PULSE = 60.0
"""Seconds without a line after which, off a terminal, a search says how far it is."""
SPACING = 1.0
"""Least seconds between two lines of progress off a terminal: trials log every update, and a student of the search's
winner, which has its settings, would print hundreds of lines."""


class Line:
    """Turns a run's events into progress. Use as a context manager; call it with each event.

    `waited`: what has counted the seconds since the command began; the times of the lines are its own.
    """

    def __init__(self, waited: Waited | None = None) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._waited = waited or Waited()
        self._search: Search | None = None
        self._alike: set[tuple[str, Any]] = set()
        """What was told of all trials of a search."""
        self._waiting_told = -math.inf
        """When it was last said that trials wait for nodes."""
        self._kept = 0.0
        self._progressed = -math.inf
        """Time of the newest progress that was told off a terminal."""
        self._lock = threading.Lock()
        """A search's own events and those of its trials come from different threads."""
        self._trial: int | None = None
        self._first: dict[int | None, dict[str, Any]] = {}
        """By trial; trials of a search run beside each other."""
        self._starts: Counter[int | None] = Counter()

    def __enter__(self) -> "Line":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    @contextmanager
    def following(self, search: Search) -> Iterator[None]:
        """The events of the block are those of a search: its own are said, and of its trials' what goes wrong."""
        self._search = search
        try:
            yield
        finally:
            self._search = None

    def __call__(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        self._trial = event.get("trial")
        if self._search and self._trial is not None and self._is_known(event):
            return
        if kind == "search":
            self._follow(event)
        elif kind == "doing":
            self._waited.enter(event["phase"])
            self._now(event["text"])
        elif kind == "started":
            self._waited.enter("training")
            self._first.pop(self._trial, None)
            self._starts[self._trial] += 1
            rate = f", learning rate {event['lr']:.3g} at its peak" if "lr" in event else ""
            workers = f"{event['workers']} worker{'' if event['workers'] == 1 else 's'}"
            where = f" on {event['device']}" if "device" in event else ""
            rows = f", {event['rows_per_update']} rows per update" if "rows_per_update" in event else ""
            self._now(f"{workers}{where}, {event['precision']}{rows}{rate}, from update {event['update']}")
        elif kind in ("tokenised", "tokens_reused"):
            self._starts[self._trial] = 0  # said once a run: the next stage of the demo is no restart
            self._keep(_rows_text(event))
        elif kind == "first_rows":
            self._now("the first rows are there")
        elif kind == "writing":
            self._waited.enter("writing")
            self._now("writing predictions, scores and the artefact")
        elif kind == "progress":
            self._pass(event)
        elif kind == "answered":
            speed = event["rows_per_second"]
            pace = "" if speed is None else f"  {speed:,.0f} rows/s  {event['left_s']:.0f} s left"
            self._now(f"row {event['rows']:,}/{event['of']:,}{pace}")
        elif text := event_messages.of(event):
            self._keep(text)
        elif kind == "crashed":
            hung = f"; what it hung in: {', '.join(event['stalled'])}" if event["stalled"] else ""
            self._keep(f"{event['cause']}: {event['error']}{hung}; going on from update {event['resumes_from']}")
        elif kind == "skipped":
            text = f"update {event['update']}: the gradient is infinite in fp16; once more with loss scale"
            self._keep(f"{text} {event['scale']:g}")
        elif kind == "device":
            self._keep(event["why"])
        elif kind == "pass_size":
            self._keep(f"passes of at most {event['tokens']:,} tokens, which is what the GPU's memory holds")
        elif kind == "speeds":
            told = ", ".join(f"{speed:.2f}" for speed in event["speeds"])
            self._keep(f"rows are dealt by the workers' speeds: {told} of the fastest")
        elif kind == "threads":
            rank = event["short"][0]
            self._keep(
                f"{event['available'][rank]} threads for worker {rank} in place of {event['kept'][rank]} as before, as "
                "its cores are fewer: the weights differ in their last bits from those of an undisturbed run"
            )
        elif kind == "smaller_passes":
            self._keep(f"passes of at most {event['tokens']:,} tokens, as a start ran out of memory")
        elif kind == "yielded":
            self._keep(
                f"{event['reason']}: stopped at update {event['update']} with a checkpoint, and going on from it"
            )
        elif kind == "set_aside":
            self._keep(f"{event['checkpoint']} does not verify ({event['reason']}): set aside")
        elif kind == "best_lost":
            self._keep(f"the best checkpoint, of update {event['update']}, does not verify: the best is sought anew")
        elif kind == "uncopied":
            self._keep(f"not copied: {event['error']} The next save tries again.")
        elif kind == "unreachable":
            text = f"{event['error']} Going on from what is here, update {event['update']}"
            self._keep(f"{text}; the next save tries again.")
        elif kind == "compressed":
            self._keep(f"gradients are sent in fewer bits, with an error of {event['error']:.1e} of their norm")
        elif kind == "waiting":
            needs = f"{event['workers']} workers" if event["workers"] else "train.min_workers"
            counts = f"the cluster has {event['has']} {event['needs']}s, {event['free']} of them free"
            asked = f"; {event['asked']}" if event.get("asked") else ""
            if event.get("starting"):
                self._keep(f"waiting for {needs} to start; {counts}")
            else:
                self._keep(f"waiting for {event['needs']}: too few for {needs}; {counts}{asked}")
        elif kind == "case":
            figures = event["measured"]
            ratios = f"weights {figures['weights_ratio']:.1e}, gradient {figures['gradient_ratio']:.1e}"
            self._keep(f"{event['name']}: {ratios}  ({figures['seconds']:.1f} s)")
        elif kind == "stage":
            self._keep(event["text"])

    def _is_known(self, event: dict[str, Any]) -> bool:
        """Whether an event of a trial says nothing new to who follows the search."""
        kind = event["kind"]
        if kind in SCORES:
            return True
        if kind == "waiting":  # for one trial or for all: they wait for the same nodes
            is_known: bool = event["time"] - self._waiting_told < WAITING_S
            self._waiting_told = self._waiting_told if is_known else event["time"]
            return is_known
        if kind not in ALIKE:
            return False
        told = ("rows" if kind in ROWS[:2] else kind, event.get("split"))
        known = bool(self._trial) or told in self._alike
        if not self._trial:
            self._alike.add(told)
        return known

    def _follow(self, event: dict[str, Any]) -> None:
        """An event of the search itself, whose line names its trial."""
        self._trial = None
        if self._search is None:
            return
        if text := self._search.said(event):
            self._keep(text)
        if self._status:
            self._now(self._search.standing)

    def _pass(self, event: dict[str, Any]) -> None:
        is_due = event["time"] - self._progressed >= SPACING or event["update"] == event["of"]
        if self._status or self._search or is_due:
            self._progressed = event["time"]
            self._now(f"update {event['update']}/{event['of']}  loss {event['loss']:.4f}{self._pace(event)}")

    def _pace(self, event: dict[str, Any]) -> str:
        """Speed and time left by the wall clock since this start's first progress, which follows its first batch."""
        restarts = self._starts[self._trial] - 1
        again = f"  {restarts} restart{'s' if restarts > 1 else ''}" if restarts > 0 else ""
        if self._search:  # a thawed trial starts again too
            again = ""
        first = self._first.setdefault(self._trial, event)
        seconds, updates = event["time"] - first["time"], event["update"] - first["update"]
        if updates <= 0 or seconds <= 0:
            return again
        speeds = ""
        if "rows" in event:
            rows, tokens = ((event[name] - first[name]) / seconds for name in ("rows", "real_tokens"))
            speeds = f"  {rows:,.0f} rows/s, {tokens:,.0f} tokens/s"
        return f"{speeds}  {seconds / updates * (event['of'] - event['update']):.0f} s left{again}"

    def _named(self, text: str) -> str:
        return text if self._trial is None else f"trial {self._trial}: {text}"

    def _now(self, text: str) -> None:
        if self._search and self._trial is not None:
            text, self._trial = f"{self._search.standing}  {self._named(text)}", None
            if not self._status and self._waited.seconds - self._kept < PULSE:
                return
        if self._status:
            shown = Text(self._named(text))  # a str would be read as markup
            shown.truncate(self._console.width - 2, overflow="ellipsis")  # beside the spinner: one line on any width
            self._status.update(shown)
        else:
            self._keep(text)

    def _keep(self, text: str) -> None:
        """A line that stays. Printed as it is: text of the user's data must not be read as markup or control codes."""
        self._kept = self._waited.seconds
        line = f"{self._kept:6.1f} s  {self._named(text)}"
        shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
        self._console.print("".join(shown), soft_wrap=True)


def _rows_text(event: dict[str, Any]) -> str:
    rows, bad = event["rows"], event["quarantined"]
    text = f"{rows['train']:,} training, {rows['valid']:,} validation, {rows['test']:,} test rows"
    text += ", tokens reused" if event["kind"] == "tokens_reused" else ""
    if bad:
        where = Path(event["store"]) / "quarantine.parquet"
        text += f"; {bad:,} bad row{'s' if bad > 1 else ''} set aside, with reasons in {where}"
    return text


def summary_text(summary: dict[str, Any], run: Run) -> str:
    """The end of a training, for a person."""
    seconds, test, classes = summary["seconds"], summary["metrics"]["test"] or {}, summary["classes"]
    running = summary.get("running_text")
    scores = ", ".join(f"{name} {value:.4f}" for name, value in test.items() if name != "rows")
    padding = summary["padded_tokens"] / summary["real_tokens"] if summary["real_tokens"] else 1.0
    lines = [
        f"{summary['status']}: {summary['updates']} updates, {summary['rows_seen']:,} rows in "
        f"{seconds['train']:.0f} s of training ({summary['rows_per_second']:.0f} rows/s), "
        f"input wait {seconds['input_wait']:.2f} s, padded/real tokens {padding:.2f}",
        f"test ({test.get('rows', 0)} rows): {scores}" if test else "no test score yet",
        *per_class.format_classes(classes.get("test") or classes.get("valid") or []),
        *([f"on running text, as requests have it: F1 {running['f1']:.4f}"] if running else []),
        f"run: {run}",
    ]
    if scale := summary["noise_scale"]:
        high = "more" if scale["high"] is None else f"{scale['high']:,.0f}"
        rows = f"{scale['rows']:,.0f} rows ({scale['low']:,.0f} to {high})"
        lines.insert(1, f"noise scale of the gradient: {rows}; an update has {summary['rows_per_update']:,}")
    if found := summary.get("cost"):
        lines.insert(-1, f"cost: {cost.sentence(found)}")
    if run.report.is_file():
        lines.append(f"report: {run.report}")
    return "\n".join(lines)


def used(folder: Path, name: object = None) -> str:
    """What to do with an artefact next, which the user knows by `name`. One that cannot be read is looked at, too."""
    try:
        verb, *options = artifact.use(artifact.read(folder, verify=False))
    except UserError:
        verb, options = "inspect", []
    return then(verb, name or folder, *options)


def after(run: Run, *words: object) -> str:
    """What to do with a run next: where it has not ended, go on by the verb and arguments `words`; else use its
    artefact."""
    created = run.first("created") or {}
    if not run.finished:
        return then(*words, "--resume", "--out", run)
    way_on = used(run.artifact)
    if created.get("task") == "masked_lm" and way_on == then("serve", run.artifact):
        return then("train", "intent", "--data", "FILE", "--model", run.artifact)
    return way_on
