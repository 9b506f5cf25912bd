"""rtrain's training side by side with others': `python -m benchmarks.train [--json] DATA`.

All sides train the packaged MiniLM on rows of banking77 in bf16, with 2 processes of 1 thread and 32 rows a pass. In
each round every side trains once, in its own processes; a figure is the median of the rounds' ratios, with its spread.
A side's clock runs from the begin of its first update, when its rows are there, to the end of its last update.
Starting, evaluations, checkpoints and exports are outside of every clock. `k4` means four passes between two exchanges,
256 rows an update, on both sides.

`--sweep` first finds each peer's fastest threads, allocator and loader processes, and keeps them beside the results for
later calls. A default call ends within 40 minutes. Some figures are measured only if they are named: the gain of each
technique, by the loop without it, and of each setting that is not the default (`--only gains`), the ratio to Accelerate
(`--only vs_accelerate`), and the time to an accuracy (`--only time_to_090`, about an hour and a half).
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import budgets, figures, ours, rows, sides, time_to
from benchmarks.budgets import Budget
from benchmarks.figures import Figure, Round
from benchmarks.peers import common
from benchmarks.sides import Work

ROWS = 1024
"""Training rows by default: a multiple of the 256 rows of an update at k = 4."""
SWEEP_ROWS = 768
GAINS = tuple(f"gain_{name}" for name in (*ours.TECHNIQUES, *ours.OPTIONS))
ALIAS = {"time_to_090": tuple(one.key for one in figures.TIMES), "gains": GAINS}
PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "tokenizers", "numpy")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__, formatter_class=form)
    parser.add_argument("data", nargs="?", help="folder that holds `banking77`")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout; the tables go to stderr")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows of each side in each round")
    parser.add_argument("--minutes", type=float, default=40, help="begin no round that would end after them")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/train.json"), help="file of the results")
    known = (*figures.figures(ours.TECHNIQUES, ours.OPTIONS), *figures.TIMES)
    keys = [*(figure.key for figure in known), *ALIAS]
    parser.add_argument("--only", nargs="+", metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument("--sweep", action="store_true", help="find the peers' fastest settings first")
    chosen = parser.parse_args(arguments)
    if chosen.data is None and chosen.only and chosen.only[-1] not in keys:
        chosen.data = chosen.only.pop()  # argparse took the folder, written after the keys, as a key
    if chosen.data is None:
        parser.error("name the folder that holds `banking77`")
    chosen.data = Path(chosen.data).absolute()
    if unknown := [key for key in chosen.only or () if key not in keys]:
        parser.error(f"--only: no such key: {', '.join(unknown)}; there are {', '.join(keys)}")
    if chosen.rows < 2 * common.ROWS_PER_PASS * common.PROCESSES or chosen.rows % common.PROCESSES:
        parser.error(
            f"--rows {chosen.rows}: write an even number of {2 * common.ROWS_PER_PASS * common.PROCESSES} or more"
        )
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: write 1 or more")
    return chosen


def figures_for(only: Sequence[str] | None) -> tuple[list[Figure], list[Figure]]:
    """The figures to measure, by the keys that the call names: those of the rounds, and those of times to an
    accuracy."""
    keys = None if only is None else {key for name in only for key in ALIAS.get(name, (name,))}
    known = figures.figures(ours.TECHNIQUES, ours.OPTIONS)
    rounds = [one for one in known if (one.default if keys is None else one.key in keys)]
    return rounds, [one for one in figures.TIMES if keys is not None and one.key in keys]


def prepare(data: Path, folder: Path, count: int) -> Work:
    """Write the rows. Everything that is measured stays on as many cores as a side has processes, if there are more."""
    cores = sorted(os.sched_getaffinity(0))[: common.PROCESSES]
    if len(cores) < common.PROCESSES:
        raise SystemExit(f"{common.PROCESSES} processor cores are needed, one for each training process; here is one")
    os.sched_setaffinity(0, cores)
    from rtrain import hub
    from rtrain.network import model

    folder.mkdir(parents=True, exist_ok=True)
    source = model.resolve(hub.PACKAGED)
    files = rows.sample(data / "banking77" / "train.csv", folder, count)
    return Work(folder, source, files, rows.equal(rows.whole_words(source), folder, count), tuple(cores))


def sweep(names: Sequence[str], work: Work, path: Path) -> None:
    """Sweep the settings of each of the peers, and save the best."""
    for name in names:
        say(f"sweep of {name}")

        def measure(budget: Budget, name: str = name) -> float:
            speed = figures.rate(sides.run(name, work, 0, budget))
            say(f"  {speed:7.1f} rows/s: {budgets.label(budget)}")
            return speed

        budgets.save(path, {name: budgets.sweep(budgets.axes(name), measure)}, about())


def measure(
    names: Sequence[str], work: Work, chosen: Mapping[str, Budget], limit: argparse.Namespace, begun: float
) -> list[Round]:
    """Measure rounds, until there are enough or the next would end too late after `begun` (by time.monotonic)."""
    found: list[Round] = []
    longest = 0.0
    for number in range(limit.rounds):
        start = time.monotonic()
        if found and start + longest - begun > 60 * limit.minutes:
            say(f"after {number} rounds: another would end after {limit.minutes:g} minutes (--minutes)")
            break
        one = {}
        for name in figures.turn(names, number):
            one[name] = sides.run(name, work, number, chosen.get(name, Budget()))
            say(
                f"round {number}: {name} "
                + (f"{figures.rate(one[name]):.1f} rows/s" if "rows" in one[name] else "done")
            )
        found.append(one)
        longest = max(longest, time.monotonic() - start)
    return found


def budgets_of(names: Sequence[str], swept: Mapping[str, Budget]) -> dict[str, Budget]:
    """The budget of each peer: what its sweep chose, or without a sweep the allocator that rtrain gives itself."""
    peers = [name for name in names if name in sides.PEERS]
    return {name: swept.get(sides.SAME_BUDGET.get(name, name), Budget(allocator="kept")) for name in peers}


def about() -> dict[str, Any]:
    """The machine, versions and settings of the measurement."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    processor = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")), ""
    )
    return {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "versions": found,
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
    }


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def document(
    found: Mapping[str, Mapping[str, Any]],
    rounds: Sequence[Round],
    chosen: Mapping[str, Budget],
    work: Work,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The result as a document: every figure by its key, and then the measurements that it was made from."""
    names = list(rounds[0]) if rounds else []
    shown = {}
    for name in names:
        of_rounds = [one[name] for one in rounds]
        budget = chosen.get(name, Budget())
        programs = [shlex.join(command) for command in sides.commands(name, work, 0, budget)]
        given = dataclasses.asdict(budget) if name in chosen else {"threads": 1}
        speed = figures.summary([figures.rate(one) for one in of_rounds]) if "rows" in of_rounds[0] else None
        shown[name] = {"budget": given, "rows_per_second": speed, "rounds": of_rounds, "programs": programs}
    return {**found, "about": dict(facts), "sides": shown}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    chosen = parse()
    out = chosen.out.absolute()
    folder, swept = out.parent / f"{out.stem}-work", out.parent / f"{out.stem}-sweep.json"
    facts = {**about(), "processes": common.PROCESSES, "rows": chosen.rows, "rows_per_pass": common.ROWS_PER_PASS}
    wants, timed = figures_for(chosen.only)
    names = figures.sides(wants)
    needed = [*names, *figures.sides(timed)]
    work = prepare(chosen.data, folder, chosen.rows)
    if chosen.sweep:
        peers = [name for name in dict.fromkeys(needed) if name in sides.PEERS and name not in sides.SAME_BUDGET]
        few = prepare(chosen.data, folder / "sweep", min(chosen.rows, SWEEP_ROWS))
        sweep(peers, sides.make_store(few) if "ddp" in peers else few, swept)
    best = budgets_of(needed, budgets.load(swept))
    facts["budgets"] = f"of the sweep in {swept.name}" if swept.is_file() else "not swept"
    rounds: list[Round] = []
    if names:
        begun = time.monotonic()
        work = sides.make_store(work)
        rounds = measure(names, work, best, chosen, begun)
    found = figures.evaluate(wants, rounds)
    if timed:
        found |= time_to.measure(chosen.data / "banking77", work, best, timed)
    result = document(found, rounds, best, work, facts)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    told = figures.table(found) + "\n\n" + figures.side_table({name: [one[name] for one in rounds] for name in names})
    print(told, file=sys.stderr if chosen.json else sys.stdout)
    if chosen.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
