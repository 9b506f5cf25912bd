"""Control a run on the connected Ray cluster: attempts, recovery from failures, and the report."""

import traceback
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rtrain.checkpoint import format as checkpoint_format, remote_copy
from rtrain.cluster import capacity, pricing
from rtrain.config import ClusterConfig
from rtrain.core import events
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.report import baselines, html, summary, tracker_feed
from rtrain.runs import nodes, recovery, run_folders, stop_request, worker_pool
from rtrain.runs.cluster_monitor import ClusterMonitor, RunCapacity
from rtrain.runs.prepare import PreparedRun, row_events
from rtrain.runs.worker import WorkerArgs

OnEvent = Callable[[dict[str, Any]], None]
NODE_LOSS_TIMEOUT_S = 10.0
"""Seconds to wait for Ray to report a lost node after workers died without an error."""


def fit(
    prepared_run: PreparedRun,
    *,
    end_step: int | None = None,
    is_rung: bool = False,
    profile: bool = False,
    workers: worker_pool.BaseWorkerGroup | None = None,
    write_reports: bool = True,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint to step `end_step` (default: the last) and return the run's summary.

    A finished run is not trained again.

    Args:
        is_rung: keep the predictions for the validation rows at `end_step` (`rtrain.trainer.evaluate`).
        profile: keep the times of each step (`rtrain.profiling`).
        workers: the worker group; default: new processes for each attempt.
        write_reports: write the report when the run finishes.

    Raises:
        TemporaryFailureError: the run was stopped by a request (`stop_request.StopOnSignal`), or it is finished and
            the storage of its remote copy is unreachable.
    """
    run, config, group = prepared_run.run, prepared_run.config, workers or worker_pool.FreshWorkerGroup()
    emit = on_event or (lambda event: None)
    if run.is_finished:
        tracker_feed.send_missing(config, run, emit)
        run_summary = summary.write_summary(run)
        complete_remote_copy(run, config.deploy.cluster)
        return run_summary
    for event in row_events(run):
        emit(event)  # logged before the follower started
    follower, tracker = events.EventFollower([(run.folder, {})], on_event), tracker_feed.follow_run(config, run, emit)
    prices_file, cluster_file = config.deploy.cluster.prices, capacity.load_autoscaler_config() or {}
    user_prices = pricing.load_user_prices(Path(prices_file) if prices_file else None, cluster_file.get("metadata"))
    worker_args = WorkerArgs(
        config=config,
        run=run.folder,
        store=prepared_run.store.folder,
        model=prepared_run.model,
        teacher=prepared_run.teacher,
        end_step=end_step,
        is_rung=is_rung,
        profile=profile,
    )
    with (
        run_folders.lock(run),
        follower,
        tracker,
        stop_request.StopOnSignal(run) as stop_signal,
        RunCapacity(run, config, prepared_run.device) as run_capacity,
    ):
        if user_prices:
            run.append_event(summary.PRICES_EVENT, prices={name: asdict(price) for name, price in user_prices.items()})
        try:
            group.acquire(run)
            _run_attempts(prepared_run, worker_args, group, run_capacity, stop_signal, emit)
        except (KeyboardInterrupt, SystemExit, TemporaryFailureError):
            run.append_event("interrupted")
            summary.write_summary(run)
            raise
        except Exception as error:
            # An error outside an attempt, e.g. of Ray. Log it, or the run counts as running for ever.
            if summary.run_status(run.events()) == "running":
                run.append_event("failed", error=str(error)[:2000])
                summary.write_summary(run)
            if isinstance(error, UserError):
                raise
            raise to_user_error(run, error) from error
        finally:
            group.release(run)
            # Remove empty hang files.
            for path in set(run.folder.glob(run.hang_traceback("*").name)) - set(run.hang_tracebacks()):
                path.unlink()
    trained = _last_trained_event(run)
    run.append_event("finished" if trained["finished"] else "paused", step=trained["steps"])
    if trained["finished"] and write_reports:  # `rtrain report` shows a paused or stopped run
        write_report(run, emit)
    run_summary = summary.write_summary(run)
    if trained["finished"]:
        complete_remote_copy(run, config.deploy.cluster)
    return run_summary


def _run_attempts(
    prepared_run: PreparedRun,
    worker_args: WorkerArgs,
    group: worker_pool.BaseWorkerGroup,
    run_capacity: RunCapacity,
    stop_signal: stop_request.StopOnSignal,
    on_event: OnEvent,
) -> None:
    """Make attempts until the run reaches its end or the retry budget is used.

    Each attempt is a worker group with its own Ray Train controller. The workers select the newest valid checkpoint.
    Ray Train's own retries would die with its controller.
    """
    run, train, cluster = prepared_run.run, prepared_run.config.recipe.train, prepared_run.config.deploy.cluster
    device, min_workers, max_workers = prepared_run.device, train.min_workers, prepared_run.device.workers
    if device.message:
        run.append_event("device", device=device.device, reason=device.message)
    group_spec = worker_pool.WorkerGroupSpec(
        max_workers,
        device.device,
        cluster.hang_timeout_s,
        is_elastic=min_workers is not None,
        node_labels=cluster.labels,
        requests_own_nodes=run_capacity.requests_nodes,
        gpu_share=run_capacity.needs.gpu_share,
    )
    worker_args = replace(worker_args, owner_tokens=claim_storage(run, cluster))
    retry_budget, worker_limit = recovery.RetryBudget(cluster.max_failures), max_workers
    while True:
        stop_request.consume_stop(run)  # a driver that died may have left a request
        run_capacity.repeat_request()
        workers = min(worker_limit, run_capacity.wait_for_workers(stop_signal))
        if not workers:  # a search requests the stop of its trials
            raise _stopped_by_request(prepared_run)
        worker_args = replace(
            worker_args, head_machine=nodes.describe_head(), halvings=recovery.count_halvings(run.events())
        )
        on_event(events.make_phase_event(f"starting {workers} worker{'' if workers == 1 else 's'}", "start of workers"))
        monitor = ClusterMonitor(run, workers, run_capacity, on_event)
        try:
            with monitor:
                group.run_attempt(worker_args, replace(group_spec, workers=workers))
        except Exception as error:
            # Read this before `discard` removes the placement group.
            nodes_in_use = monitor.used_nodes | worker_pool.workers_by_node(run).keys()
            group.discard(run)
            was_placed = not recovery.is_placement_timeout(error)
            if was_placed:
                recover_or_raise(run, error, retry_budget, nodes_in_use)
            else:  # no worker was lost, and Ray has had time to report lost nodes
                run_capacity.report_wait(workers)
            worker_limit = recovery.next_worker_limit(was_placed, workers, min_workers, max_workers)
            continue
        worker_limit = max_workers
        reason, trained = stop_request.consume_stop(run), _last_trained_event(run)
        if reason == stop_request.DIVERGED or trained["finished"] or trained["steps"] == worker_args.end_step:
            return
        if reason == stop_request.SIGNALED and not stop_signal.is_requested:  # requested by the search of this trial
            raise _stopped_by_request(prepared_run)
        group.discard(run)
        if not stop_signal.is_requested:
            # No reason: the request was consumed, and a worker saw a stale copy in the shared folder's cache.
            run.append_event("restart_requested", reason=reason or "an earlier stop request", step=trained["steps"])


def _stopped_by_request(prepared_run: PreparedRun) -> stop_request.StoppedByRequest:
    run = prepared_run.run
    progress = f"step {_newest_checkpoint_step(run)} of {prepared_run.num_steps} is saved"
    return stop_request.StoppedByRequest(
        f"{run} was stopped by a request: {progress}. Continue it with the same command and --resume"
    )


def _last_trained_event(run: Run) -> dict[str, Any]:
    return run.events("trained")[-1]


def _newest_checkpoint_step(run: Run) -> int:
    """Step of the newest complete checkpoint. The workers verify it."""
    return max(checkpoint_format.list_steps(run.checkpoints), default=0)


# ---------------------------------------------------------------------------------------------------------- failures


def recover_or_raise(
    run: Run, error: Exception, retry_budget: recovery.RetryBudget, nodes_in_use: Collection[str] = ()
) -> None:
    """Return if the run should make another attempt; otherwise raise the error for the user.

    Args:
        nodes_in_use: ids of the nodes that had its workers.
    """
    if summary.run_status(run.events()) == "stopped":  # a search kills the workers of a stopped trial
        summary.write_summary(run)
        raise to_user_error(run, error) from error
    causes = recovery.find_causes(error)
    cause = recovery.classify_failure(causes, is_preempted=stop_request.consume_stop(run) == stop_request.PREEMPTION)
    message, is_spot_loss = recovery.summarize_causes(causes), False
    if cause == "crash" and nodes_in_use:
        timeout_s = NODE_LOSS_TIMEOUT_S if recovery.may_be_node_loss(causes) else 0
        if lost_nodes := capacity.find_lost_nodes(nodes_in_use, timeout_s):
            cause = "node_lost"
            is_spot_loss = all(
                capacity.matches_labels(node.labels, capacity.SPOT_LABELS) for node in lost_nodes.values()
            )
            lost = f"{'spot ' if is_spot_loss else ''}node{'' if len(lost_nodes) == 1 else 's'}"
            names = ", ".join(sorted(name[:8] for name in lost_nodes))
            message = f"{lost} {names} lost without notice; {message}"
    user_error, checkpoint_step = recovery.find_user_error(causes), _newest_checkpoint_step(run)
    retryable_error = user_error if isinstance(user_error, TemporaryFailureError) else None  # e.g. an unreachable mount
    is_program_error = cause == "crash" and retryable_error is None and recovery.is_program_error(causes)
    if retry_budget.should_retry(cause, checkpoint_step, is_spot_loss, message if is_program_error else None):
        tracebacks = [str(path) for path in run.hang_tracebacks()]
        run.append_event(
            "crashed", cause=cause, resumes_from=checkpoint_step, error=message, hang_tracebacks=tracebacks
        )
        return
    if retryable_error is not None:
        raise retryable_error from error
    run.append_event("failed", error=str(error)[:2000])
    summary.write_summary(run)
    write_report(run, lambda event: None)
    raise to_user_error(run, error) from error


def to_user_error(run: Run, error: Exception) -> UserError:
    """Return a worker's UserError unchanged, or a UserError that names the file with the traceback."""
    causes = recovery.find_causes(error)
    if (known_error := recovery.find_user_error(causes)) is not None:
        return known_error
    traceback_path = write_traceback(run, "error", error)
    return UserError(
        f"training failed: {recovery.summarize_causes(causes)}\nThe traceback is in {traceback_path}",
        code="out_of_memory" if recovery.is_out_of_memory(map(str, causes)) else "training_failed",
    )


def write_traceback(run: Run, name: str, error: Exception) -> Path:
    """Write the error's traceback to a new file of the run."""
    path = run.new_traceback(name)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


# ------------------------------------------------------------------------------------------------ the end of a run


def write_report(run: Run, on_event: OnEvent) -> None:
    """Measure the baselines and write report.html."""
    for name, write_part, description in (
        ("baselines", baselines.ensure_baselines, "measuring baselines for the report"),
        (run.report.name, html.write_report, "writing the report"),
    ):
        on_event(events.make_phase_event(description, "report"))
        run_optional_step(run, name, write_part, on_event)


def run_optional_step(run: Run, name: str, step: Callable[[Run], Any], on_event: OnEvent) -> None:
    """Run a step after the end of a run. An error is reported, and its traceback is written to a file; the run stays
    valid."""
    try:
        step(run)
    except Exception as error:
        traceback_path = write_traceback(run, Path(name).stem, error)
        text = f"no {name}: {recovery.summarize_causes([error])} (traceback in {traceback_path})"
        on_event({"kind": "stage", "text": text})


def complete_remote_copy(run: Run, cluster: ClusterConfig) -> None:
    """Complete the remote copy of a finished run. Raises `TemporaryFailureError` if the storage is unreachable."""
    owner_tokens = _owner_tokens(run)
    run_copy = remote_copy.make_remote_copy(cluster, run.folder, owner_tokens)
    if run_copy is None:
        return
    local_checkpoints = [
        checkpoint_format.checkpoint_path(run.checkpoints, step)
        for step in checkpoint_format.list_steps(run.checkpoints)
    ]
    try:
        run_copy.refuse_other_run(run.folder)
        # `push` deletes remote checkpoints that are not local. Skip it if storage lacks none: local ones may have been
        # cleaned.
        if owner_tokens and {path.name for path in local_checkpoints} - {*run_copy.list_checkpoints()}:
            run_copy.push(run.folder, local_checkpoints)
        if run.artifact.is_dir():  # otherwise the remote artifact is the only one
            run_copy.push_artifact(run.folder)
    except remote_copy.StorageUnreachableError as error:
        run.append_event("remote_copy_incomplete", error=str(error))
        hint = "the same command with --resume copies the rest"
        message = f"{run} is finished, and its remote copy is incomplete ({error}); {hint}"
        raise TemporaryFailureError(message, code="unreachable") from error


def claim_storage(run: Run, cluster: ClusterConfig) -> tuple[str, ...]:
    """Return the tokens of all commands that have trained this run folder; the last one belongs to this command.

    Only the owner of the last token may write to the remote copy. If the storage is unreachable and there are local
    checkpoints, the run continues, and its next save claims the remote copy.
    """
    if cluster.storage is None:
        return ()
    run.append_event("storage_claimed", token=uuid.uuid4().hex)
    owner_tokens = _owner_tokens(run)
    run_copy = remote_copy.RemoteCopy(cluster.storage, run.name, owner_tokens)
    try:
        run_copy.refuse_other_run(run.folder)
        run_copy.claim_ownership()
    except remote_copy.StorageUnreachableError as error:
        if not checkpoint_format.list_steps(run.checkpoints):
            raise
        run.append_event("storage_unreachable", step=_newest_checkpoint_step(run), error=str(error))
    return owner_tokens


def _owner_tokens(run: Run) -> tuple[str, ...]:
    return tuple(event["token"] for event in run.events("storage_claimed"))
