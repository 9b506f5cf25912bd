"""`rtrain cluster rehearse`: try a cluster file on this machine before anything is billed.

The cluster runs as real Ray nodes, which Ray's own autoscaler starts and terminates. The command runs as a job, twice:
undisturbed, and with a spot notice and the loss of a node. Both runs must have the same weights and rows, and nothing
may be left when the cluster is taken down.
"""

import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rtrain import config as configuration, ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.jobs import upload
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run
from rtrain.rehearsal import command_line as commands, measurements, plan as rehearsal_plan, ports, resize
from rtrain.rehearsal.certificate import RehearsalCertificate
from rtrain.rehearsal.faults import ClusterFaultInjector, FaultKind, seconds_after_join
from rtrain.rehearsal.job_follower import POLL_INTERVAL_S, JobFollower, LogFunction, RehearsalAborted
from rtrain.rehearsal.machines.local_cluster import RehearsalCluster, launch_cluster
from rtrain.rehearsal.measurements import ResizeResult
from rtrain.rehearsal.plan import RehearsalPlan

IDLE_END_TIMEOUT_S = 120.0
"""Seconds after the idle timeout in which idle nodes must have ended."""
UNDISTURBED_RUN, DISTURBED_RUN = "undisturbed", "rehearsed"
RESIZE_REHEARSAL = "resize"
EXTRA_REHEARSALS = (RESIZE_REHEARSAL,)
"""Extra rehearsals: a run that shrinks and grows again."""


def check_request(words: Sequence[str], text: str, extras: Collection[str] = ()) -> tuple[RehearsalPlan, list[str]]:
    """Check a rehearsal before anything starts; returns the plan of the cluster file, and the command with absolute
    paths. `extras`: requested `EXTRA_REHEARSALS`. Raises `ConfigError` with all problems."""
    problems = []
    if not words or words[0] != "train":
        reason = "cannot be rehearsed: only a training has rows and weights to compare"
        problems.append(
            Problem(
                "verb", words[0] if words else None, reason, "write -- train RECIPE --data FILE", code="not_a_training"
            )
        )
    resolved_words, path_problems = commands.resolve_local_paths(words)
    problems += path_problems
    try:
        plan = rehearsal_plan.parse_plan(text)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += [
        Problem("--extra", extra, "is unknown", f"write {EXTRA_REHEARSALS[0]}", code="unknown_name")
        for extra in extras
        if extra not in EXTRA_REHEARSALS
    ]
    if not problems and RESIZE_REHEARSAL in extras:
        problems += resize.check_resizable(plan, commands.count_workers(resolved_words))
    if problems:
        raise ConfigError(problems)
    return plan, resolved_words


class Rehearsal:
    """One rehearsal: its jobs and measurements."""

    def __init__(
        self, plan: RehearsalPlan, words: Sequence[str], out: Path, log: LogFunction, extras: Collection[str] = ()
    ):
        """`words` with absolute paths, as `check_request` returns them."""
        self.plan, self.out, self._extras = plan, out, extras
        self._words, self._log = words, log
        self._began_at = time.time()
        self._listeners: set[ports.Listener] = set()
        self._first_job_at = 0.0
        self._resize_result: ResizeResult | None = None
        self._scale_down_s: float | None = None
        self._join_times: dict[str, float] = {}
        self._injector: ClusterFaultInjector | None = None

    @property
    def planned_faults(self) -> tuple[FaultKind, ...]:
        """A notice is injected only if the file starts a watcher."""
        return ("notice", "kill") if self.plan.watcher else ("kill",)

    def run(self, files: upload.Upload) -> RehearsalCertificate:
        """Run the rehearsal. Raises `UserError` if the undisturbed run fails."""
        errors = list[str]()
        with launch_cluster(self.plan, self.out / "machines", self._log) as cluster:
            follower = JobFollower(cluster, self.out / "machines", self._log)
            self._first_job_at = time.time()
            self._train(cluster, follower, UNDISTURBED_RUN, files)
            steps = Run(self.out / UNDISTURBED_RUN).events("trained")[-1]["steps"]
            self._injector = ClusterFaultInjector(cluster, self.planned_faults, steps)
            try:
                self._train(cluster, follower, DISTURBED_RUN, files)
                self._wait_for_idle_nodes(cluster)
            except RehearsalAborted as error:
                errors.append(str(error))
            self._listeners = follower.listeners
            self._join_times = ray_internals.node_start_times(cluster.address, timeout_s=10.0)
            self._log("taking the cluster down")
        if RESIZE_REHEARSAL in self._extras and not errors:
            try:
                reference_run = Run(self.out / UNDISTURBED_RUN)
                self._resize_result = resize.rehearse_resize(
                    self.plan, self._words, reference_run, self.out, files, self._log
                )
            except RehearsalAborted as error:
                errors.append(str(error))
        return self._build_certificate(cluster, self._injector, errors)

    # ------------------------------------------------------------------------------------------------------ the jobs

    def _train(self, cluster: RehearsalCluster, follower: JobFollower, name: str, files: upload.Upload) -> None:
        run = Run(self.out / name)
        words = commands.rehearsal_command(self._words, str(run.folder), f"file://{self.out}/storage")
        job = cluster.jobs.submit(words, files, lambda text: self._log(f"{name} run: {text}"))
        follower.follow_training(job, run, name, self._injector)

    def _wait_for_idle_nodes(self, cluster: RehearsalCluster) -> None:
        """Wait until idle nodes have ended."""
        waiting_since = time.monotonic()
        deadline = waiting_since + self.plan.rehearsal_idle_timeout_s + IDLE_END_TIMEOUT_S
        self._log(f"waiting for idle nodes to end, after {self.plan.rehearsal_idle_timeout_s:.0f} s")
        while len(cluster.registry.live_machines()) - 1 > self.plan.min_workers:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_INTERVAL_S)
        self._scale_down_s = round(time.monotonic() - waiting_since, 1)

    # --------------------------------------------------------------------------------------------------- the judgement

    def _build_certificate(
        self, cluster: RehearsalCluster, injector: ClusterFaultInjector, errors: Sequence[str]
    ) -> RehearsalCertificate:
        control, run = Run(self.out / UNDISTURBED_RUN), Run(self.out / DISTURBED_RUN)
        nodes = measurements.rehearsed_nodes(
            cluster.machines, self._join_times, self.plan, injector.injected, self._began_at
        )
        worker_nodes = [node for node in nodes if node.type != self.plan.head.name]
        join_times = [node.joined_at for node in worker_nodes if node.joined_at is not None]
        scale_up_s = (
            min(join_times) - (self._first_job_at - self._began_at)
            if join_times and not self.plan.min_workers
            else None
        )
        attempts = run.events("started") if run.log.is_file() else []
        worker_counts = {event["workers"] for event in [*attempts, *control.events("started")]}
        for fault in injector.injected:
            fault.seconds_after_join = seconds_after_join(fault, self._join_times.values())
        training_began = attempts[0]["time"] - self._began_at if attempts else math.inf
        settings = configuration.load_config(str(control.config))
        train = settings.recipe.train
        device = "gpu" if self.plan.has_gpus and train.device != "cpu" else "cpu"
        return RehearsalCertificate(
            plan=self.plan,
            nodes=nodes,
            max_concurrent_nodes=measurements.max_concurrent(worker_nodes),
            required_nodes=self.plan.required_nodes(
                train.workers, capacity.resource_request_from_config(settings, device)
            ),
            scale_up_s=None if scale_up_s is None else round(scale_up_s, 1),
            scale_down_s=self._scale_down_s,
            listeners=sorted(self._listeners),
            faults=injector.injected,
            planned_faults=len(self.planned_faults),
            restarts=max(0, len(attempts) - 1),
            row_comparison=measurements.compare_rows(control, run) if run.is_finished else None,
            weight_comparison=measurements.compare_weights(control, run, len(worker_counts) == 1)
            if run.is_finished
            else None,
            steps=max((event["step"] for event in run.events("progress")), default=0) if attempts else 0,
            workers_by_attempt=[event["workers"] for event in attempts],
            device=device,
            resize_result=self._resize_result,
            left_behind=cluster.left_behind,
            seconds=round(time.time() - self._began_at, 1),
            idle_terminations=sum(
                node.end_reason == measurements.END_LABELS["terminated"] and node.ended_at < training_began
                for node in worker_nodes
            ),
            errors=errors,
        )
