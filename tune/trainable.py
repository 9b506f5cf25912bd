"""A trial of a search: an ordinary run in the search's folder, trained to a rung or to its end by an assignment."""

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.checkpoint.remote_copy import RemoteCopy, StorageUnreachableError
from rtrain.cluster import preflight
from rtrain.compress import distill
from rtrain.config import Config, TrainConfig
from rtrain.core.errors import ConfigError, Problem, TemporaryFailureError, UserError
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.evaluation.candidates import iter_training_seconds
from rtrain.metrics.registry import get_metric
from rtrain.parallel import gradient_noise
from rtrain.runs import controller, prepare, run_folders, stop_request, worker_pool
from rtrain.tasks import base
from rtrain.trainer import evaluate
from rtrain.trainer.step import NonFinite
from tune import difference_ci, holdout_scores, space
from tune.history import Journal

LOG_EVERY_SETTING = "train.log_every"
DEFAULT_LOG_EVERY = TrainConfig.model_fields["log_every"].default
"""Default of the setting; a resume cannot tell whether the user set this value."""
FIXED_SETTINGS = ("train.workers", "train.micro_batch_size")
"""Settings, in addition to those of `tune`, that a resume cannot change: a trial's batch size depends on them."""
CHANGEABLE_SETTINGS = ("max_concurrent_trials", "max_minutes", "max_cost", "worker_cost_per_hour")
"""Settings of `tune` that a resume can change."""
FIRST_LOSSES, NEWEST_LOSSES = 3, 5
"""Number of first and of newest losses for the divergence check."""
MIN_RISE_FACTOR, MIN_RISE = 1.5, 0.5
"""Minimum ratio and difference of the newest losses to the minimum of the first. Losses are nats or squared deviations.
Those of a trained model are so small that a wrong label multiplies them, hence the difference; a model that guesses has
0.69 for two labels."""


@dataclass(frozen=True)
class SearchTask:
    """Common data of all trials of a search; it is sent to other processes."""

    document: Mapping[str, Any]
    """Document of the search's configuration."""
    named_settings: frozenset[str]
    """Settings that the user set."""
    search: Path
    tokens_root: Path
    teacher: Path | None = None
    """Artifact of the teacher of all trials, or None."""
    measures_noise: bool = False
    """Whether all trials measure the gradient noise, not only trial 0."""
    run_name: str | None = None
    """Name of the run folder of the only trial, in place of its number: for a trial of a user's own Tuner."""

    @property
    def config(self) -> Config:
        return replace(configuration.parse_config(self.document, {}), explicit_settings=self.named_settings)

    def trial_run(self, number: int) -> Run:
        return Run(self.search).trial(number) if self.run_name is None else Run(self.search / self.run_name)

    def config_for(self, settings: Mapping[str, Any]) -> Config:
        config = configuration.parse_config(self.document, settings)
        changes: dict[str, Any] = {}
        if interval_rows := space.evaluation_interval_rows(self.config):
            changes["train.evaluate_every"] = max(1, round(interval_rows / config.recipe.global_batch_size))
        if config.recipe.train.log_every == DEFAULT_LOG_EVERY:  # the divergence check needs every step's loss
            changes[LOG_EVERY_SETTING] = 1
        if storage := _trial_storage(config, self.search):
            changes["cluster.storage"] = storage
        config = configuration.with_overrides(config, changes)
        config = replace(config, explicit_settings=config.explicit_settings | self.named_settings)
        if self.teacher is not None:
            config = distill.derive_student_config(config, distill.Teacher.load(self.teacher), self.tokens_root)
        return config

    def prepare_trial(self, number: int, settings: Mapping[str, Any]) -> prepare.PreparedRun:
        """Create or resume the run of a trial. Its rows are those of trial 0, whose checks also hold for the others."""
        run = self.trial_run(number)
        reuse: run_folders.Reuse = "resume" if run.exists else "refuse"
        config, is_begun = self.config_for(settings), number > 0
        if self.teacher is None:
            prepared_run = prepare.prepare_run(config, run.folder, reuse, self.tokens_root, is_resumed=is_begun)
        else:
            teacher = distill.Teacher.load(self.teacher)
            prepared_run = distill.prepare(
                config, teacher, run.folder, reuse, tokens_root=self.tokens_root, is_begun=is_begun
            )
        if number == 0 or self.measures_noise:
            run.decide_once("noise", gradient_noise.DEFAULT_INTERVAL)
        return prepared_run


def strategy_problems(config: Config) -> list[Problem]:
    """Return the problem of `train.strategy=auto`: concurrent trials share a node's memory."""
    if config.recipe.train.strategy == "manual":
        return []
    reason, fix = "trials share the memory of nodes", "write manual, with the settings that rtrain plan --search prints"
    return [Problem("train.strategy", "auto", reason, fix, code="unsupported")]


@contextmanager
def open_search(
    config: Config, folder: Path, reuse: run_folders.Reuse, tokens_root: Path | None, teacher: Path | None = None
) -> Iterator[tuple[Config, SearchTask]]:
    """Lock and open the folder of a search or a study; yield its configuration and the common data of its trials.

    The token store of the trials is under `tokens_root`, by default the parent of the search's folder.

    Raises:
        ConfigError: a resumed search has other settings; nothing was written.
        TemporaryFailureError: the disk became full in the block.
    """
    command_words = ("train", config.recipe.name) if teacher is None else ("distill", teacher.parent)
    prepare.refuse_lost_search(config, folder, reuse, *command_words)
    folder, config = prepare.resolve_run_folder(config, folder, reuse)
    # All trials use the same commits of hub repositories.
    config = run_folders.resolve_paths(config, folder if reuse == "resume" else None)
    if reuse == "resume":
        _refuse_changed_search(run_folders.load_config(folder), config)
    with run_folders.lock_new_run(Run(folder), reuse) as search:
        run_folders.write_frozen_config(search, config)
        document = configuration.to_document(config)
        _restore_trials(config, search)
        task = SearchTask(document, config.explicit_settings, search.folder, tokens_root or folder.parent, teacher)
        try:
            yield config, task
        except OSError as error:
            if error.strerror not in DISK_FULL:
                raise
            message = f"{error.strerror}; free disk space, and continue with the same command and --resume"
            raise TemporaryFailureError(message, code="disk_full") from error


def _restore_trials(config: Config, search: Run) -> None:
    if storage := _trial_storage(config, search.folder):
        for run in (search.trial(trial.number) for trial in Journal(search.trials).history.trials):
            remote_copy = RemoteCopy(storage, run.name)
            if not run.exists and remote_copy.exists():
                remote_copy.restore(run.folder)


def _trial_storage(config: Config, search: Path) -> str | None:
    """Return the storage of the trials' remote copies: below the search's name, since trials of all searches have equal
    names."""
    storage = config.deploy.cluster.storage
    return f"{storage}/{search.name}" if storage else None


def _refuse_changed_search(stored_config: Config, new_config: Config) -> None:
    old_values, new_values = configuration.flatten_config(stored_config), configuration.flatten_config(new_config)
    changeable = {f"tune.{name}" for name in CHANGEABLE_SETTINGS}
    noun = "study" if stored_config.deploy.tune.study else "search"
    fix = f"leave it out, or start another {noun} with --new"
    problems = [
        Problem(
            name, new_values[name], f"the {noun} was started with {old_values[name]!r}", fix, code="changed_setting"
        )
        for name in (*FIXED_SETTINGS, *(name for name in old_values if name.startswith("tune.")))
        if name not in changeable and old_values[name] != new_values[name]
    ]
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class Assignment:
    trial: int
    settings: Mapping[str, Any]
    rung: int | None
    """Train to this rung; None: to the end."""
    rows: int
    """Rows of that rung, or of the full run."""
    repeat_of: int | None = None
    """The trial that this one repeats with another seed, or None."""


Outcome = dict[str, Any]
"""Outcome of an assignment: an event of the journal with `kind` rung_result, finished, diverged or failed; or `RETRY`,
which is not logged."""
RETRY = "retry"
"""A failure of the machine, not of the trial: a later attempt repeats the assignment."""
DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Messages of a full disk; errors of workers arrive as text."""


def run_assignment(assignment: Assignment, task: SearchTask, workers: worker_pool.BaseWorkerGroup) -> list[Outcome]:
    """Run an assignment. The run resumes from its newest checkpoint; a finished result is only read."""
    run = task.trial_run(assignment.trial)
    detector, prepared_run, end_step = DivergenceDetector(run), None, None

    def diverged(reason: str) -> list[Outcome]:
        return [{"kind": "diverged", "reason": reason, "seconds": training_seconds(run)}]

    try:
        prepared_run = task.prepare_trial(assignment.trial, assignment.settings)
        end_step = None if assignment.rung is None else prepared_run.order.step_at(assignment.rows)
        if not (run.is_finished or detector.reason or _is_frozen_at(run, end_step)):
            controller.fit(
                prepared_run,
                end_step=end_step,
                is_rung=assignment.rung is not None,
                workers=workers,
                write_reports=False,
                on_event=detector,
            )
    except NonFinite as error:
        return diverged(str(error).splitlines()[0])
    except stop_request.StoppedByRequest:
        return []
    except Exception as error:
        # A finished run counts although its remote copy is incomplete; the winner's is completed at the end.
        if prepared_run is None or not (run.is_finished and isinstance(error, TemporaryFailureError)):
            return [_failure_outcome(run, error)]
    if detector.reason and not run.is_finished:
        return diverged(detector.reason)
    try:
        outcomes = [] if end_step is None else [_rung_outcome(assignment, task, prepared_run, end_step)]
        outcomes += [_final_outcome(run, prepared_run)] if run.is_finished else []
    except Exception as error:  # an error of the trial: raised here, it would kill the slot repeatedly
        return [_failure_outcome(run, error)]
    for outcome in outcomes:
        if not math.isfinite(outcome["score"] + outcome.get("holdout_score", 0.0)):
            return diverged(f"its score at step {outcome['step']} is not finite")
    return outcomes


def _failure_outcome(run: Run, error: Exception) -> Outcome:
    message = str(error).splitlines()[0] if isinstance(error, UserError) else first_error_line(error)
    machine_failures = (TemporaryFailureError, preflight.InsufficientDiskSpace, StorageUnreachableError)
    if isinstance(error, machine_failures) or any(text in str(error) for text in DISK_FULL):
        return {"kind": RETRY, "error": message}
    if not isinstance(error, UserError):
        run.folder.mkdir(parents=True, exist_ok=True)
        message += f" (traceback in {controller.write_traceback(run, 'error', error)})"
    return {"kind": "failed", "error": message, "seconds": training_seconds(run)}


def _is_frozen_at(run: Run, end_step: int | None) -> bool:
    """Return whether the trial was frozen at this step: a killed search, or Tune without a checkpoint, repeats it."""
    return any(event["step"] == end_step for event in run.events("paused"))


def _rung_outcome(assignment: Assignment, task: SearchTask, prepared_run: prepare.PreparedRun, step: int) -> Outcome:
    """Return the result at a rung, on the steering rows."""
    run, config, store = prepared_run.run, prepared_run.config, open_store(prepared_run.store.folder)
    trained_task = base.get_task(config.recipe.task)
    metric, head = get_metric(trained_task.output), store.manifest.head
    positions = holdout_scores.steering_rows(store, config.deploy.tune.holdout_fraction)
    targets = store.targets("valid", positions)

    def steering_results(trial: int) -> RaggedArray | None:
        results = evaluate.read_rung(task.trial_run(trial), step)
        return None if results is None else results.take(positions)

    steering = steering_results(assignment.trial)
    assert steering is not None  # written before the rung's checkpoint
    repeated = None if assignment.repeat_of is None else steering_results(assignment.repeat_of)
    row_std = None
    if repeated is not None:
        row_ids = store.column("valid", "row_id")[positions]
        row_std = difference_ci.row_std(
            *(
                difference_ci.HoldoutScores(metric.headline, row_ids, metric.make_sum_metric(results, targets, head))
                for results in (repeated, steering)
            )
        )
    return {
        "kind": "rung_result",
        "rung": assignment.rung,
        "step": step,
        "rows": prepared_run.order.rows_until(step),
        "score": metric.main_scores(steering, targets, head)[metric.headline],
        "loss": evaluate.mean_row_loss(trained_task, steering, store, positions),
        "seconds": training_seconds(run),
        "row_std": row_std,
    }


def _final_outcome(run: Run, prepared_run: prepare.PreparedRun) -> Outcome:
    tune, headline = prepared_run.config.deploy.tune, headline_metric(prepared_run.config)
    holdout = holdout_scores.load_holdout_scores(run, tune.holdout_fraction)
    # The evaluations on all validation rows during training.
    scores = [
        float(event["scores"][headline])
        for event in run.events("evaluated")
        if event["split"] == "valid" and "calibration" not in event
    ]
    return {
        "kind": "finished",
        "step": (run.last_event("best") or {}).get("step", prepared_run.num_steps),
        "rows": prepared_run.order.rows_until(prepared_run.num_steps),
        "score": max(scores),
        "holdout_score": holdout.score,
        "holdout_rows": len(holdout.row_ids),
        "seconds": training_seconds(run),
        "seconds_to_target": seconds_to_target(run, headline, tune.target),
    }


def headline_metric(config: Config) -> str:
    return get_metric(base.get_task(config.recipe.task).output).headline


def training_seconds(run: Run) -> float:
    """Return the seconds of training over all attempts."""
    return round(max((seconds for _, seconds in iter_training_seconds(run.events())), default=0.0), 3)


def seconds_to_target(run: Run, headline: str, target: float | None) -> float | None:
    """Return the seconds of training until the first evaluation on all validation rows that reached the target, or
    None."""
    reached_seconds = [
        seconds
        for event, seconds in iter_training_seconds(run.events())
        if target is not None and event["kind"] == "evaluated" and event["scores"][headline] >= target
    ]
    return round(min(reached_seconds), 3) if reached_seconds else None


def first_error_line(error: BaseException) -> str:
    """The first line of the error that ended a trial. For an error from a Ray process, it is that of the error raised
    there."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).splitlines() if line.strip()]
    return lines[0 if cause else -1].strip() if lines else type(cause or error).__name__


# --------------------------------------------------------------------------------------------------------- divergence


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether a trial has diverged: all of the newest losses are far above the first.

    A loss is that of one step, with few rows, which may be hard or mislabeled; hence all newest losses must be high.
    The reference is the minimum of the first losses, since the first step may have raised the others already.
    """
    if len(losses) < FIRST_LOSSES + NEWEST_LOSSES:
        return False
    first_loss = min(losses[:FIRST_LOSSES])
    return min(losses[-NEWEST_LOSSES:]) > max(MIN_RISE_FACTOR * first_loss, first_loss + MIN_RISE)


class DivergenceDetector:
    """Follows a trial's log and requests its stop when it diverges."""

    def __init__(self, run: Run):
        self._run, self.reason = run, ""
        self._losses: list[float] = []
        for event in run.events("progress"):  # a killed search may not have logged it
            self._detect(event)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and self._detect(event):
            stop_request.request_stop(self._run, stop_request.DIVERGED)

    def _detect(self, event: dict[str, Any]) -> bool:
        self._losses.append(event["loss"])
        if self.reason or not has_diverged(self._losses):
            return False
        first_loss, newest_loss = min(self._losses[:FIRST_LOSSES]), min(self._losses[-NEWEST_LOSSES:])
        rise = f"from {first_loss:.3g} to {newest_loss:.3g}"
        self.reason = f"the training loss rose {rise} and more by step {event['step']}"
        return True
