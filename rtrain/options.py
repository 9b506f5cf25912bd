"""Options that several verbs of the command line take."""

from typing import Annotated, Any, Literal

import typer

from rtrain.errors import ConfigError, Problem

Set = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: section.name=value. Repeatable.")]
Out = Annotated[str | None, typer.Option("--out", help="Run folder (default: runs/<recipe>-<time>).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Training rows: file, folder, glob or `datasets` name.")]
ValidOption = Annotated[str | None, typer.Option("--valid", help="Validation rows; without it 10 % are split off.")]
TestOption = Annotated[str | None, typer.Option("--test", help="Test rows; without it 10 % are split off.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="minilm, a Transformers folder, or a hub name.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen where others can reach it, without keys.")]
Workers = Annotated[int | None, typer.Option("--workers", help="DDP workers.")]
Address = Annotated[str | None, typer.Option("--address", help="Ray cluster; default RAY_ADDRESS, else a local one.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
New = Annotated[bool, typer.Option("--new", help="If --out is in use, take the next free number.")]


def reuse_of(resume: bool, new: bool) -> Literal["refuse", "resume", "new"]:
    """What becomes of a run folder that is in use."""
    if resume and new:
        raise ConfigError(
            [Problem("--new", None, "--resume and --new exclude each other", "continue, or start another")]
        )
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
    "insecure": "serve.insecure",
}
"""Setting by the name of its own option."""


def configured(recipe: str, assignments: list[str] | None, **short: Any) -> Any:
    """The configuration of a verb: recipe, then the short options, then `--set`."""
    from rtrain import config

    overrides = {SHORT[name]: value for name, value in short.items() if value is not None}
    overrides |= dict(config.parse_assignment(text) for text in assignments or ())
    return config.load(recipe, overrides)
