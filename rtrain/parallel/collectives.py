"""What the ranks of a run do together beside their gradients: wait for each other's work, and follow rank 0.

A rank that waits makes no pass, and the process group's own calls fail after a time-out; how long another rank works
(an upload, the predictions of many rows) nobody knows. So in `together` those that still work tell the others every few
seconds that they do, from a side thread, in a sum that all ranks take: a wait may be as long as it takes, and ends soon
where a rank is dead, stopped or hangs with the interpreter's lock held. One that hangs otherwise is ended by its own
watch, in which such work has its limit too (`alive`).
"""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from rtrain.parallel.watchdog import Watch

TOLD_S = 5.0
"""Most seconds between two signs to those that wait; a quarter of a stall where that is shorter."""
Done = TypeVar("Done")


OTHERS = "another worker failed; its own error says why"


class Elsewhere(RuntimeError):
    """Another rank failed in what all did together; its own error says why."""


def together(watch: Watch, work: Callable[[], Done]) -> Done:
    """Do this rank's `work` and wait for all others'. Called on every rank at the same time.

    `work` takes part in no exchange by the group of all ranks; where it does by others (`Exchange.stops`), it sees to
    it that nobody waits for a rank on which it failed. Where it fails on one rank, all fail: the others with
    `Elsewhere`.
    """
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return work()
    finished, failed, error = threading.Event(), False, None

    def tell() -> None:
        nonlocal failed
        with contextlib.suppress(RuntimeError):  # a rank is dead: the next sum or exchange of this one says so
            while not failed and not finished.wait(min(TOLD_S, watch.stall_s / 4)):
                failed = _told(works=True, fails=False)[1]

    teller = threading.Thread(target=tell, daemon=True, name="rtrain-works")
    teller.start()
    try:
        done = work()
    except Exception as found:
        error = found
    finally:
        finished.set()
    teller.join()  # the ranks' sums belong together by their order alone: one thread at a time takes them
    waits = True
    try:
        while waits and not failed:
            waits, failed = _told(works=False, fails=error is not None)
            watch.alive()
    except RuntimeError:  # a rank is dead, which says less than this one's own error
        if error is None:
            raise
    if error is not None:
        raise error
    if failed:
        raise Elsewhere(OTHERS)
    return done


def _told(works: bool, fails: bool) -> tuple[bool, bool]:
    """Whether some rank still works, and whether some rank failed."""
    import torch
    import torch.distributed as dist

    sums = torch.tensor([int(works), int(fails)])
    dist.all_reduce(sums)
    return bool(sums[0]), bool(sums[1])


def decided(watch: Watch, decide: Callable[[], int]) -> int:
    """Let rank 0 decide, however long it takes, and return its decision on every rank. If it fails, all ranks fail."""

    @watch.busy()
    def work() -> int:
        return decide() if first() else 0

    return from_rank_zero(together(watch, work))


def most(value: int) -> int:
    """The largest of all ranks' values, on every rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def every(value: Done) -> list[Done]:
    """Each rank's value, by rank."""
    import torch.distributed as dist

    found = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def own() -> int:
    """This worker's rank among all workers; 0 where it is alone. That of its replica is `Exchange.rank`."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def first() -> bool:
    """Whether this worker is rank 0, which writes and says what is written and said once."""
    return own() == 0


def from_rank_zero(value: int) -> int:
    """Rank 0's `value`, on every rank."""
    import torch
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())
