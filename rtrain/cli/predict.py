"""Verbs that answer with an artifact: predict (texts, lines of stdin, or rows of files) and explain."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.api.model import make_parameters, select_entries
from rtrain.cli.options import (
    AddressOption,
    ArtifactArgument,
    JsonOption,
    SetOption,
    build_config,
    expand_options,
    format_arguments,
    format_batch_report,
    format_entries,
    hint_on_interrupt,
    print_result,
    resolve_artifact_argument,
)
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.text import Text

    from rtrain.inference.batch.predict_files import Reuse
    from rtrain.inference.predictor import Predictor

LINES_PER_CHUNK = 4096
"""Lines of standard input per batch."""
MAX_BAR_WIDTH = 20
"""Characters of the longest bar."""
MAX_TEXT_WIDTH = 44
"""Shown characters of a sentence."""
POSITIVE_STYLE, NEGATIVE_STYLE = "green", "red"


@dataclass(frozen=True)
class PredictOptions:
    artifact: ArtifactArgument
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")] = None
    as_texts: Annotated[bool, typer.Option("--text", help="Arguments are texts, never file names.")] = False
    data: Annotated[str | None, typer.Option("--data", help="Rows to answer: file, folder or glob; with --out.")] = None
    out: Annotated[
        Path | None, typer.Option("--out", help="With --data: file of answers (.csv, .jsonl, .parquet).")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped job for --out.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite --out if it exists.")] = False
    top: Annotated[
        int | None,
        typer.Option("--top", help="Labels per text; default: the best, or those past the threshold.", min=1),
    ] = None
    scores: Annotated[bool, typer.Option("--scores", help="With --data: a column for each label's score.")] = False
    batch: Annotated[int | None, typer.Option("--batch", help="Most texts of one engine call.", min=1)] = None
    assignments: SetOption = None
    address: AddressOption = None
    as_json: JsonOption = False

    def check(self, folder: Path) -> None:
        """Raise `ConfigError` with all conflicting options."""
        problems: list[Problem] = []

        def refuse(is_wrong: bool, field: str, reason: str, fix: str) -> None:
            if is_wrong:
                problems.append(Problem(field, None, reason, fix, code="conflicting_settings"))

        file_options = (
            *(("--out", self.out), ("--resume", self.resume), ("--overwrite", self.overwrite)),
            *(("--set", self.assignments), ("--address", self.address), ("--scores", self.scores)),
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
        for text in () if self.as_texts else self.texts or ():
            if os.path.isfile(text):
                fix = f"rtrain predict {folder} --data {text} --out answers.csv answers its rows; --text takes it"
                problems.append(Problem("text", text, "is the name of a file", f"{fix} as a text", code="is_a_file"))
        if problems:
            raise ConfigError(problems)

    def resume_command(self, folder: Path) -> str:
        from rtrain.report.progress import format_next_command

        arguments = format_arguments(
            str(folder), self.assignments, data=self.data, batch=self.batch, address=self.address
        )
        extra_arguments = ("--scores",) if self.scores else ()
        return format_next_command("predict", *arguments, *extra_arguments, "--out", self.out, "--resume")


@expand_options
def predict(options: PredictOptions) -> None:
    """Answer texts with an artifact, one line each; or rows of files, each with its columns and its answer."""
    folder = resolve_artifact_argument(options.artifact)
    options.check(folder)
    if options.data is None:
        print_texts(folder, options)
    else:
        write_answers(folder, options)


def explain(
    artifact: ArtifactArgument,
    text: Annotated[str | None, typer.Argument(help="A text; without it standard input, as a whole.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The second text of a pair.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Explain this label instead of the answer's.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Integration steps; default: doubled until the error is below 1 %.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attribute an answer to words and sentences by integrated gradients."""
    from rtrain.inference.explainer import Explainer
    from rtrain.inference.predictor import Predictor
    from rtrain.report.progress import next_artifact_command, print_message

    folder = resolve_artifact_argument(artifact)
    predictor = Predictor.load(folder)
    first_field, second_field = predictor.task.fields
    source_text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if text is None else text
    [attribution] = Explainer(predictor)(
        [source_text if pair is None else {first_field: source_text, second_field: pair}], label, steps
    )
    document = attribution.to_document()
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        print_explanation(document)
        print_message(next_artifact_command(folder, artifact))


# --------------------------------------------------------------------------------------------------------- explanations


def print_explanation(document: dict[str, Any]) -> None:
    """Print the words and sentences of `RowExplanation.to_document()` as bars; with colors on a terminal."""
    from rich.console import Console
    from rich.text import Text

    # Wider than any line: wrapped bars cannot be read.
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not document["answers"]:
        console.print(Text("the model found no entity in the text"))
    for answer in document["answers"]:
        console.print(Text(_format_headline(answer)))
        fields = {part["field"] for part in answer["words"]}
        # Sentences come first: they are the most useful for long texts.
        for name in ("sentence", "word"):
            parts = answer[f"{name}s"]
            if name == "word" or len(parts) > len(fields):
                for line in _format_bars(parts, name, len(fields) > 1):
                    console.print(line)
                console.print()
    if document["truncated"]:
        console.print(Text("the text is truncated after the last word"))


def _format_headline(answer: dict[str, Any]) -> str:
    error = answer["completeness_error"]
    accuracy = "the words change nothing" if error is None else f"completeness error {error:.2%}"
    place = f" at {answer['start']}-{answer['end']}" if "start" in answer else ""
    return (
        f"{answer['label']}{place}: {answer['value']:.4f} = {answer['baseline']:.4f} without words "
        f"{answer['value'] - answer['baseline']:+.4f} from these ({accuracy}, {answer['steps']} steps)"
    )


def _format_bars(parts: list[dict[str, Any]], name: str, several_fields: bool) -> "list[Text]":
    """Format `part  +0.123      |#####`; the largest attribution has the longest bar."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    names = [_make_printable(part[name], part["field"] if several_fields else "") for part in parts]
    width = min(MAX_TEXT_WIDTH, max(map(cell_len, names), default=0))
    largest = max((abs(part["attribution"]) for part in parts), default=0.0) or 1.0
    bar_lines = []
    for display_name, part in zip(names, parts, strict=True):
        value = part["attribution"]
        bar = "█" * round(MAX_BAR_WIDTH * abs(value) / largest)
        left, right = (bar.rjust(MAX_BAR_WIDTH), "") if value < 0 else (" " * MAX_BAR_WIDTH, bar)
        line = Text(f"  {set_cell_size(display_name, width)}  {value:+9.4f}  ")
        line.append(left, NEGATIVE_STYLE).append("│").append(right, POSITIVE_STYLE)
        bar_lines.append(line)
    return bar_lines


def _make_printable(text: str, field: str) -> str:
    """Return the text on one line without control characters."""
    clean = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split())
    )
    return f"{field}: {clean}" if field else clean


# --------------------------------------------------------------------------------------------------------------- texts


def print_texts(folder: Path, options: PredictOptions) -> None:
    """Print a line for each text. An unreadable text has an empty line (null with --json), and its reason on stderr;
    the exit code is 1 if no text was answered."""
    from rtrain.inference.predictor import Predictor

    predictor = Predictor.load(folder)
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

    problems = [predictor.validate_input(predictor.clean_input(text)) for text in texts]
    for number, problem in enumerate(problems, first_number):
        if problem is not None:
            print(f"rtrain: {unit_format.format(number)} {problem}", file=sys.stderr)
    valid_texts = [text for text, flaw in zip(texts, problems, strict=True) if flaw is None]
    parameters = make_parameters(predictor, options.top)
    answers = iter(predictor(valid_texts, parameters, batch_size=options.batch or DEFAULT_BATCH_SIZE))
    return [next(answers) if flaw is None else None for flaw in problems]


# ---------------------------------------------------------------------------------------------------------------- rows


def write_answers(folder: Path, options: PredictOptions) -> None:
    """Write the answers to the rows of --data to --out; the exit code is 1 if rows exist and none was answered."""
    from rtrain import config
    from rtrain.core import events
    from rtrain.inference.batch import predict_files
    from rtrain.inference.predictor import DEFAULT_BATCH_SIZE
    from rtrain.report.progress import ProgressLine

    assert options.data is not None
    assert options.out is not None
    overrides = dict(config.parse_assignment(text) for text in options.assignments or ())
    data_settings = {"data.path": options.data, **overrides}
    request = predict_files.BatchRequest(folder, data_settings, options.batch or DEFAULT_BATCH_SIZE, options.scores)
    out = options.out.expanduser().absolute()
    with hint_on_interrupt(lambda: options.resume_command(folder)), ProgressLine() as line:
        line(events.make_phase_event("loading the artifact", "loading"))
        reuse: Reuse = "resume" if options.resume else "overwrite" if options.overwrite else "refuse"
        if options.address is None and "RAY_ADDRESS" not in os.environ:
            report = predict_files.answer_to_file(request, out, reuse, on_event=line)
        else:
            from rtrain.inference.batch import pipeline

            cluster = build_config("intent", None, address=options.address)
            report = predict_files.answer_to_file(
                request, out, reuse, pipeline.make_cluster_answerer(cluster, out.parent), line
            )
    print_result(report, options.as_json, f"{format_batch_report(report)}\n{out}")
    if report["rows"] and not report["answered"]:
        raise typer.Exit(1)
