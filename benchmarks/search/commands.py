"""rtrain's commands as users give them, each in its own process, whose output is in a file beside its folder."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import sides
from rtrain.core.run_folder import Run
from tune.history import read_journal, replay


def settings(values: Mapping[str, Any]) -> list[str]:
    """The arguments `--set name=value`; what is no text is written as JSON, which YAML takes."""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [part for name, value in shown.items() for part in ("--set", f"{name}={value}")]


def words(verb: str, recipe: str, arguments: Sequence[str], values: Mapping[str, Any], out: Path) -> list[str]:
    """What follows `rtrain`; a folder that was begun is gone on with."""
    begun = ["--resume"] if (out / "config.yaml").is_file() else []
    return [verb, recipe, *arguments, *settings(values), "--out", str(out), "--json", *begun]


def run(given: Sequence[str], log: Path) -> None:
    """Run a command to its end. Raises `SystemExit` if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ {shlex.join(['rtrain', *given])}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "rtrain", *given]
    with log.open("ab") as output:
        done = subprocess.run(command, env=sides.own_environment(), stdout=output, stderr=output, check=False)
    if done.returncode:
        raise SystemExit(f"rtrain {given[0]} ended with {done.returncode}; its output is in {log}")


def train(folder: Path, recipe: str, arguments: Sequence[str], values: Mapping[str, Any]) -> Run:
    """A full run, which is trained where it is not finished."""
    made = Run(folder)
    if not made.finished:
        run(words("train", recipe, arguments, values, folder), folder.with_suffix(".log"))
    return made


def tune(folder: Path, recipe: str, arguments: Sequence[str], values: Mapping[str, Any]) -> Run:
    """A search, which is run, or gone on with, where it has not ended."""
    made = Run(folder)
    if replay(read_journal(made.trials)).chosen is None or not made.best.is_file():
        run(words("tune", recipe, arguments, values, folder), folder.with_suffix(".log"))
    return made


def scores(made: Run, split: str) -> dict[str, float]:
    """The scores of a finished run's best weights, by name."""
    found: dict[str, float] = json.loads(made.summary.read_text(encoding="utf-8"))["metrics"][split]
    return found
