"""Collectives beside gradients: ranks wait for each other's work, and follow rank 0.

A waiting rank computes no micro-batch, and collectives of the process group fail after a timeout, but another rank may
work for any time (an upload, the predictions of many rows). So in `run_on_all_ranks` working ranks send a heartbeat
from a side thread, as an all-reduce over all ranks. A wait may be arbitrarily long, and ends soon if a rank is dead,
stopped, or hangs with the interpreter lock held. A rank that hangs otherwise is ended by its own watchdog, which limits
such work too (`heartbeat`).
"""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from rtrain.parallel.watchdog import Watchdog

HEARTBEAT_INTERVAL_S = 5.0
"""Longest time between two heartbeats; a quarter of the hang timeout if that is shorter."""
T = TypeVar("T")


OTHER_RANK_FAILED = "another worker failed; its own error says why"


class OtherRankFailed(RuntimeError):
    """Another rank failed in a common operation; its own error states the reason."""


def run_on_all_ranks(watchdog: Watchdog, work: Callable[[], T]) -> T:
    """Do this rank's `work` and wait for the other ranks. Called on every rank at the same time.

    `work` uses no collective over all ranks. If it uses others (`Strategy.any_failed`), it must ensure that nobody
    waits for a failed rank. If it fails on one rank all ranks fail, the others with `OtherRankFailed`.
    """
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return work()
    work_finished, has_failed, error = threading.Event(), False, None

    def send_heartbeats() -> None:
        nonlocal has_failed
        with contextlib.suppress(RuntimeError):  # a rank is dead: its next collective reports that
            while not has_failed and not work_finished.wait(min(HEARTBEAT_INTERVAL_S, watchdog.hang_timeout_s / 4)):
                has_failed = _all_reduce_status(is_working=True, has_failed=False)[1]

    heartbeat_thread = threading.Thread(target=send_heartbeats, daemon=True, name="rtrain-works")
    heartbeat_thread.start()
    try:
        result = work()
    except Exception as exception:
        error = exception
    finally:
        work_finished.set()
    heartbeat_thread.join()  # collectives match by order alone, so only one thread may call them
    others_working = True
    try:
        while others_working and not has_failed:
            others_working, has_failed = _all_reduce_status(is_working=False, has_failed=error is not None)
            watchdog.heartbeat()
    except RuntimeError:  # a rank is dead, which is less informative than this rank's own error
        if error is None:
            raise
    if error is not None:
        raise error
    if has_failed:
        raise OtherRankFailed(OTHER_RANK_FAILED)
    return result


def _all_reduce_status(is_working: bool, has_failed: bool) -> tuple[bool, bool]:
    """Whether some rank still works, and whether some rank failed."""
    import torch
    import torch.distributed as dist

    sums = torch.tensor([int(is_working), int(has_failed)])
    dist.all_reduce(sums)
    return bool(sums[0]), bool(sums[1])


def decide_on_rank_zero(watchdog: Watchdog, decide: Callable[[], int]) -> int:
    """Let rank 0 decide, however long it takes, and return its decision on every rank. If it fails, all ranks fail."""

    @watchdog.extended_timeout()
    def work() -> int:
        return decide() if is_rank_zero() else 0

    return broadcast_from_rank_zero(run_on_all_ranks(watchdog, work))


def all_reduce_max(value: int) -> int:
    """The largest of all ranks' values, on every rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def all_gather_object(value: T) -> list[T]:
    """Each rank's value, by rank."""
    import torch.distributed as dist

    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """This worker's rank among all workers; 0 for a single one. The rank of its replica is `Strategy.replica_rank`."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Whether this worker is rank 0, which writes files and logs."""
    return rank() == 0


def broadcast_from_rank_zero(value: int) -> int:
    """Rank 0's `value`, on every rank."""
    import torch
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())
