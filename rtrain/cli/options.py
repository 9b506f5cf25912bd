"""Options that several verbs take, how a verb gets them as one object, and how its result is printed."""

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rtrain.core import signals
from rtrain.core.errors import CommandInterruptedError, ConfigError, Problem, suggest_path
from rtrain.core.run_folder import quote_path, resolve_artifact, resolve_run

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
NewOption = Annotated[bool, typer.Option("--new", help="If --out is in use, take the next free number.")]


def option_error(field: str, value: Any, reason: str, fix: str, code: str) -> ConfigError:
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def resolve_reuse(resume: bool, new: bool) -> "Reuse":
    """Return the policy for a run folder that is in use."""
    if resume and new:
        raise option_error(
            "--new", None, "--resume and --new exclude each other", "continue, or start another", "conflicting_settings"
        )
    return "resume" if resume else "new" if new else "refuse"


SETTINGS_BY_OPTION = {
    "data": "data.path",
    "valid": "data.valid",
    "test": "data.test",
    "model": "model.name",
    "workers": "train.workers",
    "address": "cluster.address",
    "host": "serve.host",
    "port": "serve.port",
    "keys": "serve.keys",
    "insecure": "serve.insecure",
    "ungated": "serve.ungated",
    "shadow": "serve.shadow_fraction",
}
"""Setting by the name of its short option."""


class SettingOptions:
    """Base of the options of a verb that set settings."""

    assignments: list[str] | None

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the options that stand for a setting, by the option's name."""
        values = {name: getattr(self, name, None) for name in SETTINGS_BY_OPTION}
        return {name: value for name, value in values.items() if value is not None and value is not False}

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


def open_run(options: TrainOptions, is_search: bool = False) -> tuple[Any, Path, "Reuse"]:
    """Return configuration, folder and reuse policy of a verb that trains, or searches (`is_search`); in a job the
    command continues as the child of a supervisor.

    A resumed run keeps its own configuration, changed by the options. The returned folder is the one to write.
    """
    from rtrain import config as configuration
    from rtrain.core.run_folder import Run
    from rtrain.runs import run_folders

    recipe, out, reuse = options.recipe, options.out, resolve_reuse(options.resume, options.new)
    config_source = _find_recipe(recipe, out, reuse)
    overrides = collect_overrides(options.assignments, **options.settings)
    if recipe is None and out and reuse == "resume":
        # The settings are the run's own: an open setting would contradict the run's decision.
        overrides = run_folders.resume_overrides(Run(run_folders.default_run_folder("", out)), overrides)
    config = configuration.load_config(config_source, overrides)
    if is_search and reuse == "resume" and config.recipe.distill.teacher is not None:
        resume_command = Run(run_folders.default_run_folder("", out)).resume_command
        reason = "a search over students needs their teacher"
        raise option_error(
            "distill.teacher", config.recipe.distill.teacher, reason, f"write {resume_command}", "needs_teacher"
        )
    if reuse != "resume":
        _refuse_student(Path(config_source).expanduser().absolute(), config)
    folder = run_folders.default_run_folder(f"{config.recipe.name}{'-search' if is_search else ''}", out)
    config = run_folders.resolve_paths(config, folder if reuse == "resume" else None)
    leave_to_supervisor(config, folder, reuse)
    from rtrain.runs import prepare  # a supervisor that imports torch could run out of memory with its child

    if is_search:
        prepare.refuse_lost_search(config, folder, reuse, "train", recipe or config.recipe.name)
    folder, config = prepare.resolve_run_folder(config, folder, reuse)
    return config, folder, reuse


def _find_recipe(recipe: str | None, out: str | None, reuse: "Reuse") -> str:
    """Return the recipe's name or file; optional where `out` holds a run, which is resumed or restarted."""
    if reuse == "resume" and out is None:
        fix = "write --out with the folder of the run"
        raise option_error("--resume", None, "continues the run in --out, which is missing", fix, "missing")
    if recipe is not None:
        return recipe
    run_config = Path(out or ".").expanduser() / "config.yaml"
    if reuse != "refuse" and run_config.is_file():
        return str(run_config)
    fix = "write a recipe's name or a YAML file; to continue a run, write --resume --out RUN"
    reason = "missing"
    if reuse == "resume" and (hint := suggest_path(run_config.parent)):
        reason, fix = f"missing, and {out} holds no run", hint
    raise option_error("recipe", None, reason, fix, "missing")


def _refuse_student(file: Path, config: Any) -> None:
    """Raise `ConfigError` if `file` is a student's configuration: `train` would train it without its teacher's logits
    and without a gate."""
    if (teacher := config.recipe.distill.teacher) is None:
        return
    from rtrain.core.run_folder import Run
    from rtrain.evaluation.inspect_artifact import make_distill_command

    run = Run(file.parent)
    distill_command = (
        make_distill_command(run, teacher) if file == run.config else "rtrain distill, with the run of that artifact"
    )
    raise option_error(
        "distill.teacher",
        teacher,
        "students are trained by rtrain distill",
        f"write {distill_command}",
        "needs_teacher",
    )


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
def resume_hint_on_interrupt(run: Path, *words: object) -> Iterator[None]:
    """`hint_on_interrupt` for a run of the verb and arguments `words`."""

    def make_hint() -> str | None:
        from rtrain.cluster import connection
        from rtrain.core.run_folder import Run
        from rtrain.report.progress import format_next_command

        if Run(run).is_finished:  # only its report is missing
            return format_next_command("report", run)
        if not Run(run).exists:
            return None
        if connection.JOB_CONFIG_VARIABLE in os.environ:  # its entry point resumes the run
            return "next: submit the same job again"
        return format_next_command(*words, "--resume", "--out", run)

    with hint_on_interrupt(make_hint):
        yield


@contextmanager
def open_session(context: typer.Context, config: Any, folder: Path, *words: object) -> Iterator[Any]:
    """Start Ray for a run in `folder`; yields the progress line. `words`: the verb that resumes the run, if any."""
    from rtrain.cluster.connection import session
    from rtrain.report.progress import ProgressLine

    with (
        resume_hint_on_interrupt(folder, *words) if words else nullcontext(),
        ProgressLine(context.obj) as line,
        session(config, folder.parent, line),
    ):
        yield line


def resolve_artifact_argument(argument: str) -> Path:
    """Return the absolute path of the artifact in a verb's folder or URL argument, and print it if it differs."""
    if "://" in argument:
        from rtrain.inference import artifact

        artifact_folder = artifact.fetch_artifact(argument, print_line=lambda line: print(line, file=sys.stderr))
    else:
        artifact_folder = resolve_artifact(Path(argument).absolute())
    if str(artifact_folder) != os.path.abspath(argument):
        print(f"answering with {quote_path(artifact_folder)}", file=sys.stderr)
    return artifact_folder


def resolve_run_argument(folder: Path) -> Path:
    """Return the absolute path of the run in a verb's folder argument, and print it if it is a search's winner."""
    run_folder = resolve_run(folder.absolute()).folder
    if run_folder != folder.absolute():
        print(f"the search's winner is {quote_path(run_folder)}", file=sys.stderr)
    return run_folder


def require_finished_run(folder: Path) -> Path:
    """`resolve_run_argument` for a verb that needs the artifact: an unfinished run is refused with the resume
    command."""
    run_folder = resolve_run_argument(folder)
    resolve_artifact(folder.absolute())
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


def select_entries(answer: Any, thresholds: Mapping[str, float] | None, top: int | None) -> Any:
    """Select the shown entries of an answer: those above their threshold (`Task.label_thresholds`), or all with
    `is_selected` when `top` is set."""
    if thresholds is None or not isinstance(answer, list):
        return answer
    if top is None:
        return [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
    return [{**entry, "is_selected": entry["score"] >= thresholds[entry["label"]]} for entry in answer]


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
