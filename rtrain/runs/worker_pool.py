"""Worker processes that are reused by several attempts.

The start of a worker group takes 10 s and more: processes, imports of torch and transformers, the process group. A
search pauses and resumes runs all the time; with reused processes, a resume costs reading a checkpoint.

"""

import gc
import itertools
import threading
import time
from collections import defaultdict
from functools import partial
from typing import Any

import ray

from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.ray_internals import HEAD_RESOURCE
from rtrain.runs import resource_leases, worker, worker_group
from rtrain.runs.worker import WorkerArgs

POLL_INTERVAL_S = 0.5
"""Seconds between two checks whether the group is alive."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds for a group to shut down."""
RAY_SHUTDOWN_TIMEOUT_S = 120.0
"""Seconds to wait for Ray to end the processes."""


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
    options: dict[str, Any] = {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}, "max_concurrency": 1000}
    return ray.remote(**options)(MailboxServer).remote()


class ReusableWorkerGroup:
    """A worker group that runs attempts of one or several runs, one after the other.

    It starts with the first attempt, and restarts if an attempt needs another specification or the last one failed.
    The folder of `group_run` has Ray Train's files and the id of the placement group.

    """

    def __init__(self, group_run: Run, mailbox_server: Any):
        self._group_run, self._mailbox_server = group_run, mailbox_server
        self._group_spec: worker_group.WorkerGroupSpec | None = None
        self._mailbox, self._attempts_sent = "", 0
        self._fit_thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        group_run.folder.mkdir(parents=True, exist_ok=True)
        resource_leases.release_group(group_run)  # left by a killed process

    @property
    def is_alive(self) -> bool:
        return self._fit_thread is not None and self._fit_thread.is_alive()

    def acquire(self, run: Run) -> None:
        if self.is_alive:
            resource_leases.share_group(self._group_run, run)

    def run_attempt(self, worker_args: WorkerArgs, group_spec: worker_group.WorkerGroupSpec) -> None:
        if not (self.is_alive and group_spec == self._group_spec):
            self.shut_down()
            self._start_group(group_spec)
        assert self._fit_thread is not None  # `_start_group`
        ray.get(self._mailbox_server.put.remote(self._mailbox, worker_args))
        reply, run = (
            self._mailbox_server.take.remote(f"{self._mailbox} done", self._attempts_sent),
            Run(worker_args.run),
        )
        self._attempts_sent += 1
        while not ray.wait([reply], timeout=POLL_INTERVAL_S)[0]:
            if not self._fit_thread.is_alive():
                raise self._errors[0] if self._errors else RuntimeError("the workers ended before their shutdown")
            resource_leases.share_group(self._group_run, run)

    def discard(self, run: Run) -> None:
        self.release(run)
        resource_leases.release_group(self._group_run)
        self.shut_down()

    def release(self, run: Run) -> None:
        run.placement_group.unlink(missing_ok=True)

    def shut_down(self) -> None:
        """Shut down the processes, if there are any. If Ray does not respond, the daemon thread is left: it ends with
        this process."""
        if self._fit_thread is not None and self._fit_thread.is_alive():
            self._mailbox_server.put.remote(self._mailbox, None)
            self._fit_thread.join(SHUTDOWN_TIMEOUT_S)
        resource_leases.release_group(self._group_run)
        if self._fit_thread is not None:
            self._fit_thread.join(RAY_SHUTDOWN_TIMEOUT_S)
        self._fit_thread = self._group_spec = None

    def _start_group(self, group_spec: worker_group.WorkerGroupSpec) -> None:
        errors: list[Exception] = []  # a new list: an abandoned thread may still append to the old one
        self._group_spec, self._errors, self._attempts_sent = group_spec, errors, 0
        self._mailbox = f"{self._group_run.folder} {time.time_ns()}"
        trainer = worker_group.make_trainer(
            partial(_run_attempts, self._mailbox_server, self._mailbox),
            group_spec,
            self._group_run.ray_storage,
            callbacks=[resource_leases.placement_callback(self._group_run)],
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

    _import_libraries()
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


def _import_libraries() -> None:
    """Import the libraries of every attempt while the first one is prepared."""
    import transformers  # noqa: F401

    stream.warm_up()
