"""What searches of banking77 gain, against random search, and in time. Each part resumes where it was stopped."""

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows, sides
from benchmarks.search import commands, figures
from benchmarks.search.figures import Ended, Trained
from rtrain import config as configuration
from rtrain.config import Config
from rtrain.run import Run
from tune import trial
from tune.asking import points, space
from tune.known.history import read_journal, replay

SEEDS = (0, 1, 2)
"""Seeds with which the recipe is trained as it stands."""
RECIPE, HEADLINE = "intent", "accuracy"
BUDGET = 8.0
"""Full runs."""
BARE = "benchmarks.search.bare"


@dataclass(frozen=True)
class Work:
    data: Path
    """Folder of the data sets."""
    folder: Path
    rows: int
    epochs: int
    searches: int
    pool: int
    kills: int
    target: float | None = None
    """Validation score of the part `time`; None for what each training with k = 1 comes to."""

    @property
    def values(self) -> dict[str, Any]:
        """Settings of all runs."""
        return {
            "train.epochs": self.epochs,
            "train.keep": 1,
            "train.log_every": 1,
        }

    def files(self) -> list[str]:
        """The arguments that name the rows: so many of the training file, the same in each call, and the test file."""
        source, place = self.data / "banking77", self.folder / f"rows-{self.rows}"
        place.mkdir(parents=True, exist_ok=True)
        found = list(dict.fromkeys(rows.read(source / "train.csv")))
        random.Random(0).shuffle(found)
        if len(found) < self.rows:
            raise SystemExit(f"--rows {self.rows}: banking77 has {len(found)} training rows")
        train = rows.write(place / "train.csv", found[: self.rows])
        test = rows.write(place / "test.csv", rows.read(source / "test.csv"))
        return ["--data", str(train), "--test", str(test)]

    def place(self, name: str) -> Path:
        """The folder of a run. Runs of other rows or epochs are others."""
        return self.folder / f"rows-{self.rows}-epochs-{self.epochs}" / name


# --------------------------------------------------------------------------------------------------------------- gain


def search(work: Work, seed: int) -> Run:
    values = {**work.values, "train.seed": seed, "tune.full_runs": BUDGET}
    return commands.tune(work.place(f"search-{seed}"), RECIPE, work.files(), values)


def default(work: Work, seed: int) -> Run:
    """The recipe as it stands. Trial 0 of the search with that seed is just this run, where there is one."""
    first = Run(work.place(f"search-{seed}")).trial(0)
    if first.finished:
        return first
    return commands.train(work.place(f"default-{seed}"), RECIPE, work.files(), {**work.values, "train.seed": seed})


def defaults(work: Work) -> list[float]:
    return [commands.scores(default(work, seed), "test")[HEADLINE] for seed in SEEDS]


def seen(made: Run) -> int:
    """Rows that a run was trained on, by its log; of all of its starts."""
    total, last = 0, 0
    for event in made.events("started", "progress"):
        if event["kind"] == "started":
            total, last = total + last, 0
        else:
            last = event["rows"]
    return total + last


def ended(made: Run, seed: int, headline: str = HEADLINE) -> Ended:
    """What a finished search has found."""
    history = replay(read_journal(made.trials))
    assert history.chosen is not None
    halving, end = figures.rows_of_search(history, {one.number: seen(made.trial(one.number)) for one in history.trials})
    return Ended(
        seed=seed,
        settings=next(one.settings for one in history.trials if one.number == history.chosen),
        test=commands.scores(made.trial(history.chosen), "test")[headline],
        default=commands.scores(made.trial(0), "test")[headline],
        trials=len(history.own),
        rows=halving,
        rows_of_the_end=end,
        seconds=history.seconds,
        verdict=history.verdict,
    )


def full_rows(work: Work) -> int:
    """Rows of a full run, over all of its epochs."""
    return int(json.loads(default(work, SEEDS[0]).summary.read_text(encoding="utf-8"))["rows_seen"])


def found(work: Work) -> list[Ended]:
    """The searches; those that have ended are read."""
    return [ended(search(work, seed), seed) for seed in range(work.searches)]


def gain(work: Work, keep: Any) -> dict[str, Any]:
    """`keep(document)` keeps what is known after each search."""
    done: list[Ended] = []
    for seed in range(work.searches):
        done.append(ended(search(work, seed), seed))
        keep({"searches": [vars(one) for one in done]})
    costs = [commands.cost_of(work.place(f"search-{seed}")) for seed in range(work.searches)]
    return {
        **figures.gain(done, defaults(work), full_rows(work)),
        "searches": [vars(one) for one in done],
        "costs": costs,
    }


# ------------------------------------------------------------------------------------------------------------- random


def drawn(work: Work, number: int) -> dict[str, Any]:
    """The settings of a random point of the space that the searches search."""
    paths = dict(zip(("data.path", "data.test"), work.files()[1::2], strict=True))
    config = configuration.load(RECIPE, {**paths, **work.values})
    return space.overrides(config, points.random_point(space.dimensions(config), 0, number))


def against_random(work: Work, keep: Any) -> dict[str, Any]:
    pool: list[Trained] = []
    for number in range(work.pool):
        # Each seed has as many runs, so that no seed's luck is that of the pool.
        values = {**work.values, **drawn(work, number), "train.seed": number % len(SEEDS)}
        made = commands.train(work.place(f"random-{number:03d}"), RECIPE, work.files(), values)
        pool.append(Trained(commands.scores(made, "valid")[HEADLINE], commands.scores(made, "test")[HEADLINE]))
        keep({"runs": [vars(one) for one in pool]})
    result = figures.against_random(pool, found(work), defaults(work), full_rows(work))
    return {**result, "runs": [vars(one) for one in pool]}


# --------------------------------------------------------------------------------------------------------------- time


EVERY = 5
"""Updates of the recipe between two evaluations, in the part `time`. Trainings of other updates are evaluated after as
many rows (`space.evaluated_every`)."""


def aim(target: float) -> dict[str, Any]:
    """Settings of the search for the least time."""
    sought = {"tune.objective": "time", "tune.target": target, "tune.full_runs": BUDGET}
    return {**sought, "train.evaluate_every": EVERY}


def evaluated(config: Config, rows: int | None) -> dict[str, Any]:
    """The setting by which a training is evaluated after so many rows; None: after each epoch."""
    return {"train.evaluate_every": rows and max(1, round(rows / config.recipe.rows_per_update))}


def until(work: Work, name: str, values: Mapping[str, Any], seed: int, rows: int | None) -> Run:
    """A full training that is evaluated after every so many rows."""
    settings = {**work.values, **values, "train.seed": seed}
    paths = dict(zip(("data.path", "data.test"), work.files()[1::2], strict=True))
    settings |= evaluated(configuration.load(RECIPE, {**paths, **settings}), rows)
    return commands.train(work.place(f"time-{name}-{seed}"), RECIPE, work.files(), settings)


def best_valid(made: Run) -> float:
    return max(float(one["scores"][HEADLINE]) for one in made.events("evaluated") if one["split"] == "valid")


def time(work: Work, keep: Any) -> dict[str, Any]:
    """Seconds of training to a score, of the settings that a search for the least time chooses, beside those with an
    exchange after every pass at the recipe's rate. The score is what each of these comes to, or `work.target`."""
    paths = dict(zip(("data.path", "data.test"), work.files()[1::2], strict=True))
    searched = configuration.load(RECIPE, {**paths, **work.values, **aim(work.target or 0.5)})
    rows = space.evaluated_every(searched)
    each = {"train.aggregation_frequency": 1, "train.rows_per_update": None}
    slow = [until(work, "k1", each, seed, rows) for seed in SEEDS]
    target = work.target or math.floor(1e4 * min(map(best_valid, slow))) / 1e4  # rounded up, none would come to it
    keep({"target": target})
    made = commands.tune(work.place(f"time-search-{target}"), RECIPE, work.files(), {**work.values, **aim(target)})
    chosen = ended(made, 0)
    fast = [until(work, f"chosen-{target}", chosen.settings, seed, rows) for seed in SEEDS]
    pairs = [
        (trial.to_target(one, HEADLINE, target), trial.to_target(two, HEADLINE, target))
        for one, two in zip(fast, slow, strict=True)
    ]
    return {
        **figures.time_vs_k1(pairs),
        "evaluated_every_rows": rows,
        "target": target,
        "settings": dict(chosen.settings),
        "verdict": dict(chosen.verdict),
    }


# -------------------------------------------------------------------------------------------------------------- slots


def bare_s() -> float:
    """Seconds until the workers of a Ray trainer begin that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        given = [sys.executable, "-m", BARE, folder]
        done = subprocess.run(given, env=sides.own_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def slots(work: Work, keep: Any) -> dict[str, Any]:
    """How long slots take from an order to its training, by the logs of the searches of the part `gain`."""
    spent: dict[str, list[float]] = {}
    for seed in range(work.searches):
        made = search(work, seed)
        history = replay(read_journal(made.trials))
        logs = {one.number: made.trial(one.number).events() for one in history.trials}
        for kind, values in figures.until_training(made.events(), logs).items():
            spent.setdefault(kind, []).extend(values)
    bare = statistics.median(bare_s() for _ in range(3))
    start = figures.seconds_of(spent["start"])
    return {
        "thaw_s": figures.seconds_of(spent["thaw"]),
        "new_trial_s": figures.seconds_of(spent["new"]),
        "start_s": None if start is None else start["median"] - bare,
        "start_whole_s": start,
        "bare_trainer_s": bare,
    }
