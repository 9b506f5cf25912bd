"""`rtrain cluster rehearse`: try a cluster file on this machine before anything is billed.

The cluster runs as real Ray nodes, which Ray's own autoscaler starts and terminates. The command runs as a job, twice:
undisturbed, and with a spot notice and the loss of a node. Both runs must have the same weights and rows, and nothing
may be left when the cluster is taken down.

The resize rehearsal is a run that loses a node at the cluster's cap, shrinks, and grows again. It trains on a cluster
so small that the run needs all nodes, in float64 and without dropout: then another number of workers differs only by
rounding, and the weights must equal those of a steady run.
"""

import json
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rtrain import config as configuration, ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import capacity
from rtrain.cluster.jobs import client
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run
from rtrain.models import builder
from rtrain.rehearsal import certificate, faults, plan as rehearsal_plan
from rtrain.rehearsal.certificate import RehearsalCertificate, ResizeResult
from rtrain.rehearsal.faults import (
    FAULT_POSITIONS,
    POLL_INTERVAL_S,
    ClusterFaultInjector,
    EventLog,
    FaultKind,
    InjectedFault,
    JobFollower,
    RehearsalAborted,
    seconds_after_join,
)
from rtrain.rehearsal.local_cluster import LogFunction, RehearsalCluster, launch_cluster
from rtrain.rehearsal.plan import RehearsalPlan
from rtrain.verification import verify

IDLE_END_TIMEOUT_S = 120.0
"""Seconds after the idle timeout in which idle nodes must have ended."""
UNDISTURBED_RUN, DISTURBED_RUN = "undisturbed", "rehearsed"
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
RESIZE_REHEARSAL = "resize"
"""The extra rehearsal: a run that shrinks and grows again."""


def check_request(words: Sequence[str], text: str, extras: Collection[str] = ()) -> tuple[RehearsalPlan, list[str]]:
    """Check a rehearsal before anything starts; returns the plan of the cluster file, and the command with absolute
    paths. `extras`: requested extra rehearsals. Raises `ConfigError` with all problems."""
    problems = []
    if not words or words[0] != "train":
        reason = "cannot be rehearsed: only a training has rows and weights to compare"
        fix, verb = "write -- train RECIPE --data FILE", words[0] if words else None
        problems.append(Problem("verb", verb, reason, fix, code="not_a_training"))
    resolved_words, path_problems = rehearsal_plan.resolve_local_paths(words)
    problems += path_problems
    try:
        plan = rehearsal_plan.parse_plan(text)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    fix = f"write {RESIZE_REHEARSAL}"
    unknown_extras = [extra for extra in extras if extra != RESIZE_REHEARSAL]
    problems += [Problem("--extra", extra, "is unknown", fix, code="unknown_name") for extra in unknown_extras]
    if not problems and extras:
        problems += check_resizable(plan, rehearsal_plan.count_workers(resolved_words))
    if problems:
        raise ConfigError(problems)
    return plan, resolved_words


class Rehearsal:
    def __init__(
        self, plan: RehearsalPlan, words: Sequence[str], out: Path, log: LogFunction, extras: Collection[str] = ()
    ):
        """`words` with absolute paths, as `check_request` returns them."""
        self.plan, self.out, self._extras = plan, out, extras
        self._words, self._log = words, log
        self._began_at = time.time()
        self._listeners: set[faults.Listener] = set()
        self._first_job_at = 0.0
        self._resize_result: ResizeResult | None = None
        self._scale_down_s: float | None = None
        self._join_times: dict[str, float] = {}
        self._injector: ClusterFaultInjector | None = None

    @property
    def planned_faults(self) -> tuple[FaultKind, ...]:
        """A notice is injected only if the file starts a watcher."""
        return ("notice", "kill") if self.plan.watcher else ("kill",)

    def run(self, files: client.Upload) -> RehearsalCertificate:
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
                self._resize_result = rehearse_resize(self.plan, self._words, reference_run, self.out, files, self._log)
            except RehearsalAborted as error:
                errors.append(str(error))
        return self._build_certificate(cluster, self._injector, errors)

    # ------------------------------------------------------------------------------------------------------ the jobs

    def _train(self, cluster: RehearsalCluster, follower: JobFollower, name: str, files: client.Upload) -> None:
        run = Run(self.out / name)
        words = rehearsal_plan.rehearsal_command(self._words, str(run.folder), f"file://{self.out}/storage")
        job = cluster.jobs.submit(words, files, lambda text: self._log(f"{name} run: {text}"))
        follower.follow_training(job, run, self._injector)

    def _wait_for_idle_nodes(self, cluster: RehearsalCluster) -> None:
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
        nodes = certificate.rehearsed_nodes(
            cluster.machines, self._join_times, self.plan, injector.injected, self._began_at
        )
        worker_nodes = [node for node in nodes if node.type != self.plan.head.name]
        join_times = [node.joined_at for node in worker_nodes if node.joined_at is not None]
        needed_nodes = bool(join_times) and not self.plan.min_workers
        attempts = run.events("started") if run.log.is_file() else []
        worker_counts = {event["workers"] for event in [*attempts, *control.events("started")]}
        training_began = attempts[0]["time"] - self._began_at if attempts else math.inf
        for fault in injector.injected:
            fault.seconds_after_join = seconds_after_join(fault, self._join_times.values())
        settings = configuration.load_config(str(control.config))
        train = settings.recipe.train
        device = "gpu" if self.plan.has_gpus and train.device != "cpu" else "cpu"
        request = capacity.resource_request_from_config(settings, device)
        return RehearsalCertificate(
            plan=self.plan,
            nodes=nodes,
            max_concurrent_nodes=certificate.max_concurrent(worker_nodes),
            required_nodes=self.plan.required_nodes(train.workers, request),
            scale_up_s=round(min(join_times) - (self._first_job_at - self._began_at), 1) if needed_nodes else None,
            scale_down_s=self._scale_down_s,
            listeners=sorted(self._listeners),
            faults=injector.injected,
            planned_faults=len(self.planned_faults),
            restarts=max(0, len(attempts) - 1),
            row_comparison=certificate.compare_rows(control, run) if run.is_finished else None,
            weight_comparison=(
                certificate.compare_weights(control, run, len(worker_counts) == 1) if run.is_finished else None
            ),
            steps=max((event["step"] for event in run.events("progress")), default=0) if attempts else 0,
            workers_by_attempt=[event["workers"] for event in attempts],
            device=device,
            resize_result=self._resize_result,
            left_behind=cluster.left_behind,
            seconds=round(time.time() - self._began_at, 1),
            idle_terminations=sum(
                node.end_reason == certificate.END_LABELS["terminated"] and node.ended_at < training_began
                for node in worker_nodes
            ),
            errors=errors,
        )


def check_resizable(plan: RehearsalPlan, workers: int) -> list[Problem]:
    """Reasons why the run cannot shrink."""
    if workers < 2:
        reason = "a run of one worker cannot shrink (--extra resize)"
        return [Problem("--workers", workers, reason, "write 2", code="too_few_workers")]
    if (small_plan := plan.shrink_to(workers, DATA_CPUS)) is None or small_plan.watcher is None:
        reason = "the file has no CPU nodes, or starts no spot watcher"
        return [Problem("--extra", "resize", reason, "leave it out", code="cannot_resize")]
    return []


def rehearse_resize(
    plan: RehearsalPlan,
    words: Sequence[str],
    reference_run: Run,
    out: Path,
    files: client.Upload,
    log_message: LogFunction,
) -> ResizeResult:
    """Rehearse the resize. `reference_run`: a run of these words, whose model and workers are used. Raises
    `RehearsalAborted` if one of the two runs fails."""
    recipe = configuration.load_config(str(reference_run.config)).recipe
    small_plan = plan.shrink_to(recipe.train.workers, DATA_CPUS)
    assert small_plan is not None  # else `check_resizable` has said so
    source_folder = builder.resolve_folder(recipe.model.name, reference_run.folder.parent)
    model_folder = copy_without_dropout(source_folder, out / "model")
    began_at = time.time()
    steady, resized = Run(out / STEADY_RUN), Run(out / RESIZED_RUN)

    def build_command(run: Run, *settings: str) -> list[str]:
        rehearsal_words = rehearsal_plan.rehearsal_command(words, str(run.folder), f"file://{out}/storage")
        return rehearsal_plan.override_command(rehearsal_words, str(model_folder), *SETTINGS, *settings)

    with launch_cluster(small_plan, out / "machines-resized", log_message) as cluster:
        follower = JobFollower(cluster, out / "machines-resized", log_message)
        total_steps = FAULT_POSITIONS["notice"] * SAVE_INTERVAL
        injector = ClusterFaultInjector(cluster, ("notice",), total_steps, recipe.train.workers)

        def has_grown(log: EventLog) -> bool:
            return bool(injector.injected) and has_trained_since(injector.injected[0], log, 2 * SAVE_INTERVAL)

        command = build_command(resized, "train.min_workers=1", f"train.save_every={SAVE_INTERVAL}")
        job = cluster.jobs.submit(command, files, log_message)
        follower.follow_training(job, resized, injector, should_stop=has_grown)
        last_step = max(checkpoint_format.list_steps(resized.checkpoints))

        def has_last_step(log: EventLog) -> bool:
            return last_step in checkpoint_format.list_steps(steady.checkpoints)

        job = cluster.jobs.submit(build_command(steady, f"train.save_every={last_step // 2}"), files, log_message)
        follower.follow_training(job, steady, should_stop=has_last_step)
        join_times = ray_internals.node_start_times(cluster.address, timeout_s=10.0)
    [notice] = injector.injected
    notice.seconds_after_join = seconds_after_join(notice, join_times.values())
    nodes = certificate.rehearsed_nodes(cluster.machines, join_times, small_plan, [notice], began_at)
    same_order, difference = certificate.compare_checkpoints(resized, steady, last_step)
    rows = verify.check_ledger(resized)
    return ResizeResult(
        notice=notice,
        workers_by_attempt=[event["workers"] for event in resized.events("started")],
        step=last_step,
        rows=certificate.RowComparison(rows.passed, rows.missing_rows, rows.repeated_rows, same_order),
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
    model_config: dict[str, Any] = json.loads((source / "config.json").read_text())
    for name, value in model_config.items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            model_config[name] = 0.0
    (folder / "config.json").write_text(json.dumps(model_config, indent=2))
    return folder
