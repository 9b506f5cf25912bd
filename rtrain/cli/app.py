"""The command line and its verbs. Each verb parses, calls one function, and prints."""

import errno
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rtrain import __version__
from rtrain.api.process import end_ray_with_calls
from rtrain.cli import cluster, compress, plan, predict, runs, serve, train
from rtrain.cli.options import add_plugin_option, print_result
from rtrain.cluster import connection as sessions
from rtrain.core import env, signals
from rtrain.core.errors import UserError
from rtrain.report import PhaseTimer


class VerbGroup(TyperGroup):
    """The verbs. Two have two words, `serve keys` and `serve status`, next to `serve ARTIFACT`: an artifact in a folder
    named keys is served as ./keys."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["serve"] and args[1:2] in (["keys"], ["status"]):
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=VerbGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
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
    *(train.verify, train.drill),
    *(plan.profile, plan.plan),
    *(train.report, compress.compare),
    *(compress.distill, compress.quantize, compress.evaluate),
    *(compress.gate, compress.inspect),
    *(predict.predict, predict.explain, serve.serve, runs.push),
):
    app.command()(add_plugin_option(_verb))
for _verb in (runs.runs, runs.clean, runs.export, train.demo):
    app.command()(_verb)
app.command(name="import")(runs.import_)
app.command(name="serve status")(serve.status)

FAILED, USAGE_ERROR = 1, 2
MINIMAL_EXTRAS: Mapping[str, tuple[str, frozenset[str]]] = {
    "predict": ("rows", frozenset({"pyarrow"})),
    "serve": ("serve", frozenset({"limits", "prometheus_client", "psutil", "pyarrow", "ray", "scipy", "starlette"})),
    "serve --standalone": (
        "standalone",
        frozenset({"httptools", "limits", "prometheus_client", "starlette", "uvicorn"}),
    ),
}
"""Verb -> an extra that is sufficient if one of these modules is missing."""
STANDALONE_OPTION = "--standalone"
FULL_EXTRA = "train"
EXTRA_MODULES = frozenset(
    {
        *("datasets", "httptools", "httpx", "huggingface_hub", "jinja2", "limits", "markupsafe", "nncf"),
        *("prometheus_client", "psutil", "pyarrow", "ray", "rouge_score", "sacrebleu", "safetensors", "scipy"),
        *("sklearn", "aiohttp", "pandas", "requests", "starlette", "torch", "transformers", "uvicorn"),
    }
)
"""Modules of the extra `train` and of its dependencies."""
FLOAT_MODULES = frozenset({"torch", "transformers", "safetensors"})
NO_HOME_MESSAGE = "Could not determine home directory."
"""Message of `Path.expanduser` for an unknown ~name, without the name."""
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to the command line's."""
    env.set_env_defaults()
    with signals.raise_on_sigterm():
        code = _run(arguments)
    if code:
        sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int | None:
    """Run a command and return its exit code. Errors are printed, a line for each problem."""
    try:
        sessions.remove_cwd_from_path()  # `python -m` puts the current folder first on the module path
        # For KeyboardInterrupt typer returns 130.
        with end_ray_with_calls():
            code: int | None = app(arguments, standalone_mode=False, obj=PhaseTimer())
    except UserError as error:
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            print_result(error.to_document(), True)
        return _print_error(str(error), error.exit_code)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "info_name", None)
        if hasattr(error, "option_name") and command in cluster.VERBS_WITH_JOB:
            hint = f"write -- before the job's verb and its options: rtrain cluster {command} -- train intent ..."
            return _print_error(f"{error.format_message()} ({hint})", USAGE_ERROR)
        return _print_error(f"{error.format_message()} (rtrain --help lists the verbs)", USAGE_ERROR)
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:  # errors of a write have no file name
            location = f"{error.filename}: " if error.filename else ""
            return _print_error(f"{location}{error.strerror}; free space on the disk, and try again", FAILED)
        if error.filename is None:  # no file of the user
            raise
        return _print_error(f"{error.filename}: {error.strerror}", FAILED)
    except RuntimeError as error:
        if str(error) != NO_HOME_MESSAGE:
            raise
        return _print_error(
            "a path begins with ~ and this machine has no such home folder; write the full path", USAGE_ERROR
        )
    except ModuleNotFoundError as error:
        if (line := _format_missing_library(arguments or sys.argv[1:], error)) is None:
            raise
        return _print_error(line, FAILED)
    except KeyboardInterrupt:  # before a verb was called
        return _print_error(*signals.describe_interruption())
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:  # from Ray's own handler, which is installed while Ray starts
            raise
        return _print_error("ended by SIGTERM", signals.TERMINATED)
    return _print_error(*signals.describe_interruption()) if code == signals.INTERRUPTED else code


def _format_missing_library(arguments: Sequence[str], error: ModuleNotFoundError) -> str | None:
    """Return the message for `arguments`, a verb first; None if the module belongs to no extra: a bug."""
    verb = " ".join([*arguments[:1], *([STANDALONE_OPTION] if STANDALONE_OPTION in arguments else [])])
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_MODULES:
        return None
    extra, sufficient_modules = MINIMAL_EXTRAS.get(verb, (FULL_EXTRA, EXTRA_MODULES))
    extra = extra if module in sufficient_modules else FULL_EXTRA
    int8_hint = "; an int8 artifact does not need it" if verb in MINIMAL_EXTRAS and module in FLOAT_MODULES else ""
    return f"rtrain {verb} needs {module}, which is not installed: pip install 'rtrain[{extra}]'{int8_hint}"


def _print_error(text: str, code: int) -> int:
    print(f"rtrain: {text}", file=sys.stderr)
    return code


def _print_help(context: typer.Context) -> None:
    """Print the help of a group that is called without a verb."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(USAGE_ERROR)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """From a file of text to an HTTP answer: train, search, shrink and serve text encoders on Ray."""
    if version:
        print(__version__)
        raise typer.Exit
    _print_help(context)


@recipes_app.callback(invoke_without_command=True)
def _recipes(context: typer.Context) -> None:
    """List the recipes, or print one."""
    _print_help(context)


@keys_app.callback(invoke_without_command=True)
def _keys(context: typer.Context) -> None:
    """Make, list and revoke API keys of the endpoint. (An artifact's folder named keys is served as ./keys.)"""
    _print_help(context)


@cluster_app.callback(invoke_without_command=True)
def _cluster(context: typer.Context) -> None:
    """Write and check a cluster file; submit and follow jobs on a cluster."""
    _print_help(context)
