"""The verbs of `rtrain serve keys`: the file of those who may ask an endpoint."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import Json

File = Annotated[Path, typer.Argument(help="File of keys, as `rtrain serve ARTIFACT --keys` takes it.")]
Name = Annotated[str, typer.Argument(help="Name of the key: whose it is.")]


def add(
    file: File,
    name: Name,
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
    from rtrain.errors import ConfigError, Problem
    from rtrain.report.live.progress import say
    from serve.door import keys

    scopes = scope or ["predict"]
    for one in scopes:
        if one not in keys.SCOPES:
            raise ConfigError([Problem("--scope", one, "there is no such scope", f"write {' or '.join(keys.SCOPES)}")])
    plain = keys.add(file, name, [known for known in keys.SCOPES if known in scopes], rate, model)
    print(plain)
    say(f"{name} may ask by the header Authorization: Bearer KEY; the key is shown this once")


def list_(file: File, as_json: Json = False) -> None:
    """List the keys by name, with what each opens and how often."""
    from serve.door import keys

    found = keys.read(file)
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


def revoke(file: File, name: Name) -> None:
    """Take a key out of the file; a running endpoint refuses it within a second."""
    from rtrain.report.live.progress import say
    from serve.door import keys

    keys.revoke(file, name)
    say(f"{name} is revoked; an endpoint that runs refuses it within {keys.LOOK_S:.0f} s")
