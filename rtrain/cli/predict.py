"""The verb predict: texts of the command line or of stdin, or rows of files."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtrain.cli.options import build_config, format_arguments, hint_on_interrupt
from rtrain.cli.output import format_batch_report, format_entries, print_result, select_entries
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rtrain.inference.batch.output_folder import Reuse
    from rtrain.inference.predictor import Predictor

LINES_PER_CHUNK = 4096
"""Lines of standard input per batch."""


@dataclass(frozen=True)
class PredictOptions:
    """The options of the verb."""

    artifact: Path
    texts: list[str]
    data: str | None
    out: Path | None
    resume: bool
    overwrite: bool
    top: int | None
    batch: int | None
    as_json: bool
    as_texts: bool
    scores: bool

    def check(self, assignments: list[str] | None, address: str | None) -> None:
        """Raise `ConfigError` with all conflicting options."""
        problems: list[Problem] = []

        def refuse(is_wrong: bool, field: str, reason: str, fix: str) -> None:
            if is_wrong:
                problems.append(Problem(field, None, reason, fix, code="conflicting_settings"))

        file_options = (
            *(("--out", self.out), ("--resume", self.resume), ("--overwrite", self.overwrite)),
            *(("--set", assignments), ("--address", address), ("--scores", self.scores)),
        )
        for name, value in file_options:
            refuse(bool(value) and self.data is None, name, "is for rows of files", "name them with --data FILE")
        if self.data is not None:
            refuse(bool(self.texts), "--data", "there are texts too", "leave out one of the two")
            refuse(
                self.top is not None, "--top", "is for texts", "leave it out, or write --scores for each label's score"
            )
            refuse(self.out is None, "--out", "missing", "name the file of the answers")
            refuse(self.resume and self.overwrite, "--resume", "--overwrite begins anew", "leave out one of the two")
        for text in () if self.as_texts else self.texts:
            if os.path.isfile(text):
                fix = (
                    f"rtrain predict {self.artifact} --data {text} --out answers.csv answers its rows; --text takes it"
                )
                problems.append(Problem("text", text, "is the name of a file", f"{fix} as a text", code="is_a_file"))
        if problems:
            raise ConfigError(problems)


# --------------------------------------------------------------------------------------------------------------- texts


def print_texts(options: PredictOptions) -> None:
    """Print a line for each text. An unreadable text has an empty line (null with --json), and its reason on stderr;
    the exit code is 1 if no text was answered."""
    from rtrain.inference.predictor import Predictor

    predictor = Predictor.load(options.artifact)
    thresholds = predictor.task.label_thresholds(predictor.head)
    unit, lines = ("text", iter(options.texts)) if options.texts else ("line", _iter_stdin_lines())
    first_number, num_answered, documents = 1, 0, []
    while texts := list(islice(lines, LINES_PER_CHUNK)):
        for answer in _predict_texts(predictor, texts, f"{unit} {{}}", first_number, options):
            num_answered += answer is not None
            entries = select_entries(answer, thresholds, options.top)
            if options.as_json:
                documents.append(entries)
            else:
                print("" if answer is None else format_entries(entries, thresholds))
        first_number += len(texts)
    if options.as_json:
        print(json.dumps(documents, ensure_ascii=False))
    if first_number > 1 and not num_answered:
        raise typer.Exit(1)


def _iter_stdin_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _predict_texts(
    predictor: "Predictor", texts: list[str], unit_format: str, first_number: int, options: PredictOptions
) -> list[Any]:
    """Yield the answer to each text; None for an unreadable text."""
    from rtrain.inference.predictor import DEFAULT_BATCH_SIZE

    problems = [predictor.validate_input(text) for text in texts]
    for number, problem in enumerate(problems, first_number):
        if problem is not None:
            print(f"rtrain: {unit_format.format(number)} {problem}", file=sys.stderr)
    valid_texts = [text for text, flaw in zip(texts, problems, strict=True) if flaw is None]
    # Where entries count by a threshold, all are asked for: it may let any number of them pass.
    wants_all = options.top is None and predictor.task.label_thresholds(predictor.head) is not None
    parameters = {} if wants_all else {"top_k": options.top or 1}
    answers = iter(predictor(valid_texts, parameters, batch_size=options.batch or DEFAULT_BATCH_SIZE))
    return [next(answers) if flaw is None else None for flaw in problems]


# ---------------------------------------------------------------------------------------------------------------- rows


def write_answers(options: PredictOptions, assignments: list[str] | None, address: str | None) -> None:
    """Write the answers to the rows of --data to --out; the exit code is 1 if rows exist and none was answered."""
    from rtrain import config
    from rtrain.core import events
    from rtrain.inference.batch import predict_files
    from rtrain.inference.predictor import DEFAULT_BATCH_SIZE
    from rtrain.report.live.progress import ProgressLine

    assert options.data is not None
    assert options.out is not None
    overrides = dict(config.parse_assignment(text) for text in assignments or ())
    data_settings = {"data.path": options.data, **overrides}
    request = predict_files.BatchRequest(
        options.artifact, data_settings, options.batch or DEFAULT_BATCH_SIZE, options.scores
    )
    out = options.out.expanduser().absolute()
    with hint_on_interrupt(lambda: _resume_command(options, assignments, address)), ProgressLine() as line:
        line(events.make_phase_event("loading the artifact", "loading"))
        reuse: Reuse = "resume" if options.resume else "overwrite" if options.overwrite else "refuse"
        if address is None and "RAY_ADDRESS" not in os.environ:
            report = predict_files.answer_to_file(request, out, reuse, on_event=line)
        else:
            from rtrain.inference.batch import actors

            cluster = build_config("intent", None, address=address)
            report = predict_files.answer_to_file(
                request, out, reuse, actors.make_cluster_answerer(cluster, out.parent), line
            )
    print_result(report, options.as_json, f"{format_batch_report(report)}\n{out}")
    if report["rows"] and not report["answered"]:
        raise typer.Exit(1)


def _resume_command(options: PredictOptions, assignments: list[str] | None, address: str | None) -> str:
    """Return the command that resumes the job."""
    from rtrain.report.live.progress import format_next_command

    arguments = format_arguments(
        str(options.artifact), assignments, data=options.data, batch=options.batch, address=address
    )
    extra_arguments = ("--scores",) if options.scores else ()
    return format_next_command("predict", *arguments, *extra_arguments, "--out", options.out, "--resume")
