"""Worker groups: processes for the attempts of runs, by Ray Train with rtrain's settings; and their placement groups.

The start of a worker group takes 10 s and more: processes, imports of torch and transformers, the process group. A
search pauses and resumes runs all the time; in a reused group, a resume costs reading a checkpoint.
"""

import gc
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from rtrain import ray_internals
from rtrain.core import atomic_write, env
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.models.device import process_group_backend
from rtrain.runs import worker
from rtrain.runs.worker import WorkerArgs

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

MIN_JOIN_TIMEOUT_S = 120
"""Minimum seconds that starting workers wait for each other: one may import torch on a busy machine."""
ELASTIC_PLACEMENT_TIMEOUT_S = 15.0
"""Seconds that an elastic worker group waits for its placement, without the start of its processes."""
POLL_INTERVAL_S = 0.5
"""Seconds between two checks whether a reused group is alive."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds for a reused group to shut down."""
RAY_SHUTDOWN_TIMEOUT_S = 120.0
"""Seconds to wait for Ray to end the processes."""


@dataclass(frozen=True)
class WorkerGroupSpec:
    """Size and resources of a worker group."""

    workers: int
    device: str = "cpu"
    """`gpu`: each worker has a GPU; else each has a CPU."""
    hang_timeout_s: float = 300.0
    """Seconds after which an unresponsive worker process counts as dead."""
    is_elastic: bool = False
    """A group that cannot be placed fails after Ray's own minute; an elastic one fails sooner, so that its size is
    chosen again: a lost node is still counted for some seconds."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node needs to get workers."""
    requests_own_nodes: bool = False
    """The run requests the workers from the autoscaler, not Ray Train."""
    gpu_share: float = 1.0
    """The share of a GPU per worker."""


class BaseWorkerGroup(Protocol):
    """Worker processes for the attempts of runs."""

    def acquire(self, run: Run) -> None:
        """Assign the group to `run`: its placement group counts as the run's."""
        ...

    def run_attempt(self, worker_args: WorkerArgs, group_spec: WorkerGroupSpec) -> None:
        """Run one attempt to its end. Raises Ray Train's error if a worker fails."""
        ...

    def discard(self, run: Run) -> None:
        """Drop the processes after a failure or a change of nodes: the next attempt gets new ones."""
        ...

    def release(self, run: Run) -> None:
        """End the assignment to `run`."""
        ...


class FreshWorkerGroup:
    """New worker processes for each attempt."""

    def acquire(self, run: Run) -> None:
        pass

    def run_attempt(self, worker_args: WorkerArgs, group_spec: WorkerGroupSpec) -> None:
        run = Run(worker_args.run)
        train_function = partial(worker.run_worker, worker_args)
        make_trainer(train_function, group_spec, run.ray_storage, callbacks=[placement_callback(run)]).fit()

    def discard(self, run: Run) -> None:
        release_group(run)

    def release(self, run: Run) -> None:
        release_group(run)


def make_trainer(
    train_function: Callable[[], None], group_spec: WorkerGroupSpec, storage: Path, *, callbacks: Sequence[Any] = ()
) -> "TorchTrainer":
    """Build a trainer that runs `train_function` on each worker. `callbacks`: Ray Train callbacks."""
    import ray.train

    is_gpu = group_spec.device == "gpu"
    env.set_ray_train_timeouts(
        group_spec.hang_timeout_s, ELASTIC_PLACEMENT_TIMEOUT_S if group_spec.is_elastic else None
    )
    requests_resources = not group_spec.requests_own_nodes and not ray_internals.is_private()
    attempt_number = len(list(storage.iterdir())) if storage.is_dir() else 0
    trainer: TorchTrainer = ray_internals.make_trainer_class(requests_resources=requests_resources)(
        train_function,
        torch_config=ray_internals.make_torch_config(
            process_group_backend(group_spec.device), int(max(group_spec.hang_timeout_s, MIN_JOIN_TIMEOUT_S))
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=group_spec.workers,
            use_gpu=is_gpu,
            resources_per_worker={"GPU": group_spec.gpu_share} if is_gpu and group_spec.gpu_share < 1 else None,
            label_selector=dict(group_spec.node_labels) or None,  # type: ignore[call-arg]
        ),
        # A new name per attempt: otherwise Ray loads its snapshot of the last one, which rtrain does not use.
        run_config=ray.train.RunConfig(
            name=f"{attempt_number:03d}",
            storage_path=str(storage),
            callbacks=list(callbacks),
            # Ray's controller would retry a failing start for ever, without a message.
            failure_config=ray.train.FailureConfig(controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )
    return trainer


# ------------------------------------------------------------------------------------------------------ reused groups


class MailboxServer:
    """Append-only mailboxes. Messages are read by number, so all workers of a group read the same ones, and a restarted
    process can read them again."""

    def __init__(self) -> None:
        import asyncio

        self._mailboxes: dict[str, list[Any]] = defaultdict(list)
        self._message_added = asyncio.Condition()

    async def put(self, mailbox: str, message: Any) -> None:
        async with self._message_added:
            self._mailboxes[mailbox].append(message)
            self._message_added.notify_all()

    async def take(self, mailbox: str, number: int) -> Any:
        """Return message `number` of the mailbox, from 0; wait until it exists."""
        async with self._message_added:
            await self._message_added.wait_for(lambda: len(self._mailboxes[mailbox]) > number)
            return self._mailboxes[mailbox][number]


def start_mailbox_server() -> Any:
    """Start a mailbox server on the head node, which is not preemptible."""
    resources = {ray_internals.HEAD_RESOURCE: 0.001}
    options: dict[str, Any] = {"num_cpus": 0, "resources": resources, "max_concurrency": 1000}
    return ray.remote(**options)(MailboxServer).remote()


class ReusableWorkerGroup:
    """A worker group that runs attempts of one or several runs, one after the other.

    It starts with the first attempt, and restarts if an attempt needs another specification or the last one failed.
    The folder of `group_run` has Ray Train's files and the id of the placement group.
    """

    def __init__(self, group_run: Run, mailbox_server: Any):
        self._group_run, self._mailbox_server = group_run, mailbox_server
        self._group_spec: WorkerGroupSpec | None = None
        self._mailbox, self._attempts_sent = "", 0
        self._fit_thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        group_run.folder.mkdir(parents=True, exist_ok=True)
        release_group(group_run)  # left by a killed process

    @property
    def is_alive(self) -> bool:
        return self._fit_thread is not None and self._fit_thread.is_alive()

    def acquire(self, run: Run) -> None:
        if self.is_alive:
            share_group(self._group_run, run)

    def run_attempt(self, worker_args: WorkerArgs, group_spec: WorkerGroupSpec) -> None:
        if not (self.is_alive and group_spec == self._group_spec):
            self.shut_down()
            self._start_group(group_spec)
        run = Run(worker_args.run)
        ray.get(self._mailbox_server.put.remote(self._mailbox, worker_args))
        reply = self._mailbox_server.take.remote(f"{self._mailbox} done", self._attempts_sent)
        self._attempts_sent += 1
        while not ray.wait([reply], timeout=POLL_INTERVAL_S)[0]:
            if not self.is_alive:
                raise self._errors[0] if self._errors else RuntimeError("the workers ended before their shutdown")
            share_group(self._group_run, run)

    def discard(self, run: Run) -> None:
        self.release(run)
        release_group(self._group_run)
        self.shut_down()

    def release(self, run: Run) -> None:
        run.placement_group.unlink(missing_ok=True)

    def shut_down(self) -> None:
        """Shut down the processes, if there are any. If Ray does not respond, the daemon thread is left: it ends with
        this process."""
        if self._fit_thread is not None and self._fit_thread.is_alive():
            self._mailbox_server.put.remote(self._mailbox, None)
            self._fit_thread.join(SHUTDOWN_TIMEOUT_S)
        release_group(self._group_run)
        if self._fit_thread is not None:
            self._fit_thread.join(RAY_SHUTDOWN_TIMEOUT_S)
        self._fit_thread = self._group_spec = None

    def _start_group(self, group_spec: WorkerGroupSpec) -> None:
        errors: list[Exception] = []  # a new list: an abandoned thread may still append to the old one
        self._group_spec, self._errors, self._attempts_sent = group_spec, errors, 0
        self._mailbox = f"{self._group_run.folder} {time.time_ns()}"
        trainer = make_trainer(
            partial(_run_attempts, self._mailbox_server, self._mailbox),
            group_spec,
            self._group_run.ray_storage,
            callbacks=[placement_callback(self._group_run)],
        )

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:
                errors.append(error)

        self._fit_thread = threading.Thread(target=fit, daemon=True, name="rtrain-workers")
        self._fit_thread.start()


def _run_attempts(mailbox_server: Any, mailbox: str) -> None:
    """The train function of a reusable group, on every worker: run attempts until the shutdown message."""
    import ray.train
    import transformers  # noqa: F401  # while the first attempt is prepared

    stream.warm_up()
    is_rank_zero = ray.train.get_context().get_world_rank() == 0
    for number in itertools.count():
        worker_args: WorkerArgs | None = ray.get(mailbox_server.take.remote(mailbox, number))
        if worker_args is None:
            return
        worker.run_worker(worker_args)
        gc.collect()  # frees the network of this attempt before the next is built
        env.release_freed_memory()
        if is_rank_zero:
            mailbox_server.put.remote(f"{mailbox} done", number)


# --------------------------------------------------------------------------------------------------- placement groups


def placement_callback(run: Run) -> Any:
    """Return a Ray Train callback that writes the id of the workers' placement group to a file of the run.

    A killed controller cannot remove the group, and Ray's own cleaner asks the State API, which needs the dashboard. A
    leaked group keeps its CPUs, and the next workers wait for ever.
    """
    return ray_internals.make_group_start_callback(partial(atomic_write.write_text, run.placement_group))


def share_group(owner: Run, run: Run) -> None:
    """Record `owner`'s placement group as the one of `run`."""
    if owner.placement_group.is_file() and not run.placement_group.is_file():
        atomic_write.write_text(run.placement_group, owner.placement_group.read_text())


def workers_by_node(run: Run) -> Counter[str]:
    """Return the number of the run's workers by node id; empty while they wait for CPUs or GPUs."""
    if not run.placement_group.is_file():
        return Counter()
    group = ray_internals.get_placement_group(run.placement_group.read_text())
    table: dict[str, Any] = placement_group_table(group)
    return Counter(node for node in table.get("bundles_to_node_id", {}).values() if node)


def release_group(run: Run) -> bool:
    """Remove the recorded group and its processes. Returns whether there was one."""
    if not run.placement_group.is_file():
        return False
    remove_placement_group(ray_internals.get_placement_group(run.placement_group.read_text()))
    run.placement_group.unlink()
    return True
