"""`rtrain profile RECIPE`: rows measured one after another, then the table, the page, the JSON document, the trace."""

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
from rtrain.models.int8_support import processor
from rtrain.parallel.timeline import SENDS
from rtrain.profiling import measure, page
from rtrain.profiling.cases import Length, Row
from rtrain.profiling.measurements import Worker
from rtrain.runs import prepare

KIND, VERSION = "rtrain profile", 1
NEEDED = ("name", "recipe", "task", "model", "length", "machine", "rows")
"""What a document is not written without, and read for."""
JSON, PAGE, TRACE = "profile.json", "profile.html", "trace.json"
Session = Callable[[Config, Path], AbstractContextManager[None]]
OnEvent = Callable[[dict[str, Any]], None]


def check(configs: Iterable[Config], folder: Path) -> None:
    """Refuse what can be refused, before Ray starts: of every row, what a training of it would be refused for."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder", code="not_empty")
    for config in configs:
        prepare.check(config, folder.parent)


def run(
    config: Config, rows: Sequence[Row], length: Length, folder: Path, session: Session, on_event: OnEvent
) -> dict[str, Any]:
    """Measure `rows` of a recipe and write the files of the profile into `folder`; returns its document.

    Each row has a `session` of its own: how many processors Ray has is part of what is measured.
    """
    check((row.config for row in rows), folder)
    load, measured = [os.getloadavg()[0]], list[measure.Measured]()
    for number, row in enumerate(rows):
        with session(row.config, folder):
            if len(rows) > 1:
                on_event({"kind": "stage", "text": f"row {number + 1} of {len(rows)}: {row.name}"})
            on_event(events.doing("reading the rows", "rows"))
            place, train = folder / f"row-{number:02d}", config.recipe.train
            measured.append(measure.row(row, place, length, train.epochs, on_event, train.evaluate_every))
    document = {
        "kind": KIND,
        "version": VERSION,
        "name": folder.name,
        "recipe": config.recipe.name,
        "task": config.recipe.task,
        "model": config.recipe.model.name,
        "time": round(time.time(), 3),
        "length": {"updates": length.updates, "warm_up": length.warm_up},
        "machine": {
            "host": os.uname().nodename,
            "cores": env.cores(),
            "processor": processor(),
            "load": [*load, os.getloadavg()[0]],
        },
        "rows": [one.figures for one in measured],
    }
    spans = [
        event
        for number, (row, one) in enumerate(zip(rows, measured, strict=True))
        for event in trace_events(row.name, number, one.workers)
    ]
    (folder / TRACE).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": spans}), encoding="utf-8")
    (folder / PAGE).write_text(page.page(document), encoding="utf-8")
    (folder / JSON).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def read(path: Path) -> dict[str, Any]:
    """A profile's document, by its file or by the folder of the profile. Raises `UserError` where there is none."""
    file = path / JSON if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--beside: {path} is no profile; name a {JSON} or the folder that holds it", code="not_found")
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = document["version"] if document["kind"] == KIND else None
    except (ValueError, KeyError, TypeError):
        version = None
    if version != VERSION:
        fix = (
            "profile again with this version of rtrain" if version else f"name a {JSON} that rtrain profile has written"
        )
        raise UserError(f"--beside: {file} is no profile of version {VERSION}; {fix}", code="other_version")
    if lacking := [name for name in NEEDED if not document.get(name)]:
        raise UserError(f"--beside: {file} lacks {', '.join(lacking)}; profile again", code="incomplete")
    return document


# ----------------------------------------------------------------------------------------------------- the Chrome trace

# The JSON object form of the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: complete
# events (`X`) on a worker's main thread, which nest; and pairs of asynchronous events (`b`, `e`) for parts of an
# exchange that are under way beside it, since several are at a time.
MAIN = 1
"""Thread of what the worker does itself."""
ROWS_APART = 1000
"""Process ids from one row of the profile to the next."""


def trace_events(name: str, number: int, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """The events of row `number`, from 0, of a profile. Times are microseconds since its first update."""
    begin = min(one.updates[0].window.start + one.epoch for one in workers)
    return [event for worker in workers for event in _of_worker(name, number * ROWS_APART, worker, begin)]


def _of_worker(name: str, first: int, worker: Worker, begin: int) -> Iterator[dict[str, Any]]:
    process = first + worker.rank
    label = f"{name}, worker {worker.rank} on {worker.host}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": MAIN, "args": {"name": "training"}}

    def at(moment: int) -> float:
        return (moment + worker.epoch - begin) / 1e3

    for update in worker.updates:
        window, counts = update.window, {"rows": update.rows, "passes": update.passes, "tokens": update.real_tokens}
        span = {"ts": at(window.start), "dur": window.wall / 1e3, "pid": process, "tid": MAIN}
        yield {"ph": "X", "name": f"update {window.number}", "cat": "update", **span, "args": counts}
        for place, one in enumerate(window.spans):
            known = {"name": one.kind, "cat": one.kind, "pid": process, "tid": MAIN}
            if one.kind == SENDS:
                identity = f"{process}-{window.number}-{place}"
                yield {"ph": "b", "id": identity, "ts": at(one.start), **known}
                yield {"ph": "e", "id": identity, "ts": at(one.stop), **known}
            else:
                yield {"ph": "X", "ts": at(one.start), "dur": (one.stop - one.start) / 1e3, **known}
