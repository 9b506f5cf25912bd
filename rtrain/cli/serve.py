"""Verbs that answer with an artifact: predict, explain, serve; and the API keys of an endpoint."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rtrain.cli.options import (
    AddressOption,
    ArtifactArgument,
    ArtifactsArgument,
    InsecureOption,
    JsonOption,
    KeysOption,
    SetOption,
    UngatedOption,
    build_config,
    resolve_artifact_argument,
)
from rtrain.core.errors import ConfigError, Problem, UserError

ModelNameOption = Annotated[
    str | None, typer.Option("--model", help="Name of one of several models (default: the only model, or all).")
]


def predict(
    artifact: ArtifactArgument,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")] = None,
    as_texts: Annotated[bool, typer.Option("--text", help="Arguments are texts, never file names.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows to answer: file, folder or glob; with --out.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --data: file of answers (.csv, .jsonl, .parquet)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped job for --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite --out if it exists.")] = False,
    top: Annotated[
        int | None,
        typer.Option("--top", help="Labels per text; default: the best, or those past the threshold.", min=1),
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="With --data: a column for each label's score.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", help="Most texts of one engine call.", min=1)] = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer texts with an artifact, one line each; or rows of files, each with its columns and its answer."""
    from rtrain.cli import predict as cli_predict

    folder = resolve_artifact_argument(artifact)
    options = cli_predict.PredictOptions(
        folder, texts or [], data, out, resume, overwrite, top, batch, as_json, as_texts, scores
    )
    options.check(assignments, address)
    if data is None:
        cli_predict.print_texts(options)
    else:
        cli_predict.write_answers(options, assignments, address)


def explain(
    artifact: ArtifactArgument,
    text: Annotated[str | None, typer.Argument(help="A text; without it standard input, as a whole.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The second text of a pair.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Explain this label instead of the answer's.")] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Integration steps; default: doubled until the error is below 1 %."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attribute an answer to words and sentences by integrated gradients."""
    from rtrain.inference.explain.explainer import Explainer
    from rtrain.inference.predictor import Predictor
    from rtrain.report import explanation
    from rtrain.report.live.progress import next_artifact_command, print_message

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
        explanation.print_explanation(document, sys.stdout)
        print_message(next_artifact_command(folder, artifact))


def serve(
    artifacts: ArtifactsArgument = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port (default 8000; 0 takes a free one).")] = None,
    keys: KeysOption = None,
    insecure: InsecureOption = False,
    ungated: UngatedOption = False,
    update: Annotated[
        bool, typer.Option("--update", help="Switch the endpoint on that port to this artifact.")
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Switch the endpoint on that port back to its previous artifact.")
    ] = False,
    model: ModelNameOption = None,
    shadow: Annotated[
        float | None,
        typer.Option("--shadow", help="For --update: share of live inputs for a shadow test before the switch."),
    ] = None,
    is_standalone: Annotated[
        bool, typer.Option("--standalone", help="Serve in this process, without Ray: no replicas, no --update.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config file for `serve deploy`, and end.")
    ] = False,
    assignments: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Serve one or several artifacts over HTTP on Ray Serve, until Ctrl-C; or change the artifact of an endpoint."""
    from rtrain.cluster.connection import wait_until_interrupted
    from rtrain.report.live.progress import print_message
    from serve import model_specs, ray_config
    from serve.auth import preflight
    from serve.rollout import admin_socket, canary

    if update and rollback:
        raise UserError("--update and --rollback exclude each other", code="conflicting_settings")
    if rollback or not artifacts:
        if artifacts or not rollback:
            raise UserError("name an artifact to serve; only --rollback takes none", code="missing")
        print_message(admin_socket.send_command(_resolve_port(port, assignments), {"rollback": True, "model": model}))
        return
    if shadow is not None and not update:
        raise UserError("--shadow needs --update", code="conflicting_settings")
    if update:
        if len(artifacts) > 1:
            raise UserError(
                "--update takes one artifact; change several models one by one", code="conflicting_settings"
            )
        serve_settings = build_config("intent", assignments, port=port, shadow=shadow).deploy.serve
        canary_policy = [*canary.CanaryPolicy.from_settings(serve_settings)] if serve_settings.shadow_fraction else None
        command = {"update": str(resolve_artifact_argument(artifacts[0])), "model": model, "policy": canary_policy}
        print_message(admin_socket.send_command(serve_settings.port, command))
        return
    if is_standalone and (address or print_config):
        raise UserError(
            "--standalone starts no Ray; leave --address and --print-config out", code="conflicting_settings"
        )
    if model is not None:
        raise UserError("--model selects the model to change; NAME=ARTIFACT names a model", code="conflicting_settings")

    option_values = {"host": host, "port": port, "keys": keys, "insecure": insecure or None, "ungated": ungated or None}
    config = build_config("intent", assignments, **option_values, address=address)
    settings = preflight.resolve_paths(config.deploy.serve)  # the session changes the folder
    preflight.check_access(settings, print_message)
    folders = model_specs.parse_model_specs(artifacts, resolve_artifact_argument)
    model_specs.check_artifacts(folders, settings, print_message)
    if is_standalone:
        _serve_standalone(folders, settings)
    if print_config:
        print(ray_config.format_ray_config(folders, settings), end="")
        return
    from serve import launcher

    with (
        launcher.launch_endpoint(config, settings, folders, print_message) as endpoint,
        admin_socket.serve_admin_socket(endpoint.port, endpoint.handle_command),
    ):
        _print_endpoint(folders, endpoint.url, settings)
        wait_until_interrupted()


def _serve_standalone(folders: Mapping[str, Path], settings: Any) -> NoReturn:
    """Serve from this process itself, until a signal ends it."""
    from serve import standalone

    standalone.run_standalone(folders, settings, lambda address: _print_endpoint(folders, address.url, settings))
    raise AssertionError("only a signal ends it")


def _print_endpoint(folders: Mapping[str, Path], url: str, settings: Any) -> None:
    """Print an endpoint's URL and an example request."""
    from rtrain.core.run_folder import quote_path
    from rtrain.report.live.progress import print_message
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
    from rtrain.report.live.progress import print_message
    from serve.auth import api_keys

    scopes = scope or ["predict"]
    for scope_name in scopes:
        if scope_name not in api_keys.SCOPES:
            problem = Problem(
                "--scope",
                scope_name,
                "unknown scope",
                f"write {' or '.join(api_keys.SCOPES)}",
                code="unknown_name",
            )
            raise ConfigError([problem])
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
    from rtrain.report.live.progress import print_message
    from serve.auth import api_keys

    api_keys.revoke_key(file, name)
    print_message(f"{name} is revoked; an endpoint that runs refuses it within {api_keys.RELOAD_INTERVAL_S:.0f} s")
