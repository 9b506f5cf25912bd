"""`rtrain verify RECIPE`: show on a slice of the recipe's rows that training is the same in every layout.

One slice is trained repeatedly in float64, with a fixed global batch size, by several numbers of workers and
micro-batch sizes. Two figures measure the difference of each case from the first: see `layout_runs.CaseMeasurement`.
Weights alone would not suffice: AdamW ignores the scale of a gradient, so a gradient that is all-reduced twice moves
them by a few thousandths.
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
from rtrain.verification.layout_runs import REFERENCE, CaseMeasurement, TrainingSlice, run_group
from rtrain.verification.verify_plan import (
    EXACT_PRECISION,
    SkippedLayout,
    VerificationCase,
    check_layout,
    check_plan as too_few,
    make_plan,
    max_group_workers,
)

TOLERANCE = 1e-8
"""Correct code stays orders of magnitude below it, in float64; see `MIN_BUG_RATIO`."""
MIN_BUG_RATIO = 1e-2
"""Smallest figure that detects a planted bug."""
MAX_NOISE_RATIO = 3.0
"""Largest difference of a layout from one worker in fp32, relative to the difference between two micro-batch sizes of
one worker."""

# ----------------------------------------------------------------------------------------------------------- judgement


@dataclass
class VerificationReport:
    """The figures of every case. `passed`: correct cases are within `TOLERANCE`, and every planted bug is detected."""

    rows: int
    global_batch_size: int
    steps: int
    cases: list[tuple[VerificationCase, CaseMeasurement]] = field(default_factory=list)
    skipped_layouts: Sequence[SkippedLayout] = ()
    seconds: float = 0.0

    def _exact_cases(self, is_planted: bool) -> list[tuple[VerificationCase, CaseMeasurement]]:
        return [
            (case, measured)
            for case, measured in self.cases
            if (case.bug is not None) == is_planted and case.precision == EXACT_PRECISION
        ]

    @property
    def noise_ratios(self) -> list[tuple[VerificationCase, float, float]]:
        """fp32 layouts with their difference from one worker relative to that between two micro-batch sizes, by weights
        and by gradients."""
        fp32_cases = [(case, measured) for case, measured in self.cases if case.precision != EXACT_PRECISION]
        reference_noise = [measured for case, measured in fp32_cases if case.workers == 1][1:]
        return [
            (
                case,
                *(
                    getattr(measured, figure) / getattr(reference_noise[0], figure)
                    for figure in ("weights_ratio", "gradient_ratio")
                ),
            )
            for case, measured in fp32_cases
            if case.workers > 1
        ]

    @property
    def weights_ratio(self) -> float:
        return max(measured.weights_ratio for _, measured in self._exact_cases(is_planted=False))

    @property
    def gradient_ratio(self) -> float:
        return max(measured.gradient_ratio for _, measured in self._exact_cases(is_planted=False))

    @property
    def missed_bugs(self) -> list[str]:
        """Planted bugs that no figure detects."""
        return [
            str(case.bug)
            for case, measured in self._exact_cases(is_planted=True)
            if max(measured.weights_ratio, measured.gradient_ratio) <= MIN_BUG_RATIO
        ]

    @property
    def problems(self) -> list[str]:
        """All problems, a line each; empty if training is the same in every layout."""
        problems = [
            f"the planted bug {bug!r} was not seen: this check cannot be trusted here" for bug in self.missed_bugs
        ]
        sound_cases = self._exact_cases(is_planted=False)
        order = sound_cases[0][1].order_digest
        for case, measurement in sound_cases:
            if not measurement.gradient_ratio <= TOLERANCE:
                problems.append(
                    f"{case.name}: the gradient of {measurement.worst_tensor} at step {measurement.worst_step} differs"
                )
            if not measurement.weights_ratio <= TOLERANCE:
                problems.append(f"{case.name}: the final weights differ")
            if measurement.order_digest != order:
                problems.append(f"{case.name}: other rows, or another order")
            if measurement.differing_workers:
                problems.append(f"{case.name}: {measurement.differing_workers} workers have other weights")
            expected = self.rows - self.steps // 2 * self.global_batch_size if case.resumed_from else self.rows
            if measurement.rows != expected:
                problems.append(f"{case.name}: {measurement.rows} rows instead of {expected}")
        for case, *ratios in self.noise_ratios:
            if not max(ratios) <= MAX_NOISE_RATIO:
                problems.append(
                    f"{case.name}: it differs from one worker {max(ratios):.1f} times as much as rounding does"
                )
        return problems

    def to_document(self) -> dict[str, Any]:
        return {
            "passed": not self.problems,
            "weights_ratio": self.weights_ratio,
            "gradient_ratio": self.gradient_ratio,
            "cases": [{"name": case.name, **asdict(case), **asdict(measured)} for case, measured in self.cases],
            "skipped_layouts": [asdict(skipped) for skipped in self.skipped_layouts],
            "problems": self.problems,
            "tolerance": TOLERANCE,
            "rows": self.rows,
            "global_batch_size": self.global_batch_size,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def format_text(self) -> str:
        lines = [
            f"{self.rows:,} rows in {self.steps} steps of {self.global_batch_size}, float64; "
            "all compared with the first case; fp32 by itself",
            f"{'workers x micro-batch':<36}  {'micro-batches':>13}  {'weights':>8}  {'gradient':>8}  "
            "worst tensor (step)",
        ]
        references = dict[str, VerificationCase]()
        for case, measurement in self.cases:
            first = references.setdefault(case.precision, case)
            worst = f"{measurement.worst_tensor} ({measurement.worst_step})" if measurement.worst_tensor else ""
            figures = f"{measurement.weights_ratio:>8.1e}  {measurement.gradient_ratio:>8.1e}  {worst}"
            lines.append(
                f"{case.name:<36}  {measurement.max_micro_batches:>13}  {'reference' if case is first else figures}"
            )
        for case, weights, gradient in self.noise_ratios:
            parts = f"weights {weights:.1f}, gradient {gradient:.1f} times as far as with another micro-batch size"
            lines.append(f"{case.name}: differs from one worker by {parts} ({MAX_NOISE_RATIO:g} allowed)")
        layouts_by_reason = dict[tuple[int, str], list[str]]()
        for skipped in self.skipped_layouts:
            layouts_by_reason.setdefault((skipped.workers, skipped.reason), []).append(skipped.layout)
        lines += [
            f"skipped: {workers} workers, {'; '.join(layouts)} ({reason})"
            for (workers, reason), layouts in layouts_by_reason.items()
        ]
        if any(case.bug for case, _ in self.cases):
            num_bugs_seen = len(self._exact_cases(is_planted=True)) - len(self.missed_bugs)
            absent_bugs = [bug for skipped in self.skipped_layouts for bug in skipped.bugs]
            more = f"; not planted, as their layouts are skipped: {', '.join(absent_bugs)}" if absent_bugs else ""
            lines.append(
                f"{num_bugs_seen} of {len(self._exact_cases(is_planted=True))} planted bugs seen (a figure above "
                f"{MIN_BUG_RATIO:g}){more}"
            )
        layouts_text = "every layout that is not skipped" if self.skipped_layouts else "every layout"
        verdict = f"passed: the same training in {layouts_text}" if not self.problems else "FAILED:"
        lines.append(
            f"{verdict} (weights {self.weights_ratio:.1e}, gradient {self.gradient_ratio:.1e}; "
            f"tolerance {TOLERANCE:g}; {self.seconds:.0f} s)"
        )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


# ----------------------------------------------------------------------------------------------------------------- run


def make_session_config(config: Config, full: bool) -> Config:
    """The configuration of a local Ray with room for the largest worker group."""
    num_workers = max_group_workers(config.recipe.train, full, env.available_cores())
    return configuration.with_overrides(config, {"train.workers": num_workers})


def _available_cores(config: Config) -> int:
    """Cores for workers, of this machine or of the requested cluster."""
    cluster = config.deploy.cluster
    return env.available_cores() if cluster.address is None else capacity.max_accelerators("cpu", cluster.labels)


def run(
    config: Config,
    folder: Path,
    *,
    full: bool = False,
    plant_bugs: bool = False,
    cores: int | None = None,
    on_event: controller.OnEvent | None = None,
) -> VerificationReport:
    """Verify a recipe on the connected Ray cluster. `cores`: cores for workers, if known.

    `folder` holds gradients and weights and is removed at the end; the token store beside it is the one of training.
    Raises `UserError` if the cases cannot run; figures that are too large are in the report.
    """
    begin = time.monotonic()
    checked_inputs = prepare.check_run(config, folder.parent)
    if folder.exists():
        reason = f"--out: {folder} exists; name a new folder, which is removed when the check has ended"
        raise UserError(reason, code="already_exists")
    source, weights, *_ = node_checks.check_nodes(config, *checked_inputs, folder.parent)
    config = models_builder.resolve_pooling(config, weights)
    store, _ = store_builder.build_or_open(config.recipe, source, weights, folder.parent)
    rows = store.num_rows("train")
    mean_tokens, find_problems = (
        store.manifest.tokens["train"] / max(1, rows),
        partial(check_layout, config.recipe, weights),
    )
    cores = _available_cores(config) if cores is None else cores
    plan = make_plan(
        config, rows, mean_tokens, full=full, plant_bugs=plant_bugs, cores=cores, find_problems=find_problems
    )
    config = configuration.with_overrides(
        config,
        {
            "train.workers": plan.workers,
            "train.global_batch_size": plan.global_batch_size,
            "train.aggregation_frequency": None,
        },
    )
    if problems := [
        *too_few(config, plan),
        *preflight.check_rows(config.recipe, rows),
        *prepare.check_capacity(config),
    ]:
        raise ConfigError(problems)
    # Disk space: in float64 the reference's gradients, weights, and checkpoints of three times the weights; in fp32 the
    # first two.
    num_copies = 1.5 * plan.steps + 5 + 3 * sum(bool(case.checkpoint_name) for group in plan.groups for case in group)
    preflight.check_disk_space(
        folder, int(num_copies * 2) * sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    )
    folder.mkdir(parents=True)
    training_slice = TrainingSlice(config.recipe, folder, store.folder, weights, plan.rows, plan.steps)
    with events.EventFollower([(folder, {})], on_event):
        for group in plan.groups:
            _run_group(group, training_slice)
    report = VerificationReport(
        plan.rows, plan.global_batch_size, plan.steps, _read_measurements(folder), plan.skipped_layouts
    )
    report.seconds = round(time.monotonic() - begin, 1)
    shutil.rmtree(folder)
    return report


def _run_group(group: Sequence[VerificationCase], training_slice: TrainingSlice) -> None:
    folder = training_slice.scratch
    try:
        # On CPUs even if there are GPUs: the check is about sums and their order, and float64 is slow on most GPUs.
        worker_group.make_trainer(
            partial(run_group, training_slice, group),
            worker_group.WorkerGroupSpec(group[0].workers),
            Run(folder).ray_storage,
        ).fit()
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:
        for path in folder.glob(f"{REFERENCE}*"):  # gigabytes; the log and the traceback stay
            shutil.rmtree(path, ignore_errors=True)
        raise failures.to_user_error(Run(folder), error) from error


def _read_measurements(folder: Path) -> list[tuple[VerificationCase, CaseMeasurement]]:
    return [
        (
            VerificationCase(**{data_field.name: event[data_field.name] for data_field in fields(VerificationCase)}),
            CaseMeasurement(**event["measurement"]),
        )
        for event in Run(folder).events("case")
    ]
