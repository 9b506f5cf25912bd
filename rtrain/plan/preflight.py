"""What can be known to fail before a process starts. Pure: facts in, problems out."""

import shutil
from pathlib import Path

from rtrain.config import Recipe
from rtrain.errors import Problem, UserError


def checkpoint_copies(keep: int) -> int:
    """How many times its fp32 weights a run's checkpoints come to.

    Each holds the weights and two moments; there are `keep`, the best, and one in the making.
    """
    return 3 * (keep + 2)


def rows(recipe: Recipe, train_rows: int) -> list[Problem]:
    """Every worker needs a row in at least one update."""
    workers = recipe.train.workers
    if train_rows < workers:
        return [
            Problem(
                "train.workers",
                workers,
                f"only {train_rows} training rows for {workers} workers",
                f"write --workers {max(1, train_rows)}, or give more rows",
            )
        ]
    return []


def capacity(recipe: Recipe, cpus: float, spare: int) -> list[Problem]:
    """A layout that can never be placed would wait for ever; a data stream without a CPU would too."""
    workers = recipe.train.min_workers or recipe.train.workers
    if cpus < workers + spare:
        return [
            Problem(
                "train.workers",
                workers,
                f"workers and data tasks need {workers + spare} logical CPUs, the Ray cluster has {cpus:g}",
                f"write --workers {max(1, int(cpus) - spare)}, or start nodes with more --num-cpus",
            )
        ]
    return []


def disk(folder: Path, needed: int) -> None:
    """Refuse to start a run that cannot write its checkpoints."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{existing} has {free / 1e6:,.0f} MB free; this run may write {needed / 1e6:,.0f} MB. "
            "Free some space, or name another disk with --out."
        )
