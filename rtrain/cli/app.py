"""The command line: which verbs there are. Each parses, calls one function, and prints."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rtrain import __version__, env
from rtrain.cli import compare, compress, proof, runs, serve, train
from rtrain.cluster import session as sessions
from rtrain.errors import UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
recipes_app = typer.Typer(no_args_is_help=True, help="List the recipes, or print one.")
app.add_typer(recipes_app, name="recipes")
recipes_app.command("list")(train.recipes_list)
recipes_app.command("show")(train.recipes_show)
for _verb in (
    *(train.train, train.tune),
    *(proof.verify, proof.drill),
    *(train.report, compare.compare),
    *(compress.distill, compress.quantize, compress.evaluate),
    *(serve.predict, serve.explain, serve.serve),
    *(runs.runs, runs.clean, runs.export),
    train.demo,
):
    app.command()(_verb)
app.command(name="import")(runs.import_)

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script and of `python -m rtrain`; `arguments` default to the command line's."""
    env.prepare()
    code = None
    try:
        sessions.forget_folder()  # `python -m` has put the current folder first on the module path
        code = app(arguments, standalone_mode=False)  # typer turns KeyboardInterrupt into the returned code 130
    except UserError as error:
        print(f"rtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        print(f"rtrain: {error.format_message()} (rtrain --help lists what there is)", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:
        print("rtrain: interrupted", file=sys.stderr)
    if code:
        sys.exit(code)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """From a file of text to an HTTP answer: train, search, shrink and serve text encoders on Ray."""
    if version:
        print(__version__)
        raise typer.Exit
