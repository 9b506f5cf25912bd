"""The table of a study of aggregation frequencies, as text, JSON and a page: results on this machine and over other
networks."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import get_metric
from rtrain.report import summary
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table as Shown
from rtrain.report.drawing.charts import ScatterPoint
from rtrain.report.drawing.page import render_html, write_page as write_page
from rtrain.tasks import base

BASELINE_FREQUENCY = 1
"""Baseline of the comparisons."""
PREDICTED_NETWORKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Networks for which times are predicted, in bits per second and direction."""
SMALL_LOSS = 0.01
"""Maximum score loss of a setting that counts as cheap."""


@dataclass(frozen=True)
class StudyCell:
    """A cell of the table. Cells with equal weights share a run."""

    optimizer: str
    frequency: int
    run_number: int
    """Number of its run."""


@dataclass(frozen=True)
class CellResult:
    """Result of a cell's run."""

    optimizer: str
    frequency: int
    score: float | None = None
    """The task's headline on the test rows; None if the run failed."""
    seconds: float | None = None
    """Seconds of training, without start, evaluations and checkpoints."""
    steps: int = 0
    sync_s: float = 0.0
    """Mean seconds that an all-reduce adds to a micro-batch; 0 with one worker."""
    gradient_bytes: int = 0
    """Bytes of a gradient."""
    workers: int = 1
    error: str | None = None
    """Error of a failed run."""

    @property
    def sync_share(self) -> float | None:
        """Share of the time in all-reduces."""
        return None if not self.seconds else self.steps * self.sync_s / self.seconds

    def seconds_at_sync(self, sync_s: float) -> float | None:
        """Return the seconds of the training if an all-reduce takes `sync_s`."""
        return None if self.seconds is None else self.seconds + self.steps * (sync_s - self.sync_s)


def read_cell_result(cell: StudyCell, run: Run, reason: str | None = None) -> CellResult:
    """Read the result of a run. `reason`: its failure, if it is known."""
    log = run.events()
    if summary.run_status(log) != "finished":
        run_error = next(
            (event["error"] for event in reversed(log) if event["kind"] == "failed"), "the run did not end"
        )
        return CellResult(cell.optimizer, cell.frequency, error=str(reason or run_error).splitlines()[0])
    run_summary, last_trained = (
        summary.summarize(run),
        next(event for event in reversed(log) if event["kind"] == "trained"),
    )
    sync_cost = last_trained.get("gradient_sync") or {"seconds": 0.0, "bytes": 0}
    return CellResult(
        cell.optimizer,
        cell.frequency,
        score=run_summary["metrics"]["test"][get_metric(base.get_task(run_summary["task"]).output).headline],
        seconds=run_summary["seconds"]["train"] + run_summary["seconds"]["input_wait"],
        steps=run_summary["steps"],
        sync_s=sync_cost["seconds"],
        gradient_bytes=sync_cost["bytes"],
        workers=run_summary["workers"],
    )


def predict_sync_seconds(gradient_bytes: int, workers: int, bits_per_second: float) -> float:
    """Return the seconds of an all-reduce over a link: in a ring, each worker sends 2 (n - 1) / n of a gradient
    (Patarasuk and Yuan 2009). Without latency and without overlap with the backward pass."""
    return 2 * (workers - 1) / workers * gradient_bytes * 8 / bits_per_second


# --------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class FigureTable:
    """One figure for all results."""

    title: str
    frequencies: Sequence[int]
    rows: Mapping[str, Sequence[str]]
    """The figure at each frequency, by optimizer."""

    @property
    def to_markdown(self) -> str:
        head = f"| {self.title} | " + " | ".join(f"k = {k}" for k in self.frequencies) + " |"
        lines = [f"| {name} | " + " | ".join(row) + " |" for name, row in self.rows.items()]
        return "\n".join([head, "|---|" + "---|" * len(self.frequencies), *lines])


@dataclass(frozen=True)
class StudyTable:
    figures: Sequence[FigureTable]
    notes: Sequence[str]
    """Skipped frequencies and failed runs, with reasons."""
    document: Mapping[str, Any]

    @property
    def to_markdown(self) -> str:
        """Markdown for the terminal."""
        return "\n\n".join(
            [*(part.to_markdown for part in self.figures), *(["\n".join(self.notes)] if self.notes else [])]
        )


def build_study_table(
    results: Sequence[CellResult],
    headline: str,
    skipped_frequencies: Mapping[int, str] | None = None,
    networks: Mapping[str, float] | None = None,
) -> StudyTable:
    """Build the table of a study: rows are optimizers, columns are frequencies; a part for each figure.

    `networks`: measured seconds of an all-reduce by network; times over `PREDICTED_NETWORKS` are predicted in addition.

    """
    result_by_cell = {(result.optimizer, result.frequency): result for result in results}

    def saved_share(result: CellResult, seconds: Callable[[CellResult], float | None]) -> float | None:
        baseline_seconds, result_seconds = (
            seconds(result_by_cell[result.optimizer, BASELINE_FREQUENCY]),
            seconds(result),
        )
        return None if not baseline_seconds or result_seconds is None else 1 - result_seconds / baseline_seconds

    def score_loss(result: CellResult) -> float | None:
        baseline_score = result_by_cell[result.optimizer, BASELINE_FREQUENCY].score
        return None if baseline_score is None or result.score is None else baseline_score - result.score

    figures = [
        _figure_table(f"{headline} on the test rows", results, lambda result: result.score, "{:.4f}"),
        _figure_table(f"score loss against k = {BASELINE_FREQUENCY}", results, score_loss, "{:+.4f}"),
        _figure_table("seconds of training here", results, lambda result: result.seconds, "{:.1f}"),
        _figure_table("share in gradient synchronization", results, lambda result: result.sync_share, "{:.1%}"),
        _figure_table(
            f"time saved against k = {BASELINE_FREQUENCY}",
            results,
            lambda result: saved_share(result, lambda cell_result: cell_result.seconds),
            "{:.1%}",
        ),
    ]
    document: dict[str, Any] = {
        "headline": headline,
        "results": [
            {
                **asdict(result),
                "sync_share": result.sync_share,
                "saved_share": saved_share(result, lambda cell_result: cell_result.seconds),
                "score_loss": score_loss(result),
            }
            for result in results
        ],
        "skipped": {str(k): reason for k, reason in (skipped_frequencies or {}).items()},
        "networks": {},
    }
    for name, (source, cost) in _sync_seconds_by_network(networks or {}).items():

        def seconds_over_network(result: CellResult, cost: Callable[[CellResult], float] = cost) -> float | None:
            return result.seconds_at_sync(cost(result))

        title = f"seconds over {name}, {source} (saved)"
        figures.append(
            _figure_table(
                title,
                results,
                seconds_over_network,
                "{:.1f}",
                lambda result, network_seconds=seconds_over_network: saved_share(result, network_seconds),  # type: ignore[misc]
            )
        )
        document["networks"][name] = {
            "source": source,
            "sync_s": (networks or {}).get(name),
            "results": [
                {"optimizer": result.optimizer, "frequency": result.frequency, "seconds": seconds_over_network(result)}
                | {"saved_share": saved_share(result, seconds_over_network)}
                for result in results
            ],
        }
    notes = [f"k = {k} is skipped: {reason}." for k, reason in (skipped_frequencies or {}).items()]
    errors_by_cell = {f"{result.optimizer}, k = {result.frequency}": result.error for result in results if result.error}
    notes += [f"{name}: {error}" for name, error in errors_by_cell.items()]
    return StudyTable(figures, notes, document)


def load_study_table(document: Mapping[str, Any], networks: Mapping[str, float] | None = None) -> StudyTable:
    """Load the table of a stored study, with its networks and further ones."""
    field_names = CellResult.__dataclass_fields__.keys()
    results = [CellResult(**{name: result[name] for name in field_names}) for result in document["results"]]
    skipped_frequencies = {int(k): reason for k, reason in document["skipped"].items()}
    return build_study_table(
        results, document["headline"], skipped_frequencies, {**measured_networks(document), **(networks or {})}
    )


def measured_networks(document: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured seconds of an all-reduce by network, from a stored study."""
    sync_seconds = {name: network.get("sync_s") for name, network in document["networks"].items()}
    return {name: seconds for name, seconds in sync_seconds.items() if seconds is not None}


def save_document(study: Run, document: Mapping[str, Any]) -> None:
    study.study_table.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _sync_seconds_by_network(
    measured_seconds: Mapping[str, float],
) -> dict[str, tuple[str, Callable[[CellResult], float]]]:
    """Return by network: (`measured` or `predicted`, function from a result to the seconds of its all-reduce)."""

    def constant(seconds: float) -> Callable[[CellResult], float]:
        return lambda result: seconds if result.workers > 1 else 0.0

    def predict(bits: float) -> Callable[[CellResult], float]:
        return lambda result: predict_sync_seconds(result.gradient_bytes, result.workers, bits)

    sources = {name: ("predicted", predict(bits)) for name, bits in PREDICTED_NETWORKS.items()}
    return sources | {name: ("measured", constant(seconds)) for name, seconds in measured_seconds.items()}


def _figure_table(
    title: str,
    results: Iterable[CellResult],
    value: Callable[[CellResult], float | None],
    number_format: str,
    share: Callable[[CellResult], float | None] | None = None,
) -> FigureTable:
    """Build one figure for all results; `share` is shown in parentheses."""
    rows: dict[str, dict[int, str]] = {}
    for result in results:
        figure, share_value = value(result), share(result) if share else None
        cell_text = "failed" if figure is None else number_format.format(figure)
        rows.setdefault(result.optimizer, {})[result.frequency] = cell_text + (
            "" if share_value is None else f" ({share_value:.0%})"
        )
    columns = sorted({k for row in rows.values() for k in row})
    return FigureTable(title, columns, {name: [row.get(k, "") for k in columns] for name, row in rows.items()})


# ---------------------------------------------------------------------------------------------------------------- page


def write_study_page(study: Run) -> Path:
    """Write study.html. Raises `UserError` if the study has not ended."""
    document_path = study.study_table
    if not document_path.is_file():
        message = f"the study {study} has not ended; continue with rtrain tune --resume --out {study}"
        raise UserError(message, code="not_finished")
    return write_page(study.study_page, render_study_page(study.name, json_files.load_json_object(document_path)))


def render_study_page(name: str, document: Mapping[str, Any]) -> str:
    """Render the page of a stored study."""
    study_table, valid_results = (
        load_study_table(document),
        [result for result in document["results"] if result["error"] is None],
    )
    tables: list[Block] = [
        Shown(part.title, ("", *(f"k = {k}" for k in part.frequencies)), [(at, *row) for at, row in part.rows.items()])
        for part in study_table.figures
    ]
    notes: list[Block] = [Note(note) for note in study_table.notes]
    sections = [
        Section("trade", "Score for the time", "", _score_time_figure(document["headline"], valid_results)),
        Section("table", "The table", "k: micro-batches between two all-reduces.", tables + notes),
    ]
    subtitle = f"A study of aggregation frequencies by rtrain, {len(document['results'])} trainings"
    return render_html(name, subtitle, [], sections, lead=summarize_finding(document["headline"], valid_results))


def summarize_finding(headline: str, results: list[Mapping[str, Any]]) -> str:
    """Return the finding in one sentence: the fastest setting with a small score loss."""
    other_results = [
        result
        for result in results
        if result["frequency"] != BASELINE_FREQUENCY and None not in (result["score_loss"], result["saved_share"])
    ]
    close_results = [result for result in other_results if round(result["score_loss"], 4) <= SMALL_LOSS]
    if not close_results:
        return (
            f"No frequency above {BASELINE_FREQUENCY} keeps the {headline} within {SMALL_LOSS:g} of that with k = "
            f"{BASELINE_FREQUENCY}."
        )
    best_result = max(close_results, key=lambda result: result["saved_share"])
    direction = "less" if best_result["saved_share"] >= 0 else "more"
    return (
        f"{best_result['optimizer']} with k = {best_result['frequency']} takes {abs(best_result['saved_share']):.0%} "
        f"{direction} time than with "
        f"k = {BASELINE_FREQUENCY}, for {-best_result['score_loss']:+.4f} of {headline}."
    )


def _score_time_figure(headline: str, results: list[Mapping[str, Any]]) -> list[Block]:
    names = list(dict.fromkeys(result["optimizer"] for result in results))
    dots = [
        ScatterPoint(
            *(result["seconds"], result["score"], names.index(result["optimizer"]), f"k={result['frequency']}"),
            f"{result['optimizer']}, k = {result['frequency']}: {result['score']:.4f} in {result['seconds']:,.0f} s",
        )
        for result in results
        if result["seconds"]
    ]
    if not dots:
        return []
    chart = charts.draw_named_points(dots, names, "seconds of training", headline)
    return [Figure(f"The {headline} on the test rows for the time", chart, "Each point is a training to its end.")]
