"""What training asks of a strategy, whichever it is: where the weights lie, and how gradients meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.core.ragged import Tokens
from rtrain.parallel.timeline import Timeline
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Kind = type[torch.optim.Optimizer]


class Work(Protocol):
    """What is computed in the passes of an update. A strategy says when and where; this says what."""

    sums: "torch.Tensor"
    """[parts]: of the losses until now."""
    idle: Tokens
    """A pass over one padding token whose loss is 0: it takes part in every exchange and adds exact zeros."""

    def answer(self, model: "torch.nn.Module", tokens: Tokens) -> "torch.Tensor":
        """Logits of a pass."""
        ...

    def loss(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """What is differentiated, []."""
        ...


class Exchange(Protocol):
    """A model and the workers that train it together.

    A replica is one whole model, on one worker or on several, all of which have its rows. What is summed, gathered and
    counted is so over replicas. What is called is called on every worker.
    """

    module: "torch.nn.Module"
    """The network, with this worker's share of its weights."""
    model: "torch.nn.Module"
    """What passes call."""
    watch: Watch
    timeline: Timeline
    """What this worker does when."""
    workers: int
    world: int
    """The number of replicas."""
    rank: int
    """Which of them this worker is of."""
    passes: int
    """Passes of an update that keep all workers of a replica busy."""

    @property
    def tells_noise(self) -> bool:
        """Whether `own_square` ever tells something."""
        ...

    def optimizer(self, made: "Callable[[Callable[[Kind], Kind]], torch.optim.Optimizer]") -> "torch.optim.Optimizer":
        """The optimizer that `made` gives, once it is told what to make of its class."""
        ...

    def settle(self, work: Work) -> None:
        """Before the first update of every start: whatever makes a restart differ from the run that it continues."""
        ...

    def run(self, passes: Sequence[Tokens], work: Work, measures: bool = False) -> None:
        """Make the passes of an update; then the mean over the replicas is this worker's share of the gradient, and
        `work.sums` has the losses of this replica's passes."""
        ...

    def agreed(self, value: int) -> int:
        """The largest of the numbers that the workers of this replica have, on all of them."""
        ...

    def norm(self) -> "torch.Tensor":
        """The norm of the whole gradient, []; the same on every worker."""
        ...

    def multiply(self, factor: "float | torch.Tensor") -> None:
        """Multiply the gradient by `factor`."""
        ...

    def own_square(self) -> float | None:
        """After a `run` that measures, the squared norm of what this replica's passes alone gave, before the exchange;
        of a single replica, of its first pass. None where that is never in one place: no `tells_noise`."""
        ...

    def answering(self, passes: int) -> AbstractContextManager[int]:
        """Around the passes of an evaluation; gives the number of idle ones that must follow them."""
        ...

    def stops(self, failed: bool) -> bool:
        """Whether this worker, or one with which it exchanges in the passes of an evaluation, has `failed`. Asked
        before each of these passes, and last by a worker that makes none any more: nobody waits for it then."""
        ...

    def whole(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        """Tensors by name, each of which is this worker's share of one: on rank 0 all of them, whole; on others none.
        To be read to its end everywhere."""
        ...

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor` summed over the replicas, in place."""
        ...

    def gather(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        """Every replica's vector by rank. The vectors may differ in length."""
        ...

    def cost(self) -> dict[str, Any] | None:
        """{seconds, bytes} of an exchange: the mean seconds on this worker, the bytes of the last one, if known."""
        ...
