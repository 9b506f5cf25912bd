"""How workers take the mean of their gradients: by the process group's own sums, or through memory that they share.

Gloo sends gradients through TCP sockets, also between two processes of one machine. Through a shared segment each
worker writes its gradient once, adds up its own share of all of them, and reads the other shares; two workers each add
up all. What a worker waits for is a sum of one number by the process group, twice an exchange, once between two
workers: where a worker dies, the others' sum fails at once.
"""

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    Future = torch.futures.Future[torch.Tensor]

ALIGNED = 64
"""The size of a cache line, in bytes."""
CHUNK = 1 << 18
"""Elements that are summed and written at a time: they are still in the processor's cache when they are written."""
NAME = "rtrain-gradients"
SAME_BITS = 2
"""The number of workers for which every transport gives the same mean, bit for bit: two terms have one order of
summation."""
SMALL = 1 << 16
"""Tensors with fewer elements are sent together, as one."""
TOKEN = 16
"""Bytes at the segment's end by which a worker knows that it has opened this one."""


class Transport(Protocol):
    name: str
    beside: bool
    """Whether what was started goes on while the worker computes; else the worker does it all, where it is called."""

    def start(self, flat: "torch.Tensor", last: bool) -> "Future":
        """Begin to replace `flat`, a vector, by its mean over the workers. Every worker starts the same ones in the
        same order; none is done before `last`, the last one of an exchange, was started by all."""
        ...

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        """`flat`, a vector, replaced by its mean over the workers."""
        ...

    def union(self, places: "torch.Tensor", rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        """The mean of a matrix that is 0 but for some rows: (places of the rows that any worker has, ascending; their
        means [places, dim]). `places` are this worker's, ascending, `rows` its rows. None, on every worker, where this
        transport has no way of its own."""
        ...

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        """Every worker's tensors `owned[rank]`, contiguous and of the same shapes everywhere, become that rank's."""
        ...


class Stock:
    """Sums by the process group. `sent` is the type in which numbers are sent; None keeps their own."""

    name, beside = "stock", True

    def __init__(self, world: int, sent: "torch.dtype | None" = None):
        self._world, self._sent = world, sent

    def start(self, flat: "torch.Tensor", last: bool) -> "Future":
        import torch
        import torch.distributed as dist

        part = torch.div(
            flat, self._world, out=flat if self._sent is None else torch.empty_like(flat, dtype=self._sent)
        )
        work = dist.all_reduce(part, async_op=True)
        assert work is not None
        future: Future = work.get_future().then(lambda done: flat if part is flat else flat.copy_(done.value()[0]))
        return future

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        return self.start(flat, last=True).wait()

    def union(self, places: "torch.Tensor", rows: "torch.Tensor") -> None:
        return None

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        import torch.distributed as dist

        rank = dist.get_rank()
        under_way: list[Any] = []
        for owner, tensors in enumerate(owned):
            small = [one for one in tensors if one.numel() < SMALL]
            under_way += [dist.broadcast(one, src=owner, async_op=True) for one in tensors if one.numel() >= SMALL]
            for alike, flat in _joined(small):
                dist.broadcast(flat, src=owner)
                if rank != owner:
                    _put_back(flat, alike)
        for work in under_way:
            work.wait()


def add_up(tensors: "Sequence[torch.Tensor]", group: "dist.ProcessGroup | None") -> None:
    """Each tensor summed over the workers of `group`, in place. Small ones go as one: workers wait for each other once
    for all of these."""
    import torch.distributed as dist

    large = [one for one in tensors if one.numel() >= SMALL and one.is_contiguous()]
    under_way: list[Any] = [dist.all_reduce(one, group=group, async_op=True) for one in large]
    whole = {id(one) for one in large}
    for alike, flat in _joined([one for one in tensors if id(one) not in whole]):
        dist.all_reduce(flat, group=group)
        _put_back(flat, alike)
    for work in under_way:
        work.wait()


def _joined(tensors: "Sequence[torch.Tensor]") -> "Iterator[tuple[list[torch.Tensor], torch.Tensor]]":
    """The tensors of each type, and one vector of all of their numbers."""
    import torch

    for kind in dict.fromkeys(one.dtype for one in tensors):
        alike = [one for one in tensors if one.dtype == kind]
        yield alike, torch.cat([one.reshape(-1) for one in alike])


def _put_back(flat: "torch.Tensor", tensors: "Sequence[torch.Tensor]") -> None:
    for one, values in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        one.copy_(values.view_as(one))


@dataclass(frozen=True)
class _Held:
    """A vector that is written and not yet summed."""

    flat: "torch.Tensor"
    first: int
    """The byte of the segment's parts at which the vector begins."""
    future: "Future"


@dataclass
class Shared:
    """Through a segment of `world` parts, which the workers write, and one more for the means.

    Terms are added in the order of ranks, by the worker that has that share: all workers get the same bits, whatever
    the buckets are. Two workers' mean is the stock transport's, bit for bit: two terms have one order.

    Two workers have two parts each, which they write in turn, and none for the means: both add up everything. A part is
    written again after the next exchange's wait, before which the other worker has read it.
    """

    segment: "torch.Tensor"
    """The segment, bytes [`parts_of(world)`, capacity]."""
    rank: int
    world: int
    sent: "torch.dtype | None" = None
    """The type in which numbers lie in the segment; None keeps their own. They are added in the vector's own type."""
    name: str = field(default="shared_memory", init=False)
    beside: bool = field(default=False, init=False)
    _held: list[_Held] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)
    """Which of its two parts a worker writes next."""

    @property
    def _alternates(self) -> bool:
        return self.world == SAME_BITS

    def start(self, flat: "torch.Tensor", last: bool) -> "Future":
        import torch

        before = self._held[-1] if self._held else None
        first = before.first + _aligned(before.flat) if before else 0
        held = _Held(flat, first, torch.futures.Future())
        torch.div(flat, self.world, out=self._part(held, self.rank))
        self._held.append(held)
        if last:
            self._finish()
        return held.future

    def mean(self, flat: "torch.Tensor") -> "torch.Tensor":
        for piece in flat.split(self.segment.shape[1] // flat.itemsize):
            self.start(piece, last=True).wait()
        return flat

    def spread(self, owned: "Sequence[Sequence[torch.Tensor]]") -> None:
        """Sum through the parts, as often as they are full; after an exchange they are free."""
        first_part = self._turn * self.world  # between two workers, those that neither reads any more
        room = self.segment[first_part : first_part + self.world].view(-1)
        placed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Rank, tensor and its place, of this round."""
        first = 0
        for rank, tensors in enumerate(owned):
            for tensor in tensors:
                for piece in tensor.view(-1).split(len(room) // tensor.itemsize):
                    if first + piece.nbytes > len(room):
                        self._pass(placed)
                        placed, first = [], 0
                    place = room[first : first + piece.nbytes].view(piece.dtype)
                    if rank == self.rank:
                        place.copy_(piece)
                    placed.append((rank, piece, place))
                    first += _aligned(piece)
        self._pass(placed)

    def _pass(self, placed: "list[tuple[int, torch.Tensor, torch.Tensor]]") -> None:
        self._wait()
        for rank, piece, place in placed:
            if rank != self.rank:
                piece.copy_(place)
        self._wait()  # before anyone writes there again

    def _finish(self) -> None:
        """A part is written again after the second wait, when all have summed it; the means after the next exchange's
        first one, when all have read them."""
        exchanged, self._held = self._held, []
        self._wait()
        for held in exchanged:
            self._sum(held)
        if self._alternates:
            self._turn = 1 - self._turn
            for held in exchanged:
                held.future.set_result(held.flat)
            return
        self._wait()
        for held in exchanged:
            means = self._part(held, self.world)
            begin, end = self._share(held, self.rank)
            held.flat[:begin].copy_(means[:begin])
            held.flat[end:].copy_(means[end:])
            held.future.set_result(held.flat)

    def union(self, places: "torch.Tensor", rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        if not self._alternates:
            return None
        import torch

        parts = self.segment[self._turn * self.world :][: self.world]
        kind, wide = self.sent or rows.dtype, rows.shape[1]

        def laid(part: "torch.Tensor", count: int) -> "tuple[torch.Tensor, torch.Tensor] | None":
            """Where a worker's places and rows lie in its part, behind their number; None where they do not fit."""
            first = ALIGNED + -(-8 * count // ALIGNED) * ALIGNED
            end = first + count * wide * kind.itemsize
            if end > len(part):
                return None
            values = part[first:end].view(kind).view(count, wide)
            return part[ALIGNED : ALIGNED + 8 * count].view(torch.int64), values

        own = parts[self.rank]
        own[:8].view(torch.int64)[0] = len(places)
        if (room := laid(own, len(places))) is not None:
            room[0].copy_(places)
            torch.div(rows, self.world, out=room[1])
        self._wait()
        self._turn = 1 - self._turn
        found = [laid(part, int(part[:8].view(torch.int64)[0])) for part in parts]
        written = [one for one in found if one is not None]
        if len(written) < self.world:
            return None
        union = torch.unique(torch.cat([numbers for numbers, _ in written]))
        means = rows.new_zeros(len(union), wide)
        for numbers, values in written:
            means[torch.searchsorted(union, numbers)] += values.to(means.dtype)
        return union, means.to(kind).to(means.dtype)

    def _sum(self, held: _Held) -> None:
        """This worker's share of the mean, into `flat` and the segment; between two workers all of it, into `flat`."""
        import torch

        parts = [self._part(held, rank) for rank in range(self.world)]
        means = None if self._alternates else self._part(held, self.world)
        begin, end = (0, held.flat.numel()) if self._alternates else self._share(held, self.rank)
        for start in range(begin, end, CHUNK):
            chunk = slice(start, min(start + CHUNK, end))
            total = held.flat[chunk]
            torch.add(parts[0][chunk].to(total.dtype), parts[1][chunk], out=total)
            for part in parts[2:]:
                total += part[chunk]
            if means is not None:
                means[chunk].copy_(total)
            if (kind := parts[0].dtype) != total.dtype:
                total.copy_(total.to(kind))  # as the others read it

    def _share(self, held: _Held, rank: int) -> tuple[int, int]:
        size = held.flat.numel()
        return size * rank // self.world, size * (rank + 1) // self.world

    def _part(self, held: _Held, number: int) -> "torch.Tensor":
        kind = self.sent or held.flat.dtype
        row = number + self._turn * self.world
        bytes_ = self.segment[row, held.first : held.first + held.flat.numel() * kind.itemsize]
        return bytes_.view(kind)

    def _wait(self) -> None:
        """Wait until all workers are here. Raises if one has died."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))


def _aligned(tensor: "torch.Tensor") -> int:
    return -(-tensor.numel() * tensor.itemsize // ALIGNED) * ALIGNED


def parts_of(world: int) -> int:
    """Parts of a segment."""
    return 2 * world if world == SAME_BITS else world + 1


def share(tensors: "Sequence[torch.Tensor]", rank: int, world: int, sent: "torch.dtype | None") -> Shared | str:
    """A shared segment for gradients of the shapes of `tensors`, or why there is none. Called on every rank, which all
    come to the same: where one of them cannot, none does."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return "gradients lie on a GPU"
    row = sum(_aligned(tensor) for tensor in tensors)
    opened = _open(parts_of(world) * row, rank)
    return opened if isinstance(opened, str) else Shared(opened.view(parts_of(world), row), rank, world, sent)


def _open(size: int, rank: int) -> "torch.Tensor | str":
    """`size` bytes that rank 0 makes and all others open. They have no name that could stay behind: the kernel frees
    them with the last process that has them open, however it ends."""
    import torch
    import torch.distributed as dist

    made, error = -1, ""
    facts = torch.zeros(3, dtype=torch.int64)
    token = secrets.randbits(62)
    if rank == 0:
        try:
            made = os.memfd_create(NAME)
            # Now, and not at the first write, where a lack of memory would end the process.
            os.posix_fallocate(made, 0, size + TOKEN)
            os.pwrite(made, token.to_bytes(TOKEN, "little"), size)
            facts = torch.tensor([os.getpid(), made, token])
        except (OSError, AttributeError) as found:  # AttributeError: not on Linux
            error = str(found)
    try:
        dist.broadcast(facts, src=0)
        process, number, token = facts.tolist()
        mapped = _map(f"/proc/{process}/fd/{number}", size, token) if process else None
        # No one goes on before all have opened it: rank 0 then closes it.
        seen = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        seen[rank] = mapped is not None
        dist.all_reduce(seen)
    finally:
        if made >= 0:
            os.close(made)
    if not process:
        return f"{size:,} bytes cannot be shared: {error or 'rank 0 says why'}"
    if mapped is None or not seen.all():
        apart = [other for other, there in enumerate(seen.tolist()) if not there]
        return f"workers {apart} do not share rank 0's memory: they are on another host or in another container"
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size)


def _map(path: str, size: int, token: int) -> mmap.mmap | None:
    """The segment, or None: on another host that path is no file, or another one."""
    try:
        if NAME not in os.readlink(path):
            return None
        opened = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(opened, TOKEN, size) != token.to_bytes(TOKEN, "little"):
            return None
        return mmap.mmap(opened, size + TOKEN)
    except OSError:
        return None
    finally:
        os.close(opened)
