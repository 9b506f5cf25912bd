"""What the verb predict does: texts of the command line or of stdin, or rows of files."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtrain.cli.options import as_given, configured, told_how
from rtrain.cli.output import batch_text, given, given_text, show
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rtrain.inference.batch.output_folder import Reuse
    from rtrain.inference.predictor import Predictor

LINES = 4096
"""Lines of standard input that are answered at a time."""


@dataclass(frozen=True)
class Given:
    """The options of the verb, as they were given."""

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
        """Raise `ConfigError` with all options that contradict each other."""
        found: list[Problem] = []

        def refuse(is_wrong: bool, field: str, reason: str, fix: str) -> None:
            if is_wrong:
                found.append(Problem(field, None, reason, fix, code="conflicting_settings"))

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
                found.append(Problem("text", text, "is the name of a file", f"{fix} as a text", code="is_a_file"))
        if found:
            raise ConfigError(found)


# --------------------------------------------------------------------------------------------------------------- texts


def print_texts(options: Given) -> None:
    """A line for each text. One that cannot be read has an empty line (null with --json), and its reason on stderr; the
    exit code is 1 if none was answered."""
    from rtrain.inference.predictor import Predictor

    predictor = Predictor.load(options.artifact)
    thresholds = predictor.task.thresholds(predictor.head)
    place, lines = ("text", iter(options.texts)) if options.texts else ("line", _lines())
    first, answered, documents = 1, 0, []
    while texts := list(islice(lines, LINES)):
        for answer in _answers(predictor, texts, f"{place} {{}}", first, options):
            answered += answer is not None
            shown = given(answer, thresholds, options.top)
            if options.as_json:
                documents.append(shown)
            else:
                print("" if answer is None else given_text(shown, thresholds))
        first += len(texts)
    if options.as_json:
        print(json.dumps(documents, ensure_ascii=False))
    if first > 1 and not answered:
        raise typer.Exit(1)


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _answers(predictor: "Predictor", texts: list[str], place: str, first: int, options: Given) -> list[Any]:
    """The answer to each text; None where it cannot be read."""
    from rtrain.inference.predictor import BATCH_ROWS

    flaws = [predictor.flaw(text) for text in texts]
    for number, flaw in enumerate(flaws, first):
        if flaw is not None:
            print(f"rtrain: {place.format(number)} {flaw}", file=sys.stderr)
    good = [text for text, flaw in zip(texts, flaws, strict=True) if flaw is None]
    # Where entries count by a threshold, all are asked for: it may let any number of them pass.
    every = options.top is None and predictor.task.thresholds(predictor.head) is not None
    parameters = {} if every else {"top_k": options.top or 1}
    found = iter(predictor(good, parameters, batch_rows=options.batch or BATCH_ROWS))
    return [next(found) if flaw is None else None for flaw in flaws]


# ---------------------------------------------------------------------------------------------------------------- rows


def answer_rows(options: Given, assignments: list[str] | None, address: str | None) -> None:
    """The rows of --data, into --out; the exit code is 1 if there are rows and none was answered."""
    from rtrain import config
    from rtrain.core import events
    from rtrain.inference.batch import predict_files
    from rtrain.inference.predictor import BATCH_ROWS
    from rtrain.report.live.progress import Line

    assert options.data is not None
    assert options.out is not None
    overrides = dict(config.parse_assignment(text) for text in assignments or ())
    rows = {"data.path": options.data, **overrides}
    asked = predict_files.Asked(options.artifact, rows, options.batch or BATCH_ROWS, options.scores)
    out = options.out.expanduser().absolute()
    with told_how(lambda: _again(options, assignments, address)), Line() as line:
        line(events.doing("loading the artefact", "loading"))
        reuse: Reuse = "resume" if options.resume else "overwrite" if options.overwrite else "refuse"
        if address is None and "RAY_ADDRESS" not in os.environ:
            report = predict_files.to_file(asked, out, reuse, on_event=line)
        else:
            from rtrain.inference.batch import actors

            cluster = configured("intent", None, address=address)
            report = predict_files.to_file(asked, out, reuse, actors.on(cluster, out.parent), line)
    show(report, options.as_json, f"{batch_text(report)}\n{out}")
    if report["rows"] and not report["answered"]:
        raise typer.Exit(1)


def _again(options: Given, assignments: list[str] | None, address: str | None) -> str:
    """How to go on with the job."""
    from rtrain.report.live.progress import then

    same = as_given(str(options.artifact), assignments, data=options.data, batch=options.batch, address=address)
    more = ("--scores",) if options.scores else ()
    return then("predict", *same, *more, "--out", options.out, "--resume")
