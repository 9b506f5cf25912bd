"""Measure `rtrain predict --data`: rows in and out, texts a second beside the engine alone, peak memory, and a kill.

    python -m benchmarks.answers --json [--rows 1000000] [--artifact FOLDER] [--data FILE]

Without --artifact an int8 artefact is trained on the demo's rows, which takes minutes. Without --data the rows are made
of the demo's messages; one in a thousand has no text, and one in a thousand is cut short. The command runs twice: as it
is, and killed (SIGKILL) once half of the rows are answered, and resumed. Both must leave the same bytes. The engine
alone makes tokens and answers of rows that are in memory already, sorted by length, at the best of some batch sizes; it
is measured before and after the command, since other programs may slow the machine down.
"""

import argparse
import csv
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rtrain import env
from rtrain.data import synthetic

ROWS = 1_000_000
SAMPLE = 8192
"""Rows that the engine alone answers, at each batch size."""
BATCHES = (16, 32, 64)
BLANK, SHORT = 1000, 1001
"""Every so many rows have no text; every so many are cut short behind their number."""


def make_rows(path: Path, count: int) -> None:
    """A csv file with the columns number and text. No two texts are alike."""
    messages, _ = synthetic.generate()
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("number", "text"))
        for number in range(count):
            if number % SHORT == SHORT - 1:
                lines.writerow((number,))
            else:
                text = f"{messages[number % len(messages)].text} {number}"
                lines.writerow((number, "" if number % BLANK == BLANK - 1 else text))


def texts_of(path: Path, column: str, count: int) -> list[str]:
    """The first texts of a csv file that are not blank."""
    found: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            if len(found) == count:
                break
            if (row[column] or "").strip():
                found.append(row[column])
    return found


def engine_rate(artifact: Path, texts: Sequence[str]) -> dict[str, float]:
    """Texts a second by batch size, tokens and engine alone."""
    from rtrain.answers.answering import copies
    from rtrain.predict import side_by_side

    engines = copies(artifact, env.cores())
    side_by_side(engines, engines[0].encode(texts[:512]), BATCHES[0])
    found = {}
    for size in BATCHES:
        start = time.perf_counter()
        side_by_side(engines, engines[0].encode(texts), size)
        found[str(size)] = len(texts) / (time.perf_counter() - start)
    return found


def engine_alone(given: argparse.Namespace, data: Path, artifact: Path) -> dict[str, float]:
    """`engine_rate` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.answers", "--artifact", str(artifact), "--data", str(data)]
    command += ["--column", given.column, "--engine"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def command_of(artifact: Path, data: Path, out: Path, column: str) -> list[str]:
    command = [sys.executable, "-m", "rtrain", "predict", str(artifact), "--data", str(data), "--out", str(out)]
    return [*command, "--set", f"data.text={column}", "--json"]


def peak_mb(process: int) -> float:
    """The most memory that a running process has had."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("VmHWM:")), 0.0)


def run(command: list[str]) -> dict[str, Any]:
    """The command's own report, its seconds by the wall, and its peak memory."""
    start, peak = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            peak = max(peak, peak_mb(process.pid))
            time.sleep(0.1)
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
    return {**report, "wall_s": round(time.perf_counter() - start, 2), "peak_mb": round(peak)}


def kill_at_half(command: list[str], log: Path, portions: int) -> int:
    """Start the command, and kill it once half of the portions are done; how many they were then."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while lines(log) < max(1, portions // 2):
            if process.poll() is not None:
                raise SystemExit("the command ended before it was killed; give more --rows")
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    return lines(log)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rows_of(path: Path) -> Iterator[tuple[str, ...]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from (tuple(row) for row in csv.reader(file))


def counted(data: Path, out: Path) -> dict[str, int]:
    """Rows in and out, and how many of the whole rows are not where they should be."""
    rows, answers = rows_of(data), rows_of(out)
    width = len(next(rows))
    next(answers)
    found = {"rows_in": 0, "rows_out": 0, "lost_or_moved": 0}
    for row in rows:
        if not row:
            continue
        answer = next(answers, None)
        found["rows_in"] += 1
        found["rows_out"] += answer is not None
        found["lost_or_moved"] += answer is None or (len(row) == width and answer[:width] != row)
    found["rows_out"] += sum(1 for _ in answers)
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trained(folder: Path) -> Path:
    """An int8 artefact of a short training on the demo's rows."""
    data, test = synthetic.write(folder)
    program = [sys.executable, "-m", "rtrain"]
    train = ["train", "intent", "--data", str(data), "--test", str(test), "--out", str(folder / "run")]
    settings = ("data.label=intent", "train.epochs=1")
    train += [part for setting in settings for part in ("--set", setting)]
    for verb in (train, ["quantize", str(folder / "run")]):
        subprocess.run([*program, *verb], check=True, stdout=subprocess.DEVNULL)
    return folder / "run" / "artifact-int8"


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    artifact = given.artifact or trained(folder)
    data = given.data
    if data is None:
        data = folder / "rows.csv"
        make_rows(data, given.rows)
    before = engine_alone(given, data, artifact)
    whole = run(command_of(artifact, data, folder / "whole.csv", given.column))
    after = engine_alone(given, data, artifact)
    engine = max(statistics.mean((before[size], after[size])) for size in before)
    rate = whole["answered"] / whole["seconds"]
    out = folder / "killed.csv"
    command, log = command_of(artifact, data, out, given.column), folder / ".killed.csv.portions" / "portions.jsonl"
    killed = kill_at_half(command, log, -(-whole["rows"] // 4096))
    resumed = run([*command, "--resume"])
    return {
        "rows": whole["rows"],
        **{name: whole[name] for name in ("answered", "empty", "bad", "seconds", "wall_s", "peak_mb")},
        "texts_per_second": round(rate, 1),
        "engine_alone": {name: [round(before[name], 1), round(after[name], 1)] for name in before},
        "of_engine": round(rate / engine, 3),
        **counted(data, folder / "whole.csv"),
        "killed_after_portions": killed,
        "resumed": {name: resumed[name] for name in ("rows", "reused_rows", "seconds", "peak_mb")},
        "after_resume": counted(data, out),
        "same_bytes": sha256(out) == sha256(folder / "whole.csv"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--data", type=Path, help="csv file of rows to answer")
    parser.add_argument("--column", default="text", help="its column with the text")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        sys.stdout.write(json.dumps(engine_rate(given.artifact, texts_of(given.data, given.column, SAMPLE))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given, Path(folder))
    shown = json.dumps(found) if given.json else "\n".join(f"{name:24} {value}" for name, value in found.items())
    sys.stdout.write(f"{shown}\n")


if __name__ == "__main__":
    main()
