"""Base class of strategies: where the weights are, and how gradients are synchronized."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rtrain import torch_internals
from rtrain.core.ragged import TokenBatch
from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.profiler import BACKWARD, COMM_WAIT, FORWARD, OPTIMIZER, Timeline
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist

    OptimizerClass = type[torch.optim.Optimizer]

EventLogger = Callable[..., None]


def ignore_event(kind: str, **fields: Any) -> None:
    """Ignore an event."""


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


class Strategy:
    """A model and the workers that train it together; the base class, and the strategy of a single worker.

    A replica is one full model, on one worker or on several, which all have its rows. Sums, gathers and counts are
    over replicas. All methods are collective: call them on every worker. A trainer calls `make_optimizer` and `warm_up`
    once; `run_micro_batches`, `gradient_norm`, `scale_gradients` and `sum_over_replicas` in each step;
    `evaluation_micro_batches`, `any_failed` and `gather_over_replicas` in an evaluation; and `gather_full_tensors` for
    a checkpoint. Subclasses override `begin_step`, `micro_batch` and `count_micro_batches`.
    """

    min_micro_batches = 1
    """Micro-batches of a step that keep all workers of a replica busy."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        group: "dist.ProcessGroup | None" = None,
    ):
        """Initialize the strategy.

        Args:
            module: The network. A strategy may shard it in place.
            watchdog: Receives a heartbeat before every micro-batch of this worker.
            log_event: Logs events; called on every worker.
            group: The workers that represent their replicas; None for all workers.
        """
        import torch.distributed as dist

        self.module = self.model = module
        """`model` is the module that micro-batches call."""
        self.watchdog, self._log_event, self._group = watchdog or Watchdog(), log_event, group
        self.timeline = Timeline()
        is_initialized = dist.is_initialized()
        self.num_workers = dist.get_world_size() if is_initialized else 1
        self.num_replicas = dist.get_world_size(group) if is_initialized else 1
        self.replica_rank = dist.get_rank(group) if is_initialized else 0
        self._first_sq_norm = 0.0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one replica."""
        return self.num_replicas > 1

    def make_optimizer(
        self, build: "Callable[[Callable[[OptimizerClass], OptimizerClass]], torch.optim.Optimizer]"
    ) -> "torch.optim.Optimizer":
        """Build the optimizer by `build`, which receives a wrapper of the optimizer's class."""
        return build(lambda optimizer_class: optimizer_class)

    def warm_up(self, runner: MicroBatchRunnerProtocol) -> None:
        """Prepare the first step of every attempt, so that a restart does not differ from the run that it continues."""

    # ------------------------------------------------------------------------------------------------------ a step

    def run_micro_batches(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol, measure_noise: bool = False
    ) -> None:
        """Run the micro-batches of a step. Afterwards this worker has its shard of the mean gradient over the replicas,
        and `runner.loss_sums` has the losses of this replica's micro-batches."""
        padded = self.start_step(micro_batches, runner, measure_noise)
        for number, tokens in enumerate(padded):
            self.watchdog.start_micro_batch()
            with self.micro_batch(is_last=number == len(padded) - 1):
                with self.timeline.span(FORWARD):
                    loss = runner.compute_loss(runner.compute_logits(self.model, tokens), tokens)
                with self.timeline.span(BACKWARD):
                    loss.backward()
                if measure_noise and not self.is_distributed and number == 0:
                    self._first_sq_norm = float(sum(map(dtensor_utils.squared_norm, self.local_gradients())))

    def start_step(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol, measure_noise: bool
    ) -> list[TokenBatch]:
        """Discard the previous step. Return the micro-batches of this one, with idle ones."""
        with self.timeline.span(OPTIMIZER):
            self.begin_step(measure_noise)
        num_idle = self.count_micro_batches(len(micro_batches)) - len(micro_batches)
        return [*micro_batches, *[runner.idle_tokens] * num_idle]

    def begin_step(self, measure_noise: bool = False) -> None:
        """Discard the previous step's gradient. Called before the first micro-batch of a step."""
        self.module.zero_grad(set_to_none=True)

    def count_micro_batches(self, num_filled: int) -> int:
        """Micro-batches of this worker with the idle ones: at least one, since gradients are synchronized in the
        last."""
        return max(1, num_filled)

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Wrap a micro-batch of a step."""
        yield

    def local_gradients(self) -> "list[torch.Tensor]":
        """Gradients so far on this worker: a tensor for each parameter with a gradient."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def gradients(self) -> "list[torch.Tensor]":
        """This worker's shard of the complete gradient."""
        return self.local_gradients()

    def replica_max(self, value: int) -> int:
        """The maximum over the workers of this replica."""
        return value

    def gradient_norm(self) -> "torch.Tensor":
        """The norm of the full gradient, []; the same on every worker."""
        return dtensor_utils.total_norm(self.gradients())

    def scale_gradients(self, factor: "float | torch.Tensor") -> None:
        """Multiply the gradient by `factor`."""
        if gradients := [dtensor_utils.local_tensor(gradient) for gradient in self.local_gradients()]:
            torch_internals.multiply(gradients, factor)

    @property
    def supports_noise_scale(self) -> bool:
        """Whether `local_sq_norm` can return a value."""
        return not self.is_distributed

    def local_sq_norm(self) -> float | None:
        """After a measuring `run_micro_batches`: the squared norm of this replica's gradient before the all-reduce;
        with a single replica, of its first micro-batch. None if no worker ever holds that gradient
        (`supports_noise_scale` is False)."""
        return self._first_sq_norm if self.supports_noise_scale else None

    # ------------------------------------------------------------------------------------------- outside of steps

    @contextlib.contextmanager
    def evaluation_micro_batches(self, num_micro_batches: int) -> Iterator[int]:
        """Wrap the micro-batches of an evaluation; yields the number of idle micro-batches that must follow."""
        yield 0

    def any_failed(self, has_failed: bool) -> bool:
        """Whether this worker, or a worker of the same collectives, has failed in an evaluation. Called before each
        micro-batch, and once by a worker that stops, so that nobody waits for it."""
        return has_failed

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        """Gather sharded tensors by name: all of them, in full, on rank 0; none on the others. Consume the iterator on
        every rank."""
        if collectives.is_rank_zero():
            yield from tensors.items()

    def sum_over_replicas(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Sum `tensor` over the replicas in place."""
        if self.is_distributed:
            import torch.distributed as dist

            with self.timeline.span(COMM_WAIT):
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_over_replicas(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
        """Every replica's vector by rank. The vectors may differ in length."""
        if not self.is_distributed:
            return [values]
        import torch
        import torch.distributed as dist

        local_values = torch.from_numpy(values)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_replicas)]
        dist.all_gather(sizes, torch.tensor([len(local_values)]), group=self._group)
        # The collective takes vectors of equal length, so all are padded to the longest.
        longest = max(int(size) for size in sizes)
        padded = [local_values.new_zeros(longest) for _ in range(self.num_replicas)]
        local_values = torch.nn.functional.pad(local_values, (0, longest - len(local_values)))
        dist.all_gather(padded, local_values, group=self._group)
        return [part[: int(size)].numpy() for part, size in zip(padded, sizes, strict=True)]

    def comm_cost(self) -> dict[str, Any] | None:
        """{seconds, bytes} of the gradient synchronization: mean seconds on this worker, bytes of the last one if
        known."""
        return None
