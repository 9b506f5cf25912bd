"""Measure one row of a profile on the connected Ray cluster."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core.run_folder import Run
from rtrain.profiling import measurements
from rtrain.profiling.cases import ProfileLength, ProfileRow
from rtrain.profiling.measurements import ProfiledWorker
from rtrain.report import summary
from rtrain.runs import controller, prepare


@dataclass(frozen=True)
class MeasuredRow:
    row_summary: dict[str, Any]
    """The row in the profile's JSON document."""
    workers: tuple[ProfiledWorker, ...]


def measure_row(
    profile_row: ProfileRow,
    folder: Path,
    length: ProfileLength,
    epochs: int,
    on_event: Callable[[dict[str, Any]], None],
    evaluate_every: int | None = None,
) -> MeasuredRow:
    """Train `length` steps of a row and measure their parts.

    The run folder is created at `folder` and removed at the end; the token store beside it is shared with training.
    `epochs` and `evaluate_every` belong to a full run of the recipe. If the training fails, the folder and its log
    remain.
    """
    prepared = prepare.prepare_run(profile_row.config, folder, tokens_root=folder.parent.parent)

    def forward_event(event: dict[str, Any]) -> None:
        # The profile ends before the run would.
        on_event({**event, "total_steps": length.total_steps} if event["kind"] == "progress" else event)

    try:
        controller.fit(prepared, end_step=length.total_steps, profile=True, write_reports=False, on_event=forward_event)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    run, order = Run(folder), prepared.order
    workers = sorted(
        (measurements.read_worker(path) for path in folder.glob(run.profile("*").name)), key=lambda worker: worker.rank
    )
    run_summary = summary.summarize(run)
    recipe, steps_per_epoch = prepared.config.recipe, order.steps_per_epoch
    info = measurements.ProfiledRunInfo(
        name=profile_row.name,
        settings=profile_row.settings,
        precision=run_summary["precision"],
        device=run_summary["device"],
        global_batch_size=recipe.global_batch_size,
        order_digest=run_summary["order_digest"],
        # Each evaluation saves a checkpoint.
        save_every=min(recipe.train.save_every or steps_per_epoch, evaluate_every or steps_per_epoch),
        run_steps=epochs * steps_per_epoch,
        workers_per_replica=recipe.train.workers_per_replica,
    )
    measured_row = MeasuredRow(measurements.summarize_row(info, workers, length), tuple(workers))
    shutil.rmtree(folder)
    return measured_row
