"""Among replicas: what every strategy does alike, whatever a replica is made of."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.core.ragged import Tokens
from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.base import Work
from rtrain.parallel.timeline import BACKWARD, FORWARD, OPTIMIZER, WAITS, Timeline
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist

Say = Callable[..., None]


def unsaid(kind: str, **fields: Any) -> None:
    """Nobody is told."""


class Replicas:
    """See `exchange.Exchange`. By itself the exchange of a worker that is alone."""

    passes = 1

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        group: "dist.ProcessGroup | None" = None,
    ):
        """`watch` is told before every pass that this worker goes on; `say`, on every worker, what the log should know.
        `group`: the workers that stand for their replicas; None for all workers."""
        import torch.distributed as dist

        self.module, self.model, self.watch, self._say, self._group = module, module, watch or Watch(), say, group
        self.timeline = Timeline()
        joined = dist.is_initialized()
        self.workers = dist.get_world_size() if joined else 1
        self.world = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        self._first = 0.0

    @property
    def distributed(self) -> bool:
        """Whether there is more than one replica."""
        return self.world > 1

    def optimizer(self, made: Any) -> "torch.optim.Optimizer":
        found: torch.optim.Optimizer = made(lambda kind: kind)
        return found

    def settle(self, work: Work) -> None:
        pass

    # ------------------------------------------------------------------------------------------------------ an update

    def run(self, passes: Sequence[Tokens], work: Work, measures: bool = False) -> None:
        with self.timeline.during(OPTIMIZER):
            self.begin(measures)
        every = self.filled(passes, work)
        for number, tokens in enumerate(every):
            self.watch.passes()
            with self.during(last=number == len(every) - 1):
                with self.timeline.during(FORWARD):
                    loss = work.loss(work.answer(self.model, tokens), tokens)
                with self.timeline.during(BACKWARD):
                    loss.backward()
                if measures and not self.distributed and number == 0:
                    self._first = float(sum(dtensor_utils.squared(one) for one in self.collected()))

    def begin(self, measures: bool = False) -> None:
        """Forget the last update. Called before the first pass of one."""
        self.module.zero_grad(set_to_none=True)

    def filled(self, passes: Sequence[Tokens], work: Work) -> Sequence[Tokens]:
        """The passes that this worker makes: at least one, since each of them exchanges something."""
        return passes or [work.idle]

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        """Wrap a pass of an update."""
        yield

    def collected(self) -> "list[torch.Tensor]":
        """What the passes until now gave, on this worker: a tensor for each parameter that has any."""
        return [one.grad for one in self.module.parameters() if one.grad is not None]

    def gradients(self) -> "list[torch.Tensor]":
        """This worker's share of the complete gradient."""
        return self.collected()

    def agreed(self, value: int) -> int:
        return value

    def norm(self) -> "torch.Tensor":
        return dtensor_utils.norm(self.gradients())

    def multiply(self, factor: "float | torch.Tensor") -> None:
        if found := [dtensor_utils.local(one) for one in self.collected()]:
            torch_internals.multiply(found, factor)

    @property
    def tells_noise(self) -> bool:
        return not self.distributed

    def own_square(self) -> float | None:
        return self._first if self.tells_noise else None

    # ------------------------------------------------------------------------------------------- outside of updates

    @contextlib.contextmanager
    def answering(self, passes: int) -> Iterator[int]:
        yield 0

    def stops(self, failed: bool) -> bool:
        return failed

    def whole(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        if collectives.first():
            yield from tensors.items()

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        if self.distributed:
            import torch.distributed as dist

            with self.timeline.during(WAITS):
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        if not self.distributed:
            return [values]
        import torch
        import torch.distributed as dist

        own = torch.from_numpy(values)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self._group)
        # The transport takes vectors of one length only: all are padded to the longest.
        longest = max(int(size) for size in sizes)
        parts = [own.new_zeros(longest) for _ in range(self.world)]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))), group=self._group)
        return [part[: int(size)].numpy() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        if self.distributed:
            import torch.distributed as dist

            dist.barrier(group=self._group)

    def cost(self) -> dict[str, Any] | None:
        return None
