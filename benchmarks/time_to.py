"""Measure the time until a test accuracy of 0.90 on banking77.

The sides are rtrain's full loop, and HF Trainer that groups by length: once with Transformers' own classifier, and once
with a handwritten one that reads the mean of the tokens, as rtrain does. All train the same epochs at the same
settings, and are scored on all test rows at the same updates. Evaluations, checkpoints and the start are not counted
for any side. HF Trainer stops when it reaches the accuracy; rtrain trains to its end, outside of the clock.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import budgets, figures, ours, rows, sides
from benchmarks.budgets import Budget
from benchmarks.figures import Figure, evaluate
from benchmarks.sides import Work
from rtrain import events

ACCURACY = 0.90
EPOCHS = 4
EVALUATE_EVERY = 39
"""Updates between two evaluations: a quarter of an epoch."""
SEEDS = (0, 1, 2)


def hf_command(name: str, work: Work, seed: int, budget: Budget, out: Path) -> list[str]:
    command = sides.peer_command(name, work, seed, budget, out)
    goal = ["--test", str(work.files.test), "--evaluate-every", str(EVALUATE_EVERY), "--until", str(ACCURACY)]
    return [*command, "--epochs", str(EPOCHS), *goal]


def own_command(work: Work, seed: int, run: Path) -> list[str]:
    """Write the rows. The test rows are also the validation rows, which are scored during training."""
    settings = {
        **ours.settings(2, 1, seed),
        "data.valid_share": None,
        "data.valid": work.files.test,
        "model.pooling": "auto",
        "train.epochs": EPOCHS,
        "train.evaluate_every": EVALUATE_EVERY,
    }
    shown = {name: "null" if value is None else value for name, value in settings.items()}
    return ours.command(sys.executable, work.files.train, work.files.test, run, shown)


def hf_seconds(document: dict[str, Any]) -> float | None:
    """Seconds until the accuracy; None if the side did not reach it."""
    return next((seconds for seconds, score in document["seen"] if score >= ACCURACY), None)


Seed = Mapping[str, float | None]
"""The seed and the seconds of each side; None if a side did not reach the accuracy."""


def measure(data: Path, work: Work, chosen: Mapping[str, Budget], wants: Sequence[Figure]) -> dict[str, Any]:
    """Figures by their keys: a peer's time over rtrain's time, for each seed."""
    folder = work.folder / "time-to"
    folder.mkdir(parents=True, exist_ok=True)
    train, test = (rows.write(folder / f"{name}.csv", rows.read(data / f"{name}.csv")) for name in ("train", "test"))
    work = Work(folder, work.model, rows.Files(train, test), work.equal, work.cores)
    found: list[Seed] = []
    for seed in SEEDS:
        one: dict[str, float | None] = {"seed": seed}
        for name in (name for name in figures.sides(wants) if name in sides.PEERS):
            out, theirs = folder / f"{name}.json", budgets.environment(chosen[name], os.environ, sides.ROOT)
            sides.run_all({name: hf_command(name, work, seed, chosen[name], out)}, theirs, work)
            one[name] = hf_seconds(json.loads(out.read_text("utf-8")))
        run = folder / "runs" / "ours"
        shutil.rmtree(run, ignore_errors=True)
        sides.run_all({"ours": own_command(work, seed, run)}, sides.own_environment(), work)
        one["ours"] = ours.seconds_until(events.read(run), "accuracy", ACCURACY)
        shutil.rmtree(run)
        print(f"seconds until {ACCURACY}: {one}", file=sys.stderr, flush=True)
        found.append(one)
    return result(found, wants)


def result(found: Sequence[Seed], wants: Sequence[Figure]) -> dict[str, Any]:
    """Each figure over the seeds in which both sides reached the accuracy; other seeds are in `seconds`, with null.

    A figure without such a seed is left out, unless no figure has one.
    """
    shown: dict[str, Any] = {}
    for figure in wants:
        pairs = [{name: one[name] for name in figure.sides} for one in found]
        rounds = [{name: {"seconds": value} for name, value in pair.items() if value} for pair in pairs]
        if both := [one for one in rounds if len(one) == len(figure.sides)]:
            shown |= evaluate([figure], both)
            shown[figure.key] |= {"accuracy": ACCURACY, "seconds": list(found)}
    if not shown:
        raise SystemExit(f"time_to_090: in no seed did rtrain and a peer reach {ACCURACY}: {found}")
    return shown
