"""Faults of `rtrain drill`: real signals to real processes, real damage to real files.

Every fault receives the run and acts on processes of this machine that belong to this Ray job.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rtrain import ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import TrainConfig
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.parallel.mesh import REPLICA_AXES


@dataclass(frozen=True)
class DrillFault:
    """`inject` acts once. A fault that damages the newest checkpoint recomputes one more interval of steps."""

    name: str
    inject: Callable[[Run], None]
    recomputed_intervals: int = 1


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
    def inject(run: Run) -> None:
        os.kill(find_processes(class_name)[-1], signal_number)

    return inject


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
