"""A search's folder as `tune.search` leaves it, made without Ray: trials with logs and scores, and who won."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rtrain import config, events
from rtrain.config import Config
from rtrain.run import Run
from rtrain.runs import opening
from tests.conftest import write_rows
from tests.reports import answers_of, write_predictions
from tune import search, space

UPDATES = 40
SPACE: Mapping[str, Any] = {
    "tune.lr": [1e-4, 3e-4, 1e-3],
    "tune.aggregation_frequency": [2, 4, 8],
    "tune.budget": 0.5,
    "tune.first_rung": 0.25,
    "optim.lr": 2e-4,
}
LABELS = ("login", "parcel", "refund")


def settings(folder: Path, trials: int, **overrides: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_rows(folder / "rows.csv", [("a parcel", "parcel")])
    return config.load("intent", {"data.path": str(rows), **SPACE, "tune.trials": trials, **overrides})


def make_search(
    folder: Path,
    scores: Sequence[float | None],
    *,
    rows: int = 60,
    ended: bool = True,
    errors: Mapping[int, str] | None = None,
    **overrides: Any,
) -> Run:
    """A search whose trials came to these scores on so many validation rows; a trial without one failed."""
    chosen = settings(folder, len(scores), **overrides)
    found = Run(folder / "search")
    opening.freeze(found, chosen)
    trials = []
    for number, (override, score) in enumerate(zip(space.trials(chosen), scores, strict=True)):
        run = found.trial(number)
        opening.freeze(run, config.with_overrides(chosen, override))
        error = (errors or {}).get(number, "ValueError: no") if score is None else None
        _train(run, number, score, rows)
        trials.append(search.summarise(chosen, run.folder, number, override, error))
    if ended:
        found.trials.write_text("".join(json.dumps(asdict(trial)) + "\n" for trial in trials))
        found.append("searched", best=search.best(trials).number, trials=len(trials))
    return found


def _train(run: Run, number: int, score: float | None, rows: int) -> None:
    """The first trial to its end, the others to the budget; their score grows, and ends as it was asked for."""
    last = UPDATES if number == 0 else UPDATES // 2
    run.append("created", run=run.name, recipe="intent", task="classification")
    run.append("started", update=0, of=UPDATES, workers=2, precision="fp32")
    if score is None:
        run.append("failed", error="ValueError: no")
        return
    for update in range(10, last + 1, 10):
        run.append("progress", update=update, of=UPDATES, loss=2.0 / update + number / 100, rows=32 * update)
        reached = {"accuracy": score * min(1.0, update / 20), "rows": rows}
        run.append("evaluated", split="valid", update=update, scores=reached)
    events.append(run.folder, "finished" if number == 0 else "paused", update=last)


def answered(run: Run, right: float, rows: int = 60, seed: int = 0) -> None:
    """Answers of a trial that was trained to its end, of which about that share is right."""
    target, _ = answers_of(LABELS, rows, 1.0, seed=0)
    _, said = answers_of(LABELS, rows, right, seed=0)
    write_predictions(run.folder, target, said, split="valid", seed=seed)
