"""Control a run on the connected Ray cluster: attempts, recovery from failures, and the report."""

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.checkpoint import format as checkpoint_format, remote_copy
from rtrain.cluster import capacity, pricing
from rtrain.cluster.autoscaler_requests import ResourceBundle, ResourceDemand, run_bundles, worker_bundle
from rtrain.config import ClusterConfig
from rtrain.core import events
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.report import baselines, cost, html, summary
from rtrain.report.live import trackers
from rtrain.runs import failures, node_info, resource_leases, run_folders, stop_request, worker_group
from rtrain.runs.prepare import PreparedRun, row_events
from rtrain.runs.recovery import FailureCause, RetryBudget, count_halvings, is_out_of_memory, next_worker_limit
from rtrain.runs.worker import WorkerArgs

OnEvent = Callable[[dict[str, Any]], None]
NODE_LOSS_TIMEOUT_S = 10.0
"""Seconds to wait for Ray to report a lost node after workers died without an error."""
RECOUNT_INTERVAL_S = 5.0
"""Seconds between two counts of the nodes that the autoscaler can start."""
RESOURCE_RELEASE_DELAY_S = 5.0
"""Seconds until Ray reports released CPUs as free."""


@dataclass(frozen=True)
class _FitOptions:
    """Options of `fit`."""

    end_step: int | None
    is_rung: bool
    profile: bool
    workers: worker_group.BaseWorkerGroup


def fit(
    prepared_run: PreparedRun,
    *,
    end_step: int | None = None,
    is_rung: bool = False,
    profile: bool = False,
    workers: worker_group.BaseWorkerGroup | None = None,
    write_reports: bool = True,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint to step `end_step` (default: the last) and return the run's summary.

    A finished run is not trained again.

    Args:
        is_rung: keep the predictions for the validation rows at `end_step` (`rtrain.trainer.rung_predictions`).
        profile: keep the times of each step (`rtrain.profiling`).
        workers: the worker group; default: new processes for each attempt.
        write_reports: write the report when the run finishes.

    Raises:
        TemporaryFailureError: the run was stopped by a request (`stop_request.StopOnSignal`), or it is finished and
            the storage of its remote copy is unreachable.

    """
    options = _FitOptions(end_step, is_rung, profile, workers or worker_group.FreshWorkerGroup())
    run = prepared_run.run
    if run.is_finished:
        trackers.send_missing(prepared_run.config, run, on_event or (lambda event: None))
        run_summary = summary.write_summary(run)
        complete_remote_copy(run, prepared_run.config.deploy.cluster)
        return run_summary
    emit = on_event or (lambda event: None)
    for event in row_events(run):
        emit(event)  # logged before the follower started
    followers = events.EventFollower([(run.folder, {})], on_event), trackers.follow_run(prepared_run.config, run, emit)
    prices_file = prepared_run.config.deploy.cluster.prices
    user_prices = pricing.load_user_prices(
        Path(prices_file) if prices_file else None, (capacity.load_autoscaler_config() or {}).get("metadata")
    )
    with (
        run_folders.lock(run),
        followers[0],
        followers[1],
        stop_request.StopOnSignal(run) as stop_signal,
        AutoscalerRequest(prepared_run) as autoscaler_request,
    ):
        if user_prices:
            run.append_event(cost.PRICES_EVENT, prices={name: asdict(price) for name, price in user_prices.items()})
        try:
            options.workers.acquire(run)
            _run_attempts(prepared_run, options, emit, stop_signal, autoscaler_request)
        except (KeyboardInterrupt, SystemExit, TemporaryFailureError):
            run.append_event("interrupted")
            summary.write_summary(run)
            raise
        # e.g. from Ray, outside an attempt: without an event the run would count as running for ever
        except Exception as error:
            if summary.run_status(run.events()) == "running":
                run.append_event("failed", error=str(error)[:2000])
                summary.write_summary(run)
            if isinstance(error, UserError):
                raise
            raise failures.to_user_error(run, error) from error
        finally:
            options.workers.release(run)
            for path in set(run.folder.glob(run.hang_traceback("*").name)) - set(run.hang_tracebacks()):
                path.unlink()
    last_trained = _last_trained_event(run)
    run.append_event("finished" if last_trained["finished"] else "paused", step=last_trained["steps"])
    if last_trained["finished"] and write_reports:  # `rtrain report` shows a paused or stopped run
        write_report(run, emit)
    run_summary = summary.write_summary(run)
    if last_trained["finished"]:
        complete_remote_copy(run, prepared_run.config.deploy.cluster)
    return run_summary


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
        traceback_path = failures.write_traceback(run, Path(name).stem, error)
        on_event(
            {
                "kind": "stage",
                "text": f"no {name}: {failures.summarize_causes([error])} (traceback in {traceback_path})",
            }
        )


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
        # If storage has every local checkpoint, keep its extra ones: local copies may have been cleaned.
        if owner_tokens and {path.name for path in local_checkpoints} - {*run_copy.list_checkpoints()}:
            run_copy.push(run.folder, local_checkpoints)
        if run.artifact.is_dir():  # otherwise the remote artifact is the only one
            run_copy.push_artifact(run.folder)
    except remote_copy.StorageUnreachableError as error:
        run.append_event("remote_copy_incomplete", error=str(error))
        hint = "the same command with --resume copies the rest"
        message = f"{run} is finished, and its remote copy is incomplete ({error}); {hint}"
        raise TemporaryFailureError(message, code="unreachable") from error


def _run_attempts(
    prepared_run: PreparedRun,
    options: _FitOptions,
    on_event: OnEvent,
    stop_signal: stop_request.StopOnSignal,
    autoscaler_request: "AutoscalerRequest",
) -> None:
    """Make attempts until the run reaches its end or the retry budget is used.

    Each attempt is a worker group with its own Ray Train controller. The workers select the newest valid checkpoint.
    Ray's own retries end with their controller; here the death of a controller is a failure like any other.

    """
    run, train, cluster = prepared_run.run, prepared_run.config.recipe.train, prepared_run.config.deploy.cluster
    device_type, min_workers, max_workers = prepared_run.device.device, train.min_workers, prepared_run.device.workers
    count_usable_workers, worker_limit = (
        stop_request.make_worker_count(max_workers, min_workers, autoscaler_request.needs),
        max_workers,
    )
    node_wait = stop_request.NodeWait(run, autoscaler_request.needs, autoscaler_request.requested_places)
    if prepared_run.device.message:
        run.append_event("device", device=device_type, reason=prepared_run.device.message)
    retry_budget, owner_tokens = RetryBudget(cluster.max_failures), claim_storage(run, cluster)
    while True:
        stop_request.consume_stop(run)  # a driver that died may have left a request
        autoscaler_request()
        workers = (
            0
            if stop_signal.is_requested
            else min(
                worker_limit, wait_for_workers(run, count_usable_workers, node_wait, autoscaler_request, stop_signal)
            )
        )
        if not workers:  # a search requests the stop of its trials
            raise _stopped_by_request(prepared_run)
        worker_args = WorkerArgs(
            config=prepared_run.config,
            run=run.folder,
            store=prepared_run.store.folder,
            model=prepared_run.model,
            teacher=prepared_run.teacher,
            end_step=options.end_step,
            is_rung=options.is_rung,
            profile=options.profile,
            head_machine=node_info.describe_head(),
            owner_tokens=owner_tokens,
            halvings=count_halvings(run.events()),
        )
        on_event(events.make_phase_event(f"starting {workers} worker{'' if workers == 1 else 's'}", "start of workers"))
        group_spec = worker_group.WorkerGroupSpec(
            workers,
            device_type,
            cluster.hang_timeout_s,
            is_elastic=min_workers is not None,
            node_labels=cluster.labels,
            requests_own_nodes=autoscaler_request.request_client is not None,
            gpu_share=autoscaler_request.needs.gpu_share,
        )
        cluster_monitor = stop_request.ClusterMonitor(
            run, workers, count_usable_workers, on_event, node_wait, autoscaler_request
        )
        try:
            with cluster_monitor:
                options.workers.run_attempt(worker_args, group_spec)
        except Exception as error:
            nodes_in_use = (
                cluster_monitor.used_nodes | resource_leases.workers_by_node(run).keys()
            )  # before their placement group is removed
            options.workers.discard(run)
            was_placed = not failures.is_placement_timeout(error)
            if was_placed:
                recover_or_raise(run, error, retry_budget, nodes_in_use)
            else:  # no worker was lost, and Ray has had time to report lost nodes
                node_wait.report(workers)
            worker_limit = next_worker_limit(was_placed, workers, min_workers, max_workers)
            continue
        worker_limit = max_workers
        reason, last_trained = stop_request.consume_stop(run), _last_trained_event(run)
        if reason == stop_request.DIVERGED or last_trained["finished"] or last_trained["steps"] == options.end_step:
            return
        if reason == stop_request.SIGNALED and not stop_signal.is_requested:  # requested by the search of this trial
            raise _stopped_by_request(prepared_run)
        options.workers.discard(run)
        if (
            not stop_signal.is_requested
        ):  # a shared folder's cache may have shown a worker a request that was consumed already
            run.append_event(
                "restart_requested", reason=reason or "an earlier stop request", step=last_trained["steps"]
            )


def _stopped_by_request(prepared_run: PreparedRun) -> stop_request.StoppedByRequest:
    run = prepared_run.run
    progress = f"step {_newest_checkpoint_step(run)} of {prepared_run.num_steps} is saved"
    return stop_request.StoppedByRequest(
        f"{run} was stopped by a request: {progress}. Continue it with the same command and --resume"
    )


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


def _last_trained_event(run: Run) -> dict[str, Any]:
    return run.events("trained")[-1]


class AutoscalerRequest:
    """Requests all workers of an elastic run from the autoscaler, if there is one. A request expires unless it is
    repeated by a call; leaving the `with` block withdraws it."""

    def __init__(self, prepared_run: PreparedRun):
        self._max_workers = prepared_run.device.workers
        self.needs = capacity.resource_request_from_config(prepared_run.config, prepared_run.device.device)
        is_elastic = (
            prepared_run.config.recipe.train.min_workers is not None and capacity.load_autoscaler_config() is not None
        )
        # By the absolute path: runs of one name would take nodes from each other.
        run_hash = hashlib.sha256(str(prepared_run.run.folder).encode()).hexdigest()[:8]
        resource_requests = ray_internals.AutoscalingClient(f"rtrain-{prepared_run.run.name}-{run_hash}")
        self.request_client = ResourceDemand(resource_requests) if is_elastic else None
        self._last_count_time = -math.inf

    def __call__(self) -> None:
        now = time.monotonic()
        if self.request_client is not None and now - self._last_count_time >= RECOUNT_INTERVAL_S:
            self._last_count_time = now
            self.request_client.request(
                run_bundles(self._max_workers, self.needs, capacity.live_nodes(), capacity.autoscaler_limits())
            )

    def requested_places(self) -> list[ResourceBundle]:
        """The resources requested from the autoscaler, by this object or by Ray Train."""
        if self.request_client is not None:
            return self.request_client.bundles
        return [worker_bundle(self.needs)] * self._max_workers

    def __enter__(self) -> "AutoscalerRequest":
        return self

    def __exit__(self, *_: object) -> None:
        if self.request_client is not None:
            self.request_client.release()


def wait_for_workers(
    run: Run,
    count_usable_workers: stop_request.WorkerCount,
    node_wait: stop_request.NodeWait,
    autoscaler_request: AutoscalerRequest,
    stop_signal: stop_request.StopOnSignal,
) -> int:
    """Return the number of workers for the next attempt by the free resources; 0 after a stop request.

    It waits, and reports that, while fewer than the minimum are free. Ray reports released CPUs of the last attempt and
    of its data tasks after a moment, so fewer workers than the nodes allow are started only after
    `RESOURCE_RELEASE_DELAY_S`.

    """
    settle_deadline = time.monotonic() + RESOURCE_RELEASE_DELAY_S
    while not (stop_signal.is_requested or stop_request.stop_requested(run)):
        free_nodes = capacity.available_nodes(resource_leases.workers_by_node(run), node_wait.needs)
        workers, is_settled = count_usable_workers(free_nodes), time.monotonic() > settle_deadline
        if workers and (is_settled or workers >= count_usable_workers(capacity.live_nodes())):
            return workers
        autoscaler_request()
        if is_settled:
            node_wait.report_if_due(None, RESOURCE_RELEASE_DELAY_S)
        time.sleep(stop_request.POLL_INTERVAL_S)
    return 0


def recover_or_raise(run: Run, error: Exception, retry_budget: RetryBudget, nodes_in_use: Collection[str] = ()) -> None:
    """Return if the run should make another attempt; otherwise raise the error for the user.

    Args:
        nodes_in_use: ids of the nodes that had its workers.
    """
    if summary.run_status(run.events()) == "stopped":  # a search kills the workers of a stopped trial
        summary.write_summary(run)
        raise failures.to_user_error(run, error) from error
    causes = failures.find_causes(error)
    user_error = failures.find_user_error(causes)
    was_preempted = stop_request.consume_stop(run) == "preemption" or any(
        getattr(cause, "preempted", False) for cause in causes
    )
    ran_out_of_memory = is_out_of_memory(map(str, causes))
    retryable_error = user_error if isinstance(user_error, TemporaryFailureError) else None  # e.g. an unreachable mount
    is_user_error = user_error is not None and retryable_error is None
    failure_cause: FailureCause = (
        "refused" if is_user_error else "preemption" if was_preempted else "memory" if ran_out_of_memory else "crash"
    )
    message, is_spot_loss = failures.summarize_causes(causes), False
    if (
        failure_cause == "crash"
        and nodes_in_use
        and (
            lost_nodes := capacity.find_lost_nodes(
                nodes_in_use, NODE_LOSS_TIMEOUT_S if failures.may_be_node_loss(causes) else 0
            )
        )
    ):
        failure_cause, is_spot_loss = (
            "node_lost",
            all(capacity.matches_labels(host.labels, capacity.SPOT_LABELS) for host in lost_nodes.values()),
        )
        node_names = ", ".join(sorted(name[:8] for name in lost_nodes))
        message = (
            f"{'spot ' if is_spot_loss else ''}node{'' if len(lost_nodes) == 1 else 's'} {node_names} "
            "lost "
            f"without notice; {message}"
        )
    checkpoint_step = _newest_checkpoint_step(run)
    is_program_error = failure_cause == "crash" and retryable_error is None and failures.is_program_error(causes)
    if retry_budget.should_retry(failure_cause, checkpoint_step, is_spot_loss, message if is_program_error else None):
        hang_tracebacks = [str(path) for path in run.hang_tracebacks()]
        run.append_event(
            "crashed", cause=failure_cause, resumes_from=checkpoint_step, error=message, hang_tracebacks=hang_tracebacks
        )
        return
    if retryable_error is not None:
        raise retryable_error from error
    run.append_event("failed", error=str(error)[:2000])
    summary.write_summary(run)
    write_report(run, lambda event: None)
    raise failures.to_user_error(run, error) from error


def _newest_checkpoint_step(run: Run) -> int:
    """Step of the newest complete checkpoint. The workers verify it."""
    return max(checkpoint_format.list_steps(run.checkpoints), default=0)
