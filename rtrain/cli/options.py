"""Options that several verbs of the command line take."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.core import signals
from rtrain.core.errors import ConfigError, Ended, Problem, meant
from rtrain.core.run_folder import artifact_of, chosen, shown

if TYPE_CHECKING:
    from rtrain.runs.run_folders import Reuse

Recipe = Annotated[
    str | None,
    typer.Argument(help="A recipe's name or a YAML file, e.g. a run's config.yaml. --resume goes on without."),
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: section.name=value. Repeatable.")]
Out = Annotated[str | None, typer.Option("--out", help="Run folder (default: runs/<recipe>-<time>).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Training rows: file, folder, glob or hub name.")]
ValidOption = Annotated[str | None, typer.Option("--valid", help="Validation rows; without it 10 % are split off.")]
TestOption = Annotated[str | None, typer.Option("--test", help="Test rows; without it 10 % are split off.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="minilm, a Transformers folder, or a hub name.")]
Keys = Annotated[str | None, typer.Option("--keys", help="File of keys, without one of which nobody is answered.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen where others can reach it, without keys.")]
Ungated = Annotated[bool, typer.Option("--ungated", help="Serve what the gate has refused or not seen, too.")]
Artefact = Annotated[
    str,
    typer.Argument(help="Artefact folder, or a run's or a search's; or an address: s3://bucket/folder."),
]
Artefacts = Annotated[
    list[str] | None,
    typer.Argument(help="Artefacts, as above; NAME=ARTEFACT to give one another name. --rollback takes none."),
]
Workers = Annotated[int | None, typer.Option("--workers", help="DDP workers.")]
Address = Annotated[str | None, typer.Option("--address", help="Ray cluster; default RAY_ADDRESS, else a local one.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
New = Annotated[bool, typer.Option("--new", help="If --out is in use, take the next free number.")]


def reuse_of(resume: bool, new: bool) -> "Reuse":
    """What becomes of a run folder that is in use."""
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


SHORT = {
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
    "shadow": "serve.shadow",
}
"""Setting by the name of its own option."""


def overrides_of(assignments: list[str] | None, **short: Any) -> dict[str, Any]:
    """What the short options name, then `--set`."""
    from rtrain import config

    overrides = {SHORT[name]: value for name, value in short.items() if value is not None}
    return overrides | dict(config.parse_assignment(text) for text in assignments or ())


def as_given(recipe: str, assignments: list[str] | None, **short: Any) -> list[str]:
    """The same recipe and settings as words of a command line."""
    words = [word for name, value in short.items() if value is not None for word in (f"--{name}", str(value))]
    return [recipe, *words, *(word for text in assignments or () for word in ("--set", text))]


def configured(recipe: str, assignments: list[str] | None, **short: Any) -> Any:
    """The configuration of a verb: recipe, then the short options, then `--set`."""
    from rtrain import config

    return config.load(recipe, overrides_of(assignments, **short))


def opened(
    recipe: str | None,
    assignments: list[str] | None,
    out: str | None,
    resume: bool,
    new: bool,
    search: bool = False,
    /,
    **short: Any,
) -> tuple[Any, Path, "Reuse"]:
    """Configuration, folder and its reuse of a verb that trains, or that makes a `search` of trainings; in a job it
    goes on as the child of a supervisor.

    A resumed run's configuration is its own, with what is named here. The folder is the one that will be written.
    """
    from rtrain import config as configuration
    from rtrain.core.run_folder import Run
    from rtrain.runs import run_folders

    reuse = reuse_of(resume, new)
    own, overrides = _recipe(recipe, out, reuse), overrides_of(assignments, **short)
    if recipe is None and out and reuse == "resume":
        # The settings are the run's own: beside what it has decided, leaving it open would contradict it.
        overrides = run_folders.asked_of(Run(run_folders.folder_for("", out)), overrides)
    config = configuration.load(own, overrides)
    if search and reuse == "resume" and config.recipe.distill.teacher is not None:
        way_on = Run(run_folders.folder_for("", out)).resumed_by
        reason = "a search over students goes on with their teacher"
        problem = Problem(
            "distill.teacher", config.recipe.distill.teacher, reason, f"write {way_on}", code="needs_teacher"
        )
        raise ConfigError([problem])
    if reuse != "resume":
        _refuse_student(Path(own).expanduser().absolute(), config)
    folder = run_folders.folder_for(f"{config.recipe.name}{'-search' if search else ''}", out)
    config = run_folders.absolute(config, folder if reuse == "resume" else None)
    leave_to_supervisor(config, folder, reuse)
    from rtrain.runs import prepare  # a supervisor that imports torch could die with its child, of memory

    if search:
        prepare.refuse_lost(config, folder, reuse, "train", recipe or config.recipe.name)
    folder, config = prepare.chosen(config, folder, reuse)
    return config, folder, reuse


def _recipe(recipe: str | None, out: str | None, reuse: "Reuse") -> str:
    """The recipe's name or file; none is needed where `out` holds a run, which is resumed or made anew."""
    if reuse == "resume" and out is None:
        fix = "write --out with the folder of the run"
        problem = Problem("--resume", None, "continues the run in --out, and none is named", fix, code="missing")
        raise ConfigError([problem])
    if recipe is not None:
        return recipe
    own = Path(out or ".").expanduser() / "config.yaml"
    if reuse != "refuse" and own.is_file():
        return str(own)
    fix = "write a recipe's name or a YAML file; a run that is here is continued without by --resume --out RUN"
    reason = "missing"
    if reuse == "resume" and (hint := meant(own.parent)):
        reason, fix = f"missing, and {out} holds no run", hint
    raise ConfigError([Problem("recipe", None, reason, fix, code="missing")])


def _refuse_student(file: Path, config: Any) -> None:
    """Raise `ConfigError` for a student's configuration, which `file` holds: a training that is begun by it has none of
    its teacher's answers, and no gate looks at what comes of it."""
    if (teacher := config.recipe.distill.teacher) is None:
        return
    from rtrain.core.run_folder import Run
    from rtrain.evaluation.reproduce_commands import distilled

    run = Run(file.parent)
    made_by = distilled(run, teacher) if file == run.config else "rtrain distill, with the run of that artefact"
    problem = Problem(
        "distill.teacher",
        teacher,
        "a student is made by rtrain distill",
        f"write {made_by}",
        code="needs_teacher",
    )
    raise ConfigError([problem])


@contextmanager
def told_how(way_on: Callable[[], str | None]) -> Iterator[None]:
    """A block that can be gone on with: where Ctrl-C or SIGTERM ends it, the one line that is said about it, once all
    that it had started has ended, names the way on."""
    try:
        yield
    except KeyboardInterrupt:
        (said, code), how = signals.ended(), way_on()
        raise Ended(said if how is None else f"{said}; {how}", code) from None


@contextmanager
def resumable(run: Path, *words: object) -> Iterator[None]:
    """`told_how` for a run that the verb and arguments `words` make."""

    def way_on() -> str | None:
        from rtrain.cluster import connection
        from rtrain.core.run_folder import Run
        from rtrain.report.live.progress import then

        if Run(run).finished:  # all but its report is there
            return then("report", run)
        if not Run(run).exists:
            return None
        if connection.IN_JOB in os.environ:  # whose entry point resumes the run
            return "next: submit the same job again"
        return then(*words, "--resume", "--out", run)

    with told_how(way_on):
        yield


def answering(given: str) -> Path:
    """The artefact, by its absolute path, that the folder or the address given to a verb stands for; said where it is
    another one."""
    if "://" in given:
        from rtrain.inference import remote

        found = remote.fetch(given, say=lambda line: print(line, file=sys.stderr))
    else:
        found = artifact_of(Path(given).absolute())
    if str(found) != os.path.abspath(given):
        print(f"answering with {shown(found)}", file=sys.stderr)
    return found


def chosen_run(folder: Path) -> Path:
    """The run, by its absolute path, that the folder given to a verb stands for; said where it is a search's winner."""
    found = chosen(folder.absolute()).folder
    if found != folder.absolute():
        print(f"the search's winner is {shown(found)}", file=sys.stderr)
    return found


def ended_run(folder: Path) -> Path:
    """`chosen_run` for a verb that needs its artefact: one whose training has not ended is refused with the way on."""
    found = chosen_run(folder)
    artifact_of(folder.absolute())
    return found


def leave_to_supervisor(config: Any, folder: Path, reuse: "Reuse") -> None:
    """In a job, does not return: the same command runs as the child of a supervisor, and this process ends with it."""
    from rtrain.cluster import supervisor
    from rtrain.runs import run_folders

    if supervisor.is_needed():
        run = folder if reuse == "resume" else run_folders.choose(folder, config, reuse)[0]
        sys.exit(supervisor.supervise([*sys.argv[1:], "--out", str(run)], run))
