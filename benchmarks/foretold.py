"""What `rtrain plan` foretells beside what runs take: `python -m benchmarks.foretold [--json] DATA`.

hours      seconds of three runs, of messages, questions and essays: foretold by the pace of a pilot over some of the
           same rows, and by that of the messages' pilot for all three
frequency  seconds until a score for k = 1, 2, 4 and 8, of messages: foretold by the noise scale and the clock of a
           pilot (`rtrain profile --choose-k`), and measured, to 0.90 where every run has come so far
questions  the same of questions

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
from rtrain.doctor import frequency as frequency_of
from rtrain.doctor.forecast import choose_k
from rtrain.run import Run

VALUES: dict[str, Any] = {"train.keep": 1, "train.log_every": 1}
"""Settings of all runs."""
PILOT = 0.15
"""Share of a run's rows that its pilot has, over all epochs."""
OF_A_PILOT: dict[str, Any] = {"train.epochs": 1, "data.valid_share": 0}
GOAL = 0.90
"""The score until which seconds are counted."""


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


@dataclass(frozen=True)
class Study:
    """What is trained with each frequency."""

    recipe: str
    headline: str
    prepare: Callable[[Path, Path, int], list[str]]
    """As that of a `Job`."""
    rows: int
    scored: int
    """Rows by which it is told how far a run is."""
    every_rows: int
    """Rows of training between two evaluations."""
    epochs: int = 3


STUDIES = {
    "messages": Study("intent", "accuracy", messages, 3500, 500, 512),
    "questions": Study("squad", "f1", questions, 1200, 300, 256),
}


def study(name: str, work: Work, keep: Keep) -> Found:
    """How much longer than the best of them the chosen frequency takes to a score."""
    job = STUDIES[name]
    given = files(work, name, job)
    told = decided(work.place(f"{name}-choose-k"), job, given)
    keep({"foretold": told})
    runs: dict[int, list[Run]] = {}
    for seed in range(work.seeds):
        for option in told["options"]:
            k = option["k"]
            made = commands.train(work.place(f"{name}-k-{k}-{seed}"), job.recipe, given, settings(job, option, seed))
            runs.setdefault(k, []).append(made)
            keep({"foretold": told, "best": {k: [best_of(one, job.headline) for one in of] for k, of in runs.items()}})
    least = min(best_of(one, job.headline) for of in runs.values() for one in of)
    logs = {k: [one.events() for one in of] for k, of in runs.items()}
    return {"foretold": told, **reached(told, logs, job.headline, target(least))}


def decided(folder: Path, job: Study, given: Sequence[str]) -> dict[str, Any]:
    """What `rtrain profile --choose-k` says; a decision that is there already stands."""
    path = folder / frequency_of.JSON
    if not path.is_file():
        values = {**VALUES, "data.valid_share": None, "train.epochs": job.epochs}
        asked = ["profile", job.recipe, "--choose-k", *given, *commands.settings(values), "--out", str(folder)]
        commands.run(asked, folder.parent / f"{folder.name}.log")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def target(least: float) -> float:
    """The score until which seconds are counted, where `least` is the best of the run that came least far: `GOAL` where
    all have reached it, else what all have."""
    return GOAL if least >= GOAL else least


def best_of(made: Run, headline: str) -> float:
    return max(float(one["scores"][headline]) for one in made.events("evaluated") if one["split"] == "valid")


def files(work: Work, name: str, job: Study) -> list[str]:
    """The rows of a study, and others by which its runs are scored while they train and at their end."""
    folder, count = work.place(f"{name}-k-rows"), work.count(job.rows)
    whole, few = folder / "whole", folder / "train"
    for place in (whole, few):
        place.mkdir(parents=True, exist_ok=True)
    # Rows of a smaller number are the first of a larger one.
    _, every = job.prepare(work.data, whole, count + job.scored)
    _, trained = job.prepare(work.data, few, count)
    scored = str(rest(Path(every), Path(trained), folder))
    return ["--data", trained, "--valid", scored, "--test", scored]


def rest(every: Path, trained: Path, folder: Path) -> Path:
    """A file of the rows, or passages, of `every` that `trained` has not."""
    path = folder / f"scored{every.suffix}"
    if every.suffix == ".csv":
        found, known = (rows.read(one, "label") for one in (every, trained))
        return rows.write(path, found[len(known) :])
    whole, part = (json.loads(one.read_text(encoding="utf-8")) for one in (every, trained))
    path.write_text(json.dumps({**whole, "data": whole["data"][len(part["data"]) :]}), encoding="utf-8")
    return path


def settings(job: Study, option: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A run with the frequency of an option, whose rate is carried as a search carries it."""
    return {
        **VALUES,
        "data.valid_share": None,
        "train.epochs": job.epochs,
        **option["settings"],
        "train.evaluate_every": max(1, job.every_rows // option["rows_per_update"]),
        "train.seed": seed,
    }


def reached(told: Mapping[str, Any], logs: Mapping[int, Sequence[ours.Events]], headline: str, score: float) -> Found:
    """Seconds until the `score` by the runs' logs, beside what was foretold; all runs have reached it."""
    seconds = {k: [ours.seconds_until(log, headline, score) for log in of] for k, of in logs.items()}
    taken = {k: [one for one in of if one is not None] for k, of in seconds.items()}
    medians = {k: statistics.median(of) for k, of in taken.items()}
    chosen = told["aggregation_frequency"]
    return {
        headline: score,
        "goal": {headline: GOAL, "reached": score >= GOAL},
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

PARTS: dict[str, Callable[[Work, Keep], Found]] = {
    "hours": hours,
    "frequency": partial(study, "messages"),
    "questions": partial(study, "questions"),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foretold", description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part alone")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each frequency")
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
