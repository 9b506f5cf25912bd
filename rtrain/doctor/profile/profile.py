"""`rtrain profile RECIPE`: rows measured one after another, then the table, the page, the JSON document, the trace."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rtrain import env, events
from rtrain.config import Config
from rtrain.doctor.profile import measure, page, trace
from rtrain.doctor.profile.rows import Length, Row
from rtrain.errors import UserError
from rtrain.network.int8 import processor
from rtrain.runs import preparing

KIND, VERSION = "rtrain profile", 1
NEEDED = ("name", "recipe", "task", "model", "length", "machine", "rows")
"""What a document is not written without, and read for."""
JSON, PAGE, TRACE = "profile.json", "profile.html", "trace.json"
Session = Callable[[Config, Path], AbstractContextManager[None]]
OnEvent = Callable[[dict[str, Any]], None]


def check(configs: Iterable[Config], folder: Path) -> None:
    """Refuse what can be refused, before Ray starts: of every row, what a training of it would be refused for."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder")
    for config in configs:
        preparing.check(config, folder.parent)


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
        for event in trace.events(row.name, number, one.workers)
    ]
    (folder / TRACE).write_text(json.dumps(trace.document(spans)), encoding="utf-8")
    (folder / PAGE).write_text(page.page(document), encoding="utf-8")
    (folder / JSON).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def read(path: Path) -> dict[str, Any]:
    """A profile's document, by its file or by the folder of the profile. Raises `UserError` where there is none."""
    file = path / JSON if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--beside: {path} is no profile; name a {JSON} or the folder that holds it")
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = document["version"] if document["kind"] == KIND else None
    except (ValueError, KeyError, TypeError):
        version = None
    if version != VERSION:
        fix = (
            "profile again with this version of rtrain" if version else f"name a {JSON} that rtrain profile has written"
        )
        raise UserError(f"--beside: {file} is no profile of version {VERSION}; {fix}")
    if lacking := [name for name in NEEDED if not document.get(name)]:
        raise UserError(f"--beside: {file} lacks {', '.join(lacking)}; profile again")
    return document
