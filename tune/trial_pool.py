"""The slots of a search: trials of Ray Tune, each a worker group that takes one order after another.

Ray Tune gives a slot its process, and a new one where that dies, however often; its workers take their CPUs or GPUs by
themselves. What is tried, and for how long, is decided in `search`: the driver puts orders into a slot's box, and the
slot puts what they came to into a common one. A slot that is killed loses the order that it had in hand, and nothing
else. Whether it is to be started again is judged here: a trial may be what kills it, and that is no fault of the slot.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.tune

from rtrain import ray_internals
from rtrain.cluster import capacity, placement
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.runs import resource_leases, stop_request, worker_pool
from tune import trainable
from tune.trainable import Order, Outcome, Task

# A slot takes no CPU itself, since its workers take theirs. Tune refuses an empty bundle, so the slot takes a sliver of
# the resource that marks the head node.
RESOURCES = {"CPU": 0, ray_internals.HEAD_RESOURCE: 0.001}
ANSWERS = "answers"
LOSSES = 3
"""How often an order may be lost with its slot before the trial counts as failed, and a slot may die without one, since
it last did one, before the search ends."""
LOOK_S = 1.0
"""How soon a slot that is not started again is noticed."""
IDLE_S = 30.0
"""Seconds that a slot without an order keeps its workers; starting them again takes some ten."""
END_S = 60.0
"""Seconds that the slots have to end, once they are told to."""


@dataclass(frozen=True)
class Answer:
    """What a slot tells: that it is up (no order), or what an order came to."""

    slot: int
    box: str
    """Where this process of the slot takes its orders."""
    order: Order | None = None
    outcomes: tuple[Outcome, ...] = ()


def number(config: Config, device: str) -> int:
    """How many slots the cluster has room for, or as many as are asked for.

    Raises `ConfigError` where so many workers and data tasks do not fit, with the nearest number that does.
    """
    train, asked = config.recipe.train, config.deploy.tune.concurrent
    needs = capacity.needs(config, device)
    spare, room = needs.of(train.workers).data, capacity.most(device, needs.labels)
    each = train.workers + spare if device == "cpu" else train.workers
    fits = max(1, placement.runs(capacity.up(), capacity.may_start(), needs, train.workers))
    if asked is None or asked <= fits:
        return asked or fits
    wanted = f"{asked} trials of {train.workers} workers need {asked * each} logical {capacity.NEEDS[device]}s"
    with_data = f", {spare} a trial for data tasks" if device == "cpu" else ""
    nearest = f"write {fits}, or {max(1, room // asked - (spare if device == 'cpu' else 0))} for train.workers"
    reason = f"{wanted}{with_data}; the Ray cluster has {room}"
    raise ConfigError([Problem("tune.concurrent", asked, reason, nearest, code="too_large")])


def _slot(settings: dict[str, Any], office: Any, task: Task) -> None:
    """The trainable of Ray Tune: do what is ordered until there is nothing more."""
    slot = int(settings["slot"])
    box = f"slot {slot} {time.time_ns()}"
    workers = worker_pool.Kept(_folder(Run(task.search), slot), office)
    ray.get(office.put.remote(ANSWERS, Answer(slot, box)))
    try:
        for taken in itertools.count():
            order = _next(office.take.remote(box, taken), workers)
            if order is None:
                return
            outcomes = trainable.run(order, task, workers)
            ray.get(office.put.remote(ANSWERS, Answer(slot, box, order, tuple(outcomes))))
    finally:
        workers.end()


def _next(taken: Any, workers: worker_pool.Kept) -> Order | None:
    """The slot's next order. While there is none, its workers give their CPUs back: where a node is gone, another slot
    may be waiting for just those."""
    if not ray.wait([taken], timeout=IDLE_S)[0]:
        workers.end()
    order: Order | None = ray.get(taken)
    return order


def _folder(search: Run, slot: int) -> Run:
    return Run(search.ray / f"slot-{slot:02d}")


class Deaths(ray.tune.Callback):
    """What Ray Tune tells of slots whose process has died, by their numbers."""

    def __init__(self) -> None:
        self.died: list[int] = []
        """One entry for each death after which the slot is started again."""
        self.ended: list[int] = []
        """Those that are not: Tune does not try again what dies before it has begun."""

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.died.append(int(trial.config["slot"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.ended.append(int(trial.config["slot"]))


@dataclass
class Slots:
    """The slots of a search that is running."""

    search: Run
    office: Any
    tuner: threading.Thread
    deaths: Deaths = field(default_factory=Deaths)
    blameless: Counter[int] = field(default_factory=Counter)
    """By slot: deaths since it last did an order or lost one, so that no trial is to blame for them."""
    boxes: dict[int, str] = field(default_factory=dict)
    """Where each slot that is up takes its orders."""
    orders: dict[int, Order] = field(default_factory=dict)
    """What each slot has in hand."""
    answers: int = 0
    """Answers that were read."""
    error: Exception | None = None
    asked: stop_request.Asked = field(default_factory=stop_request.Asked)
    """Whether the search is to end, with what its trials have reached saved."""

    @property
    def idle(self) -> list[int]:
        return [] if self.asked.given else sorted(self.boxes.keys() - self.orders.keys())

    def give(self, slot: int, order: Order) -> None:
        self.orders[slot] = order
        ray.get(self.office.put.remote(self.boxes[slot], order))

    def wait(self, look: Callable[[], None] = lambda: None) -> tuple[Order | None, tuple[Outcome, ...] | None]:
        """The next answer: (order, what it came to). (order, None): the slot died with the order in hand. (None, ()): a
        slot is up. `look` is called about every `LOOK_S` until then.

        Raises `UserError` where a slot dies again and again without an order, and where no slot is left; `AskedToEnd`
        where the search was asked to end and no order is in hand any more.
        """
        waits = self.office.take.remote(ANSWERS, self.answers)
        while True:
            look()
            if self.asked.given:
                self._give_notice()
            ended = [slot for slot in self.deaths.ended if slot in self.boxes]
            if ray.wait([waits], timeout=LOOK_S)[0]:
                break
            if not self.tuner.is_alive():
                text = f"Ray Tune has ended before the search: {self.error or 'no slot is left'}"
                raise UserError(text, code="workers_lost")
            self._count_deaths()
            for slot in ended:  # what they have answered before is read by now
                del self.boxes[slot]
                if (lost := self.orders.pop(slot, None)) is not None:
                    return lost, None
        answer: Answer = ray.get(waits)
        self.answers += 1
        self._count_deaths()
        if answer.order is None:
            lost = self.orders.pop(answer.slot, None)
            self.boxes[answer.slot] = answer.box
            if lost is not None:
                self.blameless[answer.slot] = 0
            return lost, () if lost is None else None
        del self.orders[answer.slot]
        self.blameless[answer.slot] = 0
        return answer.order, answer.outcomes

    def _give_notice(self) -> None:
        if not self.orders:
            raise stop_request.AskedToEnd(f"{self.search} was asked to end; the same command with --resume goes on")
        for order in self.orders.values():  # again and again: a trial that starts takes what was there before
            with suppress(FileNotFoundError):  # it has no folder yet
                stop_request.give(self.search.trial(order.trial), stop_request.ASKED)

    def _count_deaths(self) -> None:
        while self.deaths.died:
            slot = self.deaths.died.pop(0)
            self.blameless[slot] += 1
            if self.blameless[slot] > LOSSES:
                raise UserError(
                    f"the process of slot {slot} died {self.blameless[slot]} times while it started or had nothing to "
                    "do; the logs of Ray's workers say why. The same command with --resume goes on",
                    code="workers_lost",
                )
            if slot not in self.orders:
                self.boxes.pop(slot, None)  # nobody reads it any more


@contextmanager
def opened(config: Config, task: Task, count: int) -> Iterator[Slots]:
    """Start so many slots. They end with the block, and at once where it raises."""
    search, office, deaths = Run(task.search), worker_pool.post(), Deaths()
    started = len(list(search.ray.iterdir())) if search.ray.is_dir() else 0
    ending = search.folder / ".ending"
    ending.unlink(missing_ok=True)
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(partial(_slot, office=office, task=task), RESOURCES),
        param_space={"slot": ray.tune.grid_search(list(range(count)))},
        run_config=ray.tune.RunConfig(
            # Each start has a new name. Under an old name Ray would unpickle its state of the last start.
            name=f"tune-{started:03d}",
            storage_path=str(search.ray),
            failure_config=ray.tune.FailureConfig(max_failures=-1),
            stop=_Told(ending),
            callbacks=[ray_internals.silent_progress(), deaths],
            verbose=0,
        ),
    )

    def fit() -> None:
        try:
            tuner.fit()
        except Exception as error:
            slots.error = error

    slots = Slots(search, office, threading.Thread(target=fit, daemon=True, name="rtrain-tune"), deaths)
    slots.tuner.start()
    try:
        with slots.asked:
            yield slots
        for box in slots.boxes.values():
            ray.get(office.put.remote(box, None))
        slots.tuner.join(END_S)
    finally:
        # Tune's thread must not be inside Ray's core when the session ends.
        ending.touch()
        slots.tuner.join(worker_pool.UNANSWERED_S)
        ending.unlink(missing_ok=True)
        for slot in range(count):
            resource_leases.release(_folder(search, slot))
        ray.kill(office)


class _Told(ray.tune.Stopper):
    """Stops all trials of Ray Tune once a file is there."""

    def __init__(self, file: Path):
        self._file = file

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._file.exists()
