"""Resize rehearsal: a run that loses a node at the cluster's cap, shrinks, and grows again.

It trains on a cluster so small that the run needs all nodes, in float64 and without dropout: then another number of
workers differs only by rounding, and the weights must equal those of a steady run.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtrain import config as configuration, ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster.jobs import upload
from rtrain.core.errors import Problem
from rtrain.core.run_folder import Run
from rtrain.models import builder
from rtrain.rehearsal import command_line as commands, measurements
from rtrain.rehearsal.faults import FAULT_POSITIONS, ClusterFaultInjector, EventLog, InjectedFault, seconds_after_join
from rtrain.rehearsal.job_follower import JobFollower, LogFunction
from rtrain.rehearsal.machines.local_cluster import launch_cluster
from rtrain.rehearsal.measurements import ResizeResult
from rtrain.rehearsal.plan import RehearsalPlan
from rtrain.verification import ledger

STEADY_RUN, RESIZED_RUN = "steady", "resized"
SAVE_INTERVAL = 20
"""An even number: the steady run also saves at half of it."""
NO_LIMIT = 1_000_000
DATA_CPUS = 1
SETTINGS = (
    *("train.precision=fp64", "train.device=cpu", f"cluster.data_cpus={DATA_CPUS}"),
    # The run is stopped once it has grown: its learning rate must not depend on its planned length.
    *(f"train.epochs={NO_LIMIT}", f"train.evaluate_every={NO_LIMIT}", "optim.schedule=constant", "optim.warmup=0"),
)


def check_resizable(plan: RehearsalPlan, workers: int) -> list[Problem]:
    """Reasons why the run cannot shrink."""
    if workers < 2:
        return [
            Problem(
                "--workers",
                workers,
                "a run of one worker cannot shrink (--extra resize)",
                "write 2",
                code="too_few_workers",
            )
        ]
    if (small_plan := plan.shrink_to(workers, DATA_CPUS)) is None or small_plan.watcher is None:
        reason = "the file has no CPU nodes, or starts no spot watcher"
        return [Problem("--extra", "resize", reason, "leave it out", code="cannot_resize")]
    return []


def rehearse_resize(
    plan: RehearsalPlan,
    words: Sequence[str],
    reference_run: Run,
    out: Path,
    files: upload.Upload,
    log_message: LogFunction,
) -> ResizeResult:
    """Rehearse the resize. `reference_run`: a run of these words, whose model and workers are used. Raises
    `RehearsalAborted` if one of the two runs fails."""
    recipe = configuration.load_config(str(reference_run.config)).recipe
    workers = recipe.train.workers
    small_plan = plan.shrink_to(workers, DATA_CPUS)
    assert small_plan is not None  # else `check_resizable` has said so
    model_folder = copy_without_dropout(
        builder.resolve_folder(recipe.model.name, reference_run.folder.parent), out / "model"
    )
    began_at = time.time()
    steady, resized = Run(out / STEADY_RUN), Run(out / RESIZED_RUN)

    def build_command(run: Run, *settings: str) -> list[str]:
        rehearsal_words = commands.rehearsal_command(words, str(run.folder), f"file://{out}/storage")
        return commands.override_command(rehearsal_words, str(model_folder), *SETTINGS, *settings)

    with launch_cluster(small_plan, out / "machines-resized", log_message) as cluster:
        follower = JobFollower(cluster, out / "machines-resized", log_message)
        injector = ClusterFaultInjector(cluster, ("notice",), FAULT_POSITIONS["notice"] * SAVE_INTERVAL, workers)

        def has_grown(log: EventLog) -> bool:
            return bool(injector.injected) and has_trained_since(injector.injected[0], log, 2 * SAVE_INTERVAL)

        job = cluster.jobs.submit(
            build_command(resized, "train.min_workers=1", f"train.save_every={SAVE_INTERVAL}"), files, log_message
        )
        follower.follow_training(job, resized, RESIZED_RUN, injector, should_stop=has_grown)
        last_step = max(checkpoint_format.list_steps(resized.checkpoints))
        job = cluster.jobs.submit(build_command(steady, f"train.save_every={last_step // 2}"), files, log_message)
        follower.follow_training(
            job,
            steady,
            STEADY_RUN,
            should_stop=lambda log: last_step in checkpoint_format.list_steps(steady.checkpoints),
        )
        join_times = ray_internals.node_start_times(cluster.address, timeout_s=10.0)
    [notice] = injector.injected
    notice.seconds_after_join = seconds_after_join(notice, join_times.values())
    nodes = measurements.rehearsed_nodes(cluster.machines, join_times, small_plan, [notice], began_at)
    (same_order, difference), ledger_check = (
        measurements.compare_checkpoints(resized, steady, last_step),
        ledger.check_ledger(resized),
    )
    return ResizeResult(
        notice=notice,
        workers_by_attempt=[event["workers"] for event in resized.events("started")],
        step=last_step,
        rows=measurements.RowComparison(
            ledger_check.passed, ledger_check.missing_rows, ledger_check.repeated_rows, same_order
        ),
        difference=difference,
        started_nodes=len(nodes) - 1,
        required_nodes=small_plan.max_workers + 1,
        seconds=round(time.time() - began_at, 1),
        left_behind=cluster.left_behind,
    )


def has_trained_since(notice: InjectedFault, log: EventLog, steps: int) -> bool:
    """Whether a run has trained `steps` steps since it had all its workers again."""
    if notice.full_size_at is None:
        return False
    first_step = next(
        event["step"] for event in log if event["kind"] == "progress" and event["time"] >= notice.full_size_at
    )
    return bool(log[-1]["kind"] == "progress" and log[-1]["step"] >= first_step + steps)


def copy_without_dropout(source: Path, folder: Path) -> Path:
    """The same model with every dropout of its configuration at 0; its other files are linked."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    model_config: Mapping[str, Any] = json.loads((source / "config.json").read_text())
    changed_config = {
        name: 0.0 if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in model_config.items()
    }
    (folder / "config.json").write_text(json.dumps(changed_config, indent=2))
    return folder
