"""Plan of `rtrain verify`: rows, layouts, and skipped layouts with reasons. Pure, except for reading config.json."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rtrain.config import Config, Recipe, TrainConfig
from rtrain.core.errors import Problem
from rtrain.parallel import constraints
from rtrain.verification import planted_bugs

EXACT_PRECISION = "fp64"
SINGLE_WORKER = "1 worker"
"""The reference, as a layout to resume from."""
PAIR_LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor 2": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "gpipe": {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "pipeline": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "context": {"context_parallel_size": 2},
}
"""Settings of `train` by the name of a layout."""
GRID_LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 2, tensor 2": {"zero_stage": 2, "tensor_parallel_size": 2},
    "zero 3, sequence": {"zero_stage": 3, "tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline of 2": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"},
    "context of 2": {"context_parallel_size": 2},
    "pipeline, zero 3": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "zero_stage": 3},
    "pipeline, tensor 2": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "tensor_parallel_size": 2},
}
"""Layouts of four workers: two replicas of two workers each, and one of all."""
CUBE_LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2x2": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "tensor_parallel_size": 2},
    "2x2x2, zero 3": {
        "pipeline_parallel_size": 2,
        "pipeline_schedule": "1f1b",
        "tensor_parallel_size": 2,
        "zero_stage": 3,
    },
}
"""Layouts of eight workers: two replicas of two stages on two workers each."""
GRID_WORKERS, CUBE_WORKERS = 4, 8
FP32_LAYOUT = "zero 3"
"""The layout that is also trained in fp32, where its collectives differ from float64."""
PLAIN_SETTINGS = {
    **{
        "zero_stage": 0,
        "tensor_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
    },
    "gradient_compression": "none",
}
"""Settings of a case without a layout. Compression is off, since its error is intended and no error of the sums."""

MAX_BATCH_SIZE, FULL_MAX_BATCH_SIZE = 32, 97
UNEVEN_MULTIPLE = 48
"""Steps of the full matrix have a multiple of these rows, which two and three replicas split into full micro-batches of
8, 4 and 2; and one row more, so that one replica has one micro-batch more."""
MIN_FULL_ROWS = 1000
"""Smallest number of rows in the full matrix."""
TOKEN_BUDGET, FULL_TOKEN_BUDGET = 4_000, 40_000
"""Token budget: long texts get fewer rows, so that the time of a slice does not depend on them."""
FULL_STEPS = 4
"""Full steps of the default slice. One step of a single row follows in both, in which all workers but one are idle."""


@dataclass(frozen=True)
class VerificationCase:
    """One layout of the slice."""

    workers: int
    micro_batch_size: int
    layout: str = ""
    """A key of `PAIR_LAYOUTS`, `GRID_LAYOUTS` or `CUBE_LAYOUTS`, or empty: the full model on every worker."""
    resumed_from: str = ""
    """The source of the mid-slice checkpoint from which the case starts, if any: `SINGLE_WORKER`, or a layout."""
    bug: str | None = None
    """A key of `planted_bugs.BUGS`, or None."""
    precision: str = EXACT_PRECISION

    @property
    def name(self) -> str:
        resumed_text = (
            "resized from 1"
            if self.resumed_from == SINGLE_WORKER
            else self.resumed_from and f"resumed from {self.resumed_from}"
        )
        precision_text = "" if self.precision == EXACT_PRECISION else self.precision
        parts = [f"{self.workers} x {self.micro_batch_size}", self.layout, resumed_text, self.bug or "", precision_text]
        return ", ".join(part for part in parts if part)

    @property
    def checkpoint_name(self) -> str:
        """Name of the checkpoint that the case leaves in mid-slice, or empty."""
        return "" if self.resumed_from or self.bug or self.precision != EXACT_PRECISION else self.layout


@dataclass(frozen=True)
class SkippedLayout:
    """A layout that is not trained with this number of workers, and the bugs that would have been planted in it."""

    workers: int
    layout: str
    reason: str
    bugs: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerificationPlan:
    """The plan: `rows` rows of the store in steps of `global_batch_size`, in each group's cases."""

    rows: int
    global_batch_size: int
    groups: tuple[tuple[VerificationCase, ...], ...]
    """One worker group each: all its cases have the same number of workers. The first case is the reference."""
    skipped_layouts: tuple[SkippedLayout, ...] = ()

    @property
    def steps(self) -> int:
        return -(-self.rows // self.global_batch_size)

    @property
    def workers(self) -> int:
        return max(group[0].workers for group in self.groups)


LayoutCheck = Callable[[int, str], Sequence[Problem]]
"""Returns the problems of a layout, by its name, on a number of workers."""


def case_train_config(train: TrainConfig, layout: str, workers: int) -> TrainConfig:
    """The section `train` of a case. Workers with a part of the model compute equally many micro-batches."""
    layout_settings = (
        {"load_balancing": "off", **{**PAIR_LAYOUTS, **GRID_LAYOUTS, **CUBE_LAYOUTS}[layout]} if layout else {}
    )
    return train.model_copy(update={**PLAIN_SETTINGS, **layout_settings, "workers": workers, "min_workers": None})


def check_layout(recipe: Recipe, weights: Path, workers: int, layout: str) -> list[Problem]:
    """Conflicts of a layout with the recipe, or with the model in the folder `weights`."""
    train = case_train_config(recipe.train, layout, workers)
    return constraints.check_parallelism(recipe.model_copy(update={"train": train}), weights)


def make_plan(
    config: Config,
    train_rows: int,
    mean_tokens: float,
    *,
    full: bool = False,
    plant_bugs: bool = False,
    cores: int = 1,
    find_problems: LayoutCheck = lambda workers, layout: (),
) -> VerificationPlan:
    """Plan slice and cases for a recipe with `train_rows` rows of `mean_tokens` tokens on average; `cores` are for
    workers."""
    groups, skipped_layouts = list[tuple[VerificationCase, ...]](), list[SkippedLayout]()
    if not full and cores < GRID_WORKERS:
        reason = f"{GRID_WORKERS} workers have {cores} cores here; with --full they share them"
        skipped_layouts += [SkippedLayout(GRID_WORKERS, layout, reason) for layout in GRID_LAYOUTS]
    for group in _case_groups(config.recipe.train, full, cores):
        # Bugs are planted in the first group with several workers.
        bugs_by_layout = (
            {"": planted_bugs.possible_bugs(config.recipe.model.freeze), **planted_bugs.LAYOUT_BUGS}
            if len(groups) == 1
            else {}
        )
        problems_by_layout = {layout: find_problems(group.workers, layout) for layout in group.layouts}
        valid_layouts = [layout for layout, problems in problems_by_layout.items() if not problems]
        cases = group.cases(valid_layouts)
        if plant_bugs:
            cases += [
                VerificationCase(group.workers, 3, where, bug=bug)
                for where in ("", *valid_layouts)
                for bug in bugs_by_layout.get(where, ())
            ]
        for layout, problems in problems_by_layout.items():
            if problems:
                reason = "; ".join(f"{problem.field}={problem.value}: {problem.reason}" for problem in problems)
                skipped_layouts.append(
                    SkippedLayout(
                        group.workers, layout, reason, tuple(bugs_by_layout.get(layout, ())) if plant_bugs else ()
                    )
                )
        groups.append(tuple(cases))
    max_workers = max(group[0].workers for group in groups)
    budget = int((FULL_TOKEN_BUDGET if full else TOKEN_BUDGET) / max(1.0, mean_tokens))
    batch_size = min(config.recipe.global_batch_size, FULL_MAX_BATCH_SIZE if full else MAX_BATCH_SIZE)
    batch_size = min(batch_size, budget // FULL_STEPS, train_rows // FULL_STEPS)
    # At least four rows for each worker: two micro-batches of three, the second of them short.
    batch_size = max(batch_size, 4 * max_workers)
    if full and batch_size > UNEVEN_MULTIPLE:
        batch_size -= (batch_size - 1) % UNEVEN_MULTIPLE
    steps = min(math.ceil(MIN_FULL_ROWS / batch_size), max(FULL_STEPS, budget // batch_size)) if full else FULL_STEPS
    rows = min(steps * batch_size + 1, train_rows)
    if rows > batch_size:
        rows -= (rows - 1) % batch_size
    return VerificationPlan(rows, batch_size, tuple(groups), tuple(skipped_layouts))


def check_plan(config: Config, plan: VerificationPlan) -> list[Problem]:
    """Problems of a slice: cases resume between two of its steps."""
    if plan.steps > 1:
        return []
    reason = f"its {plan.rows} training rows are one step of {plan.global_batch_size}, and a case resumes between two"
    fix = f"give {plan.global_batch_size + 1} of them or more"
    return [Problem("data.path", config.recipe.data.path, reason, fix, code="too_few_rows")]


@dataclass(frozen=True)
class _CaseGroup:
    workers: int
    micro_batch_sizes: tuple[int, ...]
    """Micro-batch sizes, for workers with the full model."""
    layouts: Iterable[str] = ()
    """Layouts, with the second micro-batch size."""

    def cases(self, layouts: Sequence[str]) -> list[VerificationCase]:
        """Cases with the given layouts: each is trained, and resumed by the next one; the last by workers with the full
        model."""
        cases = [VerificationCase(self.workers, size) for size in self.micro_batch_sizes]
        if self.workers == 1:
            return [*cases, *(VerificationCase(1, size, precision="fp32") for size in self.micro_batch_sizes[:2])]
        size = self.micro_batch_sizes[1]
        if FP32_LAYOUT in layouts:
            cases.append(VerificationCase(self.workers, size, FP32_LAYOUT, precision="fp32"))
        cases += [
            VerificationCase(self.workers, size, resumed_from=SINGLE_WORKER),
            *(VerificationCase(self.workers, size, name) for name in layouts),
        ]
        chain = pairwise([*layouts, ""])
        return [*cases, *(VerificationCase(self.workers, size, into, resumed_from=name) for name, into in chain)]


def _case_groups(train: TrainConfig, full: bool, cores: int) -> list[_CaseGroup]:
    if full:
        three_sizes = 8, 4, 2
        multi_worker_groups = (_CaseGroup(workers, three_sizes, PAIR_LAYOUTS) for workers in (2, 3))
        return [
            _CaseGroup(1, three_sizes),
            *multi_worker_groups,
            _CaseGroup(GRID_WORKERS, (8, 4), GRID_LAYOUTS),
            _CaseGroup(CUBE_WORKERS, (8, 4), CUBE_LAYOUTS),
        ]
    two_sizes = train.micro_batch_size, 3 if train.micro_batch_size != 3 else 2
    groups = [_CaseGroup(1, two_sizes), _CaseGroup(max(2, train.workers), two_sizes, PAIR_LAYOUTS)]
    return groups if cores < GRID_WORKERS else [*groups, _CaseGroup(GRID_WORKERS, two_sizes, GRID_LAYOUTS)]


def max_group_workers(train: TrainConfig, full: bool, cores: int) -> int:
    """Workers of the largest group."""
    return max(group.workers for group in _case_groups(train, full, cores))
