"""What `rtrain verify` trains: how many rows, in which layouts, and which of these are left out and why. Pure, but for
the model's config.json."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rtrain.config import Config, Recipe, Train
from rtrain.core.errors import Problem
from rtrain.parallel import constraints
from rtrain.verification import planted_bugs

EXACT = "fp64"
SINGLE = "1 worker"
"""The reference, as a layout to start from."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "tensor 2": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pipeline": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "context": {"context": 2},
}
"""Settings of `train` by the name of a layout."""
GRIDS: dict[str, dict[str, Any]] = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "shard 3, sequence": {"shard": 3, "tensor": 2, "sequence": True},
    "pipeline of 2": {"pipeline": 2, "schedule": "1f1b"},
    "context of 2": {"context": 2},
    "pipeline, shard 3": {"pipeline": 2, "schedule": "1f1b", "shard": 3},
    "pipeline, tensor 2": {"pipeline": 2, "schedule": "1f1b", "tensor": 2},
}
"""Layouts of four workers: two replicas of two workers each, and one of all."""
CUBES: dict[str, dict[str, Any]] = {
    "2x2x2": {"pipeline": 2, "schedule": "1f1b", "tensor": 2},
    "2x2x2, shard 3": {"pipeline": 2, "schedule": "1f1b", "tensor": 2, "shard": 3},
}
"""Layouts of eight workers: two replicas of two stages on two workers each."""
GRID, CUBE = 4, 8
FP32 = "shard 3"
"""The layout that is trained in fp32 too, where its exchanges are others than in float64."""
PLAIN = {
    **{"shard": 0, "tensor": 1, "sequence": False, "pipeline": 1, "context": 1},
    "gradient_compression": "none",
}
"""Settings of a case without a layout. Compression is left out: the user asked for what it loses, and the sums are not
at fault."""

ROWS_PER_UPDATE, FULL_ROWS_PER_UPDATE = 32, 97
UNEQUAL = 48
"""Updates of the full matrix have a multiple of these rows, which two and three replicas share in whole passes of 8, 4
and 2; and one row more, for which one replica makes one pass more."""
FULL_ROWS = 1000
"""The full matrix has so many rows or more."""
TOKENS, FULL_TOKENS = 4_000, 40_000
"""Long texts get fewer rows, so that the time of a slice does not depend on them."""
UPDATES = 4
"""Full updates of the default slice. In both, one update of a single row follows, in which all workers but one are
idle."""


@dataclass(frozen=True)
class Case:
    """One layout of the slice."""

    workers: int
    micro_batch: int
    layout: str = ""
    """The name of one of `LAYOUTS`, `GRIDS` or `CUBES`, or none: the whole model on every worker."""
    resumed: str = ""
    """From whose checkpoint in mid-slice the case starts, if from any: `SINGLE`, or a layout."""
    bug: str | None = None
    """The name of one of `planted.BUGS`, or none."""
    precision: str = EXACT

    @property
    def name(self) -> str:
        resumed = "resized from 1" if self.resumed == SINGLE else self.resumed and f"resumed from {self.resumed}"
        rounded = "" if self.precision == EXACT else self.precision
        parts = [f"{self.workers} x {self.micro_batch}", self.layout, resumed, self.bug or "", rounded]
        return ", ".join(part for part in parts if part)

    @property
    def keeps(self) -> str:
        """The name under which the case leaves a checkpoint in mid-slice, if it does."""
        return "" if self.resumed or self.bug or self.precision != EXACT else self.layout


@dataclass(frozen=True)
class LeftOut:
    """A layout that is not trained with so many workers, and the bugs that would have been planted in it."""

    workers: int
    layout: str
    why: str
    bugs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What will be trained: `rows` rows of the store in updates of `rows_per_update`, in each group's cases."""

    rows: int
    rows_per_update: int
    groups: tuple[tuple[Case, ...], ...]
    """One worker group each: all its cases have the same number of workers. The first case is the reference."""
    left_out: tuple[LeftOut, ...] = ()

    @property
    def updates(self) -> int:
        return -(-self.rows // self.rows_per_update)

    @property
    def workers(self) -> int:
        return max(group[0].workers for group in self.groups)


Refused = Callable[[int, str], Sequence[Problem]]
"""What is wrong with a layout, by its name, on so many workers."""


def train_of(train: Train, layout: str, workers: int) -> Train:
    """The section `train` of a case. The workers of what is shared out make equally many
    passes."""
    shared = {"balance": "off", **{**LAYOUTS, **GRIDS, **CUBES}[layout]} if layout else {}
    return train.model_copy(update={**PLAIN, **shared, "workers": workers, "min_workers": None})


def refused(recipe: Recipe, weights: Path, workers: int, layout: str) -> list[Problem]:
    """What in the recipe, or in the model of the folder `weights`, does not go with a layout."""
    train = train_of(recipe.train, layout, workers)
    return constraints.problems(recipe.model_copy(update={"train": train}), weights)


def plan(
    config: Config,
    train_rows: int,
    mean_tokens: float,
    *,
    full: bool = False,
    bugs: bool = False,
    cores: int = 1,
    refused: Refused = lambda workers, layout: (),
) -> Plan:
    """Slice and cases for a recipe with `train_rows` rows of `mean_tokens` tokens in the mean; `cores` there are for
    workers."""
    groups, left_out = list[tuple[Case, ...]](), list[LeftOut]()
    if not full and cores < GRID:
        why = f"{GRID} workers have {cores} cores here; with --full they share them"
        left_out += [LeftOut(GRID, layout, why) for layout in GRIDS]
    for group in _groups(config.recipe.train, full, cores):
        # The first of several workers has the layouts in which bugs are planted.
        planting = (
            {"": planted_bugs.possible(config.recipe.model.freeze), **planted_bugs.LAID_OUT} if len(groups) == 1 else {}
        )
        found = {layout: refused(group.workers, layout) for layout in group.layouts}
        fit = [layout for layout, problems in found.items() if not problems]
        cases = group.cases(fit)
        if bugs:
            cases += [Case(group.workers, 3, where, bug=bug) for where in ("", *fit) for bug in planting.get(where, ())]
        for layout, problems in found.items():
            if problems:
                why = "; ".join(f"{one.field}={one.value}: {one.reason}" for one in problems)
                left_out.append(LeftOut(group.workers, layout, why, tuple(planting.get(layout, ())) if bugs else ()))
        groups.append(tuple(cases))
    most = max(group[0].workers for group in groups)
    budget = int((FULL_TOKENS if full else TOKENS) / max(1.0, mean_tokens))
    rows_per_update = min(config.recipe.rows_per_update, FULL_ROWS_PER_UPDATE if full else ROWS_PER_UPDATE)
    rows_per_update = min(rows_per_update, budget // UPDATES, train_rows // UPDATES)
    # Four rows for each worker at least: in passes of three they make two, and the second is short.
    rows_per_update = max(rows_per_update, 4 * most)
    if full and rows_per_update > UNEQUAL:
        rows_per_update -= (rows_per_update - 1) % UNEQUAL
    updates = min(math.ceil(FULL_ROWS / rows_per_update), max(UPDATES, budget // rows_per_update)) if full else UPDATES
    rows = min(updates * rows_per_update + 1, train_rows)
    if rows > rows_per_update:
        rows -= (rows - 1) % rows_per_update
    return Plan(rows, rows_per_update, tuple(groups), tuple(left_out))


def problems(config: Config, todo: Plan) -> list[Problem]:
    """What is wrong with a slice: cases are resumed between two of its updates."""
    if todo.updates > 1:
        return []
    reason = f"its {todo.rows} training rows are one update of {todo.rows_per_update}, and a case resumes between two"
    fix = f"give {todo.rows_per_update + 1} of them or more"
    return [Problem("data.path", config.recipe.data.path, reason, fix, code="too_few_rows")]


@dataclass(frozen=True)
class _Group:
    workers: int
    sizes: tuple[int, ...]
    """Rows of a pass, of workers that have the whole model each."""
    layouts: Iterable[str] = ()
    """With passes of the second size."""

    def cases(self, layouts: Sequence[str]) -> list[Case]:
        """Those with some of the layouts: each of these trained, and each resumed by the next one; the last by workers
        that have the whole model."""
        cases = [Case(self.workers, size) for size in self.sizes]
        if self.workers == 1:
            return [*cases, *(Case(1, size, precision="fp32") for size in self.sizes[:2])]
        size = self.sizes[1]
        if FP32 in layouts:
            cases.append(Case(self.workers, size, FP32, precision="fp32"))
        cases += [Case(self.workers, size, resumed=SINGLE), *(Case(self.workers, size, name) for name in layouts)]
        chain = pairwise([*layouts, ""])
        return [*cases, *(Case(self.workers, size, into, resumed=name) for name, into in chain)]


def _groups(train: Train, full: bool, cores: int) -> list[_Group]:
    if full:
        three = 8, 4, 2
        several = (_Group(workers, three, LAYOUTS) for workers in (2, 3))
        return [_Group(1, three), *several, _Group(GRID, (8, 4), GRIDS), _Group(CUBE, (8, 4), CUBES)]
    two = train.micro_batch, 3 if train.micro_batch != 3 else 2
    groups = [_Group(1, two), _Group(max(2, train.workers), two, LAYOUTS)]
    return groups if cores < GRID else [*groups, _Group(GRID, two, GRIDS)]


def most_workers(train: Train, full: bool, cores: int) -> int:
    """Those of the largest group."""
    return max(group.workers for group in _groups(train, full, cores))
