"""`rtrain drill RECIPE`: fault injection; a run with faults must end like an undisturbed one.

Two runs have the same recipe and rows: a control run, and one with every fault of `FAULTS` in turn. They must
end with the same weights, bit for bit, and the same ledger of rows; every fault must resume from a checkpoint. If
workers share a model, a rank of each kind of process group is killed and stopped.
"""

import contextlib
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rtrain import config as configuration, ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Config, TrainConfig
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.store import builder
from rtrain.parallel.mesh import REPLICA_AXES
from rtrain.report import html, summary
from rtrain.runs import controller, nodes, prepare
from rtrain.verification import verify

SAVE_EVERY = 8
"""Default number of steps between two checkpoints."""
KEEP_CHECKPOINTS = 3
"""Two are damaged at a time; a third must remain to resume from."""
EXIT_TIMEOUT_S = 15.0
HANG_TIMEOUT_S = 20.0
"""Shorter than the default of five minutes."""


@dataclass(frozen=True)
class DrillFault:
    """`inject` acts once. A fault that damages the newest checkpoint recomputes one more interval of steps."""

    name: str
    inject: Callable[[Run], None]
    recomputed_intervals: int = 1


@dataclass
class FaultResult:
    """A fault and its effect on the run."""

    name: str
    at_step: int
    """Last logged step before the fault."""
    max_recomputed_steps: int
    """Largest number of recomputed steps: those since the newest checkpoint that the fault leaves intact."""
    injected_at: float = field(default=0.0, repr=False)
    resumed_from: int = -1
    recomputed_steps: int = -1
    seconds_to_next_step: float = -1.0
    """From the fault to the end of the first new step."""

    @property
    def passed(self) -> bool:
        return self.resumed_from > 0 and 0 <= self.recomputed_steps <= self.max_recomputed_steps


@dataclass
class DrillReport:
    passed: bool
    is_same_weights: bool
    rows_lost: int
    rows_repeated: int
    is_same_order: bool
    leftovers: list[str]
    """Drafts in the run folder, and worker processes that outlived the run."""
    steps: int
    save_every: int
    workers: int
    faults: list[dict[str, Any]]
    seconds: float

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def format_text(self) -> str:
        lines = [f"{'fault':<28}  {'at':>5}  {'resumed':>7}  {'again':>5}  {'s to next step':>16}"]
        for fault in self.faults:
            lines.append(
                f"{fault['name']:<28}  {fault['at_step']:>5}  {fault['resumed_from']:>7}  "
                f"{fault['recomputed_steps']:>5}  {fault['seconds_to_next_step']:>16.1f}"
                f"{'' if fault['passed'] else '   FAILED'}"
            )
        weights = "the same weights, bit for bit" if self.is_same_weights else "OTHER WEIGHTS"
        rows = "the same rows" if self.is_same_order else "OTHER ROWS"
        lines.append(
            f"{'passed' if self.passed else 'FAILED'}: after {len(self.faults)} faults in {self.steps} steps of "
            f"{self.workers} workers: {weights} and {rows} as the undisturbed run; "
            f"{self.rows_lost} rows lost, {self.rows_repeated} repeated ({self.seconds:.0f} s)"
        )
        lines += [f"left behind: {name}" for name in self.leftovers]
        return "\n".join(lines)


class DrillFaultInjector:
    """Follows a run's events and injects the next fault after enough progress since the last one."""

    def __init__(self, run: Run, faults: Sequence[DrillFault], save_every: int, on_event: controller.OnEvent | None):
        self._run, self._pending, self._save_every, self._on_event = run, list(faults), save_every, on_event
        self.results: list[FaultResult] = []

    def __call__(self, event: dict[str, Any]) -> None:
        if self._on_event:
            self._on_event(event)
        current = self.results[-1] if self.results else None
        if event["kind"] == "started" and current and current.resumed_from < 0:
            current.resumed_from = event["step"]
            current.recomputed_steps = current.at_step - event["step"]
        if event["kind"] != "progress":
            return
        if current and current.seconds_to_next_step < 0:
            if current.resumed_from < 0:
                current.at_step = event["step"]  # logged before the fault took effect
            elif event["step"] > current.at_step:
                current.seconds_to_next_step = round(event["time"] - current.injected_at, 1)
        elif self._pending and event["step"] >= self._next_fault_step():
            self._inject(self._pending.pop(0), event["step"])

    def _next_fault_step(self) -> int:
        """Two intervals after the last fault, and half an interval after a checkpoint, so that steps can be lost."""
        last_step = self.results[-1].at_step if self.results else 0
        return (last_step // self._save_every + 2) * self._save_every + self._save_every // 2

    def _inject(self, fault: DrillFault, step: int) -> None:
        max_recomputed_steps = fault.recomputed_intervals * self._save_every
        self.results.append(FaultResult(fault.name, step, max_recomputed_steps, injected_at=time.time()))
        if self._on_event:
            self._on_event({"kind": "stage", "text": f"fault: {fault.name}"})
        fault.inject(self._run)


def run(
    config: Config, folder: Path, faults: Sequence[DrillFault] | None = None, on_event: controller.OnEvent | None = None
) -> DrillReport:
    """Drill a recipe on the connected Ray cluster; both runs are kept under `folder`. `faults`: None for all of
    `FAULTS` and the faults of the recipe's process groups."""
    begin, train = time.monotonic(), config.recipe.train
    faults = (*FAULTS, *group_faults(train, train.workers)) if faults is None else faults
    save_every = train.save_every or SAVE_EVERY
    settings = {"save_every": save_every, "keep_checkpoints": KEEP_CHECKPOINTS, "log_every": 1}
    overrides: dict[str, Any] = {f"train.{name}": value for name, value in settings.items()}
    overrides |= {"cluster.hang_timeout_s": HANG_TIMEOUT_S, "cluster.storage": None}
    config = configuration.with_overrides(config, overrides)
    steps = 3 * save_every * (len(faults) + 1)
    config = _with_enough_epochs(config, folder.parent, steps)
    control_run = prepare.prepare_run(config, folder / "control", tokens_root=folder.parent)
    controller.fit(control_run, end_step=steps, on_event=on_event)
    fault_run = prepare.prepare_run(config, folder / "drilled", tokens_root=folder.parent)
    injector = DrillFaultInjector(fault_run.run, faults, save_every, on_event)
    _fit_with_faults(fault_run, steps, injector)
    is_complete = len(injector.results) == len(faults)
    report = _make_report(control_run.run, fault_run, injector.results, steps)
    report.passed = report.passed and is_complete
    report.seconds = round(time.monotonic() - begin, 1)
    fault_run.run.append_event("drill_report", report=report.to_document())
    summary.write_summary(fault_run.run)
    html.write_report(fault_run.run)
    return report


def _with_enough_epochs(config: Config, root: Path, steps: int) -> Config:
    """The recipe with enough epochs for `steps` steps."""
    source, model, *_ = nodes.check_nodes(config, *prepare.check_run(config, root), root)
    store, _ = builder.build_or_open(config.recipe, source, model, root)
    steps_per_epoch = -(-store.num_rows("train") // config.recipe.global_batch_size)
    epochs = max(config.recipe.train.epochs, -(-steps // steps_per_epoch))
    return configuration.with_overrides(config, {"train.epochs": epochs})


def _fit_with_faults(prepared: prepare.PreparedRun, steps: int, injector: DrillFaultInjector) -> None:
    """Train to the end. If a fault raises a user error, resume as the user would."""
    num_results = 0
    while True:
        try:
            controller.fit(prepared, end_step=steps, on_event=injector)
            return
        except UserError as error:
            if len(injector.results) == num_results:
                raise
            num_results = len(injector.results)
            injector({"kind": "stage", "text": f"ended by: {str(error).splitlines()[0]}"})
            prepared = prepare.prepare_run(
                prepared.config, prepared.run.folder, "resume", prepared.store.folder.parents[1]
            )


def _make_report(
    control: Run, fault_run: prepare.PreparedRun, results: Sequence[FaultResult], steps: int
) -> DrillReport:
    ledger, control_ledger = verify.check_ledger(fault_run.run), verify.check_ledger(control)
    weights, control_weights = _digest_weights(fault_run.run, steps), _digest_weights(control, steps)
    is_same_weights = weights is not None and weights == control_weights
    is_same_order = ledger.passed and ledger.order_digest == control_ledger.order_digest
    leftovers, train = _find_leftovers(fault_run.run), fault_run.config.recipe.train
    return DrillReport(
        passed=is_same_weights and is_same_order and not leftovers and all(fault.passed for fault in results),
        is_same_weights=is_same_weights,
        rows_lost=ledger.missing_rows,
        rows_repeated=ledger.repeated_rows,
        is_same_order=is_same_order,
        leftovers=leftovers,
        steps=steps,
        save_every=train.save_every or 0,
        workers=train.workers,
        faults=[{**asdict(fault), "passed": fault.passed} for fault in results],
        seconds=0.0,
    )


def _find_leftovers(run: Run) -> list[str]:
    """Leftovers of the run. Checked repeatedly, since Ray ends its processes in the background."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while True:
        drafts = [path for folder in (run.folder, run.checkpoints) for path in folder.glob(".*")]
        leftovers = [*(str(path) for path in sorted(drafts)), *find_leftover_workers()]
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        time.sleep(0.5)


def _digest_weights(run: Run, step: int) -> str | None:
    """Digest of weights and optimizer state after `step`."""
    folder = checkpoint_format.checkpoint_path(run.checkpoints, step)
    files = [folder / name for name in ("model.safetensors", "optim.safetensors")]
    if not all(path.is_file() for path in files):
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def find_processes(class_name: str) -> list[int]:
    """Process ids of this job's living actors of a class, in the order of their starts."""
    import ray

    job, node = ray.get_runtime_context().get_job_id(), ray.get_runtime_context().get_node_id()
    actors = [
        actor
        for actor in ray_internals.list_actors()
        if actor["ActorClassName"].endswith(class_name) and actor["State"] == "ALIVE" and actor["JobID"] == job
    ]
    if any(actor["Address"]["NodeID"] != node for actor in actors):
        reason = "drill: a worker is on another machine, where it cannot be killed; drill on a single machine"
        raise UserError(reason, code="unsupported")
    return [actor["Pid"] for actor in sorted(actors, key=lambda actor: (actor["StartTime"], actor["Pid"]))]


def find_group_peers(train: TrainConfig, workers: int) -> dict[str, int]:
    """For each kind of process group in which workers share a model or gradients: a rank that shares such a group, and
    no other, with rank 0. Empty if every worker has the full model, since all workers are alike then."""
    peers, stride = dict[str, int](), 1
    for axis in reversed(REPLICA_AXES):  # from the innermost axis of the mesh
        if (size := getattr(train, axis)) > 1:
            peers[f"{axis}={size}"] = stride
            stride *= size
    if workers > stride and (stride > 1 or train.zero_stage > 1):
        peers[f"zero_stage={train.zero_stage}" if train.zero_stage > 1 else "replicas"] = stride
    return peers


def find_process(run: Run, rank: int) -> int:
    """The process id of a rank, found by its open hang-traceback file."""
    hang_file = str(run.hang_traceback(rank).resolve())
    for pid in find_processes(WORKER_CLASS):
        with contextlib.suppress(psutil.Error):
            if hang_file in [file.path for file in psutil.Process(pid).open_files()]:
                return pid
    raise UserError(f"drill: no process is rank {rank}", code="not_found")


def group_faults(train: TrainConfig, workers: int) -> tuple[DrillFault, ...]:
    """Two faults for each kind of process group: a rank is killed, and a rank is stopped."""

    def make_injector(rank: int, signal_number: int) -> Callable[[Run], None]:
        return lambda run: os.kill(find_process(run, rank), signal_number)

    signals = {"killed (SIGKILL)": signal.SIGKILL, "stopped (SIGSTOP)": signal.SIGSTOP}
    return tuple(
        DrillFault(f"rank {rank} by {group} {what}", make_injector(rank, number))
        for group, rank in find_group_peers(train, workers).items()
        for what, number in signals.items()
    )


def find_leftover_workers() -> list[str]:
    """Processes of workers and controllers of this Ray session, even if Ray has lost track of them."""
    processes = []
    for pid in ray_internals.list_session_pids():
        with contextlib.suppress(psutil.Error):
            title = " ".join(psutil.Process(pid).cmdline())
            if title.startswith((f"ray::{WORKER_CLASS}", f"ray::{CONTROLLER_CLASS}")):
                processes.append(f"process {pid} ({title})")
    return processes


def _make_signal_injector(class_name: str, signal_number: int) -> Callable[[Run], None]:
    return lambda run: os.kill(find_processes(class_name)[-1], signal_number)


def _limit_file_size(run: Run) -> None:
    """Limit the size of the workers' files to one page: the effect of a full disk, without filling one."""
    for pid in find_processes(WORKER_CLASS):
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _truncate_checkpoint(run: Run) -> None:
    """Truncate the newest checkpoint's weights, as after a power failure, and kill the workers."""
    path = _complete_checkpoints(run)[-1] / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    _kill_all()


def _swap_checkpoints(run: Run) -> None:
    """Swap the weights of the newest two checkpoints: both files are valid, but in the wrong place."""
    first, second = (path / "model.safetensors" for path in _complete_checkpoints(run)[-2:])
    temporary = first.with_suffix(".aside")
    first.rename(temporary)
    second.rename(first)
    temporary.rename(second)
    _kill_all()


def _complete_checkpoints(run: Run) -> list[Path]:
    return [
        checkpoint_format.checkpoint_path(run.checkpoints, step)
        for step in checkpoint_format.list_steps(run.checkpoints)
    ]


def _kill_all() -> None:
    for pid in find_processes(WORKER_CLASS):
        os.kill(pid, signal.SIGKILL)


WORKER_CLASS, CONTROLLER_CLASS = "RayTrainWorker", "TrainController"

FAULTS = (
    DrillFault("worker killed (SIGKILL)", _make_signal_injector(WORKER_CLASS, signal.SIGKILL)),
    DrillFault("worker terminated (SIGTERM)", _make_signal_injector(WORKER_CLASS, signal.SIGTERM)),
    DrillFault("worker stopped (SIGSTOP)", _make_signal_injector(WORKER_CLASS, signal.SIGSTOP)),
    DrillFault("controller killed (SIGKILL)", _make_signal_injector(CONTROLLER_CLASS, signal.SIGKILL)),
    DrillFault("newest checkpoint torn", _truncate_checkpoint, recomputed_intervals=2),
    DrillFault("checkpoint files swapped", _swap_checkpoints, recomputed_intervals=3),
    DrillFault("disk full", _limit_file_size),
)
