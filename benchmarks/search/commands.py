"""rtrain's commands as users give them, each in its own process: their settings, their memory, and what they leave."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import sides
from rtrain.run import Run
from tune.known.history import read_journal, replay

MARK = "BENCHMARK_COMMAND"
"""Environment variable by whose value the processes of a command are known: all that it starts inherit it."""
INTERVAL_S = 5.0
"""Between two samples of the memory in use."""
ENDING_S = 60.0
"""Time that processes have to end after their command."""
PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mb: float
    """Memory of all its processes; pages that they share are counted once."""
    processes_left: int


def settings(values: Mapping[str, Any]) -> list[str]:
    """The arguments `--set name=value`; what is no text is written as JSON, which YAML takes."""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [part for name, value in shown.items() for part in ("--set", f"{name}={value}")]


def words(verb: str, recipe: str, arguments: Sequence[str], values: Mapping[str, Any], out: Path) -> list[str]:
    """What follows `rtrain`; a folder that was begun is gone on with."""
    begun = ["--resume"] if (out / "config.yaml").is_file() else []
    return [verb, recipe, *arguments, *settings(values), "--out", str(out), "--json", *begun]


@contextlib.contextmanager
def started(given: Sequence[str], log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """The process of a command, and its mark. It is killed where the block is left before its end."""
    mark = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ {shlex.join(['rtrain', *given])}", file=sys.stderr, flush=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rtrain", *given],
            env={**sides.own_environment(), MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, mark
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def run(given: Sequence[str], log: Path) -> Cost:
    """Run a command to its end. Raises `SystemExit` if it fails."""
    begun, peak, done = time.monotonic(), [0.0], threading.Event()
    with started(given, log) as (process, mark):

        def watch() -> None:
            while not done.wait(INTERVAL_S):
                peak.append(memory_mb(mark))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        code = process.wait()
        seconds = time.monotonic() - begun
        done.set()
        watching.join()
    if code:
        raise SystemExit(f"rtrain {given[0]} ended with {code}; its output is in {log}")
    return Cost(round(seconds, 1), round(max(peak), 1), left(mark))


def processes(mark: str) -> list[int]:
    """Ids of the processes with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def memory_mb(mark: str) -> float:
    total = 0
    for pid in processes(mark):
        with contextlib.suppress(OSError):  # it may have ended since
            total += sum(map(int, PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())))
    return total * 1024 / 1e6


def left(mark: str) -> int:
    """How many processes are there still, once they have had time to end."""
    until = time.monotonic() + ENDING_S
    while (there := len(processes(mark))) and time.monotonic() < until:
        time.sleep(0.5)
    return there


# -------------------------------------------------------------------------------------------------- runs that are kept


def cost_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-cost.json")


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
        cost = run(words("tune", recipe, arguments, values, folder), folder.with_suffix(".log"))
        cost_file(folder).write_text(json.dumps(vars(cost)) + "\n", encoding="utf-8")
    return made


def cost_of(folder: Path) -> dict[str, Any] | None:
    """What the newest start of a search cost; None where its end was not seen."""
    path = cost_file(folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def scores(made: Run, split: str) -> dict[str, float]:
    """The scores of a finished run's best weights, by name."""
    found: dict[str, float] = json.loads(made.summary.read_text(encoding="utf-8"))["metrics"][split]
    return found
