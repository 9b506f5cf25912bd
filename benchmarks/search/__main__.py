"""What a search of settings finds, and what it costs: `python -m benchmarks.search [--json] DATA`.

Every search and every run is a command of rtrain in its own process, and stays in the folder of its name beside the
results: one that has ended is not made again, one that was stopped is gone on with, and each part can be run alone.

gain     test accuracy on banking77 of what searches of 8 full runs find, over that of the recipe as it stands
random   the rows that random search takes to what the searches came to, by a pool of full runs of random settings
time     seconds to an accuracy with what a search for time chooses, over those with an exchange after every pass
slots    seconds from an order to its training: of a frozen trial, and of the first one in a slot
kills    a search whose driver is killed again and again, beside one that nothing disturbs
others   what searches gain for essay scores and for questions

The parts `gain` and `slots` share their searches, and `random` takes them too. `results` are written after each search.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import Found, Keep, Results
from benchmarks.search import kills, others, parts
from benchmarks.search.parts import Work

PARTS: dict[str, Callable[[Work, Keep], Found]] = {
    "gain": parts.gain,
    "random": parts.against_random,
    "time": parts.time,
    "slots": parts.slots,
    "kills": kills.measure,
    "others": others.measure,
}
FEWEST_ROWS = 1000
"""Fewer have not one row of each intent in both halves of the validation rows."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__, formatter_class=form)
    parser.add_argument("data", nargs="?", help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--rows", type=int, default=3000, help="training rows of each set")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a full run of banking77")
    parser.add_argument("--searches", type=int, default=3, help="searches of banking77, each with another seed")
    parser.add_argument("--pool", type=int, default=24, help="full runs of random settings")
    parser.add_argument("--target", type=float, help="accuracy of the part `time`; default: what k = 1 comes to")
    parser.add_argument("--kills", type=int, default=5, help="times that the driver is killed")
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/search.json"), help="file of the results")
    chosen = parser.parse_args(arguments)
    if chosen.data is None and chosen.only and chosen.only[-1] not in PARTS:
        chosen.data = chosen.only.pop()  # argparse took the folder, written after the parts, as a part
    if chosen.data is None:
        parser.error("name the folder that holds `banking77`")
    chosen.data = Path(chosen.data).absolute()
    if unknown := [name for name in chosen.only or () if name not in PARTS]:
        parser.error(f"--only: no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if chosen.rows < FEWEST_ROWS:
        parser.error(f"--rows {chosen.rows}: write {FEWEST_ROWS} or more")
    if chosen.target is not None and not 0 < chosen.target < 1:
        parser.error(f"--target {chosen.target:g}: write a share, e.g. 0.9")
    for name in ("epochs", "searches", "pool", "kills"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} {getattr(chosen, name)}: write 1 or more")
    return chosen


def main() -> None:
    chosen = parse()
    given = {"rows": chosen.rows, "epochs": chosen.epochs, "searches": chosen.searches}
    results = Results(chosen.out, **given)
    sizes = (chosen.rows, chosen.epochs, chosen.searches, chosen.pool, chosen.kills)
    work = Work(chosen.data, results.folder, *sizes, chosen.target)
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
