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
from tune.history import read_journal, replay_journal


def settings(values: Mapping[str, Any]) -> list[str]:
    """Arguments `--set name=value`; values other than text are written as JSON, which is valid YAML."""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [part for name, value in shown.items() for part in ("--set", f"{name}={value}")]


def words(verb: str, recipe: str, arguments: Sequence[str], values: Mapping[str, Any], out: Path) -> list[str]:
    """Arguments after `rtrain`; an existing folder is resumed."""
    resume_options = ["--resume"] if (out / "config.yaml").is_file() else []
    return [verb, recipe, *arguments, *settings(values), "--out", str(out), "--json", *resume_options]


def run(arguments: Sequence[str], log: Path) -> None:
    """Run a command to its end. Raises `SystemExit` if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ {shlex.join(['rtrain', *arguments])}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "rtrain", *arguments]
    with log.open("ab") as output:
        done = subprocess.run(command, env=sides.own_environment(), stdout=output, stderr=output, check=False)
    if done.returncode:
        raise SystemExit(f"rtrain {arguments[0]} ended with {done.returncode}; its output is in {log}")


def train(folder: Path, recipe: str, arguments: Sequence[str], values: Mapping[str, Any]) -> Run:
    """A full run, which is trained where it is not finished."""
    run_result = Run(folder)
    if not run_result.is_finished:
        run(words("train", recipe, arguments, values, folder), folder.with_suffix(".log"))
    return run_result


def tune(folder: Path, recipe: str, arguments: Sequence[str], values: Mapping[str, Any]) -> Run:
    """Run a search, or resume it if it has not ended."""
    run_result = Run(folder)
    if replay_journal(read_journal(run_result.trials)).winner is None or not run_result.best_config.is_file():
        run(words("tune", recipe, arguments, values, folder), folder.with_suffix(".log"))
    return run_result


def scores(run_result: Run, split: str) -> dict[str, float]:
    """The scores of a finished run's best weights, by name."""
    metrics: dict[str, float] = json.loads(run_result.summary.read_text(encoding="utf-8"))["metrics"][split]
    return metrics
