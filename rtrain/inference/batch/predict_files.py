"""Predict files of rows (`rtrain predict --data`).

Predictions are computed as for requests (`rtrain.inference.predictor`). Rows are read by the settings of the artifact's
training rows (`rtrain.inference.score.resolve_data_settings`), but need no labels.

.<name>.chunks/manifest.json        digests of input, artifact and settings; a resume with others is refused
               chunks.jsonl         a line per chunk, written after its file: rows, size, SHA-256
               000000.csv ...       the rows of a chunk, written atomically
               writer.lock          locked by the writer
<name>                              the output, moved there when it is complete

A killed job loses its current chunks. `--resume` verifies the others and continues.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import fsspec
import fsspec.utils

from rtrain.config import DataConfig
from rtrain.core import atomic_write, env, manifest
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Head
from rtrain.data import row_reader, sources
from rtrain.data.row_reader import DataSource
from rtrain.inference import artifact as artifacts, score
from rtrain.inference.batch import chunks, formats
from rtrain.inference.batch.chunks import Chunk, FileSurvey
from rtrain.inference.batch.formats import Format, OutputSchema, detect_format
from rtrain.inference.batch.pipeline import AnswerCounts, AnsweredChunk, BatchPredictJob, ChunkAnswerer, load_copies
from rtrain.inference.predictor import DEFAULT_BATCH_SIZE
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn

PROGRESS_S = 5.0
SCHEMA_VERSION = 1
MANIFEST, LOG, LOCK = "manifest.json", "chunks.jsonl", "writer.lock"
BINDING_NAMES = {"input": "rows", "artifact": "artifact", "settings": "settings", "schema_version": "version of rtrain"}
"""Name of each manifest key, for messages."""
Reuse = Literal["refuse", "resume", "overwrite"]
OnEvent = Callable[[dict[str, Any]], None]
AnswerChunks = Callable[[BatchPredictJob, list[Chunk]], Iterator[AnsweredChunk]]
"""Predicts chunks in any order."""


@dataclass(frozen=True)
class BatchRequest:
    artifact: Path
    overrides: Mapping[str, Any]
    """`data` settings, with `path`."""
    batch_rows: int = DEFAULT_BATCH_SIZE
    with_label_scores: bool = False
    """Add a column for the score of each label."""

    def answer_columns(self, loaded_artifact: artifacts.Artifact) -> list[AnswerColumn]:
        task, head = base.get_task(loaded_artifact.task), Head(loaded_artifact.labels, loaded_artifact.facts)
        return task.answer_columns(head) + (formats.make_score_columns(task, head) if self.with_label_scores else [])


def answer_locally(job: BatchPredictJob, file_chunks: list[Chunk]) -> Iterator[AnsweredChunk]:
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
    # Every row is answered, also where data.where leaves rows out of a training.
    data = data.model_copy(update={**columns_of_scores, "slices": (), "labels": {}, "where": None})
    answer_columns = request.answer_columns(loaded_artifact)
    rows_source = row_reader.inspect_source(data)
    on_event({"kind": "stage", "text": "counting rows"})
    file_survey = chunks.survey_files(rows_source, data)
    output_schema = formats.build_output_schema(file_survey.column_types, answer_columns)
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
    counts: AnswerCounts, reused_rows: int, output_schema: formats.OutputSchema, seconds: float
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


class ChunkFolder:
    """The chunks of one output file, locked by this process. Use as a context manager."""

    def __init__(self, out: Path, format: Format, binding: Mapping[str, Any], reuse: Reuse):
        self.out, self._format, self._reuse = out, format, reuse
        self._binding = {"schema_version": SCHEMA_VERSION, **binding}
        self.path = out.with_name(f".{out.name}.chunks")
        self.counts_by_chunk: dict[int, AnswerCounts] = {}
        """Counts by chunk number."""
        self._lock = -1

    def __enter__(self) -> "ChunkFolder":
        """Raises `ConfigError` if the output exists, `UserError` if it cannot be written or resumed."""
        self._check_output()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); name another place with --out", code="not_writable"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"another process is writing {self.out}; wait until it ends, or name another --out",
                code="already_running",
            ) from None
        except OSError:
            pass  # storage without locks
        try:
            with self._map_write_errors():
                self._open_or_reset()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.counts_by_chunk:
            shutil.rmtree(self.path, ignore_errors=True)  # nothing to resume
        os.close(self._lock)

    def _check_output(self) -> None:
        refuse_existing(self.out, self._reuse != "refuse")
        if self._reuse == "refuse" and (self.path / MANIFEST).exists():
            fix = "continue with --resume, or start again with --overwrite"
            problem = Problem("--out", str(self.out), "an unfinished job writes it", fix, code="unfinished_job")
            raise ConfigError([problem])

    def _open_or_reset(self) -> None:
        stored_binding = self._stored_binding()
        if self._reuse != "resume" or stored_binding is None:
            for path in self.path.iterdir():
                if path.name != LOCK:
                    path.unlink()
            _write_atomically(self.path / MANIFEST, json.dumps(self._binding, indent=1).encode())
            return
        if changed_keys := [
            BINDING_NAMES[key] for key, value in self._binding.items() if stored_binding.get(key) != value
        ]:
            raise UserError(
                f"--resume: {self.out.name} was started with other {' and '.join(changed_keys)} ({self.path}); use the "
                "same, or start again with --overwrite",
                code="other_job",
            )
        log_lines = self._read_log()
        for line in log_lines:
            entry: manifest.FileEntry = {"size": line["size"], "sha256": line["sha256"]}
            if manifest.find_file_problem(self._chunk_path(line["number"]), entry) is None:
                self.counts_by_chunk[line["number"]] = AnswerCounts(*line["counts"])
        # Rewritten: a killed process may have left a partial line at its end.
        _write_atomically(self.path / LOG, b"".join(_encode_line(line) for line in log_lines))

    def _stored_binding(self) -> dict[str, Any] | None:
        """Return the stored manifest, or None."""
        path = self.path / MANIFEST
        if not path.exists():
            return None
        stored_binding = _parse_json(path.read_bytes())
        if stored_binding is None and self._reuse == "resume":
            raise UserError(f"--resume: {path} cannot be read; start again with --overwrite", code="unreadable")
        return stored_binding

    def _read_log(self) -> list[dict[str, Any]]:
        """Return the valid lines of the log. A killed process may leave a partial line, and a crashed machine zeros.
        Each line is verified by its chunk's file, so an invalid line costs that chunk only."""
        path = self.path / LOG
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        parsed_lines = [_parse_json(line) for line in lines]
        return [
            line for line in parsed_lines if line is not None and line.keys() >= {"number", "counts", "size", "sha256"}
        ]

    def _chunk_path(self, number: int) -> Path:
        return self.path / f"{number:06d}.{self._format}"

    def add_chunk(self, answered_chunk: AnsweredChunk) -> None:
        """Write a chunk's file atomically, and then its line in the log."""
        path = self._chunk_path(answered_chunk.number)
        with self._map_write_errors():
            _write_atomically(path, answered_chunk.body)
            line = {
                "number": answered_chunk.number,
                "counts": list(answered_chunk.counts),
                **manifest.compute_entry(path),
            }
            with (self.path / LOG).open("ab") as log:
                log.write(_encode_line(line))
                log.flush()
                os.fsync(log.fileno())
        self.counts_by_chunk[answered_chunk.number] = answered_chunk.counts

    def join_chunks(self, output_schema: OutputSchema, chunks: Sequence[Chunk]) -> None:
        """Join the chunks to the output file, and remove the folder."""
        mismatched = [
            chunk.number
            for chunk in chunks
            if self.counts_by_chunk.get(chunk.number, AnswerCounts(0, 0, 0)).rows != chunk.rows
        ]
        assert not mismatched, f"chunks {mismatched[:5]} have other rows than the input"
        joined_file = self.path / f"whole.{self._format}"
        with self._map_write_errors():
            with joined_file.open("wb") as file:
                formats.join_chunks(
                    self._format, output_schema, (self._chunk_path(chunk.number) for chunk in chunks), file
                )
            atomic_write.sync(joined_file)
            joined_file.replace(self.out)
            atomic_write.sync(self.out.parent)
        shutil.rmtree(self.path)

    @contextmanager
    def _map_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); fix that, and continue with --resume",
                code="not_writable",
            ) from None


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise `ConfigError` for an existing file without --overwrite, and for a folder."""
    if out.is_dir():
        raise ConfigError([Problem("--out", str(out), "is a folder", "name a file in it", code="is_a_folder")])
    if out.exists() and not overwrite:
        fix = "name another, or replace it with --overwrite"
        raise ConfigError([Problem("--out", str(out), "the file exists", fix, code="already_exists")])


def refuse_among_rows(source: DataSource, data: DataConfig, out: Path) -> None:
    """Raise `ConfigError` if the next call would read the output as rows."""
    output_path, data_path = out.resolve(), Path(fsspec.core.strip_protocol(str(data.path))).resolve()
    is_source_file = any(Path(file.uri.removeprefix("file://")).resolve() == output_path for file in source.files)
    # By fsspec's rule, which finds the rows: in Python 3.11 and 3.12 `**` is one folder, in fsspec any number.
    is_matched = sources.is_glob(str(data.path)) and re.match(
        fsspec.utils.glob_translate(str(data_path)), str(output_path)
    )
    if is_source_file or is_matched or (data_path.is_dir() and output_path.is_relative_to(data_path)):
        reason, fix = "it is among the rows that --data names", "write the answers to another folder"
        raise ConfigError([Problem("--out", str(out), reason, fix, code="among_the_rows")])


def _parse_json(body: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the bytes are not one."""
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _encode_line(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _write_atomically(path: Path, body: bytes) -> None:
    with atomic_write.replace_file(path) as draft:
        draft.write_bytes(body)
