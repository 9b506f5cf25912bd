"""Worker processes that are kept from one start to the next.

Starting a worker group takes 10 s and more: processes, imports of torch and transformers, their process group. A search
freezes and thaws runs all the time; with the processes kept, a thaw costs reading a checkpoint.
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
from rtrain.runs.worker import Start

LOOK_EVERY_S = 0.5
"""How soon a group that has died is noticed."""
END_S = 20.0
"""Seconds that a group has to end when it is told to."""
UNANSWERED_S = 120.0
"""Seconds after which a Ray that does not end the processes is not waited for any more."""


class Post:
    """Boxes of messages that are only added to. Each is read by its number, so that all workers of a group read the
    same ones, and whoever starts again may read them again."""

    def __init__(self) -> None:
        import asyncio

        self._boxes: dict[str, list[Any]] = defaultdict(list)
        self._more = asyncio.Condition()

    async def put(self, box: str, message: Any) -> None:
        async with self._more:
            self._boxes[box].append(message)
            self._more.notify_all()

    async def take(self, box: str, number: int) -> Any:
        """Message `number` of the box, from 0; waits until it is there."""
        async with self._more:
            await self._more.wait_for(lambda: len(self._boxes[box]) > number)
            return self._boxes[box][number]


def post() -> Any:
    """A post office on the head node, which no spot notice takes away."""
    options: dict[str, Any] = {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}, "max_concurrency": 1000}
    return ray.remote(**options)(Post).remote()


class Kept:
    """A worker group that makes one start after another, of the same run or of others.

    It is started with the first one, and anew where a start needs another layout or the last one failed. `folder` has
    Ray Train's files of it, and the id of its placement group.
    """

    def __init__(self, folder: Run, office: Any):
        self._own, self._post = folder, office
        self._layout: worker_group.Layout | None = None
        self._box, self._sent = "", 0
        self._fit: threading.Thread | None = None
        self._errors: list[Exception] = []
        folder.folder.mkdir(parents=True, exist_ok=True)
        resource_leases.release(folder)  # what a process before this one held, if that was killed

    @property
    def alive(self) -> bool:
        return self._fit is not None and self._fit.is_alive()

    def taken(self, run: Run) -> None:
        if self.alive:
            resource_leases.lend(self._own, run)

    def train(self, start: Start, layout: worker_group.Layout) -> None:
        if not (self.alive and layout == self._layout):
            self.end()
            self._begin(layout)
        assert self._fit is not None  # `_begin`
        ray.get(self._post.put.remote(self._box, start))
        done, run = self._post.take.remote(f"{self._box} done", self._sent), Run(start.run)
        self._sent += 1
        while not ray.wait([done], timeout=LOOK_EVERY_S)[0]:
            if not self._fit.is_alive():
                raise self._errors[0] if self._errors else RuntimeError("the workers ended before they were told to")
            resource_leases.lend(self._own, run)

    def lost(self, run: Run) -> None:
        self.left(run)
        resource_leases.release(self._own)
        self.end()

    def left(self, run: Run) -> None:
        run.placement_group.unlink(missing_ok=True)

    def end(self) -> None:
        """End the processes, if there are any. Where Ray does not answer, their thread is left behind: it must not hold
        the command, and this process takes it along when it ends."""
        if self._fit is not None and self._fit.is_alive():
            self._post.put.remote(self._box, None)
            self._fit.join(END_S)
        resource_leases.release(self._own)
        if self._fit is not None:
            self._fit.join(UNANSWERED_S)
        self._fit = self._layout = None

    def _begin(self, layout: worker_group.Layout) -> None:
        errors: list[Exception] = []  # a list of its own: a thread left behind may still add to its list
        self._layout, self._errors, self._sent = layout, errors, 0
        self._box = f"{self._own.folder} {time.time_ns()}"
        made = worker_group.trainer(
            partial(_serve, self._post, self._box),
            layout,
            self._own.ray,
            callbacks=[resource_leases.remember(self._own)],
        )

        def fit() -> None:
            try:
                made.fit()
            except Exception as error:
                errors.append(error)

        self._fit = threading.Thread(target=fit, daemon=True, name="rtrain-workers")
        self._fit.start()


def _serve(office: Any, box: str) -> None:
    """The train function of a kept group, on every worker: one start after another, until there is none."""
    import ray.train

    _import()
    first = ray.train.get_context().get_world_rank() == 0
    for number in itertools.count():
        start: Start | None = ray.get(office.take.remote(box, number))
        if start is None:
            return
        worker.run(start)
        gc.collect()  # the network of this start, before the next one's is built
        env.give_memory_back()
        if first:
            office.put.remote(f"{box} done", number)


def _import() -> None:
    """What every start needs, while the first is being prepared."""
    import transformers  # noqa: F401

    stream.warm_up()
