"""Verbs that answer with an artefact: predict, explain, serve; and the file of those who may ask an endpoint."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rtrain.cli.options import (
    Address,
    Artefact,
    Artefacts,
    Insecure,
    Json,
    Keys,
    Set,
    Ungated,
    answering,
    configured,
)
from rtrain.core.errors import ConfigError, Problem, UserError

Model = Annotated[
    str | None, typer.Option("--model", help="Which model of several is meant (default: the one, or all of them).")
]


def predict(
    artifact: Artefact,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")] = None,
    as_texts: Annotated[bool, typer.Option("--text", help="Texts are texts, even where a file is called so.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows to answer: file, folder or glob; with --out.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --data: file of answers (.csv, .jsonl, .parquet)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped job for --out was.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write --out anew if it exists.")] = False,
    top: Annotated[
        int | None,
        typer.Option("--top", help="Labels per text; default: the best, or those past the threshold.", min=1),
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="With --data: a column for each label's score.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", help="Most texts of one engine call.", min=1)] = None,
    assignments: Set = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Answer texts with an artefact, one line each; or rows of files, each with its columns and its answer."""
    from rtrain.cli import predict as cli_predict

    folder = answering(artifact)
    given = cli_predict.Given(folder, texts or [], data, out, resume, overwrite, top, batch, as_json, as_texts, scores)
    given.check(assignments, address)
    if data is None:
        cli_predict.print_texts(given)
    else:
        cli_predict.answer_rows(given, assignments, address)


def explain(
    artifact: Artefact,
    text: Annotated[str | None, typer.Argument(help="A text; without it standard input, as a whole.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The second text, where there are two.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Explain this label instead of the answer's.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Of the integral; default: doubled until the error is below 1 %.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which words, and which sentences, an answer rests on, by integrated gradients."""
    from rtrain.inference.explain.explainer import Explainer
    from rtrain.inference.predictor import Predictor
    from rtrain.report import explanation
    from rtrain.report.live.progress import say, used

    folder = answering(artifact)
    predictor = Predictor.load(folder)
    first, second = predictor.task.fields
    read = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if text is None else text
    [found] = Explainer(predictor)([read if pair is None else {first: read, second: pair}], label, steps)
    document = found.to_document()
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        explanation.show(document, sys.stdout)
        say(used(folder, artifact))


def serve(
    artifacts: Artefacts = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port (default 8000; 0 takes a free one).")] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    ungated: Ungated = False,
    update: Annotated[
        bool, typer.Option("--update", help="Have the endpoint on that port answer with this artefact from now on.")
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Have the endpoint on that port answer with what it served before.")
    ] = False,
    model: Model = None,
    shadow: Annotated[
        float | None,
        typer.Option("--shadow", help="With --update: share of live texts by which it has to prove itself first."),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Answer by this process itself, without Ray: no replicas, no --update.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the file for `serve deploy` that serves it so, and end.")
    ] = False,
    assignments: Set = None,
    address: Address = None,
) -> None:
    """Answer HTTP requests with an artefact, or with several, on Ray Serve, until Ctrl-C; or change what an endpoint
    answers with."""
    from rtrain.cluster.connection import until_interrupted
    from rtrain.report.live.progress import say
    from serve import model_specs, ray_config
    from serve.auth import preflight
    from serve.rollout import admin_socket, canary

    if update and rollback:
        raise UserError("--update and --rollback exclude each other", code="conflicting_settings")
    if rollback or not artifacts:
        if artifacts or not rollback:
            raise UserError("name an artefact to serve; --rollback alone takes none", code="missing")
        say(admin_socket.ask(_port(port, assignments), {"rollback": True, "model": model}))
        return
    if shadow is not None and not update:
        raise UserError(
            "--shadow says how a candidate proves itself; write it with --update", code="conflicting_settings"
        )
    if update:
        if len(artifacts) > 1:
            raise UserError(
                "--update takes one artefact; several models are changed one after another", code="conflicting_settings"
            )
        asked = configured("intent", assignments, port=port, shadow=shadow).deploy.serve
        trial = [*canary.Aim.of(asked)] if asked.shadow else None
        question = {"update": str(answering(artifacts[0])), "model": model, "trial": trial}
        say(admin_socket.ask(asked.port, question))
        return
    if alone and (address or print_config):
        raise UserError("--alone starts no Ray; leave --address and --print-config out", code="conflicting_settings")
    if model is not None:
        raise UserError(
            "--model says which model is changed; a name is given to one by NAME=ARTEFACT", code="conflicting_settings"
        )

    short = {"host": host, "port": port, "keys": keys, "insecure": insecure or None, "ungated": ungated or None}
    config = configured("intent", assignments, **short, address=address)
    settings = preflight.absolute(config.deploy.serve)  # the session works in another folder
    preflight.check(settings, say)
    folders = model_specs.artifacts(artifacts, answering)
    model_specs.admit(folders, settings, say)
    if alone:
        _alone(folders, settings)
    if print_config:
        print(ray_config.text(folders, settings), end="")
        return
    from serve import launcher

    with (
        launcher.endpoint(config, settings, folders, say) as endpoint,
        admin_socket.listening(endpoint.port, endpoint.change),
    ):
        _told(folders, endpoint.url, settings)
        until_interrupted()


def _alone(folders: Mapping[str, Path], settings: Any) -> NoReturn:
    """Answer by this process itself, until a signal ends it."""
    from serve import standalone

    standalone.run(folders, settings, lambda found: _told(folders, found.url, settings))
    raise AssertionError("only a signal ends it")


def _told(folders: Mapping[str, Path], url: str, settings: Any) -> None:
    """Where an endpoint answers, and how it is asked."""
    from rtrain.core.run_folder import shown
    from rtrain.report.live.progress import say
    from serve.auth import preflight

    first = next(iter(folders))
    if len(folders) == 1:
        say(f"serving {folders[first]} at {url} (Ctrl-C ends it)")
        say(f"next: {preflight.curl(url, settings)}")
        return
    for name, folder in folders.items():
        say(f"serving {shown(folder)} at {url}/models/{name} (Ctrl-C ends it)")
    say(f"next: {preflight.curl(f'{url}/models/{first}', settings)}")


def status(
    port: Annotated[int | None, typer.Option("--port", help="Port of the endpoint (default 8000).")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Tell what the endpoint of this user's on a port does: versions, trial, replicas, queue, drift."""
    from serve.rollout import admin_socket

    document = json.loads(admin_socket.ask(_port(port, None), {"status": True, "model": model}))
    print(json.dumps(document, ensure_ascii=False) if as_json else admin_socket.format_status(document))


def _port(port: int | None, assignments: list[str] | None) -> int:
    """The port that the settings name, as `rtrain serve` would read them."""
    found: int = configured("intent", assignments, port=port).deploy.serve.port
    return found


KeyFile = Annotated[Path, typer.Argument(help="File of keys, as `rtrain serve ARTIFACT --keys` takes it.")]
KeyName = Annotated[str, typer.Argument(help="Name of the key: whose it is.")]


def add_key(
    file: KeyFile,
    name: KeyName,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="What it opens: predict (default) or metrics. Repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Model that it may ask; default: all. Repeatable.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Most requests, e.g. 100/minute; default: no limit.")
    ] = None,
) -> None:
    """Make a key and print it, this once; the file has only its hash."""
    from rtrain.report.live.progress import say
    from serve.auth import api_keys

    scopes = scope or ["predict"]
    for one in scopes:
        if one not in api_keys.SCOPES:
            problem = Problem(
                "--scope",
                one,
                "there is no such scope",
                f"write {' or '.join(api_keys.SCOPES)}",
                code="unknown_name",
            )
            raise ConfigError([problem])
    plain = api_keys.add(file, name, [known for known in api_keys.SCOPES if known in scopes], rate, model)
    print(plain)
    say(f"{name} may ask by the header Authorization: Bearer KEY; the key is shown this once")


def list_keys(file: KeyFile, as_json: Json = False) -> None:
    """List the keys by name, with what each opens and how often."""
    from serve.auth import api_keys

    found = api_keys.read(file)
    if as_json:
        print(json.dumps([key.model_dump(exclude={"sha256"}) for key in found]))
        return
    rows = [("name", "id", "scopes", "models", "rate", "created")]
    rows += [
        (key.name, key.id, ",".join(key.scopes), ",".join(key.models or ["all"]), key.rate or "-", key.created)
        for key in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def revoke_key(file: KeyFile, name: KeyName) -> None:
    """Take a key out of the file; a running endpoint refuses it within a second."""
    from rtrain.report.live.progress import say
    from serve.auth import api_keys

    api_keys.revoke(file, name)
    say(f"{name} is revoked; an endpoint that runs refuses it within {api_keys.LOOK_S:.0f} s")
