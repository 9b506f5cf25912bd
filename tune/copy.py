"""The copy of a search at `cluster.storage`: settings, log and journal. One whose folder is lost goes on from it."""

import uuid

from rtrain.checkpoints.replica import Replica
from rtrain.run import Run


class Copy:
    """Written by the start that holds the search's lock. One that is still alive on another machine, whose folder was
    lost to this one, is refused (`replica.Lost`)."""

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
