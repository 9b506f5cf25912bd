"""What `rtrain drill` does to its own run. Real signals to real processes, real damage to real files.

Every fault is given the run and acts on processes of this machine that belong to this Ray job.
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
from rtrain.config import Train
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.parallel.mesh import WITHIN


@dataclass(frozen=True)
class Fault:
    """`inject` acts once. Where it spoils the newest checkpoint, one more interval of updates is recomputed."""

    name: str
    inject: Callable[[Run], None]
    intervals: int = 1


def processes(class_name: str) -> list[int]:
    """Process ids of this job's living actors of a class, in the order in which they were started."""
    import ray

    job, node = ray.get_runtime_context().get_job_id(), ray.get_runtime_context().get_node_id()
    actors = [
        actor
        for actor in ray_internals.actors()
        if actor["ActorClassName"].endswith(class_name) and actor["State"] == "ALIVE" and actor["JobID"] == job
    ]
    if any(actor["Address"]["NodeID"] != node for actor in actors):
        reason = "drill: a worker is on another machine, where it cannot be killed; drill on a single machine"
        raise UserError(reason, code="unsupported")
    return [actor["Pid"] for actor in sorted(actors, key=lambda actor: (actor["StartTime"], actor["Pid"]))]


def neighbours(train: Train, workers: int) -> dict[str, int]:
    """For each kind of group in which workers share a model or its gradients, a rank with which rank 0 is in such a
    group and in no other. Empty where every worker has the whole model: all of them are alike then."""
    found, apart = dict[str, int](), 1
    for what in reversed(WITHIN):  # from the innermost axis of the grid
        if (size := getattr(train, what)) > 1:
            found[f"{what}={size}"] = apart
            apart *= size
    if workers > apart and (apart > 1 or train.shard > 1):
        found[f"shard={train.shard}" if train.shard > 1 else "replicas"] = apart
    return found


def process_of(run: Run, rank: int) -> int:
    """The process of a rank, by the file in which its watch would tell where it hung."""
    told = str(run.stalled(rank).resolve())
    for pid in processes(WORKER):
        with contextlib.suppress(psutil.Error):
            if told in [file.path for file in psutil.Process(pid).open_files()]:
                return pid
    raise UserError(f"drill: no process is rank {rank}", code="not_found")


def of_groups(train: Train, workers: int) -> tuple[Fault, ...]:
    """For each kind of group a rank of it killed, and one stopped."""

    def at(rank: int, number: int) -> Callable[[Run], None]:
        return lambda run: os.kill(process_of(run, rank), number)

    kinds = {"killed (SIGKILL)": signal.SIGKILL, "stopped (SIGSTOP)": signal.SIGSTOP}
    return tuple(
        Fault(f"rank {rank} by {group} {what}", at(rank, number))
        for group, rank in neighbours(train, workers).items()
        for what, number in kinds.items()
    )


def workers_left() -> list[str]:
    """Processes of workers and controllers of this Ray session, whatever Ray itself still knows of them."""
    found = []
    for pid in ray_internals.session_processes():
        with contextlib.suppress(psutil.Error):
            title = " ".join(psutil.Process(pid).cmdline())
            if title.startswith((f"ray::{WORKER}", f"ray::{CONTROLLER}")):
                found.append(f"process {pid} ({title})")
    return found


def _signal(class_name: str, number: int) -> Callable[[Run], None]:
    def inject(run: Run) -> None:
        os.kill(processes(class_name)[-1], number)

    return inject


def _full_disk(run: Run) -> None:
    """No worker may write a file beyond its next page: what a full disk does to a save, without filling one."""
    for pid in processes(WORKER):
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _torn(run: Run) -> None:
    """The newest checkpoint loses the end of its weights, as after a power cut, and the workers die."""
    path = _complete(run)[-1] / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    _kill_all()


def _swapped(run: Run) -> None:
    """The newest two checkpoints exchange their weights: both files are valid, neither is where it belongs."""
    one, other = (path / "model.safetensors" for path in _complete(run)[-2:])
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    _kill_all()


def _complete(run: Run) -> list[Path]:
    return [checkpoint_format.path_of(run.checkpoints, update) for update in checkpoint_format.updates(run.checkpoints)]


def _kill_all() -> None:
    for pid in processes(WORKER):
        os.kill(pid, signal.SIGKILL)


WORKER, CONTROLLER = "RayTrainWorker", "TrainController"

FAULTS = (
    Fault("worker killed (SIGKILL)", _signal(WORKER, signal.SIGKILL)),
    Fault("worker terminated (SIGTERM)", _signal(WORKER, signal.SIGTERM)),
    Fault("worker stopped (SIGSTOP)", _signal(WORKER, signal.SIGSTOP)),
    Fault("controller killed (SIGKILL)", _signal(CONTROLLER, signal.SIGKILL)),
    Fault("newest checkpoint torn", _torn, intervals=2),
    Fault("checkpoint files swapped", _swapped, intervals=3),
    Fault("disk full", _full_disk),
)
