"""`rtrain profile RECIPE`: measure the rows in sequence, then write the table, the page, the JSON document and the
trace."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rtrain.config import Config
from rtrain.core import env, events
from rtrain.core.errors import UserError
from rtrain.models.int8_support import read_cpu_name
from rtrain.parallel.timeline import COMM_ASYNC
from rtrain.profiling import measure, page
from rtrain.profiling.cases import ProfileLength, ProfileRow
from rtrain.profiling.measurements import ProfiledWorker
from rtrain.runs import prepare

DOCUMENT_KIND, DOCUMENT_VERSION = "rtrain profile", 2
REQUIRED_KEYS = ("name", "recipe", "task", "model", "length", "machine", "rows")
"""Required keys of a profile document."""
JSON_FILE, PAGE_FILE, TRACE_FILE = "profile.json", "profile.html", "trace.json"
SessionFactory = Callable[[Config, Path], AbstractContextManager[None]]
OnEvent = Callable[[dict[str, Any]], None]


def check_profile(configs: Iterable[Config], folder: Path) -> None:
    """Refuse before Ray starts: each row is checked like a training run."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder", code="not_empty")
    for config in configs:
        prepare.check_run(config, folder.parent)


def run_profile(
    config: Config,
    rows: Sequence[ProfileRow],
    length: ProfileLength,
    folder: Path,
    session: SessionFactory,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Measure `rows` of a recipe, write the profile's files into `folder`, and return its document.

    Each row has its own `session`: the number of Ray's CPUs is part of the measurement.
    """
    check_profile((row.config for row in rows), folder)
    load_averages, measured_rows = [os.getloadavg()[0]], list[measure.MeasuredRow]()
    for index, row in enumerate(rows):
        with session(row.config, folder):
            if len(rows) > 1:
                on_event({"kind": "stage", "text": f"row {index + 1} of {len(rows)}: {row.name}"})
            on_event(events.make_phase_event("reading the rows", "rows"))
            row_folder, train = folder / f"row-{index:02d}", config.recipe.train
            measured_rows.append(
                measure.measure_row(row, row_folder, length, train.epochs, on_event, train.evaluate_every)
            )
    document = {
        "kind": DOCUMENT_KIND,
        "version": DOCUMENT_VERSION,
        "name": folder.name,
        "recipe": config.recipe.name,
        "task": config.recipe.task,
        "model": config.recipe.model.name,
        "time": round(time.time(), 3),
        "length": {"steps": length.steps, "warm_up": length.warm_up_steps},
        "machine": {
            "host": os.uname().nodename,
            "cores": env.available_cores(),
            "processor": read_cpu_name(),
            "load": [*load_averages, os.getloadavg()[0]],
        },
        "rows": [measured_row.row_summary for measured_row in measured_rows],
    }
    events_of_rows = [
        event
        for number, (row, measured_row) in enumerate(zip(rows, measured_rows, strict=True))
        for event in build_trace_events(row.name, number, measured_row.workers)
    ]
    (folder / TRACE_FILE).write_text(
        json.dumps({"displayTimeUnit": "ms", "traceEvents": events_of_rows}), encoding="utf-8"
    )
    (folder / PAGE_FILE).write_text(page.render_profile(document), encoding="utf-8")
    (folder / JSON_FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile document from its file or its folder. Raises `UserError` for anything else."""
    file = path / JSON_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--compare: {path} is not a profile; name a {JSON_FILE} or its folder", code="not_found")
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = document["version"] if document["kind"] == DOCUMENT_KIND else None
    except (ValueError, KeyError, TypeError):
        version = None
    if version != DOCUMENT_VERSION:
        fix = "profile again with this version of rtrain" if version else f"name a {JSON_FILE} of rtrain profile"
        raise UserError(
            f"--compare: {file} is not a profile of version {DOCUMENT_VERSION}; {fix}", code="other_version"
        )
    if missing := [name for name in REQUIRED_KEYS if not document.get(name)]:
        raise UserError(f"--compare: {file} lacks {', '.join(missing)}; profile again", code="incomplete")
    return document


# ----------------------------------------------------------------------------------------------------- the Chrome trace

# The Trace Event Format of Perfetto (ui.perfetto.dev) and chrome://tracing: nested complete events (`X`) on a worker's
# main thread, and pairs of asynchronous events (`b`, `e`) for gradient buckets in flight, since several overlap.
MAIN_THREAD = 1
"""Thread of the worker's own work."""
PROCESS_IDS_PER_ROW = 1000
"""Process ids per row of the profile."""


def build_trace_events(name: str, index: int, workers: Sequence[ProfiledWorker]) -> list[dict[str, Any]]:
    """Build the trace events of row `index` (from 0). Times are microseconds since its first step."""
    start_ns = min(worker.steps[0].window.start + worker.epoch for worker in workers)
    return [
        event for worker in workers for event in _worker_events(name, index * PROCESS_IDS_PER_ROW, worker, start_ns)
    ]


def _worker_events(name: str, first_process_id: int, worker: ProfiledWorker, start_ns: int) -> Iterator[dict[str, Any]]:
    process_id = first_process_id + worker.rank
    label = f"{name}, worker {worker.rank} on {worker.host}"
    yield {"ph": "M", "name": "process_name", "pid": process_id, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process_id, "args": {"sort_index": process_id}}
    yield {"ph": "M", "name": "thread_name", "pid": process_id, "tid": MAIN_THREAD, "args": {"name": "training"}}

    def to_trace_time(time_ns: int) -> float:
        return (time_ns + worker.epoch - start_ns) / 1e3

    for step in worker.steps:
        window, counts = (
            step.window,
            {"rows": step.rows, "micro_batches": step.micro_batches, "tokens": step.real_tokens},
        )
        timing = {"ts": to_trace_time(window.start), "dur": window.wall / 1e3, "pid": process_id, "tid": MAIN_THREAD}
        yield {"ph": "X", "name": f"step {window.step_number}", "cat": "step", **timing, "args": counts}
        for index, span in enumerate(window.spans):
            common = {"name": span.kind, "cat": span.kind, "pid": process_id, "tid": MAIN_THREAD}
            if span.kind == COMM_ASYNC:
                span_id = f"{process_id}-{window.step_number}-{index}"
                yield {"ph": "b", "id": span_id, "ts": to_trace_time(span.start), **common}
                yield {"ph": "e", "id": span_id, "ts": to_trace_time(span.stop), **common}
            else:
                yield {"ph": "X", "ts": to_trace_time(span.start), "dur": (span.stop - span.start) / 1e3, **common}
