"""`rtrain verify RECIPE`: the same training, whatever the layout, shown on a slice of the user's own recipe and rows.

One slice is trained again and again, at a fixed number of rows per update, by several numbers of workers and sizes of
passes, in float64. Two figures say how far each case parts from the first: see `cases.Measured`. Weights alone would
not do: AdamW ignores the scale of a gradient, so that a gradient exchanged twice moves them by a few thousandths.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import capacity, preflight
from rtrain.config import Config
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.data.store import builder as store_builder
from rtrain.models import builder as models_builder
from rtrain.runs import controller, failures, node_checks, prepare, worker_group as worker_group
from rtrain.verification.layout_runs import REFERENCE, Measured, Slice, run_group
from rtrain.verification.verify_plan import EXACT, Case, LeftOut, most_workers, plan, problems as too_few, refused

TOLERANCE = 1e-8
"""Correct code stays below it by orders of magnitude, in float64; see `PLANTED`."""
PLANTED = 1e-2
"""What a planted bug must reach in at least one figure."""
NOISE = 3.0
"""How far a layout may part from one worker in fp32, by how far two sizes of passes of one worker do."""

# ----------------------------------------------------------------------------------------------------------- judgement


@dataclass
class Report:
    """The figures of every case. `passed`: sound cases within `TOLERANCE`, and every planted bug seen."""

    rows: int
    rows_per_update: int
    updates: int
    cases: list[tuple[Case, Measured]] = field(default_factory=list)
    left_out: Sequence[LeftOut] = ()
    seconds: float = 0.0

    def _of(self, planted: bool) -> list[tuple[Case, Measured]]:
        return [
            (case, measured)
            for case, measured in self.cases
            if (case.bug is not None) == planted and case.precision == EXACT
        ]

    @property
    def beyond_noise(self) -> list[tuple[Case, float, float]]:
        """Layouts in fp32, and how many times as far as two sizes of passes they part from one worker: by weights, by
        gradients."""
        rounded = [(case, measured) for case, measured in self.cases if case.precision != EXACT]
        noise = [measured for case, measured in rounded if case.workers == 1][1:]
        return [
            (
                case,
                *(
                    getattr(measured, figure) / getattr(noise[0], figure)
                    for figure in ("weights_ratio", "gradient_ratio")
                ),
            )
            for case, measured in rounded
            if case.workers > 1
        ]

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
        for case, *times in self.beyond_noise:
            if not max(times) <= NOISE:
                found.append(f"{case.name}: it parts from one worker {max(times):.1f} times as far as rounding does")
        return found

    def to_document(self) -> dict[str, Any]:
        return {
            "passed": not self.problems,
            "weights_ratio": self.weights_ratio,
            "gradient_ratio": self.gradient_ratio,
            "cases": [{"name": case.name, **asdict(case), **asdict(measured)} for case, measured in self.cases],
            "left_out": [asdict(one) for one in self.left_out],
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
            "all compared with the first case; fp32 by itself",
            f"{'workers x micro-batch':<36}  {'passes':>6}  {'weights':>8}  {'gradient':>8}  worst tensor (update)",
        ]
        references = dict[str, Case]()
        for case, measured in self.cases:
            first = references.setdefault(case.precision, case)
            worst = f"{measured.worst_tensor} ({measured.worst_update})" if measured.worst_tensor else ""
            figures = f"{measured.weights_ratio:>8.1e}  {measured.gradient_ratio:>8.1e}  {worst}"
            lines.append(f"{case.name:<36}  {measured.most_passes:>6}  {'reference' if case is first else figures}")
        for case, weights, gradient in self.beyond_noise:
            parts = f"weights {weights:.1f}, gradient {gradient:.1f} times as far as with passes of another size"
            lines.append(f"{case.name}: apart from one worker by {parts} ({NOISE:g} allowed)")
        why = dict[tuple[int, str], list[str]]()
        for one in self.left_out:
            why.setdefault((one.workers, one.why), []).append(one.layout)
        lines += [f"left out: {workers} workers, {'; '.join(of)} ({reason})" for (workers, reason), of in why.items()]
        if any(case.bug for case, _ in self.cases):
            seen = len(self._of(planted=True)) - len(self.unseen)
            absent = [bug for one in self.left_out for bug in one.bugs]
            more = f"; not planted, as their layouts are left out: {', '.join(absent)}" if absent else ""
            lines.append(
                f"{seen} of {len(self._of(planted=True))} planted bugs seen (a figure above {PLANTED:g}){more}"
            )
        trained = "every layout that is not left out" if self.left_out else "every layout"
        verdict = f"passed: the same training in {trained}" if not self.problems else "FAILED:"
        lines.append(
            f"{verdict} (weights {self.weights_ratio:.1e}, gradient {self.gradient_ratio:.1e}; "
            f"tolerance {TOLERANCE:g}; {self.seconds:.0f} s)"
        )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


# ----------------------------------------------------------------------------------------------------------------- run


def session_config(config: Config, full: bool) -> Config:
    """The configuration whose local Ray has room for the largest of the worker groups."""
    most = most_workers(config.recipe.train, full, env.cores())
    return configuration.with_overrides(config, {"train.workers": most})


def _cores(config: Config) -> int:
    """Those for workers: of this machine, or of the cluster that is asked for."""
    cluster = config.deploy.cluster
    return env.cores() if cluster.address is None else capacity.most("cpu", cluster.labels)


def run(
    config: Config,
    folder: Path,
    *,
    full: bool = False,
    bugs: bool = False,
    cores: int | None = None,
    on_event: controller.OnEvent | None = None,
) -> Report:
    """Verify a recipe on the Ray that the process is connected to. `cores`: those for workers, where they are known.

    `folder` is made for gradients and weights and removed in the end; the token store beside it is the one that
    training uses. Raises `UserError` where the cases cannot be run; figures that are too large are in the report.
    """
    begin = time.monotonic()
    found = prepare.check(config, folder.parent)
    if folder.exists():
        reason = f"--out: {folder} exists; name a new folder, which is removed when the check has ended"
        raise UserError(reason, code="already_exists")
    source, weights, *_ = node_checks.share(config, *found, folder.parent)
    config = models_builder.resolved(config, weights)
    store, _ = store_builder.ensure(config.recipe, source, weights, folder.parent)
    rows = store.rows("train")
    mean_tokens, fits = store.manifest.tokens["train"] / max(1, rows), partial(refused, config.recipe, weights)
    cores = _cores(config) if cores is None else cores
    todo = plan(config, rows, mean_tokens, full=full, bugs=bugs, cores=cores, refused=fits)
    config = configuration.with_overrides(
        config,
        {
            "train.workers": todo.workers,
            "train.rows_per_update": todo.rows_per_update,
            "train.aggregation_frequency": None,
        },
    )
    if problems := [*too_few(config, todo), *preflight.rows(config.recipe, rows), *prepare.capacity(config)]:
        raise ConfigError(problems)
    # In float64 the reference's gradients, its weights and checkpoints of three times its weights; in fp32 the first.
    copies = 1.5 * todo.updates + 5 + 3 * sum(bool(case.keeps) for group in todo.groups for case in group)
    preflight.disk(folder, int(copies * 2) * sum(path.stat().st_size for path in weights.glob("*.safetensors")))
    folder.mkdir(parents=True)
    trained = Slice(config.recipe, folder, store.folder, weights, todo.rows, todo.updates)
    with events.Follow([(folder, {})], on_event):
        for group in todo.groups:
            _run_group(group, trained)
    report = Report(todo.rows, todo.rows_per_update, todo.updates, _measured(folder), todo.left_out)
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
        for kept in folder.glob(f"{REFERENCE}*"):  # gigabytes; the log and the traceback stay
            shutil.rmtree(kept, ignore_errors=True)
        raise failures.explain(Run(folder), error) from error


def _measured(folder: Path) -> list[tuple[Case, Measured]]:
    return [
        (
            Case(**{one.name: event[one.name] for one in fields(Case)}),
            Measured(**event["measured"]),
        )
        for event in Run(folder).events("case")
    ]
