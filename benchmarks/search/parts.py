"""What searches of banking77 gain, and against random search. Each part resumes where it was stopped."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.search import commands, figures
from benchmarks.search.figures import Ended, Trained
from rtrain import config as configuration
from rtrain.core.run_folder import Run
from tune import points, space
from tune.history import read_journal, replay

SEEDS = (0, 1, 2)
"""Seeds with which the recipe is trained as it stands."""
RECIPE, HEADLINE = "intent", "accuracy"
BUDGET = 8.0
"""Full runs."""


@dataclass(frozen=True)
class Work:
    data: Path
    """Folder of the data sets."""
    folder: Path
    rows: int
    epochs: int
    searches: int
    pool: int

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


def ended(made: Run, seed: int) -> Ended:
    """What a finished search has found."""
    history = replay(read_journal(made.trials))
    assert history.chosen is not None
    halving, end = figures.rows_of_search(history, {one.number: seen(made.trial(one.number)) for one in history.trials})
    return Ended(
        seed=seed,
        settings=next(one.settings for one in history.trials if one.number == history.chosen),
        test=commands.scores(made.trial(history.chosen), "test")[HEADLINE],
        default=commands.scores(made.trial(0), "test")[HEADLINE],
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
    return {
        **figures.gain(done, defaults(work), full_rows(work)),
        "searches": [vars(one) for one in done],
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
