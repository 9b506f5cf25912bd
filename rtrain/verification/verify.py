"""`rtrain verify RECIPE`: show on a slice of the recipe's rows that training is the same in every layout.

One slice is trained repeatedly in float64, with a fixed global batch size, by several numbers of workers and
micro-batch sizes. Two figures measure the difference of each case from the first: see `layout_runs.CaseMeasurement`.
Weights alone would not suffice: AdamW ignores the scale of a gradient, so a gradient that is all-reduced twice moves
them by a few thousandths.

`rtrain verify --ledger RUN` recomputes the rows of a run offline and compares them with its records.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import capacity, preflight
from rtrain.config import Config
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, UserError, suggest_path
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data import sampling
from rtrain.data.order import RowOrder, chain_digest, hash_step_rows
from rtrain.data.store import builder as store_builder
from rtrain.data.store.store import Store
from rtrain.models import builder as models_builder
from rtrain.runs import controller, nodes, prepare, worker_pool
from rtrain.trainer.trainer import INITIAL_LEDGER
from rtrain.verification.layout_runs import (
    REFERENCE,
    CaseMeasurement,
    SkippedLayout,
    TrainingSlice,
    VerificationCase,
    check_layout,
    check_plan,
    make_plan,
    max_group_workers,
    run_group,
)

TOLERANCE = 1e-8
"""Correct code stays orders of magnitude below it, in float64; see `MIN_BUG_RATIO`."""
MIN_BUG_RATIO = 1e-2
"""Smallest figure that detects a planted bug."""
MAX_NOISE_RATIO = 3.0
"""Largest difference of a layout from one worker in fp32, relative to the difference between two micro-batch sizes of
one worker."""

Measured = tuple[VerificationCase, CaseMeasurement]


@dataclass
class VerificationReport:
    """The figures of every case. `passed`: correct cases are within `TOLERANCE`, and every planted bug is detected."""

    rows: int
    global_batch_size: int
    steps: int
    cases: list[Measured] = field(default_factory=list)
    skipped_layouts: Sequence[SkippedLayout] = ()
    seconds: float = 0.0

    @property
    def _sound_cases(self) -> list[Measured]:
        return [(case, measured) for case, measured in self.cases if case.is_exact and case.bug is None]

    @property
    def _planted_cases(self) -> list[Measured]:
        return [(case, measured) for case, measured in self.cases if case.is_exact and case.bug is not None]

    @property
    def noise_ratios(self) -> list[tuple[VerificationCase, float, float]]:
        """fp32 layouts with their difference from one worker relative to that between two micro-batch sizes, by weights
        and by gradients."""
        fp32_cases = [(case, measured) for case, measured in self.cases if not case.is_exact]
        if not fp32_cases:
            return []
        noise = [measured for case, measured in fp32_cases if case.workers == 1][1]
        return [
            (case, measured.weights_ratio / noise.weights_ratio, measured.gradient_ratio / noise.gradient_ratio)
            for case, measured in fp32_cases
            if case.workers > 1
        ]

    @property
    def weights_ratio(self) -> float:
        return max(measured.weights_ratio for _, measured in self._sound_cases)

    @property
    def gradient_ratio(self) -> float:
        return max(measured.gradient_ratio for _, measured in self._sound_cases)

    @property
    def missed_bugs(self) -> list[str]:
        """Planted bugs that no figure detects."""
        return [
            str(case.bug)
            for case, measured in self._planted_cases
            if max(measured.weights_ratio, measured.gradient_ratio) <= MIN_BUG_RATIO
        ]

    @property
    def problems(self) -> list[str]:
        """All problems, a line each; empty if training is the same in every layout."""
        problems = [
            f"the planted bug {bug!r} is not detected: do not trust this check here" for bug in self.missed_bugs
        ]
        orders = {case.is_weighted: measured.order_digest for case, measured in reversed(self._sound_cases)}
        for case, measured in self._sound_cases:
            rows = self.rows - (self.steps // 2 * self.global_batch_size if case.resumed_from else 0)
            gradient = f"the gradient of {measured.worst_tensor} at step {measured.worst_step} differs"
            failed_checks = {
                gradient: not measured.gradient_ratio <= TOLERANCE,
                "the final weights differ": not measured.weights_ratio <= TOLERANCE,
                "other rows, or another order": measured.order_digest != orders[case.is_weighted],
                f"{measured.differing_workers} workers have other weights": measured.differing_workers > 0,
                f"{measured.rows} rows instead of {rows}": measured.rows != rows,
            }
            problems += [f"{case.name}: {problem}" for problem, has_failed in failed_checks.items() if has_failed]
        return problems + [
            f"{case.name}: it differs from one worker {max(ratios):.1f} times as much as rounding does"
            for case, *ratios in self.noise_ratios
            if not max(ratios) <= MAX_NOISE_RATIO
        ]

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
        columns = f"{'micro-batches':>13}  {'weights':>8}  {'gradient':>8}  worst tensor (step)"
        lines = [
            f"{self.rows:,} rows in {self.steps} steps of {self.global_batch_size}, float64; "
            "all compared with the first case; fp32 and weighted by themselves",
            f"{'workers x micro-batch':<36}  {columns}",
        ]
        references = dict[tuple[str, bool], VerificationCase]()
        for case, measured in self.cases:
            worst = f"{measured.worst_tensor} ({measured.worst_step})" if measured.worst_tensor else ""
            figures = f"{measured.weights_ratio:>8.1e}  {measured.gradient_ratio:>8.1e}  {worst}"
            if references.setdefault((case.precision, case.is_weighted), case) is case:
                figures = "reference"
            lines.append(f"{case.name:<36}  {measured.max_micro_batches:>13}  {figures}")
        for case, weights, gradient in self.noise_ratios:
            parts = f"weights {weights:.1f}, gradient {gradient:.1f} times as far as with another micro-batch size"
            lines.append(f"{case.name}: differs from one worker by {parts} ({MAX_NOISE_RATIO:g} allowed)")
        layouts_by_reason = dict[tuple[int, str], list[str]]()
        for skipped in self.skipped_layouts:
            layouts_by_reason.setdefault((skipped.workers, skipped.reason), []).append(skipped.layout)
        for (workers, reason), layouts in layouts_by_reason.items():
            lines.append(f"skipped: {workers} workers, {'; '.join(layouts)} ({reason})")
        if num_bugs := len(self._planted_cases):
            absent_bugs = ", ".join(bug for skipped in self.skipped_layouts for bug in skipped.bugs)
            more = f"; not planted, as their layouts are skipped: {absent_bugs}" if absent_bugs else ""
            num_seen = num_bugs - len(self.missed_bugs)
            lines.append(f"{num_seen} of {num_bugs} planted bugs seen (a figure above {MIN_BUG_RATIO:g}){more}")
        layouts_text = "every layout that is not skipped" if self.skipped_layouts else "every layout"
        verdict = f"passed: the same training in {layouts_text}" if not self.problems else "FAILED:"
        lines.append(
            f"{verdict} (weights {self.weights_ratio:.1e}, gradient {self.gradient_ratio:.1e}; "
            f"tolerance {TOLERANCE:g}; {self.seconds:.0f} s)"
        )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def make_session_config(config: Config, full: bool) -> Config:
    """The configuration of a local Ray with room for the largest worker group."""
    num_workers = max_group_workers(config.recipe.train, full, env.available_cores())
    return configuration.with_overrides(config, {"train.workers": num_workers})


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
    begin, cluster = time.monotonic(), config.deploy.cluster
    checked_inputs = prepare.check_run(config, folder.parent)
    if folder.exists():
        reason = f"--out: {folder} exists; name a new folder, which is removed when the check has ended"
        raise UserError(reason, code="already_exists")
    source, weights, *_ = nodes.check_nodes(config, *checked_inputs, folder.parent)
    config = models_builder.resolve_pooling(config, weights)
    store, _ = store_builder.build_or_open(config.recipe, source, weights, folder.parent)
    rows = store.num_rows("train")
    if cores is None:  # of this machine, or of the requested cluster
        is_local = cluster.address is None
        cores = env.available_cores() if is_local else capacity.max_accelerators("cpu", cluster.labels)
    plan = make_plan(
        config,
        (rows, store.manifest.tokens["train"] / max(1, rows)),
        full=full,
        plant_bugs=plant_bugs,
        cores=cores,
        find_problems=partial(check_layout, config.recipe, weights),
    )
    overrides = {"train.workers": plan.workers, "train.global_batch_size": plan.global_batch_size}
    config = configuration.with_overrides(config, {**overrides, "train.aggregation_frequency": None})
    row_problems = preflight.check_rows(config.recipe, rows)
    if problems := [*check_plan(config, plan), *row_problems, *prepare.check_capacity(config)]:
        raise ConfigError(problems)
    # Disk space: in float64 both references' gradients, weights, and checkpoints of three times the weights; in fp32
    # the first two.
    num_copies = 2.5 * plan.steps + 9 + 3 * sum(bool(case.checkpoint_name) for group in plan.groups for case in group)
    weight_bytes = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    preflight.check_disk_space(folder, int(num_copies * 2) * weight_bytes)
    folder.mkdir(parents=True)
    training_slice = TrainingSlice(config.recipe, folder, store.folder, weights, plan.rows, plan.steps)
    with events.EventFollower([(folder, {})], on_event):
        for group in plan.groups:
            _run_group(group, training_slice)
    cases = [
        (
            VerificationCase(**{case_field.name: event[case_field.name] for case_field in fields(VerificationCase)}),
            CaseMeasurement(**event["measurement"]),
        )
        for event in Run(folder).events("case")
    ]
    seconds = round(time.monotonic() - begin, 1)
    shutil.rmtree(folder)
    return VerificationReport(plan.rows, plan.global_batch_size, plan.steps, cases, plan.skipped_layouts, seconds)


def _run_group(group: Sequence[VerificationCase], training_slice: TrainingSlice) -> None:
    folder = training_slice.scratch
    # On CPUs even if there are GPUs: the check is about sums and their order, and float64 is slow on most GPUs.
    spec = worker_pool.WorkerGroupSpec(group[0].workers)
    try:
        worker_pool.make_trainer(partial(run_group, training_slice, group), spec, Run(folder).ray_storage).fit()
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:
        for path in folder.glob(f"{REFERENCE}*"):  # gigabytes; the log and the traceback stay
            shutil.rmtree(path, ignore_errors=True)
        raise controller.to_user_error(Run(folder), error) from error


# -------------------------------------------------------------------------------------------------------------- ledger

# A run's ledger is a hash chain over the row ids of its steps. Every checkpoint and every progress event holds its
# link, and the workers verify at each step that their rows are those of the chain. So it suffices to recompute the
# chain from the token store and the order, and to compare it with the records.


@dataclass(frozen=True)
class LedgerReport:
    """Result of a ledger check. `passed` if every record agrees and every row occurred exactly once an epoch, or with
    `data.sampling` as often as planned."""

    passed: bool
    rows: int
    steps: int
    """Recorded steps of the run."""
    steps_per_epoch: int
    order_digest: str
    """The recomputed chain after those steps."""
    matching_records: dict[int, str]
    """Step -> source of the record (`checkpoint`, `progress` or `trained`), for every matching record."""
    mismatching_records: dict[int, str]
    repeated_rows: int
    """Rows that occur more than once in an epoch, over all started epochs."""
    missing_rows: int
    """Rows that are missing in a complete epoch."""
    drawn_rows: dict[str, dict[str, int]] = field(default_factory=dict)
    """With `data.sampling`, by value of its column: `rows`, `per_epoch` and `drawn` so far."""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def format_text(self) -> str:
        epochs, rest = divmod(self.steps, self.steps_per_epoch)
        rows_text = f"{self.rows:,} rows x {epochs} epochs" + (f" and {rest} steps" if rest else "")
        num_matching, mismatching = len(self.matching_records), self.mismatching_records
        if self.passed:
            text = f"every row once per epoch: {rows_text}, {self.steps} steps"
            if self.drawn_rows:
                draws = (
                    f"{value or '(empty)'} {counts['per_epoch']:,} of {counts['rows']:,}"
                    for value, counts in self.drawn_rows.items()
                )
                text = f"rows drawn per epoch as planned, {', '.join(draws)}: {rows_text}, {self.steps} steps"
            return f"{text}; the recorded ledger agrees at all of {num_matching} points"
        text = f"NOT every row once per epoch ({rows_text}): {self.repeated_rows} repeated, {self.missing_rows} missing"
        if not mismatching:
            return text
        first = min(mismatching)
        last_matching = max((step for step in self.matching_records if step < first), default=0)
        return (
            f"{text}\nother rows than the order's were trained on between step {last_matching} and step {first} "
            f"(recorded by {mismatching[first]}); {len(mismatching)} of {len(mismatching) + num_matching} records "
            "disagree"
        )


def check_ledger(run: Run) -> LedgerReport:
    """Recompute the order of `run` from its configuration and token store. Needs no Ray, and reads only the index."""
    if not run.exists:
        fix = suggest_path(run.folder) or "name the folder given to --out"
        raise UserError(f"--ledger: {run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    recipe = configuration.load_config(str(run.config)).recipe
    store = _open_store(run)
    records = _read_records(run)
    if not records:
        raise UserError(f"--ledger: {run} has recorded no step yet; train it first", code="not_started")
    order = sampling.make_order(recipe, store)
    last_step = max(step for step, _, _ in records)
    links, draws, (repeated, missing) = _recompute_chain(store, order, last_step, {step for step, _, _ in records})
    matching, mismatching = dict[int, str](), dict[int, str]()
    for step, link, source in records:
        (matching if links[step] == link else mismatching)[step] = source
    return LedgerReport(
        passed=not (mismatching or repeated or missing),
        rows=order.rows,
        steps=last_step,
        steps_per_epoch=order.steps_per_epoch,
        order_digest=links[last_step],
        matching_records={step: matching[step] for step in sorted(matching) if step not in mismatching},
        mismatching_records=mismatching,
        repeated_rows=repeated,
        missing_rows=missing,
        drawn_rows=_count_draws(store, order, draws) if isinstance(order, sampling.SampledOrder) else {},
    )


def _count_draws(store: Store, order: sampling.SampledOrder, draws: Ints) -> dict[str, dict[str, int]]:
    """`LedgerReport.drawn_rows`, if the training rows were drawn so often."""
    groups = store.sampling_groups
    counts_by_value = np.split(draws[groups.members], np.cumsum(groups.sizes)[:-1])
    return {
        value: {"rows": size, "per_epoch": int(quota), "drawn": int(counts.sum())}
        for value, size, quota, counts in zip(groups.values, groups.sizes, order.quotas, counts_by_value, strict=True)
    }


def _open_store(run: Run) -> Store:
    if (created_event := run.first_event("created")) is None:
        reason = f"--ledger: {run.log} does not say where the run's token store is; the log is damaged"
        raise UserError(reason, code="damaged")
    store, digest = Store(Path(created_event["store"])), created_event["data_digest"]
    if store.manifest.digest != digest:
        reason = f"the token store {store.folder} is now {store.manifest.digest}; the run was trained on {digest}"
        raise UserError(f"--ledger: {reason}", code="different_rows")
    return store


def _read_records(run: Run) -> list[tuple[int, str, str]]:
    """(step, link, source) of all records of the run, including those of killed attempts."""
    records = [(event["step"], event["ledger"], "progress") for event in run.events("progress")]
    records += [(event["steps"], event["order_digest"], "trained") for event in run.events("trained") if event["steps"]]
    for step in checkpoint_format.list_steps(run.checkpoints):
        state = checkpoint_format.read_state(checkpoint_format.checkpoint_path(run.checkpoints, step))
        records.append((state.step, state.ledger, "checkpoint"))
    return records


def _recompute_chain(
    store: Store, order: RowOrder, last_step: int, steps: set[int]
) -> tuple[dict[int, str], Ints, tuple[int, int]]:
    """(chain after each of `steps`, draws of each row, (rows repeated, rows missing)) over the first `last_step` steps
    of `order`. Without `data.sampling` the draws are not kept."""
    row_ids = store.column("train", "row_id")
    link, links = INITIAL_LEDGER, {}
    repeated = missing = 0
    is_sampled = isinstance(order, sampling.SampledOrder)
    row_counts: Ints = np.zeros(order.rows, dtype=np.int64 if is_sampled else np.uint8)
    for step in range(last_step):
        positions = order.positions(step)
        np.add.at(row_counts, positions, 1)
        link = chain_digest(link, hash_step_rows(step, row_ids[positions]))
        if step + 1 in steps:
            links[step + 1] = link.hex()
        ends_epoch = (step + 1) % order.steps_per_epoch == 0
        if not is_sampled and (ends_epoch or step + 1 == last_step):
            repeated += int((row_counts > 1).sum())
            missing += int((row_counts == 0).sum()) if ends_epoch else 0
            row_counts[:] = 0
    if isinstance(order, sampling.SampledOrder):
        repeated, missing = order.find_wrong_draws(row_counts, last_step)
    # The chain could not detect an exchange of two rows with the same id.
    repeated += order.rows - len(np.unique(row_ids[: order.rows]))
    return links, row_counts, (repeated, missing)
