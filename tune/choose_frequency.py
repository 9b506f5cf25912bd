"""Choose the aggregation frequency by a calibration run, which is trained here."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from rtrain.models import builder
from rtrain.parallel import gradient_noise
from rtrain.planning import throughput
from rtrain.runs import controller, prepare, worker_pool
from tune import space

DECISION_FILE: Final = "choose-k.json"
CALIBRATION_FOLDER: Final = "calibration"
SECOND_POINT_FOLDER: Final = "second_point"
WORKERS_FOLDER: Final = "workers"
"""Folders below the decision's: the calibration run, the steps at a second frequency, and the workers of both."""
MAX_CALIBRATION_SHARE: Final = 0.15
"""Maximum share of a run's steps for the calibration."""
CALIBRATION_FREQUENCIES: Final = (4, 2, 1)
"""Frequencies of a calibration run; a smaller one if a larger one would have too few steps."""
CALIBRATION_STEPS: Final = 16
"""Steps of a calibration run: eight measurements of the noise."""
MIN_CALIBRATION_STEPS: Final = 8
"""Steps of the calibration of a short run, with one micro-batch per step."""
MAX_CALIBRATION_STEPS: Final = 2 * gradient_noise.MAX_MEASUREMENTS
"""Maximum steps: more measurements are not used."""
TIMING_STEPS: Final = 5
"""Steps to time the second frequency: step times are nearly constant."""


def calibration_steps(order: RowOrder, aggregation_frequency: int) -> int | None:
    """Return the steps of the calibration at `aggregation_frequency`; None if the run is too short for it and for the
    steps at the second frequency."""
    second_point_steps = math.ceil(TIMING_STEPS * second_frequency(aggregation_frequency) / aggregation_frequency)
    steps = min(MAX_CALIBRATION_STEPS, math.floor(MAX_CALIBRATION_SHARE * order.num_steps) - second_point_steps)
    return steps if steps >= (CALIBRATION_STEPS if aggregation_frequency > 1 else MIN_CALIBRATION_STEPS) else None


def second_frequency(aggregation_frequency: int) -> int:
    """Return the second frequency: the times at 1 and 4 predict the time at 8, but those at 1 and 2 do not."""
    return 1 if aggregation_frequency == CALIBRATION_FREQUENCIES[0] else CALIBRATION_FREQUENCIES[0]


def run_calibration(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> tuple[Run, Run]:
    """Train a calibration run of the recipe in `folder`, and some steps at a second frequency, on the connected Ray.

    Raises `UserError` if a run of the recipe is too short.
    """

    def prepare_at(aggregation_frequency: int, name: str) -> prepare.PreparedRun:
        run_config = calibration_config(config, aggregation_frequency)
        return prepare.prepare_run(run_config, folder / name, tokens_root=folder.parent)

    for aggregation_frequency in CALIBRATION_FREQUENCIES:
        prepared = prepare_at(aggregation_frequency, CALIBRATION_FOLDER)
        steps = calibration_steps(prepared.order, aggregation_frequency)
        if steps is not None:
            break
        shutil.rmtree(prepared.run.folder)
    else:
        raise UserError(
            f"--choose-k: a calibration needs {MIN_CALIBRATION_STEPS} steps, and the time of "
            f"{TIMING_STEPS * second_frequency(1)} more at a second k, within {MAX_CALIBRATION_SHARE:.0%} of a run; "
            f"this run has {prepared.order.num_steps} steps of {prepared.config.recipe.global_batch_size} rows. Train "
            "on more rows or epochs",
            code="too_few_rows",
        )
    second_point = prepare_at(second_frequency(aggregation_frequency), SECOND_POINT_FOLDER)
    workers = worker_pool.ReusableWorkerGroup(Run(folder / WORKERS_FOLDER), worker_pool.start_mailbox_server())
    try:
        prepared.run.decide_once("noise", gradient_noise.CALIBRATION_INTERVAL)
        for run, end_step in ((prepared, steps), (second_point, TIMING_STEPS)):
            controller.fit(run, end_step=end_step, write_reports=False, workers=workers, on_event=on_event)
    finally:
        workers.shut_down()
    return prepared.run, second_point.run


def calibration_config(config: Config, aggregation_frequency: int) -> Config:
    """Return the configuration of a calibration run. Its warm-up is scaled down, so that the noise is that of a
    training. It has no remote copy, since its folder is removed."""
    overrides = {
        **frequency_overrides(config, aggregation_frequency),
        "optim.warmup": MAX_CALIBRATION_SHARE * config.recipe.optim.warmup,
        "train.log_every": 1,
        "cluster.storage": None,
    }
    return configuration.with_overrides(config, overrides)


def frequency_overrides(config: Config, aggregation_frequency: int) -> dict[str, Any]:
    """Return the overrides of a search's trial with this frequency; `tune.lr_scaling` scales the learning rate."""
    return space.trial_overrides(config, {space.FREQUENCY_SETTING: aggregation_frequency})


def make_decision(config: Config, calibration_run: Run, second_run: Run) -> dict[str, Any]:
    """Return the decision as JSON, from the logs of the calibration run and of the run at the second frequency.

    Raises `UserError` if the logs have too few measurements.
    """
    recipe, second_recipe = (configuration.load_config(str(run.config)).recipe for run in (calibration_run, second_run))
    model_folder = builder.resolve_folder(recipe.model.name, calibration_run.folder.parent)
    second_micro_batches = throughput.micro_batches_per_step(second_recipe, second_recipe.train.workers)
    calibration, options = throughput.evaluate_log(
        calibration_run.events(),
        recipe,
        throughput.model_weight_bytes(model_folder),
        second_point=(second_micro_batches, throughput.median_step_s(second_run.events())),
    )
    end_event = calibration_run.last_event("trained")
    assert end_event is not None  # `evaluate_log` refuses a run without one
    settings = {
        option.aggregation_frequency: frequency_overrides(config, option.aggregation_frequency) for option in options
    }
    best = throughput.best_option(options).aggregation_frequency
    return {
        "noise_scale": dataclasses.asdict(calibration.noise_scale),
        "calibration": {"steps": end_event["steps"], "global_batch_size": calibration.global_batch_size},
        "options": [
            {
                **dataclasses.asdict(option),
                "settings": settings[option.aggregation_frequency],
                "lr": configuration.with_overrides(config, settings[option.aggregation_frequency]).recipe.peak_lr,
            }
            for option in options
        ],
        "aggregation_frequency": best,
        "settings": settings[best],
    }


def choose_frequency(config: Config, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Calibrate, decide, and write the decision to `folder`. The runs are removed."""
    document = make_decision(config, *run_calibration(config, folder, on_event))
    (folder / DECISION_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name in (CALIBRATION_FOLDER, SECOND_POINT_FOLDER, WORKERS_FOLDER):
        shutil.rmtree(folder / name)
    return document


def format_decision(document: Mapping[str, Any]) -> list[str]:
    noise_scale, calibration = document["noise_scale"], document["calibration"]
    upper_bound = "unknown" if noise_scale["high"] is None else f"{noise_scale['high']:,.0f}"
    lines = [
        f"noise scale {noise_scale['rows']:,.0f} rows ({noise_scale['low']:,.0f} to {upper_bound}), by "
        f"{calibration['steps']:,} steps of {calibration['global_batch_size']:,} rows"
    ]
    lines += [
        f"k {option['aggregation_frequency']}: {option['global_batch_size']:,} rows in {option['step_s']:.3g} s, "
        f"lr {option['lr']:.3g}; {option['relative_time']:.2f} x the shortest time"
        for option in document["options"]
    ]
    settings = {name: "null" if value is None else value for name, value in document["settings"].items()}
    options = " ".join(f"--set {name}={value}" for name, value in settings.items())
    reason = (
        "" if noise_scale["high"] is None else f", by {upper_bound} rows: the noise scale grows while a model learns"
    )
    return [*lines, f"k {document['aggregation_frequency']} is chosen{reason}", f"write {options}"]
