"""The interface of strategies: where the weights are, and how gradients are synchronized."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rtrain.core.ragged import TokenBatch
from rtrain.parallel.timeline import Timeline
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    OptimizerClass = type[torch.optim.Optimizer]


class MicroBatchRunnerProtocol(Protocol):
    """Computation of the micro-batches of a step. A strategy decides when and where."""

    loss_sums: "torch.Tensor"
    """[parts]: the losses so far."""
    idle_tokens: TokenBatch
    """A micro-batch of one padding token whose loss is 0: it takes part in every collective and adds exact zeros."""

    def compute_logits(self, model: "torch.nn.Module", tokens: TokenBatch) -> "torch.Tensor":
        """Logits of a micro-batch."""
        ...

    def compute_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """The scalar to differentiate, []."""
        ...


class Strategy(Protocol):
    """A model and the workers that train it together.

    A replica is one full model, on one worker or on several, which all have its rows. Sums, gathers and counts are
    over replicas. All methods are collective: call them on every worker.
    """

    module: "torch.nn.Module"
    """The network, with this worker's shard of the weights."""
    model: "torch.nn.Module"
    """The module that micro-batches call."""
    watchdog: Watchdog
    timeline: Timeline
    """The spans of this worker."""
    num_workers: int
    num_replicas: int
    """The number of replicas."""
    replica_rank: int
    """The replica of this worker."""
    min_micro_batches: int
    """Micro-batches of a step that keep all workers of a replica busy."""

    @property
    def supports_noise_scale(self) -> bool:
        """Whether `local_sq_norm` can return a value."""
        ...

    def make_optimizer(
        self, build: "Callable[[Callable[[OptimizerClass], OptimizerClass]], torch.optim.Optimizer]"
    ) -> "torch.optim.Optimizer":
        """Build the optimizer by `build`, which receives a wrapper of the optimizer's class."""
        ...

    def warm_up(self, runner: MicroBatchRunnerProtocol) -> None:
        """Prepare the first step of every attempt, so that a restart does not differ from the run that it continues."""
        ...

    def run_micro_batches(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol, measure_noise: bool = False
    ) -> None:
        """Run the micro-batches of a step. Afterwards this worker has its shard of the mean gradient over the replicas,
        and `work.sums` has the losses of this replica's micro-batches."""
        ...

    def replica_max(self, value: int) -> int:
        """The maximum over the workers of this replica."""
        ...

    def gradient_norm(self) -> "torch.Tensor":
        """The norm of the full gradient, []; the same on every worker."""
        ...

    def scale_gradients(self, factor: "float | torch.Tensor") -> None:
        """Multiply the gradient by `factor`."""
        ...

    def local_sq_norm(self) -> float | None:
        """After a measuring `run_micro_batches`: the squared norm of this replica's gradient before the all-reduce;
        with a single replica, of its first micro-batch. None if no worker ever holds that gradient
        (`supports_noise_scale` is False)."""
        ...

    def evaluation_micro_batches(self, num_micro_batches: int) -> AbstractContextManager[int]:
        """Wrap the micro-batches of an evaluation; yields the number of idle micro-batches that must follow."""
        ...

    def any_failed(self, has_failed: bool) -> bool:
        """Whether this worker, or a worker of the same collectives, has failed in an evaluation. Called before each
        micro-batch, and once by a worker that stops, so that nobody waits for it."""
        ...

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        """Gather sharded tensors by name: all of them, in full, on rank 0; none on the others. Consume the iterator on
        every rank."""
        ...

    def sum_over_replicas(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Sum `tensor` over the replicas in place."""
        ...

    def gather_over_replicas(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        """Every replica's vector by rank. The vectors may differ in length."""
        ...

    def comm_cost(self) -> dict[str, Any] | None:
        """{seconds, bytes} of the gradient synchronization: mean seconds on this worker, bytes of the last one if
        known."""
        ...
