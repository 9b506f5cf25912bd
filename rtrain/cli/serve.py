"""Verbs of the endpoint: serve, its status, and its API keys."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rtrain.cli.options import (
    AddressOption,
    ArtifactsArgument,
    InsecureOption,
    JsonOption,
    KeysOption,
    SetOption,
    SettingOptions,
    UngatedOption,
    build_config,
    expand_options,
    option_error,
    resolve_artifact_argument,
)
from rtrain.core.errors import UserError

ModelNameOption = Annotated[
    str | None, typer.Option("--model", help="Name of one of several models (default: the only model, or all).")
]


@dataclass(frozen=True)
class ServeOptions(SettingOptions):
    artifacts: ArtifactsArgument = None
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).")] = None
    port: Annotated[int | None, typer.Option("--port", help="Port (default 8000; 0 takes a free one).")] = None
    keys: KeysOption = None
    insecure: InsecureOption = False
    ungated: UngatedOption = False
    update: Annotated[bool, typer.Option("--update", help="Switch the endpoint on that port to this artifact.")] = False
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Switch the endpoint on that port back to its previous artifact.")
    ] = False
    model_name: ModelNameOption = None
    shadow: Annotated[
        float | None,
        typer.Option("--shadow", help="For --update: share of live inputs for a shadow test before the switch."),
    ] = None
    is_standalone: Annotated[
        bool, typer.Option("--standalone", help="Serve in this process, without Ray: no replicas, no --update.")
    ] = False
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config file for `serve deploy`, and end.")
    ] = False
    assignments: SetOption = None
    address: AddressOption = None


@expand_options
def serve(options: ServeOptions) -> None:
    """Serve one or several artifacts over HTTP on Ray Serve, until Ctrl-C; or change the artifact of an endpoint."""
    from rtrain.api import artifacts as api
    from rtrain.cluster.connection import wait_until_interrupted
    from rtrain.report.progress import print_message
    from serve import ray_config
    from serve.rollout import admin_socket, canary

    artifacts, rollback, model_name = options.artifacts, options.rollback, options.model_name
    if options.update and rollback:
        raise UserError("--update and --rollback exclude each other", code="conflicting_settings")
    if rollback or not artifacts:
        if artifacts or not rollback:
            raise UserError("name an artifact to serve; only --rollback takes none", code="missing")
        print_message(
            admin_socket.send_command(
                _resolve_port(options.port, options.assignments), {"rollback": True, "model": model_name}
            )
        )
        return
    if options.shadow is not None and not options.update:
        raise UserError("--shadow needs --update", code="conflicting_settings")
    if options.update:
        if len(artifacts) > 1:
            raise UserError(
                "--update takes one artifact; change several models one by one", code="conflicting_settings"
            )
        serve_settings = build_config(
            "intent", options.assignments, port=options.port, shadow=options.shadow
        ).deploy.serve
        canary_policy = [*canary.CanaryPolicy.from_settings(serve_settings)] if serve_settings.shadow_fraction else None
        command = {"update": str(resolve_artifact_argument(artifacts[0])), "model": model_name, "policy": canary_policy}
        print_message(admin_socket.send_command(serve_settings.port, command))
        return
    if options.is_standalone and (options.address or options.print_config):
        raise UserError(
            "--standalone starts no Ray; leave --address and --print-config out", code="conflicting_settings"
        )
    if model_name is not None:
        raise UserError("--model selects the model to change; NAME=ARTIFACT names a model", code="conflicting_settings")

    config = options.load_config("intent")
    if options.is_standalone or options.print_config:
        settings, folders = api.prepare_endpoint(artifacts, config, print_message)
        if options.is_standalone:
            _serve_standalone(folders, settings)
        print(ray_config.format_ray_config(folders, settings), end="")
        return
    with api.serve(
        artifacts, settings=options.overrides, on_event=lambda event: print_message(event["text"])
    ) as endpoint:
        _print_endpoint(endpoint.folders, endpoint.url, endpoint.settings)
        wait_until_interrupted()


def _serve_standalone(folders: Mapping[str, Path], settings: Any) -> NoReturn:
    """Serve from this process itself, until a signal ends it."""
    from serve import standalone

    standalone.run_standalone(folders, settings, lambda address: _print_endpoint(folders, address.url, settings))
    raise AssertionError("only a signal ends it")


def _print_endpoint(folders: Mapping[str, Path], url: str, settings: Any) -> None:
    from rtrain.core.run_folder import quote_path
    from rtrain.report.progress import print_message
    from serve.auth import preflight

    first_name = next(iter(folders))
    if len(folders) == 1:
        print_message(f"serving {folders[first_name]} at {url} (Ctrl-C ends it)")
        print_message(f"next: {preflight.curl_command(url, settings)}")
        return
    for name, folder in folders.items():
        print_message(f"serving {quote_path(folder)} at {url}/models/{name} (Ctrl-C ends it)")
    print_message(f"next: {preflight.curl_command(f'{url}/models/{first_name}', settings)}")


def status(
    port: Annotated[int | None, typer.Option("--port", help="Port of the endpoint (default 8000).")] = None,
    model: ModelNameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the status of this user's endpoint on a port: versions, rollout, replicas, queue, drift."""
    from serve.rollout import admin_socket

    document = json.loads(admin_socket.send_command(_resolve_port(port, None), {"status": True, "model": model}))
    print(json.dumps(document, ensure_ascii=False) if as_json else admin_socket.format_status(document))


def _resolve_port(port: int | None, assignments: list[str] | None) -> int:
    """Return the port of `rtrain serve` with these settings."""
    resolved_port: int = build_config("intent", assignments, port=port).deploy.serve.port
    return resolved_port


KeyFile = Annotated[Path, typer.Argument(help="File of keys, for `rtrain serve ARTIFACT --keys`.")]
KeyName = Annotated[str, typer.Argument(help="Name of the key, of its owner.")]


def add_key(
    file: KeyFile,
    name: KeyName,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="Scope: predict (default) or metrics. Repeatable.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Allowed model; default: all. Repeatable.")] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Most requests, e.g. 100/minute; default: no limit.")
    ] = None,
) -> None:
    """Make a key and print it once; the file stores only its hash."""
    from rtrain.report.progress import print_message
    from serve.auth import api_keys

    scopes = scope or ["predict"]
    for scope_name in scopes:
        if scope_name not in api_keys.SCOPES:
            raise option_error(
                "--scope", scope_name, "unknown scope", f"write {' or '.join(api_keys.SCOPES)}", "unknown_name"
            )
    key = api_keys.add_key(file, name, [name for name in api_keys.SCOPES if name in scopes], rate, model)
    print(key)
    print_message(f"requests of {name} need the header Authorization: Bearer KEY; the key is shown only once")


def list_keys(file: KeyFile, as_json: JsonOption = False) -> None:
    """List the keys by name, with scopes, models and rates."""
    from serve.auth import api_keys

    stored_keys = api_keys.read_keys(file)
    if as_json:
        print(json.dumps([key.model_dump(exclude={"sha256"}) for key in stored_keys]))
        return
    rows = [("name", "id", "scopes", "models", "rate", "created")]
    rows += [
        (key.name, key.id, ",".join(key.scopes), ",".join(key.models or ["all"]), key.rate or "-", key.created)
        for key in stored_keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def revoke_key(file: KeyFile, name: KeyName) -> None:
    """Remove a key from the file; a running endpoint refuses it within a second."""
    from rtrain.report.progress import print_message
    from serve.auth import api_keys

    api_keys.revoke_key(file, name)
    print_message(f"{name} is revoked; an endpoint that runs refuses it within {api_keys.RELOAD_INTERVAL_S:.0f} s")
