"""What a search of settings finds, and what it costs: `python -m benchmarks.search [--json] DATA`.

Every search and every run is a command of rtrain in its own process, and stays in the folder of its name beside the
results: one that has ended is not made again, one that was stopped is gone on with, and each part can be run alone.

gain     test accuracy on banking77 of what searches of 8 full runs find, over that of the recipe as it stands
random   the rows that random search takes to what the searches came to, by a pool of full runs of random settings

The parts share their searches. `results` are written after each search.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import Found, Keep, Results
from benchmarks.search import parts
from benchmarks.search.parts import Work

PARTS: dict[str, Callable[[Work, Keep], Found]] = {
    "gain": parts.gain,
    "random": parts.against_random,
}
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
    chosen = parser.parse_args(arguments)
    if chosen.rows < FEWEST_ROWS:
        parser.error(f"--rows {chosen.rows}: write {FEWEST_ROWS} or more")
    for name in ("epochs", "searches", "pool"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} {getattr(chosen, name)}: write 1 or more")
    return chosen


def main() -> None:
    chosen = parse()
    given = {"rows": chosen.rows, "epochs": chosen.epochs, "searches": chosen.searches}
    results = Results(chosen.out, **given)
    work = Work(chosen.data.absolute(), results.folder, chosen.rows, chosen.epochs, chosen.searches, chosen.pool)
    for name in chosen.only or PARTS:
        found = results.measure(name, partial(PARTS[name], work))
        print(f"{name}: {json.dumps(short(found), default=str)}", file=sys.stderr, flush=True)
    if chosen.json:
        print(results)


def short(part: Found) -> Found:
    """The figures of a part, without what they were made from."""
    return {name: value for name, value in part.items() if isinstance(value, int | float | str) or value is None}


if __name__ == "__main__":
    main()
