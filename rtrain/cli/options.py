"""Options that several verbs take, how a verb gets them as one object, and how its result is printed."""

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rtrain.api.keywords import SETTINGS_BY_OPTION as SETTINGS_BY_OPTION, option_error as option_error
from rtrain.api.model import find_artifact
from rtrain.api.process import RunInterruptedError
from rtrain.core import plugins, signals
from rtrain.core.errors import CommandInterruptedError
from rtrain.core.run_folder import quote_path, resolve_run

if TYPE_CHECKING:
    from rtrain.runs.run_folders import Reuse

RecipeArgument = Annotated[
    str | None, typer.Argument(help="A recipe's name or a YAML file, e.g. a run's config.yaml. --resume needs none.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: section.name=value. Repeatable.")]
OutOption = Annotated[str | None, typer.Option("--out", help="Run folder (default: runs/<recipe>-<time>).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Training rows: file, folder, glob or hub name.")]
ValidOption = Annotated[str | None, typer.Option("--valid", help="Validation rows; without it 10 % are split off.")]
TestOption = Annotated[str | None, typer.Option("--test", help="Test rows; without it 10 % are split off.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="minilm, a Transformers folder, or a hub name.")]
KeysOption = Annotated[str | None, typer.Option("--keys", help="File of API keys; requests without a key are refused.")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Listen on an address open to other machines, without keys.")
]
UngatedOption = Annotated[
    bool, typer.Option("--ungated", help="Serve artifacts that the gate has refused or not judged, too.")
]
ArtifactArgument = Annotated[
    str, typer.Argument(help="Folder of an artifact, a run or a search; or a URL: s3://bucket/folder.")
]
ArtifactsArgument = Annotated[
    list[str] | None, typer.Argument(help="Artifacts, as above; NAME=ARTIFACT sets a name. --rollback takes none.")
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="DDP workers.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster; default RAY_ADDRESS, else a local one.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
PluginOption = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python file or module with tasks, losses, ... of yours. Repeatable."),
]
NewOption = Annotated[bool, typer.Option("--new", help="If --out is in use, take the next free number.")]


class SettingOptions:
    """Base of the options of a verb that set settings."""

    assignments: list[str] | None

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the options that stand for a setting, by the option's name."""
        values = {name: getattr(self, name, None) for name in SETTINGS_BY_OPTION}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def overrides(self) -> dict[str, Any]:
        """Values of the options and of `--set`, by dotted name."""
        return collect_overrides(self.assignments, **self.settings)

    def load_config(self, recipe: str) -> Any:
        return build_config(recipe, self.assignments, **self.settings)

    def format_train_command(self, recipe: str) -> str:
        """Format the next command: the training of the same rows."""
        from rtrain.report.progress import format_next_command

        return format_next_command("train", *format_arguments(recipe, self.assignments, **self.settings))


@dataclass(frozen=True)
class TrainOptions(SettingOptions):
    recipe: RecipeArgument = None
    data: DataOption = None
    valid: ValidOption = None
    test: TestOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    out: OutOption = None
    assignments: SetOption = None
    address: AddressOption = None
    resume: ResumeOption = False
    new: NewOption = False
    as_json: JsonOption = False

    @property
    def api_arguments(self) -> dict[str, Any]:
        """Arguments of `rtrain.train` and `rtrain.tune`."""
        return {
            "recipe": self.recipe,
            "out": self.out,
            "settings": self.overrides,
            "resume": self.resume,
            "new": self.new,
        }


def expand_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a verb whose type is a dataclass by the fields of the dataclass.

    Typer makes options from the signature of a function, so a verb gets many options as one object.
    """
    hints, groups, parameters = get_type_hints(verb, include_extras=True), dict[str, Any](), list[inspect.Parameter]()
    for parameter in inspect.signature(verb).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        groups[parameter.name], field_hints = kind, get_type_hints(kind, include_extras=True)
        for option in fields(kind):
            default = inspect.Parameter.empty if option.default is MISSING else option.default
            hint = field_hints[option.name]
            parameters.append(
                inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            )

    @functools.wraps(verb)
    def call(**values: Any) -> None:
        options = {
            name: kind(**{option.name: values.pop(option.name) for option in fields(kind) if option.name in values})
            for name, kind in groups.items()
        }
        verb(**values, **options)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def add_plugin_option(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the option `--plugin`, whose modules are loaded before it runs."""
    hints, signature = get_type_hints(verb, include_extras=True), inspect.signature(verb)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    option = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PluginOption)

    @functools.wraps(verb)
    def call(*, plugin: list[str] | None = None, **values: Any) -> None:
        plugins.command_plugins.extend(plugins.load_plugins(plugin or ()))
        with plugins.attribute_errors():
            verb(**values)

    call.__signature__ = signature.replace(parameters=[*parameters, option])  # type: ignore[attr-defined]
    call.__annotations__ = {**hints, "plugin": PluginOption}
    return call


def collect_overrides(assignments: list[str] | None, **option_values: Any) -> dict[str, Any]:
    """Collect overrides from the short options, then `--set`."""
    from rtrain import config

    overrides = {SETTINGS_BY_OPTION[name]: value for name, value in option_values.items() if value is not None}
    return overrides | dict(config.parse_assignment(text) for text in assignments or ())


def format_arguments(recipe: str, assignments: list[str] | None, **option_values: Any) -> list[str]:
    """Format the recipe and settings as arguments of a command line."""
    option_words = [
        word for name, value in option_values.items() if value is not None for word in (f"--{name}", str(value))
    ]
    return [recipe, *option_words, *(word for text in assignments or () for word in ("--set", text))]


def build_config(recipe: str, assignments: list[str] | None, **option_values: Any) -> Any:
    """Build a verb's configuration: recipe, then the short options, then `--set`."""
    from rtrain import config

    return config.load_config(recipe, collect_overrides(assignments, **option_values))


@contextmanager
def hint_on_interrupt(make_hint: Callable[[], str | None]) -> Iterator[None]:
    """Add a hint for resuming to the message of Ctrl-C or SIGTERM within the block, which is printed after all child
    processes have ended."""
    try:
        yield
    except KeyboardInterrupt:
        (message, code), hint = signals.describe_interruption(), make_hint()
        raise CommandInterruptedError(message if hint is None else f"{message}; {hint}", code) from None


@contextmanager
def follow_verb(context: typer.Context, *words: object) -> Iterator[Any]:
    """Yield the progress line for a call of the API. `words`: the verb and its arguments, for the hint that resumes an
    interrupted run."""
    from rtrain.report.progress import ProgressLine

    interrupted_runs: list[Path] = []
    with hint_on_interrupt(lambda: _make_resume_hint(interrupted_runs, words)):
        try:
            with ProgressLine(context.obj) as line:
                yield line
        except RunInterruptedError as error:
            interrupted_runs.append(error.folder)
            raise


def _make_resume_hint(interrupted_runs: Sequence[Path], words: Sequence[object]) -> str | None:
    from rtrain.cluster import connection
    from rtrain.core.run_folder import Run
    from rtrain.report.progress import format_next_command

    if not interrupted_runs:
        return None
    [run] = interrupted_runs
    if Run(run).is_finished:  # only its report is missing
        return format_next_command("report", run)
    if connection.JOB_CONFIG_VARIABLE in os.environ:  # its entry point resumes the run
        return "next: submit the same job again"
    return format_next_command(*words, "--resume", "--out", run)


@contextmanager
def open_session(context: typer.Context, config: Any, folder: Path) -> Iterator[Any]:
    """Start Ray for runs in `folder`; yields the progress line."""
    from rtrain.cluster.connection import session
    from rtrain.report.progress import ProgressLine

    with ProgressLine(context.obj) as line, session(config, folder.parent, line):
        yield line


def resolve_artifact_argument(argument: str) -> Path:
    """Return the absolute path of the artifact in a verb's folder or URL argument, and print it if it differs."""
    artifact_folder = find_artifact(argument, lambda line: print(line, file=sys.stderr))
    if str(artifact_folder) != os.path.abspath(argument):
        print(f"answering with {quote_path(artifact_folder)}", file=sys.stderr)
    return artifact_folder


def resolve_run_argument(folder: Path) -> Path:
    """Return the absolute path of the run in a verb's folder argument, and print it if it is a search's winner."""
    run_folder = resolve_run(folder.absolute()).folder
    if run_folder != folder.absolute():
        print(f"the search's winner is {quote_path(run_folder)}", file=sys.stderr)
    return run_folder


def leave_to_supervisor(config: Any, folder: Path, reuse: "Reuse") -> None:
    """In a job, run the same command as the child of a supervisor; this process ends with it."""
    from rtrain.cluster import supervisor
    from rtrain.runs import run_folders

    if supervisor.should_supervise():
        run = folder if reuse == "resume" else run_folders.choose_folder(folder, config, reuse)[0]
        sys.exit(supervisor.supervise([*sys.argv[1:], "--out", str(run)], run))


_COLUMN_SEPARATORS = re.compile(r"[\t\r\n]+")
"""Separators of printed columns and lines."""


def print_result(document: Any, as_json: bool, *lines: str) -> None:
    """Print a verb's result: as one JSON object, else as text, with the next command in the last line."""
    print(escape_surrogates(json.dumps(document, ensure_ascii=False) if as_json else "\n".join(lines)))


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates like JSON: file names that are not UTF-8 have them, and a UTF-8 terminal rejects them."""
    return re.sub(r"[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def format_answer(answer: Any) -> str:
    """Format an answer (labels and scores, also by head, a number or a text) on one tab-separated line."""
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, list):
        return "\t".join(format_answer(entry) for entry in answer)
    if isinstance(answer, dict):
        has_heads = all(isinstance(value, list) for value in answer.values())
        labeled_texts = ((f"{name}\t" if has_heads else "", format_answer(value)) for name, value in answer.items())
        return "\t".join(name + text for name, text in labeled_texts)
    return _COLUMN_SEPARATORS.sub(" ", str(answer))


def format_entries(answer: Any, thresholds: Mapping[str, float] | None) -> str:
    if thresholds is None or not isinstance(answer, list):
        return format_answer(answer)
    if not answer:
        return "(no label)"
    return "\t".join(
        f"{entry['label']}\t{entry['score']:.4f}"
        + ("" if entry.get("is_selected", True) else f" (below {thresholds[entry['label']]:.4g})")
        for entry in answer
    )


def format_batch_report(report: dict[str, Any]) -> str:
    count_text = (
        f"{report['rows']:,} rows: {report['answered']:,} answered, {report['empty']:,} empty, "
        f"{report['unusable']:,} unusable"
    )
    reuse_text = f", {report['reused_rows']:,} of them before" if report["reused_rows"] else ""
    return f"{count_text}{reuse_text}; {report['seconds']:.1f} s, {report['texts_per_second']:,.0f} texts/s"
