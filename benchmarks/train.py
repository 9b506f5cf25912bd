"""rtrain's training side by side with others': `python -m benchmarks.train [--json] DATA`.

All sides train the packaged MiniLM on rows of banking77 in bf16, with 2 processes of 1 thread and 32 rows a pass. In
each round every side trains once, in its own processes; a figure is the median of the rounds' ratios, with its spread.
A side's clock runs from the begin of its first update, when its rows are there, to the end of its last update.
Starting, evaluations, checkpoints and exports are outside of every clock. `k4` means four passes between two exchanges,
256 rows an update, on both sides.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, rows, sides
from benchmarks.figures import Figure, Round
from benchmarks.peers import common
from benchmarks.results import machine
from benchmarks.sides import Work

ROWS = 1024
"""Training rows by default: a multiple of the 256 rows of an update at k = 4."""
KEYS = [figure.key for figure in figures.FIGURES]
PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "tokenizers", "numpy")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, help="folder that holds `banking77`")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout; the tables go to stderr")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows of each side in each round")
    parser.add_argument("--only", action="append", choices=KEYS, help="a figure; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/train.json"), help="file of the results")
    chosen = parser.parse_args(arguments)
    least = 2 * common.ROWS_PER_PASS * common.PROCESSES
    if chosen.rows < least or chosen.rows % common.PROCESSES:
        parser.error(f"--rows {chosen.rows}: write an even number of {least} or more")
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: write 1 or more")
    return chosen


def prepare(data: Path, folder: Path, count: int) -> Work:
    """Write the rows. Everything that is measured stays on as many cores as a side has processes, if there are more."""
    cores = sorted(os.sched_getaffinity(0))[: common.PROCESSES]
    if len(cores) < common.PROCESSES:
        raise SystemExit(f"{common.PROCESSES} processor cores are needed, one for each training process; here is one")
    os.sched_setaffinity(0, cores)
    from rtrain.core import hub
    from rtrain.models import builder

    folder.mkdir(parents=True, exist_ok=True)
    source = builder.resolve(hub.PACKAGED)
    files = rows.sample(data / "banking77" / "train.csv", folder, count)
    return Work(folder, source, files, rows.equal(rows.whole_words(source), folder, count), tuple(cores))


def measure(names: Sequence[str], work: Work, count: int) -> list[Round]:
    found: list[Round] = []
    for number in range(count):
        measured = {}
        for name in figures.turn(names, number):
            measured[name] = sides.run(name, work, number)
            print(f"round {number}: {name} {figures.rate(measured[name]):.1f} rows/s", file=sys.stderr, flush=True)
        found.append(measured)
    return found


def document(
    wanted: Sequence[Figure], rounds: Sequence[Round], work: Work, about: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The result as a document and as tables: every figure by its key, and the measurements that it was made from."""
    found = figures.evaluate(wanted, rounds)
    by_side = {name: [measured[name] for measured in rounds] for name in rounds[0]}
    shown = {
        name: {
            "rows_per_second": figures.summary([figures.rate(side) for side in measured]),
            "rounds": measured,
            "programs": [shlex.join(command) for command in sides.commands(name, work, 0)],
        }
        for name, measured in by_side.items()
    }
    return {**found, "about": dict(about), "sides": shown}, f"{figures.table(found)}\n\n{figures.side_table(by_side)}"


def main() -> None:
    chosen = parse()
    out = chosen.out.absolute()
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name in PACKAGES}
    about = {**machine(), "python": platform.python_version(), "versions": versions, "rows": chosen.rows}
    about |= {"processes": common.PROCESSES, "rows_per_pass": common.ROWS_PER_PASS}
    wanted = [figure for figure in figures.FIGURES if figure.key in (chosen.only or KEYS)]
    work = sides.make_store(prepare(chosen.data.absolute(), out.parent / f"{out.stem}-work", chosen.rows))
    result, tables = document(wanted, measure(figures.sides(wanted), work, chosen.rounds), work, about)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(tables, file=sys.stderr if chosen.json else sys.stdout)
    if chosen.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
