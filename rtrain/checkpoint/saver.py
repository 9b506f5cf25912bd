"""Checkpoints of a training that goes on: taken at once, written by a thread, and only so many of them kept."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.remote_copy import Replica, Unreachable
from rtrain.core.errors import UserError
from rtrain.parallel import collectives
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch

Stamps = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of every file of a checkpoint: equal stamps spare reading it again."""


LOOK_S = 1.0
"""Seconds between two looks at the thread's progress, by whoever waits for it."""
FETCHES = 2
"""How often a checkpoint is fetched that comes back damaged: it may have been whole there."""


class Unwritten(UserError):
    """A checkpoint could not be written; the training before it is in the older ones."""

    code = "not_writable"


class Saver:
    """Saves the checkpoints of one run. At most one is being written, and another waits for it before it is taken.

    So the memory beside the training's own is that of one checkpoint, however slow the disk is. What goes wrong in the
    thread is raised by the next `save` or `flush`. As a context, it writes what was taken however the training ends.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        replica: Replica | None = None,
        say: Callable[..., None] = lambda kind, **fields: None,
        watch: Watch | None = None,
    ):
        """With a `replica`, what is kept is kept there too. Where that fails, `say` is told an event, and the next save
        makes up for it: the training goes on, since its checkpoints are here. `watch` sees that a wait gets on."""
        self.folder, self._keep, self._replica, self._say = folder, keep, replica, say
        self._watch = watch or Watch()
        self._moved = 0
        """Pieces that were copied to the replica: while nobody waits, they are no sign that the training goes on."""
        self._thread: threading.Thread | None = None
        self._taken: checkpoint_format.Snapshot | None = None
        self._error: Exception | None = None
        self._verified: dict[int, Stamps] = {}

    def save(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        state: checkpoint_format.State,
        gathered: checkpoint_format.Gathered = dict.items,
    ) -> None:
        """Take a checkpoint; it is on the disk after `flush`. Called on every worker, where the tensors are `gathered`
        from all of them; rank 0 writes."""
        self.flush()
        self._taken = checkpoint_format.Snapshot.take(model, optimizer, state, over=self._taken, gathered=gathered)
        if collectives.first():
            self._thread = threading.Thread(target=self._write, args=(self._taken,), name="checkpoint")
            self._thread.start()

    def select(self, run: str) -> int | None:
        """The newest checkpoint of `run` that verifies, here or in the replica; its best one comes back with it.

        Raises `Unreachable` only where what is here is not enough to go on.
        """
        checkpoint_format.sweep(self.folder)
        try:
            return self._fetched(run)
        except Unreachable as error:
            chosen = checkpoint_format.select(self.folder, run)
            if chosen is None or self._best(chosen) not in (None, *checkpoint_format.updates(self.folder)):
                raise
            self._say("unreachable", update=chosen, error=str(error))
            return chosen

    def _best(self, update: int) -> int | None:
        return checkpoint_format.read_state(checkpoint_format.path_of(self.folder, update)).best_update

    def _fetched(self, run: str) -> int | None:
        chosen = checkpoint_format.select(self.folder, run)
        for update in reversed(self._elsewhere()):
            if (chosen is None or update > chosen) and self._fetch(update, run):
                chosen = update
        if chosen is not None:
            best = self._best(chosen)
            if best is not None and best in self._elsewhere() and best not in checkpoint_format.updates(self.folder):
                self._fetch(best, run)
        return chosen

    def _elsewhere(self) -> list[int]:
        names = self._replica.checkpoints() if self._replica else []
        return [update for name in names if (update := checkpoint_format.update_of(name)) is not None]

    def _fetch(self, update: int, run: str) -> bool:
        assert self._replica
        path = checkpoint_format.path_of(self.folder, update)
        for _ in range(FETCHES):
            self._replica.pull(path, self._watch.alive)
            try:
                if checkpoint_format.sound(self.folder, update, run):
                    return True
            except checkpoint_format.OtherRun:
                checkpoint_format.discard(path)  # it is there; here it would be in the way of config.yaml's own
                raise checkpoint_format.OtherRun(f"{self._replica.url}/checkpoints/{path.name}") from None
        self._replica.distrust(path.name)
        return False

    def flush(self) -> None:
        """Wait until what was taken is on the disk, and its copy was tried."""
        if self._thread is not None:
            self._wait(self._thread)
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _wait(self, thread: threading.Thread) -> None:
        with self._watch.busy():
            seen = self._moved
            while thread.is_alive():
                thread.join(LOOK_S)
                if self._moved != seen:
                    seen = self._moved
                    self._watch.alive()

    def _count(self) -> None:
        self._moved += 1

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
        except Exception as second:
            if error is None:
                raise
            error.add_note(str(second))  # it must not hide what ended the training

    def _write(self, snapshot: checkpoint_format.Snapshot) -> None:
        state = snapshot.state
        try:
            self._verified[state.update] = _stamps(checkpoint_format.write(self.folder, snapshot))
            kept = self._kept(state.run)
            self._copy(kept)
            for update in set(checkpoint_format.updates(self.folder)) - kept:
                checkpoint_format.discard(checkpoint_format.path_of(self.folder, update))
        except OSError as error:
            self._error = Unwritten(
                f"saving {checkpoint_format.path_of(self.folder, state.update)} failed: {error}. Free some space "
                "there, or "
                "make the folder writable, and continue with --resume; the checkpoints before it are whole."
            )
        except Exception as error:
            self._error = error

    def _copy(self, kept: set[int]) -> None:
        if self._replica is None:
            return
        try:
            self._replica.push(
                self.folder.parent,
                [checkpoint_format.path_of(self.folder, update) for update in sorted(kept)],
                self._count,
            )
        except Unreachable as error:
            self._say("uncopied", error=str(error))

    def _kept(self, run: str) -> set[int]:
        """The newest checkpoints, and the best that each of these names: a resume would want it too."""
        newest: list[int] = []
        for update in reversed(checkpoint_format.updates(self.folder)):
            # One that does not verify is no reason to delete an older one.
            if len(newest) < self._keep and self._verifies(update, run):
                newest.append(update)
        kept = {*newest, *map(self._best, newest)}
        return {update for update in checkpoint_format.updates(self.folder) if update in kept}

    def _verifies(self, update: int, run: str) -> bool:
        """Whether a checkpoint is whole: its bytes are read once, unless this process wrote them."""
        stamps = _stamps(checkpoint_format.path_of(self.folder, update))
        if self._verified.get(update) != stamps:
            if not checkpoint_format.sound(self.folder, update, run):
                return False
            self._verified[update] = stamps
        return True


def _stamps(path: Path) -> Stamps:
    found = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)
