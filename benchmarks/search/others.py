"""What a search at a small budget gains for other tasks: scores of essays, and questions, of fewer rows."""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import few, tasks
from benchmarks.search import commands, parts
from benchmarks.search.parts import Work

BUDGET = 3.0
"""Full runs: some six trials."""


@dataclass(frozen=True)
class Set:
    job: str
    """Its line of `benchmarks.tasks`, of which it has rows and recipe."""
    headline: str


SETS = (Set("asap_aes fold 0", "qwk"), Set("squadshifts", "f1"))
VALUES: dict[str, Any] = {
    "train.epochs": 1,
    "train.log_every": 10,
    "report.attributions": 0,
    "tune.full_runs": BUDGET,
    "tune.final_rows": 0,
}


def measure(work: Work, keep: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in SETS:
        job = next(job for job in tasks.JOBS if job.name == one.job)
        folder = work.folder / "others" / job.folder
        (folder / "data").mkdir(parents=True, exist_ok=True)
        arguments = few.arguments(job.prepare(work.data / job.folder, folder / "data"), work.rows, folder)
        made = commands.tune(folder / "search", job.recipe, arguments, VALUES)
        ended = parts.ended(made, 0, one.headline)
        found[one.job] = {
            "score": one.headline,
            "winner": ended.test,
            "default": ended.default,
            "gain": ended.test - ended.default,
            "settings": dict(ended.settings),
            "trials": ended.trials,
            "seconds": ended.seconds,
            "verdict": dict(ended.verdict),
            "cost": commands.cost_of(made.folder),
        }
        keep({"sets": found})
    gains = [one["gain"] for one in found.values()]
    return {"sets": found, "gain_mean": statistics.fmean(gains), "gain_least": min(gains)}
