"""The table of a study of aggregation frequencies, as text, JSON and a page: what each run came to, on this machine and
over other networks.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import metric_for
from rtrain.report import summary
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table as Shown
from rtrain.report.drawing.charts import Dot
from rtrain.report.drawing.page import render, write as write_page
from rtrain.tasks import base

FIRST = 1
"""The frequency with which the others are compared."""
LINKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Networks for which times are predicted, in bits per second and direction."""
CLOSE = 0.01
"""Difference of the score: a setting that loses no more is told as one that costs little."""


@dataclass(frozen=True)
class Cell:
    """A place of the table. Two cells whose weights are the same have one run."""

    optimizer: str
    frequency: int
    number: int
    """The run's number."""


@dataclass(frozen=True)
class Result:
    """What the run of a cell came to."""

    optimizer: str
    frequency: int
    score: float | None = None
    """The task's headline on the test rows; None if the run failed."""
    seconds: float | None = None
    """Seconds of training: without its start, evaluations and checkpoints."""
    updates: int = 0
    exchange_s: float = 0.0
    """Mean seconds by which an exchange lengthens a pass; 0 with one worker."""
    exchange_bytes: int = 0
    """Bytes of a gradient."""
    workers: int = 1
    error: str | None = None
    """Why there is no score."""

    @property
    def share(self) -> float | None:
        """The share of the time that goes into the exchange."""
        return None if not self.seconds else self.updates * self.exchange_s / self.seconds

    def over(self, exchange_s: float) -> float | None:
        """Seconds of the same training where an exchange takes so many."""
        return None if self.seconds is None else self.seconds + self.updates * (exchange_s - self.exchange_s)


def of_run(cell: Cell, run: Run, why: str | None = None) -> Result:
    """What a run came to. `why`: how it is known to have failed."""
    log = run.events()
    if summary.status(log) != "finished":
        failed = next((event["error"] for event in reversed(log) if event["kind"] == "failed"), "the run did not end")
        return Result(cell.optimizer, cell.frequency, error=str(why or failed).splitlines()[0])
    found, last = summary.summarise(run), next(event for event in reversed(log) if event["kind"] == "trained")
    cost = last.get("exchange") or {"seconds": 0.0, "bytes": 0}
    return Result(
        cell.optimizer,
        cell.frequency,
        score=found["metrics"]["test"][metric_for(base.get(found["task"]).output).headline],
        seconds=found["seconds"]["train"] + found["seconds"]["input_wait"],
        updates=found["updates"],
        exchange_s=cost["seconds"],
        exchange_bytes=cost["bytes"],
        workers=found["workers"],
    )


def over_link(gradient_bytes: int, workers: int, bits_per_second: float) -> float:
    """Seconds of an exchange over a link: in a ring, each worker sends 2 (n - 1) / n of a gradient (Patarasuk and Yuan
    2009). Latency is left out, and nothing is hidden behind the backward pass."""
    return 2 * (workers - 1) / workers * gradient_bytes * 8 / bits_per_second


# --------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Part:
    """One figure of all results."""

    title: str
    frequencies: Sequence[int]
    rows: Mapping[str, Sequence[str]]
    """By optimizer: the figure at each frequency."""

    @property
    def text(self) -> str:
        head = f"| {self.title} | " + " | ".join(f"k = {k}" for k in self.frequencies) + " |"
        lines = [f"| {name} | " + " | ".join(row) + " |" for name, row in self.rows.items()]
        return "\n".join([head, "|---|" + "---|" * len(self.frequencies), *lines])


@dataclass(frozen=True)
class Table:
    parts: Sequence[Part]
    notes: Sequence[str]
    """What is left out or has failed, and why."""
    document: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Markdown that a terminal shows well."""
        return "\n\n".join([*(part.text for part in self.parts), *(["\n".join(self.notes)] if self.notes else [])])


def table(
    results: Sequence[Result],
    headline: str,
    left_out: Mapping[int, str] | None = None,
    networks: Mapping[str, float] | None = None,
) -> Table:
    """The table of a study: optimizers are its rows, frequencies its columns; a part for each figure.

    `networks` has the seconds of an exchange over networks that were measured, by name;
    beside them the times over `LINKS` are predicted.
    """
    by = {(one.optimizer, one.frequency): one for one in results}

    def saved(one: Result, seconds: Callable[[Result], float | None]) -> float | None:
        first, own = seconds(by[one.optimizer, FIRST]), seconds(one)
        return None if not first or own is None else 1 - own / first

    def lost(one: Result) -> float | None:
        first = by[one.optimizer, FIRST].score
        return None if first is None or one.score is None else first - one.score

    parts = [
        _part(f"{headline} on the test rows", results, lambda one: one.score, "{:.4f}"),
        _part(f"lost against k = {FIRST}", results, lost, "{:+.4f}"),
        _part("seconds of training here", results, lambda one: one.seconds, "{:.1f}"),
        _part("share of them in the exchange", results, lambda one: one.share, "{:.1%}"),
        _part(
            f"time saved against k = {FIRST}", results, lambda one: saved(one, lambda other: other.seconds), "{:.1%}"
        ),
    ]
    document: dict[str, Any] = {
        "headline": headline,
        "results": [
            {**asdict(one), "share": one.share, "saved": saved(one, lambda other: other.seconds), "lost": lost(one)}
            for one in results
        ],
        "left_out": {str(k): why for k, why in (left_out or {}).items()},
        "networks": {},
    }
    for name, (how, cost) in _networks(networks or {}).items():

        def there(one: Result, cost: Callable[[Result], float] = cost) -> float | None:
            return one.over(cost(one))

        title = f"seconds over {name}, {how} (saved)"
        parts.append(_part(title, results, there, "{:.1f}", lambda one, there=there: saved(one, there)))  # type: ignore[misc]
        document["networks"][name] = {
            "how": how,
            "exchange_s": (networks or {}).get(name),
            "results": [
                {"optimizer": one.optimizer, "frequency": one.frequency, "seconds": there(one)}
                | {"saved": saved(one, there)}
                for one in results
            ],
        }
    notes = [f"k = {k} is left out: {why}." for k, why in (left_out or {}).items()]
    failed = {f"{one.optimizer}, k = {one.frequency}": one.error for one in results if one.error}
    notes += [f"{name}: {why}" for name, why in failed.items()]
    return Table(parts, notes, document)


def of_document(document: Mapping[str, Any], networks: Mapping[str, float] | None = None) -> Table:
    """The table of a study that was kept, with the networks that it knows and further ones."""
    names = Result.__dataclass_fields__.keys()
    results = [Result(**{name: one[name] for name in names}) for one in document["results"]]
    left_out = {int(k): why for k, why in document["left_out"].items()}
    return table(results, document["headline"], left_out, {**measured(document), **(networks or {})})


def measured(document: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of an exchange over the networks that were measured for a study that was kept, by name."""
    known = {name: one.get("exchange_s") for name, one in document["networks"].items()}
    return {name: seconds for name, seconds in known.items() if seconds is not None}


def keep(study: Run, document: Mapping[str, Any]) -> None:
    study.study_table.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _networks(measured: Mapping[str, float]) -> dict[str, tuple[str, Callable[[Result], float]]]:
    """How the time of an exchange over each network is known, and the seconds that a result's exchange takes there."""

    def known(seconds: float) -> Callable[[Result], float]:
        return lambda one: seconds if one.workers > 1 else 0.0

    def predicted(bits: float) -> Callable[[Result], float]:
        return lambda one: over_link(one.exchange_bytes, one.workers, bits)

    told = {name: ("predicted", predicted(bits)) for name, bits in LINKS.items()}
    return told | {name: ("measured", known(seconds)) for name, seconds in measured.items()}


def _part(
    title: str,
    results: Iterable[Result],
    value: Callable[[Result], float | None],
    form: str,
    beside: Callable[[Result], float | None] | None = None,
) -> Part:
    """A figure of all results, `beside` it a share in brackets."""
    rows: dict[str, dict[int, str]] = {}
    for one in results:
        own, other = value(one), beside(one) if beside else None
        shown = "failed" if own is None else form.format(own)
        rows.setdefault(one.optimizer, {})[one.frequency] = shown + ("" if other is None else f" ({other:.0%})")
    columns = sorted({k for row in rows.values() for k in row})
    return Part(title, columns, {name: [row.get(k, "") for k in columns] for name, row in rows.items()})


# ---------------------------------------------------------------------------------------------------------------- page


def write(study: Run) -> Path:
    """Make the study's study.html. Raises `UserError` for a study that has not ended."""
    kept = study.study_table
    if not kept.is_file():
        text = f"{study} is a study that has not ended; rtrain tune --resume --out {study} goes on"
        raise UserError(text, code="not_finished")
    return write_page(study.study_page, page(study.name, json_files.read(kept)))


def page(name: str, document: Mapping[str, Any]) -> str:
    """The page of a study's table as it was kept."""
    found, sound = of_document(document), [one for one in document["results"] if one["error"] is None]
    tables: list[Block] = [
        Shown(part.title, ("", *(f"k = {k}" for k in part.frequencies)), [(at, *row) for at, row in part.rows.items()])
        for part in found.parts
    ]
    notes: list[Block] = [Note(note) for note in found.notes]
    sections = [
        Section("trade", "Score for the time", "", _trade(document["headline"], sound)),
        Section("table", "The table", "k: passes of a worker between two exchanges of gradients.", tables + notes),
    ]
    about = f"A study of aggregation frequencies by rtrain, {len(document['results'])} trainings"
    return render(name, about, [], sections, lead=told(document["headline"], sound))


def told(headline: str, results: list[Mapping[str, Any]]) -> str:
    """The finding in one sentence: the fastest of the settings that lose little."""
    others = [one for one in results if one["frequency"] != FIRST and None not in (one["lost"], one["saved"])]
    close = [one for one in others if round(one["lost"], 4) <= CLOSE]
    if not close:
        return f"No frequency above {FIRST} keeps the {headline} within {CLOSE:g} of that with k = {FIRST}."
    best = max(close, key=lambda one: one["saved"])
    word = "less" if best["saved"] >= 0 else "more"
    return (
        f"{best['optimizer']} with k = {best['frequency']} takes {abs(best['saved']):.0%} {word} time than with "
        f"k = {FIRST}, for {-best['lost']:+.4f} of {headline}."
    )


def _trade(headline: str, results: list[Mapping[str, Any]]) -> list[Block]:
    names = list(dict.fromkeys(one["optimizer"] for one in results))
    items = [
        Dot(
            *(one["seconds"], one["score"], names.index(one["optimizer"]), f"k={one['frequency']}"),
            f"{one['optimizer']}, k = {one['frequency']}: {one['score']:.4f} in {one['seconds']:,.0f} s",
        )
        for one in results
        if one["seconds"]
    ]
    if not items:
        return []
    chart = charts.dots(items, names, "seconds of training", headline)
    return [Figure(f"The {headline} on the test rows for the time", chart, "Each point is a training to its end.")]
