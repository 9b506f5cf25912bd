"""Asynchronous checkpointing: snapshots are taken at once, written by a thread, and old checkpoints are removed."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.remote_copy import RemoteCopy, StorageUnreachableError
from rtrain.core.errors import UserError
from rtrain.parallel import collectives
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

FileStamps = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and modification time of every file of a checkpoint; with equal stamps it is not read again."""
POLL_INTERVAL_S = 1.0
"""Seconds between two checks of the thread's progress."""
MAX_FETCH_ATTEMPTS = 2
"""Attempts to fetch a checkpoint whose download is damaged."""


class CheckpointWriteError(UserError):
    """A checkpoint could not be written; older checkpoints are intact."""

    code = "not_writable"


class CheckpointSaver:
    """Saves the checkpoints of one run. At most one is being written; the next snapshot waits for it.

    So the extra memory is that of one checkpoint, however slow the disk is. Errors of the thread are raised by the next
    `save` or `flush`. As a context manager, it writes the last snapshot however the training ends.
    """

    def __init__(
        self,
        folder: Path,
        keep_checkpoints: int,
        remote_copy: RemoteCopy | None = None,
        log_event: Callable[..., None] = lambda kind, **fields: None,
        watchdog: Watchdog | None = None,
    ):
        """`remote_copy`: where checkpoints are copied. A failed copy is logged by `log_event` and repeated by the next
        save; the training continues with its local checkpoints. `watchdog` receives heartbeats while a thread is waited
        for."""
        self.folder, self._keep_checkpoints = folder, keep_checkpoints
        self._remote_copy, self._log_event = remote_copy, log_event
        self._watchdog = watchdog or Watchdog()
        self._progress_count = 0
        """Parts copied to the remote copy; they are heartbeats only while `flush` waits."""
        self._thread: threading.Thread | None = None
        self._snapshot: checkpoint_format.Snapshot | None = None
        self._error: Exception | None = None
        self._verified_stamps: dict[int, FileStamps] = {}

    def save(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        state: checkpoint_format.CheckpointState,
        gather: checkpoint_format.GatherTensors = dict.items,
    ) -> None:
        """Take a snapshot; it is on disk after `flush`. Called on every worker, since `gather` collects tensors from
        all; rank 0 writes."""
        self.flush()
        self._snapshot = checkpoint_format.Snapshot.capture(model, optimizer, state, self._snapshot, gather)
        if collectives.is_rank_zero():
            self._thread = threading.Thread(target=self._write_snapshot, args=(self._snapshot,), name="checkpoint")
            self._thread.start()

    def select_checkpoint(self, run_id: str) -> int | None:
        """Return the step of the newest checkpoint of `run_id` that verifies, local or in the remote copy; its best
        checkpoints are fetched too.

        Raises `StorageUnreachableError` only where the local checkpoints are not sufficient.
        """
        checkpoint_format.remove_drafts(self.folder)
        try:
            return self._select_with_remote(run_id)
        except StorageUnreachableError as error:
            step = checkpoint_format.find_latest(self.folder, run_id)
            if step is None or not self._best_steps(step) <= set(checkpoint_format.list_steps(self.folder)):
                raise
            self._log_event("storage_unreachable", step=step, error=str(error))
            return step

    def _best_steps(self, step: int) -> set[int]:
        return checkpoint_format.read_state(checkpoint_format.checkpoint_path(self.folder, step)).best_steps

    def _select_with_remote(self, run_id: str) -> int | None:
        selected_step = checkpoint_format.find_latest(self.folder, run_id)
        for step in reversed(self._remote_steps()):
            if (selected_step is None or step > selected_step) and self._fetch_checkpoint(step, run_id):
                selected_step = step
        if selected_step is not None:
            missing_steps = self._best_steps(selected_step) - set(checkpoint_format.list_steps(self.folder))
            for best_step in sorted(missing_steps & set(self._remote_steps())) if missing_steps else ():
                self._fetch_checkpoint(best_step, run_id)
        return selected_step

    def _remote_steps(self) -> list[int]:
        names = self._remote_copy.list_checkpoints() if self._remote_copy else []
        return [step for name in names if (step := checkpoint_format.parse_step(name)) is not None]

    def _fetch_checkpoint(self, step: int, run_id: str) -> bool:
        assert self._remote_copy
        path = checkpoint_format.checkpoint_path(self.folder, step)
        for _ in range(MAX_FETCH_ATTEMPTS):
            self._remote_copy.pull(path, self._watchdog.heartbeat)
            try:
                if checkpoint_format.verify_or_quarantine(self.folder, step, run_id):
                    return True
            except checkpoint_format.WrongRunError:
                # The remote copy keeps it; a local one would block the checkpoints of config.yaml.
                checkpoint_format.delete_checkpoint(path)
                raise checkpoint_format.WrongRunError(f"{self._remote_copy.url}/checkpoints/{path.name}") from None
        self._remote_copy.mark_damaged(path.name)
        return False

    def flush(self) -> None:
        """Wait until the last snapshot is on disk and its upload was tried."""
        if self._thread is not None:
            self._wait_for_thread(self._thread)
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _wait_for_thread(self, thread: threading.Thread) -> None:
        with self._watchdog.extended_timeout():
            last_count = self._progress_count
            while thread.is_alive():
                thread.join(POLL_INTERVAL_S)
                if self._progress_count != last_count:
                    last_count = self._progress_count
                    self._watchdog.heartbeat()

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        except Exception as second:
            if error is None:
                raise
            error.add_note(str(second))  # it must not hide the error that ended the training

    def _write_snapshot(self, snapshot: checkpoint_format.Snapshot) -> None:
        state = snapshot.state
        try:
            self._verified_stamps[state.step] = _read_stamps(checkpoint_format.write_checkpoint(self.folder, snapshot))
            kept_steps = self._steps_to_keep(state.run_id)
            self._push_to_remote(kept_steps)
            for step in set(checkpoint_format.list_steps(self.folder)) - kept_steps:
                checkpoint_format.delete_checkpoint(checkpoint_format.checkpoint_path(self.folder, step))
        except OSError as error:
            path = checkpoint_format.checkpoint_path(self.folder, state.step)
            fix = "Free some space there, or make the folder writable, and continue with --resume"
            self._error = CheckpointWriteError(f"saving {path} failed: {error}. {fix}; older checkpoints are intact.")
        except Exception as error:
            self._error = error

    def _push_to_remote(self, kept_steps: set[int]) -> None:
        if self._remote_copy is None:
            return

        def count_progress() -> None:
            self._progress_count += 1

        checkpoints = [checkpoint_format.checkpoint_path(self.folder, step) for step in sorted(kept_steps)]
        try:
            self._remote_copy.push(self.folder.parent, checkpoints, count_progress)
        except StorageUnreachableError as error:
            self._log_event("remote_copy_incomplete", error=str(error))

    def _steps_to_keep(self, run_id: str) -> set[int]:
        """Return the newest checkpoints, and the best checkpoints of each, which a resume needs too."""
        newest_steps: list[int] = []
        for step in reversed(checkpoint_format.list_steps(self.folder)):
            # A damaged checkpoint does not count, so that older intact ones are kept.
            if len(newest_steps) < self._keep_checkpoints and self._is_verified(step, run_id):
                newest_steps.append(step)
        kept_steps = set(newest_steps).union(*map(self._best_steps, newest_steps))
        return {step for step in checkpoint_format.list_steps(self.folder) if step in kept_steps}

    def _is_verified(self, step: int, run_id: str) -> bool:
        """Whether a checkpoint verifies: its bytes are read once, unless this process wrote them."""
        stamps = _read_stamps(checkpoint_format.checkpoint_path(self.folder, step))
        if self._verified_stamps.get(step) != stamps:
            if not checkpoint_format.verify_or_quarantine(self.folder, step, run_id):
                return False
            self._verified_stamps[step] = stamps
        return True


def _read_stamps(path: Path) -> FileStamps:
    file_stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in file_stats)
