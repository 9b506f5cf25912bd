"""What searches of banking77 gain, and against random search. Each part resumes where it was stopped."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.search import commands, figures
from benchmarks.search.figures import FinishedSearch, Trained
from rtrain import config as configuration
from rtrain.core.run_folder import Run
from tune import space
from tune.history import read_journal, replay_journal

SEEDS = (0, 1, 2)
"""Seeds of the unchanged recipe."""
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
        return {"train.epochs": self.epochs, "train.keep_checkpoints": 1, "train.log_every": 1}

    def files(self) -> list[str]:
        """The arguments that name the rows: so many of the training file, the same in each call, and the test file."""
        source, place = self.data / "banking77", self.folder / f"rows-{self.rows}"
        place.mkdir(parents=True, exist_ok=True)
        rows_found = list(dict.fromkeys(rows.read(source / "train.csv")))
        random.Random(0).shuffle(rows_found)
        if len(rows_found) < self.rows:
            raise SystemExit(f"--rows {self.rows}: banking77 has {len(rows_found)} training rows")
        train = rows.write(place / "train.csv", rows_found[: self.rows])
        test = rows.write(place / "test.csv", rows.read(source / "test.csv"))
        return ["--data", str(train), "--test", str(test)]

    def place(self, name: str) -> Path:
        """The folder of a run. Runs of other rows or epochs are others."""
        return self.folder / f"rows-{self.rows}-epochs-{self.epochs}" / name


# --------------------------------------------------------------------------------------------------------------- gain


def search(work: Work, seed: int) -> Run:
    values = {**work.values, "train.seed": seed, "tune.budget_full_runs": BUDGET}
    return commands.tune(work.place(f"search-{seed}"), RECIPE, work.files(), values)


def default(work: Work, seed: int) -> Run:
    """Run the unchanged recipe. Trial 0 of the search with that seed is the same run, if it exists."""
    first = Run(work.place(f"search-{seed}")).trial(0)
    if first.is_finished:
        return first
    return commands.train(work.place(f"default-{seed}"), RECIPE, work.files(), {**work.values, "train.seed": seed})


def defaults(work: Work) -> list[float]:
    return [commands.scores(default(work, seed), "test")[HEADLINE] for seed in SEEDS]


def rows_seen(run: Run) -> int:
    """Rows that a run was trained on, by its log; of all of its starts."""
    total, last = 0, 0
    for event in run.events("started", "progress"):
        if event["kind"] == "started":
            total, last = total + last, 0
        else:
            last = event["rows"]
    return total + last


def finished_search(run: Run, seed: int) -> FinishedSearch:
    """Result of a finished search."""
    history = replay_journal(read_journal(run.trials))
    assert history.winner is not None
    halving, end = figures.rows_of_search(
        history, {trial.number: rows_seen(run.trial(trial.number)) for trial in history.trials}
    )
    return FinishedSearch(
        seed=seed,
        settings=next(trial.settings for trial in history.trials if trial.number == history.winner),
        test=commands.scores(run.trial(history.winner), "test")[HEADLINE],
        default=commands.scores(run.trial(0), "test")[HEADLINE],
        trials=len(history.original_trials),
        rows=halving,
        rows_of_the_end=end,
        seconds=history.seconds,
        verdict=history.verdict,
    )


def full_rows(work: Work) -> int:
    """Rows of a full run, over all of its epochs."""
    return int(json.loads(default(work, SEEDS[0]).summary.read_text(encoding="utf-8"))["rows_seen"])


def load_searches(work: Work) -> list[FinishedSearch]:
    """Run the searches; finished ones are read."""
    return [finished_search(search(work, seed), seed) for seed in range(work.searches)]


def gain(work: Work, keep: Any) -> dict[str, Any]:
    """`keep(document)` saves the results so far after each search."""
    done: list[FinishedSearch] = []
    for seed in range(work.searches):
        done.append(finished_search(search(work, seed), seed))
        keep({"searches": [vars(search) for search in done]})
    return {**figures.gain(done, defaults(work), full_rows(work)), "searches": [vars(search) for search in done]}


# ------------------------------------------------------------------------------------------------------------- random


def draw_settings(work: Work, number: int) -> dict[str, Any]:
    """The settings of a random point of the space that the searches search."""
    paths = dict(zip(("data.path", "data.test"), work.files()[1::2], strict=True))
    config = configuration.load_config(RECIPE, {**paths, **work.values})
    return space.trial_overrides(config, next(space.random_points(space.build_dimensions(config), 0, number)))


def against_random(work: Work, keep: Any) -> dict[str, Any]:
    pool: list[Trained] = []
    for number in range(work.pool):
        # Each seed has as many runs, so that no seed's luck is that of the pool.
        values = {**work.values, **draw_settings(work, number), "train.seed": number % len(SEEDS)}
        run = commands.train(work.place(f"random-{number:03d}"), RECIPE, work.files(), values)
        pool.append(Trained(commands.scores(run, "valid")[HEADLINE], commands.scores(run, "test")[HEADLINE]))
        keep({"runs": [vars(run) for run in pool]})
    result = figures.against_random(pool, load_searches(work), defaults(work), full_rows(work))
    return {**result, "runs": [vars(run) for run in pool]}
