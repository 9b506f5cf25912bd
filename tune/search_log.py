"""What one start of a search writes down while its slots work: the journal, the log, and what the user is told."""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rtrain.checkpoint.remote_copy import Replica, Unreachable
from rtrain.config import Cluster
from rtrain.core import events
from rtrain.core.errors import TryAgain
from rtrain.core.run_folder import Run
from rtrain.runs import controller
from tune.history import History, Journal
from tune.trainable import AGAIN, Order, Outcome, seconds_of
from tune.trial_pool import LOSSES, Slots


class Copy:
    """The copy of a search at `cluster.storage`: settings, log and journal. One whose folder is lost goes on from it.

    Written by the start that holds the search's lock. One that is still alive on another machine, whose folder was
    lost to this one, is refused (`replica.Lost`).
    """

    def __init__(self, search: Run, storage: str):
        self._search, self._storage = search, storage
        self._replica: Replica | None = None

    def write(self) -> None:
        """Bring the copy to where the folder is. Raises `Unreachable`; the next call does it all then."""
        if self._replica is None:
            self._search.append("claimed", token=uuid.uuid4().hex)
            owners = tuple(event["token"] for event in self._search.events("claimed"))
            self._replica = Replica(self._storage, self._search.name, owners)
            self._replica.refuse_other(self._search.folder)
            self._replica.claim()
        self._replica.push(self._search.folder, [])


class Record:
    """The journal and the log of a search, and its user."""

    def __init__(self, search: Run, on_event: controller.OnEvent | None, cluster: Cluster | None = None):
        """With a `cluster` that has a storage, what is written down is copied there."""
        self._search, self._journal, self._on_event = search, Journal(search.trials), on_event
        self._copy = Copy(search, cluster.storage) if cluster and cluster.storage else None
        self._is_away = False
        """Whether the storage did not answer the last time."""
        self._follow: events.Follow | None = None
        self._lost: Counter[int] = Counter()

    @property
    def history(self) -> History:
        return self._journal.history

    def say(self, event: dict[str, Any]) -> None:
        """Tell the user an event."""
        if self._on_event is not None:
            self._on_event(event)

    def write(self, kind: str, **fields: Any) -> None:
        """Add an event to the journal, and tell the user. A trial is asked for in the copy before it begins: its own
        copy would be in the way of another trial of its number."""
        self._journal.append(kind, **fields)
        if kind != "spent":
            self._copy_out()
        if kind == "asked" and self._follow is not None:
            self._follow.add(self._search.trial(fields["trial"]).folder, {"trial": fields["trial"]})
        self.say({"kind": "search", "what": kind, **fields})

    def _copy_out(self) -> None:
        """Copy what is new. A storage that does not answer is told of once; what it lacks goes with the next event."""
        if self._copy is None:
            return
        try:
            self._copy.write()
            self._is_away = False
        except Unreachable as error:
            if not self._is_away:
                self._search.append("uncopied", error=str(error))
                self.say({"kind": "uncopied", "error": str(error)})
            self._is_away = True

    def finish_copy(self) -> None:
        """Make the copy of a search that has ended whole. Raises `TryAgain` where the storage does not answer."""
        try:
            if self._copy is not None:
                self._copy.write()
        except Unreachable as error:
            way_on = "the same command with --resume copies the rest"
            text = f"{self._search} has ended, and its copy is not whole ({error}); {way_on}"
            raise TryAgain(text, code="unreachable") from error

    @contextmanager
    def following(self) -> Iterator[None]:
        """In the block the user is told what the trials log, those too that are still to be asked for."""
        trials = [(self._search.trial(trial.number).folder, {"trial": trial.number}) for trial in self.history.trials]
        with events.Follow(trials, self._on_event) as self._follow:
            yield

    def give(self, slots: Slots, slot: int, order: Order) -> None:
        """Give an order to an idle slot."""
        self._search.append("ordered", trial=order.trial, rung=order.rung, slot=slot)
        slots.give(slot, order)

    def hear(self, slots: Slots, look: Callable[[], None] = lambda: None) -> None:
        """Wait for a slot's next answer, with a `look` about every second, and write down what it tells. An order that
        was lost is due again, unless it was lost too often: then its trial has failed. Raises `TryAgain` where
        something is wrong with the machine."""
        order, outcomes = slots.wait(look)
        if order is None:
            self._search.append("slot_up")
        elif outcomes is None:
            self._search.append("lost", trial=order.trial, rung=order.rung)
            self._lost[order.trial] += 1
            if self._lost[order.trial] > LOSSES:
                error = f"the process that ran it died {LOSSES + 1} times"
                run = self._search.trial(order.trial)
                self.write("failed", trial=order.trial, error=error, seconds=seconds_of(run))
        else:
            for outcome in outcomes:
                self._heard(order, outcome)

    def _heard(self, order: Order, outcome: Outcome) -> None:
        if outcome["kind"] == AGAIN:
            way_on = "the same command with --resume goes on"
            raise TryAgain(f"trial {order.trial} could not go on: {outcome['error']}; {way_on}", code="machine_failed")
        fields = {name: value for name, value in outcome.items() if name != "kind"}
        self.write(outcome["kind"], trial=order.trial, **fields)
