"""What `rtrain plan` foretells beside what runs take: `python -m benchmarks.foretold [--json] DATA`.

hours      seconds of three runs, of messages, questions and essays: foretold by the pace of a pilot over some of the
           same rows, and by that of the messages' pilot for all three
frequency  seconds until an accuracy for k = 1, 2, 4 and 8: foretold by the noise scale and the clock of a pilot with
           k = 4, and measured

Every run is a command of rtrain in its own process, and stays beside the results: one that has ended is not made again.
Starts, checkpoints and what follows training are in no figure.
"""

import argparse
import gzip
import json
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ours, rows, sets, sides
from benchmarks.results import Found, Keep, Results
from benchmarks.search import commands
from benchmarks.search.parts import best_valid
from rtrain import config as configuration
from rtrain.doctor.forecast import choose_k
from rtrain.exchange import noise
from rtrain.run import Run

VALUES: dict[str, Any] = {"train.keep": 1, "train.log_every": 1, "report.attributions": 0}
"""Settings of all runs."""
PILOT = 0.15
"""Share of a run's rows that its pilot has, over all epochs."""
OF_A_PILOT: dict[str, Any] = {"train.epochs": 1, "data.valid_share": 0}
RECIPE, HEADLINE = "intent", "accuracy"
PILOT_K = 4
SCORED = 500
"""Messages by which it is told how far a run is."""
EVERY_ROWS = 512
"""Rows of training between two evaluations."""
FEWEST_UPDATES = 3 * noise.EVERY
"""Updates of the shortest pilot that tells a noise scale: three measurements of it."""


@dataclass(frozen=True)
class Work:
    data: Path
    """Folder of the data sets."""
    folder: Path
    seeds: int
    share: float
    """How much of the rows of each part is used."""

    def count(self, rows: int) -> int:
        return round(self.share * rows)

    def place(self, name: str) -> Path:
        """The folder of a run. Runs over another share of the rows are others."""
        return self.folder / f"share-{self.share:g}" / name


def machine(folder: Path) -> Path:
    """The file of a cluster that is this machine: processors are Ray's, and logical, as in a run without a cluster."""
    kinds = {"here": {"resources": {"CPU": 8}, "node_config": {}}}
    path = folder / "cluster.yaml"
    document = {"cluster_name": "here", "max_workers": 0, "head_node_type": "here", "available_node_types": kinds}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def plan(*arguments: str) -> dict[str, Any]:
    """What `rtrain plan` prints as JSON."""
    given = [sys.executable, "-m", "rtrain", "plan", *arguments, "--json"]
    print(f"$ {shlex.join(given[2:])}", file=sys.stderr, flush=True)
    done = subprocess.run(given, env=sides.own_environment(), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -------------------------------------------------------------------------------------------------------------- hours


def messages(source: Path, folder: Path, count: int) -> list[str]:
    found = list(dict.fromkeys(rows.read(source / "banking77" / "train.csv")))
    random.Random(0).shuffle(found)
    return ["--data", str(rows.write(folder / "rows.csv", found[:count]))]


def questions(source: Path, folder: Path, count: int) -> list[str]:
    """Whole passages, until they have so many questions; each of these is in one split."""
    found = (json.loads(gzip.decompress(path.read_bytes())) for path in sorted((source / "squadshifts").glob("*.gz")))
    passages = [passage for one in found for article in one["data"] for passage in article["paragraphs"]]
    random.Random(0).shuffle(passages)
    taken, asked = list[dict[str, Any]](), 0
    for passage in passages:
        if asked >= count:
            break
        taken.append({"title": str(len(taken)), "paragraphs": [passage]})
        asked += len(passage["qas"])
    path = folder / "rows.json"
    path.write_text(json.dumps({"version": "1.1", "data": taken}), encoding="utf-8")
    return ["--data", str(path)]


def essays(source: Path, folder: Path, count: int) -> list[str]:
    arguments = sets.asap(source / "asap_aes", folder)
    path = Path(arguments[1])
    lines = path.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    path.write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
    return arguments


@dataclass(frozen=True)
class Job:
    recipe: str
    prepare: Callable[[Path, Path, int], list[str]]
    """Writes so many rows, those of a smaller number among them, and gives the arguments that name them."""
    rows: int
    epochs: int = 1


JOBS = {
    "messages": Job("intent", messages, 5000, 2),
    "questions": Job("squad", questions, 1200),
    "essays": Job("essay", essays, 800),
}


def hours(work: Work, keep: Keep) -> Found:
    """`keep(document)` keeps what is known after each run."""
    cluster = machine(work.folder)
    made: dict[str, Run] = {}
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        values = {**VALUES, "train.epochs": job.epochs}
        whole = arguments_of(work, name, job, work.count(job.rows))
        few = arguments_of(work, f"{name}-pilot", job, round(PILOT * job.epochs * work.count(job.rows)))
        made[name] = commands.train(work.place(f"{name}-pilot"), job.recipe, few, {**VALUES, **OF_A_PILOT})
        asked = [job.recipe, "--cluster", str(cluster), *whole, *commands.settings(values)]
        # The plan comes before the run that it foretells.
        own, other = (plan(*asked, "--like", str(made[like].folder))["seconds"] for like in (name, "messages"))
        run = commands.train(work.place(name), job.recipe, whole, values)
        found[name] = compared(json.loads(run.summary.read_text(encoding="utf-8"))["seconds"], own, other)
        keep({"runs": found})
    ratios = [one["ratio"] for one in found.values()]
    return {"runs": found, "worst": max(abs(ratio - 1) for ratio in ratios)}


def arguments_of(work: Work, name: str, job: Job, count: int) -> list[str]:
    folder = work.place(f"{name}-rows")
    folder.mkdir(parents=True, exist_ok=True)
    return job.prepare(work.data, folder, count)


def compared(
    measured: Mapping[str, float], own: Mapping[str, float], other: Mapping[str, float]
) -> dict[str, dict[str, float] | float]:
    """Seconds of a run's summary and of two plans; the ratios are those of foretold to measured seconds."""

    def total(of: Mapping[str, float]) -> float:
        return of["train"] + of["evaluate"]

    return {
        "measured_s": {name: measured[name] for name in ("train", "evaluate", "total")},
        "foretold_s": dict(own),
        "foretold_by_messages_s": dict(other),
        "ratio": total(own) / total(measured),
        "ratio_of_training": own["train"] / measured["train"],
        "ratio_by_messages": total(other) / total(measured),
    }


# ---------------------------------------------------------------------------------------------------------- frequency

ROWS, EPOCHS = 3500, 3


def frequency(work: Work, keep: Keep) -> Found:
    """How much longer than the best of them the chosen frequency takes to an accuracy that every run has reached."""
    count = work.count(ROWS)
    pilot = commands.train(
        work.place("k-pilot"), RECIPE, files(work, "k-pilot", pilot_rows(count)), settings(PILOT_K, 1.0, 0, 1)
    )
    told = plan("--choose-k", "--like", str(pilot.folder))
    keep({"foretold": told})
    runs: dict[int, list[Run]] = {}
    for seed in range(work.seeds):
        for option in told["options"]:
            k, values = option["k"], settings(option["k"], option["lr_factor"], seed, EPOCHS)
            made = commands.train(work.place(f"k-{k}-{seed}"), RECIPE, files(work, "k", count), values)
            runs.setdefault(k, []).append(made)
            keep({"foretold": told, "best": {k: [best_valid(one) for one in of] for k, of in runs.items()}})
    target = min(best_valid(one) for of in runs.values() for one in of)
    return {"foretold": told, **reached(told, {k: [one.events() for one in of] for k, of in runs.items()}, target)}


def pilot_rows(count: int) -> int:
    """Raises `SystemExit` where a pilot of a run over so many rows would tell no noise scale."""
    found = round(PILOT * EPOCHS * count)
    fewest = FEWEST_UPDATES * settings(PILOT_K, 1.0, 0, 1)["train.rows_per_update"]
    if found < fewest:
        raise SystemExit(f"--share: a pilot of {found} rows is too short for a noise scale; it needs {fewest}")
    return found


def files(work: Work, name: str, count: int) -> list[str]:
    """Messages, and others by which a run is scored while it trains and at its end."""
    folder = work.place(f"{name}-rows")
    folder.mkdir(parents=True, exist_ok=True)
    others = list(dict.fromkeys(rows.read(work.data / "banking77" / "test.csv")))
    random.Random(0).shuffle(others)
    scored = str(rows.write(folder / "scored.csv", others[:SCORED]))
    return [*messages(work.data, folder, count), "--valid", scored, "--test", scored]


def settings(k: int, lr_factor: float, seed: int, epochs: int) -> dict[str, Any]:
    """A run with the frequency `k`, whose rate is the recipe's times `lr_factor`."""
    recipe = configuration.load(RECIPE, {"data.path": "rows.csv"}).recipe
    per_update = recipe.train.workers * recipe.train.micro_batch * k
    return {
        **VALUES,
        "data.valid_share": None,
        "optim.lr": recipe.optim.lr * lr_factor,
        "train.epochs": epochs,
        "train.rows_per_update": per_update,
        "train.evaluate_every": max(1, EVERY_ROWS // per_update),
        "train.seed": seed,
    }


def reached(told: Mapping[str, Any], logs: Mapping[int, Sequence[ours.Events]], accuracy: float) -> Found:
    """Seconds until the `accuracy` by the runs' logs, beside what was foretold; all runs have reached it."""
    seconds = {k: [ours.seconds_until(log, HEADLINE, accuracy) for log in of] for k, of in logs.items()}
    taken = {k: [one for one in of if one is not None] for k, of in seconds.items()}
    medians = {k: statistics.median(of) for k, of in taken.items()}
    chosen = told["aggregation_frequency"]
    return {
        "accuracy": accuracy,
        "chosen": chosen,
        "over_the_best": choose_k.miss(taken, chosen),
        "by_k": [
            {
                "k": one["k"],
                "foretold": one["relative"],
                "measured": medians[one["k"]] / min(medians.values()),
                "seconds": taken[one["k"]],
            }
            for one in told["options"]
        ],
    }


# ------------------------------------------------------------------------------------------------------------ command

PARTS: dict[str, Callable[[Work, Keep], Found]] = {"hours": hours, "frequency": frequency}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foretold", description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part alone")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each frequency")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of each part")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/foretold.json"), help="file of the results")
    chosen = parser.parse_args(arguments)
    if chosen.seeds < 1:
        parser.error(f"--seeds {chosen.seeds}: write 1 or more")
    if not 0 < chosen.share <= 1:
        parser.error(f"--share {chosen.share:g}: write a number above 0, and at most 1")
    return chosen


def main() -> None:
    chosen = parse()
    results = Results(chosen.out, seeds=chosen.seeds, share=chosen.share)
    work = Work(chosen.data.absolute(), results.folder, chosen.seeds, chosen.share)
    for name in [chosen.only] if chosen.only else PARTS:
        found = results.measure(name, partial(PARTS[name], work))
        print(f"{name}: {json.dumps(found, default=str)}", file=sys.stderr, flush=True)
    if chosen.json:
        print(results)


if __name__ == "__main__":
    main()
