"""Predict files of rows (`rtrain predict --data`).

Predictions are computed as for requests (`rtrain.inference.predictor`). Rows are read by the settings of the artifact's
training rows (`rtrain.inference.score.resolve_data_settings`), but need no labels.

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
from rtrain.inference.batch.chunks import Chunk, FileSurvey
from rtrain.inference.batch.formats import Format, detect_format
from rtrain.inference.batch.output_folder import ChunkFolder, Reuse, refuse_among_rows
from rtrain.inference.batch.pipeline import AnswerCounts, AnsweredChunk, BatchPredictJob, ChunkAnswerer, load_copies
from rtrain.inference.predictor import DEFAULT_BATCH_SIZE
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn

PROGRESS_S = 5.0

OnEvent = Callable[[dict[str, Any]], None]
AnswerChunks = Callable[[BatchPredictJob, list[Chunk]], Iterator[AnsweredChunk]]
"""Predicts chunks in any order."""


@dataclass(frozen=True)
class BatchRequest:
    """Rows, artifact and settings of a batch prediction."""

    artifact: Path
    overrides: Mapping[str, Any]
    """`data` settings, with `path`."""
    batch_rows: int = DEFAULT_BATCH_SIZE
    with_label_scores: bool = False
    """Add a column for the score of each label."""

    def answer_columns(self, loaded_artifact: artifacts.Artifact) -> list[AnswerColumn]:
        """Return the columns of the predictions."""
        task, head = base.get_task(loaded_artifact.task), Head(loaded_artifact.labels, loaded_artifact.facts)
        return task.answer_columns(head) + (columns.make_score_columns(task, head) if self.with_label_scores else [])


def answer_locally(job: BatchPredictJob, file_chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
    """Predict the chunks in this process."""
    if len(file_chunks) < 2:
        return ChunkAnswerer(job).answer_all(file_chunks) if file_chunks else iter(())
    return ChunkAnswerer(job, load_copies(job.artifact, env.available_cores())).answer_all(file_chunks)


def answer_to_file(
    request: BatchRequest,
    out: Path,
    reuse: Reuse = "refuse",
    answer_chunks: AnswerChunks = answer_locally,
    on_event: OnEvent = lambda event: None,
) -> dict[str, Any]:
    """Predict all rows into the file `out`; return counts and seconds.

    Raises `ConfigError` for invalid files, columns or `out`.

    """
    start, format = time.perf_counter(), detect_format(out)
    job, file_survey, version = _prepare_job(request, format, on_event)
    refuse_among_rows(job.source, job.data, out)
    binding = {"input": job.source.digest(), "artifact": version, "settings": _job_settings(job)}
    with ChunkFolder(out, format, binding, reuse) as chunk_folder:
        remaining_chunks = [chunk for chunk in file_survey.chunks if chunk.number not in chunk_folder.counts_by_chunk]
        reused_rows = sum(counts.rows for counts in chunk_folder.counts_by_chunk.values())
        if reuse == "resume":
            on_event({"kind": "stage", "text": f"{reused_rows:,} of {file_survey.rows:,} rows are predicted already"})
        progress = _AnswerProgress(file_survey.rows, reused_rows, on_event)
        for answered_chunk in answer_chunks(job, remaining_chunks):
            chunk_folder.add_chunk(answered_chunk)
            progress(answered_chunk.counts.rows)
        if row_reader.DataSource(job.source.files, job.source.columns).digest() != binding["input"]:
            raise UserError(
                f"{request.overrides['data.path']} was changed while it was read; start again with --overwrite",
                code="rows_changed",
            )
        chunk_folder.join_chunks(job.output_schema, file_survey.chunks)
        totals = [sum(column) for column in zip(*chunk_folder.counts_by_chunk.values(), strict=True)] or [0, 0, 0]
    return {
        **_make_report(AnswerCounts(*totals), reused_rows, job.output_schema, time.perf_counter() - start),
        "out": str(out),
    }


# ------------------------------------------------------------------------------------------------------ the job


def _prepare_job(request: BatchRequest, format: Format, on_event: OnEvent) -> tuple[BatchPredictJob, FileSurvey, str]:
    """Return the job, the chunks, and the artifact's version. Rows are read without labels and other columns of
    scoring."""
    loaded_artifact = artifacts.read_artifact(request.artifact)
    data = score.resolve_data_settings(loaded_artifact, request.overrides)
    columns_of_scores = dict.fromkeys(
        ("label", "separator", "group_column", "split_column", "out_of_scope_label", "id")
    )
    data = data.model_copy(update={**columns_of_scores, "slices": ()})
    answer_columns = request.answer_columns(loaded_artifact)
    rows_source = row_reader.inspect_source(data)
    on_event({"kind": "stage", "text": "counting rows"})
    file_survey = chunks.survey_files(rows_source, data)
    output_schema = columns.build_output_schema(file_survey.column_types, answer_columns)
    job = BatchPredictJob(
        request.artifact, rows_source, data, output_schema, format, request.batch_rows, request.with_label_scores
    )
    for name, new_name in output_schema.renamed_columns.items():
        on_event(
            {"kind": "stage", "text": f"the rows have a column {name!r} of their own: the answer's is {new_name!r}"}
        )
    return job, file_survey, loaded_artifact.version


def _job_settings(job: BatchPredictJob) -> dict[str, Any]:
    """Return the settings that the output bytes depend on."""
    return {
        "data": job.data.model_dump(mode="json", exclude={"path"}),
        "batch": job.batch_rows,
        "scores": job.with_label_scores,
    }


# ----------------------------------------------------------------------------------------------------------- the report


def _make_report(
    counts: AnswerCounts, reused_rows: int, output_schema: columns.OutputSchema, seconds: float
) -> dict[str, Any]:
    rate = round((counts.rows - reused_rows) / seconds, 1)
    figures = {"rows": counts.rows, **counts._asdict(), "reused_rows": reused_rows}
    return {**figures, "seconds": round(seconds, 3), "texts_per_second": rate, "renamed": output_schema.renamed_columns}


class _AnswerProgress:
    """Reports every `PROGRESS_S` seconds the number of predicted rows, the speed and the remaining time."""

    def __init__(self, rows: int, rows_done: int, on_event: OnEvent):
        self._rows, self._rows_done, self._on_event = rows, rows_done, on_event
        self._first_report = (0.0, 0)
        """Time and rows at the first chunk, whose time includes the loading of the model."""
        self._reported_at = 0.0

    def __call__(self, rows: int) -> None:
        self._rows_done += rows
        now = time.perf_counter()
        if not self._reported_at:
            self._first_report = (now, self._rows_done)
        if now - self._reported_at < PROGRESS_S and self._rows_done < self._rows:
            return
        self._reported_at = now
        seconds, new_rows = now - self._first_report[0], self._rows_done - self._first_report[1]
        speed = new_rows / seconds if new_rows else None
        seconds_left = (self._rows - self._rows_done) / speed if speed else None
        self._on_event(
            {
                "kind": "answered",
                "rows": self._rows_done,
                "of": self._rows,
                "rows_per_second": speed,
                "left_s": seconds_left,
            }
        )
