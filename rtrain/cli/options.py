"""Options that several verbs of the command line take."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.core import signals
from rtrain.core.errors import CommandInterruptedError, ConfigError, Problem, suggest_path
from rtrain.core.run_folder import quote_path, resolve_artifact, resolve_run

if TYPE_CHECKING:
    from rtrain.runs.run_folders import Reuse

RecipeArgument = Annotated[
    str | None,
    typer.Argument(help="A recipe's name or a YAML file, e.g. a run's config.yaml. --resume needs none."),
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
    str,
    typer.Argument(help="Folder of an artifact, a run or a search; or a URL: s3://bucket/folder."),
]
ArtifactsArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Artifacts, as above; NAME=ARTIFACT sets a name. --rollback takes none."),
]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="DDP workers.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster; default RAY_ADDRESS, else a local one.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
NewOption = Annotated[bool, typer.Option("--new", help="If --out is in use, take the next free number.")]


def resolve_reuse(resume: bool, new: bool) -> "Reuse":
    """Return the policy for a run folder that is in use."""
    if resume and new:
        problem = Problem(
            "--new",
            None,
            "--resume and --new exclude each other",
            "continue, or start another",
            code="conflicting_settings",
        )
        raise ConfigError([problem])
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


def open_run(
    recipe: str | None,
    assignments: list[str] | None,
    out: str | None,
    resume: bool,
    new: bool,
    is_search: bool = False,
    /,
    **option_values: Any,
) -> tuple[Any, Path, "Reuse"]:
    """Return configuration, folder and reuse policy of a verb that trains, or searches (`is_search`); in a job the
    command continues as the child of a supervisor.

    A resumed run keeps its own configuration, changed by the options. The returned folder is the one to write.
    """
    from rtrain import config as configuration
    from rtrain.core.run_folder import Run
    from rtrain.runs import run_folders

    reuse = resolve_reuse(resume, new)
    config_source, overrides = _find_recipe(recipe, out, reuse), collect_overrides(assignments, **option_values)
    if recipe is None and out and reuse == "resume":
        # The settings are the run's own: an open setting would contradict the run's decision.
        overrides = run_folders.resume_overrides(Run(run_folders.default_run_folder("", out)), overrides)
    config = configuration.load_config(config_source, overrides)
    if is_search and reuse == "resume" and config.recipe.distill.teacher is not None:
        resume_command = Run(run_folders.default_run_folder("", out)).resume_command
        reason = "a search over students needs their teacher"
        problem = Problem(
            "distill.teacher", config.recipe.distill.teacher, reason, f"write {resume_command}", code="needs_teacher"
        )
        raise ConfigError([problem])
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
        problem = Problem("--resume", None, "continues the run in --out, which is missing", fix, code="missing")
        raise ConfigError([problem])
    if recipe is not None:
        return recipe
    run_config = Path(out or ".").expanduser() / "config.yaml"
    if reuse != "refuse" and run_config.is_file():
        return str(run_config)
    fix = "write a recipe's name or a YAML file; to continue a run, write --resume --out RUN"
    reason = "missing"
    if reuse == "resume" and (hint := suggest_path(run_config.parent)):
        reason, fix = f"missing, and {out} holds no run", hint
    raise ConfigError([Problem("recipe", None, reason, fix, code="missing")])


def _refuse_student(file: Path, config: Any) -> None:
    """Raise `ConfigError` if `file` is a student's configuration: `train` would train it without its teacher's logits
    and without a gate."""
    if (teacher := config.recipe.distill.teacher) is None:
        return
    from rtrain.core.run_folder import Run
    from rtrain.evaluation.reproduce_commands import make_distill_command

    run = Run(file.parent)
    distill_command = (
        make_distill_command(run, teacher) if file == run.config else "rtrain distill, with the run of that artifact"
    )
    problem = Problem(
        "distill.teacher",
        teacher,
        "students are trained by rtrain distill",
        f"write {distill_command}",
        code="needs_teacher",
    )
    raise ConfigError([problem])


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
        from rtrain.report.live.progress import format_next_command

        if Run(run).is_finished:  # only its report is missing
            return format_next_command("report", run)
        if not Run(run).exists:
            return None
        if connection.JOB_CONFIG_VARIABLE in os.environ:  # its entry point resumes the run
            return "next: submit the same job again"
        return format_next_command(*words, "--resume", "--out", run)

    with hint_on_interrupt(make_hint):
        yield


def resolve_artifact_argument(argument: str) -> Path:
    """Return the absolute path of the artifact in a verb's folder or URL argument, and print it if it differs."""
    if "://" in argument:
        from rtrain.inference import remote

        artifact_folder = remote.fetch_artifact(argument, print_line=lambda line: print(line, file=sys.stderr))
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
