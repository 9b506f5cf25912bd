"""What a search at a small budget gains for other tasks: scores of essays, and questions, of fewer rows."""

from pathlib import Path
from typing import Any

from benchmarks import few, tasks
from benchmarks.search import commands, parts
from benchmarks.search.parts import Work
from rtrain import config as configuration
from rtrain.run import Run
from tune import trial

BUDGET = 3.0
"""Full runs: eight trials come to a fifth, four to two fifths."""
SETS = ("asap_aes fold 0", "squadshifts")
"""Lines of `benchmarks.tasks`, of which they have rows and recipe."""
BESIDE = ("qwk", "exact_match")
"""Scores that are told beside the one that was searched for, where a task has them."""
VALUES: dict[str, Any] = {
    "train.epochs": 1,
    "train.log_every": 10,
    "tune.full_runs": BUDGET,
    "tune.final_rows": 0,
}


def place(work: Work, job: tasks.Job) -> Path:
    """The folder of a set. Searches of other rows are others."""
    return work.folder / "others" / f"rows-{work.rows}-epochs-{VALUES['train.epochs']}" / job.folder


def told(made: Run) -> dict[str, Any]:
    """What a search that has ended has gained, by the score that it has searched for; larger is better."""
    headline = trial.headline_of(configuration.load(str(made.config)))
    ended = parts.ended(made, 0, headline)
    assert made.winner is not None  # it has ended
    best, first = (commands.scores(run, "test") for run in (made.winner, made.trial(0)))
    return {
        "score": headline,
        "winner": ended.test,
        "default": ended.default,
        "gain": ended.test - ended.default,
        "beside": {name: {"winner": best[name], "default": first[name]} for name in BESIDE if name in best},
        "settings": dict(ended.settings),
        "trials": ended.trials,
        "seconds": ended.seconds,
        "verdict": dict(ended.verdict),
    }


def measure(work: Work, keep: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SETS:
        job = next(job for job in tasks.JOBS if job.name == name)
        folder = place(work, job)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        arguments = few.arguments(job.prepare(work.data / job.folder, folder / "data"), work.rows, folder)
        made = commands.tune(folder / "search", job.recipe, arguments, VALUES)
        found[name] = {**told(made), "cost": commands.cost_of(made.folder)}
        keep({"sets": found})
    return {"sets": found, "winners_behind_the_default": sum(one["gain"] < 0 for one in found.values())}
