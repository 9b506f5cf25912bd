"""The journal, the log, the user's events and the remote copy of an attempt of a search."""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rtrain.checkpoint.remote_copy import RemoteCopy, StorageUnreachableError
from rtrain.config import ClusterConfig
from rtrain.core import events
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run
from rtrain.runs import controller
from tune.history import History, Journal
from tune.trainable import RETRY, Assignment, training_seconds
from tune.trial_pool import MAX_LOSSES, SlotPool


class SearchLog:
    def __init__(self, search: Run, on_event: controller.OnEvent | None, cluster: ClusterConfig | None = None):
        """The search is copied to the storage of `cluster`, if there is one."""
        self._search, self._journal, self._on_event = search, Journal(search.trials), on_event
        self._storage = None if cluster is None else cluster.storage
        self._remote_copy: RemoteCopy | None = None
        self._is_storage_unreachable = False
        """Whether the last copy failed."""
        self._followers: events.EventFollower | None = None
        self._lost_counts: Counter[int] = Counter()

    @property
    def history(self) -> History:
        return self._journal.history

    def notify(self, event: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event to the journal and notify the user. A new trial is in the remote journal before it starts:
        otherwise its remote copy would block another trial with its number."""
        self._journal.append(kind, **fields)
        if kind != "usage":
            self._push_changes()
        if kind == "created" and self._followers is not None:
            self._followers.add(self._search.trial(fields["trial"]).folder, {"trial": fields["trial"]})
        self.notify({"kind": "search", "what": kind, **fields})

    def _push_changes(self) -> None:
        """Copy new events. An unreachable storage is reported once; the next event copies the rest."""
        try:
            self._update_copy()
            self._is_storage_unreachable = False
        except StorageUnreachableError as error:
            if not self._is_storage_unreachable:
                self._search.append_event("remote_copy_incomplete", error=str(error))
                self.notify({"kind": "remote_copy_incomplete", "error": str(error)})
            self._is_storage_unreachable = True

    def _update_copy(self) -> None:
        """Update the remote copy at `cluster.storage`, if there is one: settings, log and journal, from which a lost
        folder is restored.

        The attempt that holds the search's lock writes it. An older attempt on another machine is refused
        (`remote_copy.RunTakenOverError`). After `StorageUnreachableError` the next call copies all changes.
        """
        if self._storage is None:
            return
        if self._remote_copy is None:
            self._search.append_event("storage_claimed", token=uuid.uuid4().hex)
            owner_tokens = tuple(event["token"] for event in self._search.events("storage_claimed"))
            self._remote_copy = RemoteCopy(self._storage, self._search.name, owner_tokens)
            self._remote_copy.refuse_other_run(self._search.folder)
            self._remote_copy.claim_ownership()
        self._remote_copy.push(self._search.folder, [])

    def complete_copy(self) -> None:
        """Complete the remote copy of an ended search. Raises `TemporaryFailureError` if the storage is unreachable."""
        try:
            self._update_copy()
        except StorageUnreachableError as error:
            hint = "the same command with --resume copies the rest"
            message = f"{self._search} has ended, and its remote copy is incomplete ({error}); {hint}"
            raise TemporaryFailureError(message, code="unreachable") from error

    @contextmanager
    def follow_trials(self) -> Iterator[None]:
        """In the block, the user gets the log events of all trials, including new ones."""
        runs = [(self._search.trial(trial.number).folder, {"trial": trial.number}) for trial in self.history.trials]
        with events.EventFollower(runs, self._on_event) as self._followers:
            yield

    def dispatch(self, slot_pool: SlotPool, slot: int, assignment: Assignment) -> None:
        self._search.append_event("assigned", trial=assignment.trial, rung=assignment.rung, slot=slot)
        slot_pool.assign(slot, assignment)

    def receive(self, slot_pool: SlotPool, on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait for the next report of a slot and log its outcomes; `on_poll` is called about every second.

        A lost assignment is repeated; after too many losses its trial fails. Raises `TemporaryFailureError` after a
        failure of the machine.
        """
        assignment, outcomes = slot_pool.wait(on_poll)
        if assignment is None:
            self._search.append_event("slot_started")
            return
        if outcomes is None:
            self._search.append_event("assignment_lost", trial=assignment.trial, rung=assignment.rung)
            self._lost_counts[assignment.trial] += 1
            if self._lost_counts[assignment.trial] > MAX_LOSSES:
                seconds = training_seconds(self._search.trial(assignment.trial))
                error = f"its process died {MAX_LOSSES + 1} times"
                self.write("failed", trial=assignment.trial, error=error, seconds=seconds)
        for outcome in outcomes or ():
            if outcome["kind"] == RETRY:
                hint = "continue with the same command and --resume"
                raise TemporaryFailureError(
                    f"trial {assignment.trial} was interrupted: {outcome['error']}; {hint}", code="machine_failed"
                )
            fields = {name: value for name, value in outcome.items() if name != "kind"}
            self.write(outcome["kind"], trial=assignment.trial, **fields)
