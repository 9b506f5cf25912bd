"""`rtrain verify RECIPE`: the same training, whatever the layout, shown on a slice of the user's own recipe and rows.

One slice is trained again and again, at a fixed number of rows per update, by several numbers of workers and sizes of
passes, in float64. Two figures say how far each case parts from the first: see `cases.Measured`. Weights alone would
not do: AdamW ignores the scale of a gradient, so that a gradient exchanged twice moves them by a few thousandths.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rtrain import config as configuration, events
from rtrain.cluster import preflight
from rtrain.config import Config, Recipe
from rtrain.data import tokens
from rtrain.errors import ConfigError, UserError
from rtrain.network import model
from rtrain.proof import planted
from rtrain.proof.cases import GRIDS, LAYOUTS, PLAIN, REFERENCE, SCHEDULES, SINGLE, Case, Measured, Slice, run_group
from rtrain.run import Run
from rtrain.runs import driver, failures, group as worker_group, nodes, preparing
from rtrain.strategies import allowed

TOLERANCE = 1e-8
"""Correct code stays below it by orders of magnitude, in float64; see `PLANTED`."""
PLANTED = 1e-2
"""What a planted bug must reach in at least one figure."""

ROWS_PER_UPDATE, FULL_ROWS_PER_UPDATE = 32, 64
FULL_ROWS = 1003
"""A prime beyond 1,000: no layout divides it, so every layout has ragged passes and a short last update."""
TOKENS, FULL_TOKENS = 4_000, 40_000
"""Long texts get fewer rows, so that the time of a slice does not depend on them."""
UPDATES = 4
"""Full updates of the default slice; one update of a single row follows, in which all workers but one are idle."""


@dataclass(frozen=True)
class Plan:
    """What will be trained: `rows` rows of the store in updates of `rows_per_update`, in each group's cases."""

    rows: int
    rows_per_update: int
    groups: tuple[tuple[Case, ...], ...]
    """One worker group each: all its cases have the same number of workers. The first case is the reference."""

    @property
    def updates(self) -> int:
        return -(-self.rows // self.rows_per_update)

    @property
    def workers(self) -> int:
        return max(group[0].workers for group in self.groups)


def plan(config: Config, train_rows: int, mean_tokens: float, *, full: bool = False, bugs: bool = False) -> Plan:
    """Pure: slice and cases for a recipe with `train_rows` rows of `mean_tokens` tokens in the mean."""
    train = config.recipe.train
    groups = _full() if full else _default(train.workers, train.micro_batch)
    if bugs:
        named = planted.possible(config.recipe.model.freeze)
        workers = groups[-1][0].workers
        planted_in = [("", bug) for bug in named]
        planted_in += [(where, bug) for where, bugs in planted.LAID_OUT.items() for bug in bugs]
        groups = (*groups[:-1], (*groups[-1], *(Case(workers, 3, where, bug=bug) for where, bug in planted_in)))
    most = max(group[0].workers for group in groups)
    budget = int((FULL_TOKENS if full else TOKENS) / max(1.0, mean_tokens))
    rows_per_update = min(config.recipe.rows_per_update, FULL_ROWS_PER_UPDATE if full else ROWS_PER_UPDATE)
    rows_per_update = min(rows_per_update, budget // UPDATES, train_rows // UPDATES)
    # Four rows for each worker at least: in passes of three they make two, and the second is short.
    rows_per_update = max(rows_per_update, 4 * most)
    rows = min(FULL_ROWS, budget) if full else UPDATES * rows_per_update + 1
    return Plan(min(max(rows, UPDATES * rows_per_update + 1), train_rows), rows_per_update, groups)


def _default(workers: int, micro_batch: int) -> tuple[tuple[Case, ...], ...]:
    workers = max(2, workers)
    other = 3 if micro_batch != 3 else 2
    several = (Case(workers, micro_batch), Case(workers, other), Case(workers, other, resumed=SINGLE))
    return ((Case(1, micro_batch), Case(1, other)), (*several, *_laid_out(workers, other)))


def _laid_out(workers: int, size: int, layouts: Iterable[str] = LAYOUTS) -> tuple[Case, ...]:
    """Each layout, and each resumed by the next one; the last by workers that have the whole model."""
    cases = tuple(Case(workers, size, name) for name in layouts)
    return (*cases, *(Case(workers, size, into, resumed=name) for name, into in pairwise([*layouts, ""])))


def possible(todo: Plan, recipe: Recipe, weights: Path) -> Plan:
    """The plan without the layouts that the number of workers, or the model in the folder `weights`, does not allow."""

    def fits(case: Case) -> bool:
        known = {**LAYOUTS, **SCHEDULES, **GRIDS}
        layouts = [name for name in (case.layout, case.resumed) if name in known]
        chosen = [{**PLAIN, **known[name], "workers": case.workers, "min_workers": None} for name in layouts]
        trains = [recipe.train.model_copy(update=settings) for settings in chosen]
        return not any(allowed.problems(recipe.model_copy(update={"train": one}), weights) for one in trains)

    return replace(todo, groups=tuple(tuple(case for case in group if fits(case)) for group in todo.groups))


def _full() -> tuple[tuple[Case, ...], ...]:
    sizes = (8, 4, 2)
    groups = [tuple(Case(workers, size) for size in sizes) for workers in (1, 2, 3)]
    resized = [(*group, Case(group[0].workers, 4, resumed=SINGLE)) for group in groups[1:]]
    grids = (Case(4, 4), *_laid_out(4, 4, GRIDS))
    every = (*LAYOUTS, *SCHEDULES)
    return (groups[0], *((*group, *_laid_out(group[0].workers, 4, every)) for group in resized), grids)


# ----------------------------------------------------------------------------------------------------------- judgement


@dataclass
class Report:
    """The figures of every case. `passed`: sound cases within `TOLERANCE`, and every planted bug seen."""

    rows: int
    rows_per_update: int
    updates: int
    cases: list[tuple[Case, Measured]] = field(default_factory=list)
    seconds: float = 0.0

    def _of(self, planted: bool) -> list[tuple[Case, Measured]]:
        return [(case, measured) for case, measured in self.cases if (case.bug is not None) == planted]

    @property
    def weights_ratio(self) -> float:
        return max(measured.weights_ratio for _, measured in self._of(planted=False))

    @property
    def gradient_ratio(self) -> float:
        return max(measured.gradient_ratio for _, measured in self._of(planted=False))

    @property
    def unseen(self) -> list[str]:
        """Planted bugs that no figure shows."""
        return [
            str(case.bug)
            for case, measured in self._of(planted=True)
            if max(measured.weights_ratio, measured.gradient_ratio) <= PLANTED
        ]

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each; nothing where the training is the same in every layout."""
        found = [f"the planted bug {bug!r} was not seen: this check cannot be trusted here" for bug in self.unseen]
        sound = self._of(planted=False)
        order = sound[0][1].order_digest
        for case, measured in sound:
            if not measured.gradient_ratio <= TOLERANCE:
                found.append(
                    f"{case.name}: the gradient of {measured.worst_tensor} at update {measured.worst_update} is another"
                )
            if not measured.weights_ratio <= TOLERANCE:
                found.append(f"{case.name}: the weights end elsewhere")
            if measured.order_digest != order:
                found.append(f"{case.name}: other rows, or in another order")
            if measured.workers_differ:
                found.append(f"{case.name}: {measured.workers_differ} workers do not hold the others' weights")
            expected = self.rows - self.updates // 2 * self.rows_per_update if case.resumed else self.rows
            if measured.rows != expected:
                found.append(f"{case.name}: {measured.rows} rows instead of {expected}")
        return found

    def to_document(self) -> dict[str, Any]:
        return {
            "passed": not self.problems,
            "weights_ratio": self.weights_ratio,
            "gradient_ratio": self.gradient_ratio,
            "cases": [{"name": case.name, **asdict(case), **asdict(measured)} for case, measured in self.cases],
            "problems": self.problems,
            "tolerance": TOLERANCE,
            "rows": self.rows,
            "rows_per_update": self.rows_per_update,
            "updates": self.updates,
            "seconds": self.seconds,
        }

    def text(self) -> str:
        lines = [
            f"{self.rows:,} rows in {self.updates} updates of {self.rows_per_update}, float64; "
            "all compared with the first case",
            f"{'workers x micro-batch':<36}  {'passes':>6}  {'weights':>8}  {'gradient':>8}  worst tensor (update)",
        ]
        for number, (case, measured) in enumerate(self.cases):
            worst = f"{measured.worst_tensor} ({measured.worst_update})" if measured.worst_tensor else ""
            figures = f"{measured.weights_ratio:>8.1e}  {measured.gradient_ratio:>8.1e}  {worst}"
            lines.append(f"{case.name:<36}  {measured.most_passes:>6}  {figures if number else 'reference'}")
        if any(case.bug for case, _ in self.cases):
            seen = len(self._of(planted=True)) - len(self.unseen)
            lines.append(f"{seen} of {len(self._of(planted=True))} planted bugs seen (a figure above {PLANTED:g})")
        verdict = "passed: the same training in every layout" if not self.problems else "FAILED:"
        lines.append(
            f"{verdict} (weights {self.weights_ratio:.1e}, gradient {self.gradient_ratio:.1e}; "
            f"tolerance {TOLERANCE:g}; {self.seconds:.0f} s)"
        )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


# ----------------------------------------------------------------------------------------------------------------- run


def session_config(config: Config, full: bool) -> Config:
    """The configuration whose local Ray has room for the largest of the worker groups."""
    most = max(group[0].workers for group in (_full() if full else _default(config.recipe.train.workers, 8)))
    return configuration.with_overrides(config, {"train.workers": most})


def run(
    config: Config,
    folder: Path,
    *,
    full: bool = False,
    bugs: bool = False,
    on_event: driver.OnEvent | None = None,
) -> Report:
    """Verify a recipe on the Ray that the process is connected to.

    `folder` is made for gradients and weights and removed in the end; the token store beside it is the one that
    training uses. Raises `UserError` where the cases cannot be run; figures that are too large are in the report.
    """
    begin = time.monotonic()
    found = preparing.check(config, folder.parent)
    if folder.exists():
        raise UserError(f"--out: {folder} exists; name a new folder, which is removed when the check has ended")
    source, weights, *_ = nodes.share(config, *found, folder.parent)
    config, _ = preparing.separated(model.resolved(config, weights), source)
    store, _ = tokens.ensure(config.recipe, source, weights, folder.parent)
    rows = store.rows("train")
    todo = plan(config, rows, store.manifest.tokens["train"] / max(1, rows), full=full, bugs=bugs)
    todo = possible(todo, config.recipe, weights)
    config = configuration.with_overrides(
        config,
        {
            "train.workers": todo.workers,
            "train.rows_per_update": todo.rows_per_update,
            "train.aggregation_frequency": None,
        },
    )
    if problems := [*preflight.rows(config.recipe, rows), *preparing.capacity(config)]:
        raise ConfigError(problems)
    # In float64 the reference's gradients, its weights and checkpoints of three times its weights.
    copies = todo.updates + 4 + 3 * sum(bool(case.keeps) for group in todo.groups for case in group)
    preflight.disk(folder, copies * 2 * sum(path.stat().st_size for path in weights.glob("*.safetensors")))
    folder.mkdir(parents=True)
    trained = Slice(config.recipe, folder, store.folder, weights, todo.rows, todo.updates)
    with events.Follow([(folder, {})], on_event):
        for group in todo.groups:
            _run_group(group, trained)
    report = Report(todo.rows, todo.rows_per_update, todo.updates, _measured(folder))
    report.seconds = round(time.monotonic() - begin, 1)
    shutil.rmtree(folder)
    return report


def _run_group(group: Sequence[Case], trained: Slice) -> None:
    folder = trained.scratch
    try:
        # On CPUs, also where there are GPUs: the claim is about sums and their order, and float64 is slow on most.
        worker_group.trainer(
            partial(run_group, trained, group), worker_group.Layout(group[0].workers), Run(folder).ray
        ).fit()
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(folder / REFERENCE, ignore_errors=True)  # gigabytes; the log and the traceback stay
        raise failures.explain(Run(folder), error) from error


def _measured(folder: Path) -> list[tuple[Case, Measured]]:
    return [
        (
            Case(**{name: event[name] for name in ("workers", "micro_batch", "layout", "resumed", "bug")}),
            Measured(**event["measured"]),
        )
        for event in Run(folder).events("case")
    ]
