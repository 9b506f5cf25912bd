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
    options = parser.parse_args(arguments)
    min_rows = 2 * common.MICRO_BATCH_SIZE * common.PROCESSES
    if options.rows < min_rows or options.rows % common.PROCESSES:
        parser.error(f"--rows {options.rows}: write an even number of {min_rows} or more")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: write 1 or more")
    return options


def prepare(data: Path, folder: Path, count: int) -> Work:
    """Write the rows. Everything that is measured stays on as many cores as a side has processes, if there are more."""
    cores = sorted(os.sched_getaffinity(0))[: common.PROCESSES]
    if len(cores) < common.PROCESSES:
        raise SystemExit(f"{common.PROCESSES} processor cores are needed, one for each training process; here is one")
    os.sched_setaffinity(0, cores)
    from rtrain.core import hub
    from rtrain.models import builder

    folder.mkdir(parents=True, exist_ok=True)
    source = builder.resolve_folder(hub.PACKAGED_MODEL)
    files = rows.sample(data / "banking77" / "train.csv", folder, count)
    return Work(folder, source, files, rows.equal(rows.whole_words(source), folder, count), tuple(cores))


def measure(names: Sequence[str], work: Work, count: int) -> list[Round]:
    rounds: list[Round] = []
    for number in range(count):
        measured = {}
        for name in figures.turn(names, number):
            measured[name] = sides.run(name, work, number)
            print(f"round {number}: {name} {figures.rate(measured[name]):.1f} rows/s", file=sys.stderr, flush=True)
        rounds.append(measured)
    return rounds


def document(
    selected_figures: Sequence[Figure], rounds: Sequence[Round], work: Work, about: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The result as a document and as tables: every figure by its key, and the measurements that it was made from."""
    verdicts = figures.evaluate(selected_figures, rounds)
    by_side = {name: [measured[name] for measured in rounds] for name in rounds[0]}
    shown = {
        name: {
            "rows_per_second": figures.summary([figures.rate(side) for side in measured]),
            "rounds": measured,
            "programs": [shlex.join(command) for command in sides.commands(name, work, 0)],
        }
        for name, measured in by_side.items()
    }
    return {
        **verdicts,
        "about": dict(about),
        "sides": shown,
    }, f"{figures.table(verdicts)}\n\n{figures.side_table(by_side)}"


def main() -> None:
    options = parse()
    out = options.out.absolute()
    versions = {
        package.name: package.version for package in importlib.metadata.distributions() if package.name in PACKAGES
    }
    about = {**machine(), "python": platform.python_version(), "versions": versions, "rows": options.rows}
    about |= {"processes": common.PROCESSES, "micro_batch_size": common.MICRO_BATCH_SIZE}
    selected_figures = [figure for figure in figures.FIGURES if figure.key in (options.only or KEYS)]
    work = sides.make_store(prepare(options.data.absolute(), out.parent / f"{out.stem}-work", options.rows))
    result, tables = document(
        selected_figures, measure(figures.sides(selected_figures), work, options.rounds), work, about
    )
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(tables, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
