"""The command line: which verbs there are. Each parses, calls one function, and prints."""

import errno
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rtrain import __version__
from rtrain.cli import cluster, compress, gate, plan, profile, runs, serve, train, verify
from rtrain.cli.output import show
from rtrain.cluster import connection as sessions
from rtrain.core import env, signals
from rtrain.core.errors import UserError
from rtrain.report.live.phase_timer import Waited


class Verbs(TyperGroup):
    """The verbs. Two of them have two words: `serve keys` and `serve status` stand beside `serve ARTIFACT`, whose
    artefact may have any name but these. A folder that is called keys is served as ./keys."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["serve"] and args[1:2] in (["keys"], ["status"]):
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Verbs, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
recipes_app = typer.Typer()
app.add_typer(recipes_app, name="recipes")
recipes_app.command("list")(train.recipes_list)
recipes_app.command("show")(train.recipes_show)
cluster_app = typer.Typer()
app.add_typer(cluster_app, name="cluster")
for _cluster_verb in (
    *(cluster.lint, cluster.init, cluster.kubernetes, cluster.rehearse),
    *(cluster.submit, cluster.serve, cluster.status, cluster.logs, cluster.stop, cluster.fetch, cluster.down),
):
    cluster_app.command()(_cluster_verb)
keys_app = typer.Typer()
app.add_typer(keys_app, name="serve keys")
keys_app.command("add")(serve.add_key)
keys_app.command("list")(serve.list_keys)
keys_app.command("revoke")(serve.revoke_key)
for _verb in (
    *(train.train, train.tune),
    *(verify.verify, verify.drill),
    *(profile.profile, plan.plan),
    *(train.report, gate.compare),
    *(compress.distill, compress.quantize, compress.evaluate),
    *(gate.gate, gate.inspect),
    *(serve.predict, serve.explain, serve.serve),
    *(runs.runs, runs.clean, runs.export),
    train.demo,
):
    app.command()(_verb)
app.command(name="import")(runs.import_)
app.command(name="serve status")(serve.status)

FAILED, USAGE = 1, 2
SMALL: Mapping[str, tuple[str, frozenset[str]]] = {
    "predict": ("rows", frozenset({"pyarrow"})),
    "serve": ("serve", frozenset({"fastapi", "limits", "prometheus_client", "psutil", "pyarrow", "ray", "scipy"})),
    "serve --alone": ("alone", frozenset({"fastapi", "httptools", "limits", "prometheus_client", "uvicorn"})),
}
"""Verb -> an extra that is enough for it where one of these modules is lacking."""
ALONE = "--alone"
LARGE = "train"
MODULES = frozenset(
    {
        *("datasets", "fastapi", "httptools", "httpx", "huggingface_hub", "jinja2", "limits", "markupsafe", "nncf"),
        *("prometheus_client", "psutil", "pyarrow", "ray", "rouge_score", "sacrebleu", "safetensors", "scipy"),
        *("sklearn", "aiohttp", "pandas", "requests", "starlette", "torch", "transformers", "uvicorn"),
    }
)
"""Modules of the extra `train`, and of what comes with it."""
FLOAT = frozenset({"torch", "transformers", "safetensors"})
NO_HOME = "Could not determine home directory."
"""What `Path.expanduser` raises of ~name/path, without the name."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to the command line's."""
    env.prepare()
    with signals.owned():
        code = _run(arguments)
    if code:
        sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int | None:
    """The exit code. What went wrong has been said by then, in a line for each thing."""
    try:
        sessions.forget_folder()  # `python -m` has put the current folder first on the module path
        # For KeyboardInterrupt typer returns 130.
        code: int | None = app(arguments, standalone_mode=False, obj=Waited())
    except UserError as error:
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            show(error.to_document(), True)
        return _said(str(error), error.exit_code)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "info_name", None)
        if hasattr(error, "option_name") and command in cluster.TAKE_VERBS:
            way = f"write -- before the job's verb and its options: rtrain cluster {command} -- train intent ..."
            return _said(f"{error.format_message()} ({way})", USAGE)
        return _said(f"{error.format_message()} (rtrain --help lists what there is)", USAGE)
    except OSError as error:
        if error.errno in FULL:  # of a write, which names no file
            where = f"{error.filename}: " if error.filename else ""
            return _said(f"{where}{error.strerror}; make room on the disk that is written to, and try again", FAILED)
        if error.filename is None:  # no file that the user can do something about
            raise
        return _said(f"{error.filename}: {error.strerror}", FAILED)
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        return _said("a path begins with ~ and this machine knows no such home folder; write the path out", USAGE)
    except ModuleNotFoundError as error:
        if (line := _missing_library(arguments or sys.argv[1:], error)) is None:
            raise
        return _said(line, FAILED)
    except KeyboardInterrupt:  # before a verb was called
        return _said(*signals.ended())
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:  # by Ray's own handler, which stands while Ray starts
            raise
        return _said("ended by SIGTERM", signals.TERMINATED)
    return _said(*signals.ended()) if code == signals.INTERRUPTED else code


def _missing_library(words: Sequence[str], error: ModuleNotFoundError) -> str | None:
    """The line for a user who wrote `words`, a verb first; None where the module belongs to no extra, and its absence
    is a fault of the program."""
    verb = " ".join([*words[:1], *([ALONE] if ALONE in words else [])])
    module = (error.name or "").partition(".")[0]
    if module not in MODULES:
        return None
    extra, enough = SMALL.get(verb, (LARGE, MODULES))
    extra = extra if module in enough else LARGE
    other = "; an int8 artefact is answered without" if verb in SMALL and module in FLOAT else ""
    return f"rtrain {verb} needs {module}, which is not installed: pip install 'rtrain[{extra}]'{other}"


def _said(text: str, code: int) -> int:
    print(f"rtrain: {text}", file=sys.stderr)
    return code


def _help(context: typer.Context) -> None:
    """A group that is called without a verb says what there is."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(USAGE)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """From a file of text to an HTTP answer: train, search, shrink and serve text encoders on Ray."""
    if version:
        print(__version__)
        raise typer.Exit
    _help(context)


@recipes_app.callback(invoke_without_command=True)
def _recipes(context: typer.Context) -> None:
    """List the recipes, or print one."""
    _help(context)


@keys_app.callback(invoke_without_command=True)
def _keys(context: typer.Context) -> None:
    """Keys of the endpoint: made, listed, revoked. (An artefact's folder that is called keys is served as ./keys.)"""
    _help(context)


@cluster_app.callback(invoke_without_command=True)
def _cluster(context: typer.Context) -> None:
    """A cluster's file: written, checked; and the jobs on a cluster."""
    _help(context)
