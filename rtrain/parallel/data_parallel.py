"""Common behavior of all strategies among replicas."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.core.ragged import TokenBatch
from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.base import MicroBatchRunnerProtocol
from rtrain.parallel.timeline import BACKWARD, COMM_WAIT, FORWARD, OPTIMIZER, Timeline
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist

EventLogger = Callable[..., None]


def ignore_event(kind: str, **fields: Any) -> None:
    """Ignore an event."""


class SingleReplica:
    """Base class of strategies, and the strategy of a single worker; see `base.Strategy`."""

    min_micro_batches = 1

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        group: "dist.ProcessGroup | None" = None,
    ):
        """Initialize the strategy.

        Args:
            watchdog: Receives a heartbeat before every micro-batch of this worker.
            log_event: Logs events; called on every worker.
            group: The workers that represent their replicas; None for all workers.
        """
        import torch.distributed as dist

        self.module, self.model, self.watchdog, self._log_event, self._group = (
            module,
            module,
            watchdog or Watchdog(),
            log_event,
            group,
        )
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

    def make_optimizer(self, build: Any) -> "torch.optim.Optimizer":
        optimizer: torch.optim.Optimizer = build(lambda kind: kind)
        return optimizer

    def warm_up(self, runner: MicroBatchRunnerProtocol) -> None:
        pass

    # ------------------------------------------------------------------------------------------------------ a step

    def run_micro_batches(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol, measure_noise: bool = False
    ) -> None:
        with self.timeline.span(OPTIMIZER):
            self.begin_step(measure_noise)
        padded = self.pad_with_idle(micro_batches, runner)
        for number, tokens in enumerate(padded):
            self.watchdog.start_micro_batch()
            with self.micro_batch(is_last=number == len(padded) - 1):
                with self.timeline.span(FORWARD):
                    loss = runner.compute_loss(runner.compute_logits(self.model, tokens), tokens)
                with self.timeline.span(BACKWARD):
                    loss.backward()
                if measure_noise and not self.is_distributed and number == 0:
                    self._first_sq_norm = float(
                        sum(dtensor_utils.squared_norm(gradient) for gradient in self.local_gradients())
                    )

    def begin_step(self, measure_noise: bool = False) -> None:
        """Discard the previous step. Called before the first micro-batch of a step."""
        self.module.zero_grad(set_to_none=True)

    def pad_with_idle(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol
    ) -> Sequence[TokenBatch]:
        """The micro-batches of this worker: at least one, since each strategy synchronizes in the last one."""
        return micro_batches or [runner.idle_tokens]

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
        return value

    def gradient_norm(self) -> "torch.Tensor":
        return dtensor_utils.total_norm(self.gradients())

    def scale_gradients(self, factor: "float | torch.Tensor") -> None:
        if gradients := [dtensor_utils.local_tensor(gradient) for gradient in self.local_gradients()]:
            torch_internals.multiply(gradients, factor)

    @property
    def supports_noise_scale(self) -> bool:
        return not self.is_distributed

    def local_sq_norm(self) -> float | None:
        return self._first_sq_norm if self.supports_noise_scale else None

    # ------------------------------------------------------------------------------------------- outside of steps

    @contextlib.contextmanager
    def evaluation_micro_batches(self, num_micro_batches: int) -> Iterator[int]:
        yield 0

    def any_failed(self, has_failed: bool) -> bool:
        return has_failed

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        if collectives.is_rank_zero():
            yield from tensors.items()

    def sum_over_replicas(self, tensor: "torch.Tensor") -> "torch.Tensor":
        if self.is_distributed:
            import torch.distributed as dist

            with self.timeline.span(COMM_WAIT):
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_over_replicas(self, values: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
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
        dist.all_gather(
            padded, torch.nn.functional.pad(local_values, (0, longest - len(local_values))), group=self._group
        )
        return [part[: int(size)].numpy() for part, size in zip(padded, sizes, strict=True)]

    def barrier(self) -> None:
        if self.is_distributed:
            import torch.distributed as dist

            dist.barrier(group=self._group)

    def comm_cost(self) -> dict[str, Any] | None:
        return None
