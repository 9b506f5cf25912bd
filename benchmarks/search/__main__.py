"""Gain and cost of a search of settings: `python -m benchmarks.search [--json] DATA`.

Every search and every run is a command of rtrain in its own process, and stays in the folder of its name beside the
results: a finished one is not repeated, a stopped one is resumed, and each part can be run alone.

gain     test accuracy on banking77 of searches of 8 full runs, over that of the unchanged recipe
random   rows that random search needs for the same score, by a pool of full runs of random settings

The parts share their searches. `results` are written after each search.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import Keep, PartResult, Results
from benchmarks.search import parts
from benchmarks.search.parts import Work

PARTS: dict[str, Callable[[Work, Keep], PartResult]] = {"gain": parts.gain, "random": parts.against_random}
FEWEST_ROWS = 1000
"""Fewer have not one row of each intent in both halves of the validation rows."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, help="folder that holds `banking77`")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--rows", type=int, default=3000, help="training rows")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a full run of banking77")
    parser.add_argument("--searches", type=int, default=3, help="searches of banking77, each with another seed")
    parser.add_argument("--pool", type=int, default=24, help="full runs of random settings")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/search.json"), help="file of the results")
    options = parser.parse_args(arguments)
    if options.rows < FEWEST_ROWS:
        parser.error(f"--rows {options.rows}: write {FEWEST_ROWS} or more")
    for name in ("epochs", "searches", "pool"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: write 1 or more")
    return options


def main() -> None:
    options = parse()
    values = {"rows": options.rows, "epochs": options.epochs, "searches": options.searches}
    results = Results(options.out, **values)
    work = Work(options.data.absolute(), results.folder, options.rows, options.epochs, options.searches, options.pool)
    for name in options.only or PARTS:
        result = results.measure(name, partial(PARTS[name], work))
        print(f"{name}: {json.dumps(short(result), default=str)}", file=sys.stderr, flush=True)
    if options.json:
        print(results)


def short(part: PartResult) -> PartResult:
    """Figures of a part, without the data behind them."""
    return {name: value for name, value in part.items() if isinstance(value, int | float | str) or value is None}


if __name__ == "__main__":
    main()
