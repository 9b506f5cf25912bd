"""Time until a test accuracy of 0.90 on banking77: rtrain's full loop, and HF Trainer that groups by length.

Both train the same epochs at the same settings and are scored on all test rows at the same updates; neither's
evaluations, checkpoints and start count. HF Trainer stops where it gets there; rtrain goes on to its end, unclocked.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import budgets, ours, rows, sides
from benchmarks.budgets import Budget
from benchmarks.figures import TIME_TO, summary
from benchmarks.sides import Work
from rtrain.report import events

ACCURACY = 0.90
EPOCHS = 4
EVALUATE_EVERY = 39
"""Updates between two evaluations: a quarter of an epoch."""
SEEDS = (0, 1, 2)


def hf_command(work: Work, seed: int, budget: Budget, out: Path) -> list[str]:
    command = sides.peer_command("hf_grouped", work, seed, budget, out)
    goal = ["--test", str(work.files.test), "--evaluate-every", str(EVALUATE_EVERY), "--until", str(ACCURACY)]
    return [*command, "--epochs", str(EPOCHS), *goal]


def own_command(work: Work, seed: int, run: Path) -> list[str]:
    """The test rows are given as validation rows too: those are scored while it trains."""
    settings = {
        **ours.settings(2, 1, seed),
        "data.valid_share": None,
        "data.valid": work.files.test,
        "train.epochs": EPOCHS,
        "train.evaluate_every": EVALUATE_EVERY,
    }
    shown = {name: "null" if value is None else value for name, value in settings.items()}
    return ours.command(sys.executable, work.files.train, work.files.test, run, shown)


def hf_seconds(document: dict[str, Any]) -> float | None:
    """None where it did not get there."""
    return next((seconds for seconds, score in document["seen"] if score >= ACCURACY), None)


def measure(data: Path, work: Work, budget: Budget) -> dict[str, Any]:
    """Seconds of each side by seed, and their ratio: how many times as soon rtrain gets there."""
    folder = work.folder / "time-to"
    folder.mkdir(parents=True, exist_ok=True)
    train, test = (rows.write(folder / f"{name}.csv", rows.read(data / f"{name}.csv")) for name in ("train", "test"))
    work = Work(folder, work.model, rows.Files(train, test), work.equal, work.cores)
    found: list[dict[str, float | None]] = []
    for seed in SEEDS:
        out, run = folder / "hf.json", folder / "runs" / "ours"
        shutil.rmtree(run, ignore_errors=True)
        theirs = budgets.environment(budget, os.environ, sides.ROOT)
        sides.run_all({"hf": hf_command(work, seed, budget, out)}, theirs, work)
        sides.run_all({"ours": own_command(work, seed, run)}, sides.own_environment(), work)
        own = ours.seconds_until(events.read(run), "accuracy", ACCURACY)
        found.append({"seed": seed, "ours": own, "hf_grouped": hf_seconds(json.loads(out.read_text("utf-8")))})
        shutil.rmtree(run)
    return result(found)


def result(found: list[dict[str, float | None]]) -> dict[str, Any]:
    """Ratios of the seeds in which both got there; the others are in `seconds`, with null."""
    ratios = [one["hf_grouped"] / one["ours"] for one in found if one["hf_grouped"] and one["ours"]]
    if not ratios:
        raise SystemExit(f"{TIME_TO}: in no seed did both sides reach {ACCURACY}: {found}")
    return {**summary(ratios), "floor": None, "goal": None, "accuracy": ACCURACY, "seconds": found}
