"""One row of a profile, measured on the Ray that the process is connected to."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain.core.run_folder import Run
from rtrain.profiling import measurements
from rtrain.profiling.cases import Length, Row
from rtrain.profiling.measurements import Worker
from rtrain.report import summary
from rtrain.runs import controller, prepare


@dataclass(frozen=True)
class Measured:
    figures: dict[str, Any]
    """The row of the profile's document."""
    workers: tuple[Worker, ...]


def row(
    found: Row,
    folder: Path,
    length: Length,
    epochs: int,
    on_event: Callable[[dict[str, Any]], None],
    evaluate_every: int | None = None,
) -> Measured:
    """Train as the recipe says for so many updates, and read where their time went.

    The run's folder is made at `folder` and removed in the end; the token store beside it is the one that training
    uses. `epochs` and `evaluate_every`: of a whole run of the recipe. Where the training fails, the folder stays, with
    its log.
    """
    prepared = prepare.prepare(found.config, folder, tokens_root=folder.parent.parent)

    def told(event: dict[str, Any]) -> None:
        # It ends before the run that it begins does.
        on_event({**event, "of": length.until} if event["kind"] == "progress" else event)

    try:
        controller.fit(prepared, until=length.until, profile=True, reports=False, on_event=told)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    run, order = Run(folder), prepared.order
    workers = sorted(
        (measurements.read_worker(path) for path in folder.glob(run.profile("*").name)), key=lambda one: one.rank
    )
    known = summary.summarise(run)
    recipe, each = prepared.config.recipe, order.updates_per_epoch
    facts = measurements.Facts(
        name=found.name,
        settings=found.settings,
        precision=known["precision"],
        device=known["device"],
        rows_per_update=recipe.rows_per_update,
        order_digest=known["order_digest"],
        # Each evaluation saves too.
        save_every=min(recipe.train.save_every or each, evaluate_every or each),
        run_updates=epochs * each,
        within=recipe.train.within,
    )
    measured = Measured(measurements.of_row(facts, workers, length), tuple(workers))
    shutil.rmtree(folder)
    return measured
