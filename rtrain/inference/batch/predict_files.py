"""An artefact and files of rows -> a file of answers: the verb `predict --data`.

The answers go through `rtrain.inference.predictor`, as those of requests do. Rows are read as the artefact's own
training rows were (`rtrain.inference.score.settings`), but need no labels.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core import env
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head
from rtrain.data import row_reader
from rtrain.inference import artifact as artifacts, score
from rtrain.inference.batch import chunks, columns
from rtrain.inference.batch.chunks import Portion, Survey
from rtrain.inference.batch.formats import Format, format_of
from rtrain.inference.batch.output_folder import Folder, Reuse, refuse_among_rows
from rtrain.inference.batch.pipeline import Answered, Answerer, Counts, Work, copies
from rtrain.inference.predictor import BATCH_ROWS
from rtrain.tasks import base
from rtrain.tasks.base import Column

PROGRESS_S = 5.0

OnEvent = Callable[[dict[str, Any]], None]
Answers = Callable[[Work, list[Portion]], Iterator[Answered]]
"""Answers portions in any order."""


@dataclass(frozen=True)
class Asked:
    """The rows to answer, by what, and how they are read."""

    artifact: Path
    overrides: Mapping[str, Any]
    """Settings of `data`, its `path` among them."""
    batch_rows: int = BATCH_ROWS
    scores: bool = False
    """Whether each label's score has a column of its own."""

    def columns(self, made: artifacts.Artifact) -> list[Column]:
        """The answers' columns."""
        task, head = base.get(made.task), Head(made.labels, made.facts)
        return task.columns(head) + (columns.score_columns(task, head) if self.scores else [])


def here(work: Work, portions: list[Portion]) -> Iterator[Answered]:
    """The portions answered in this process."""
    if len(portions) < 2:
        return Answerer(work).each(portions) if portions else iter(())
    return Answerer(work, copies(work.artifact, env.cores())).each(portions)


def to_file(
    asked: Asked, out: Path, reuse: Reuse = "refuse", answers: Answers = here, on_event: OnEvent = lambda event: None
) -> dict[str, Any]:
    """Answer all rows into the file `out`; returns counts and seconds.

    Raises `ConfigError` where files, columns or `out` cannot be used.
    """
    start, format = time.perf_counter(), format_of(out)
    work, found, version = _opened(asked, format, on_event)
    refuse_among_rows(work.source, work.data, out)
    binding = {"input": work.source.digest(), "artifact": version, "settings": _settings(work)}
    with Folder(out, format, binding, reuse) as folder:
        left = [portion for portion in found.portions if portion.number not in folder.done]
        reused = sum(counts.rows for counts in folder.done.values())
        if reuse == "resume":
            on_event({"kind": "stage", "text": f"{reused:,} of {found.rows:,} rows are answered already"})
        progress = _Progress(found.rows, reused, on_event)
        for answered in answers(work, left):
            folder.add(answered)
            progress(answered.counts.rows)
        if row_reader.Source(work.source.pieces, work.source.columns).digest() != binding["input"]:
            raise UserError(
                f"{asked.overrides['data.path']} was changed while it was read; begin anew with --overwrite",
                code="rows_changed",
            )
        folder.join(work.layout, found.portions)
        totals = [sum(column) for column in zip(*folder.done.values(), strict=True)] or [0, 0, 0]
    return {**_report(Counts(*totals), reused, work.layout, time.perf_counter() - start), "out": str(out)}


# ------------------------------------------------------------------------------------------------------ what is asked


def _opened(asked: Asked, format: Format, on_event: OnEvent) -> tuple[Work, Survey, str]:
    """The work, its portions, and the artefact's version. Rows are read without labels, and without what only scores
    need."""
    made = artifacts.read(asked.artifact)
    data = score.settings(made, asked.overrides)
    columns_of_scores = dict.fromkeys(("label", "separator", "split_by", "split", "outside", "id"))
    data = data.model_copy(update={**columns_of_scores, "slices": ()})
    answer = asked.columns(made)
    found = row_reader.inspect(data)
    on_event({"kind": "stage", "text": "counting rows"})
    survey = chunks.survey(found, data)
    layout = columns.layout(survey.kinds, answer)
    work = Work(asked.artifact, found, data, layout, format, asked.batch_rows, asked.scores)
    for name, other in layout.renamed.items():
        on_event({"kind": "stage", "text": f"the rows have a column {name!r} of their own: the answer's is {other!r}"})
    return work, survey, made.version


def _settings(work: Work) -> dict[str, Any]:
    """What else an answer's bytes depend on."""
    return {
        "data": work.data.model_dump(mode="json", exclude={"path"}),
        "batch": work.batch_rows,
        "scores": work.scores,
    }


# ----------------------------------------------------------------------------------------------------------- the report


def _report(counts: Counts, reused: int, layout: columns.Layout, seconds: float) -> dict[str, Any]:
    rate = round((counts.rows - reused) / seconds, 1)
    figures = {"rows": counts.rows, **counts._asdict(), "reused_rows": reused}
    return {**figures, "seconds": round(seconds, 3), "texts_per_second": rate, "renamed": layout.renamed}


class _Progress:
    """Says every `PROGRESS_S` seconds how many rows are answered, how fast, and how long the rest will take."""

    def __init__(self, rows: int, done: int, on_event: OnEvent):
        self._rows, self._done, self._on_event = rows, done, on_event
        self._first = (0.0, 0)
        """Time and rows when the first portion was done, which took the loading of the model too."""
        self._said = 0.0

    def __call__(self, rows: int) -> None:
        self._done += rows
        now = time.perf_counter()
        if not self._said:
            self._first = (now, self._done)
        if now - self._said < PROGRESS_S and self._done < self._rows:
            return
        self._said = now
        seconds, new = now - self._first[0], self._done - self._first[1]
        speed = new / seconds if new else None
        left = (self._rows - self._done) / speed if speed else None
        self._on_event(
            {"kind": "answered", "rows": self._done, "of": self._rows, "rows_per_second": speed, "left_s": left}
        )
