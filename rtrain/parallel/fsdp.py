"""Sharded gradients and optimizer state, or weights too: ZeRO stages 2 and 3 (Rajbhandari et al. 2020,
arXiv:1910.02054) by torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277).

Replicas gather a layer's weights before it computes; after its backward pass each keeps its shard of the summed
gradient. So every micro-batch of every replica is a collective, and all compute equally many.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.core.ragged import TokenBatch
from rtrain.models import layerwise_lr
from rtrain.parallel import dtensor_utils, mesh
from rtrain.parallel.base import MicroBatchRunnerProtocol
from rtrain.parallel.data_parallel import EventLogger, ignore_event
from rtrain.parallel.tensor import TensorParallelStrategy
from rtrain.parallel.timeline import COMM_WAIT, Timeline
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard


class FSDPStrategy(TensorParallelStrategy):
    """A shard of every tensor on every replica."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        *,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        shard_weights: bool = True,
        **options: Any,
    ):
        """`shard_weights`: keep only a shard of a layer's weights between two micro-batches (stage 3); otherwise the
        weights are full from the first micro-batch of a step to its last (stage 2)."""
        from torch.distributed.fsdp import fully_shard

        super().__init__(
            module,
            watchdog,
            log_event,
            tensor_parallel_size=tensor_parallel_size,
            sequence_parallel=sequence_parallel,
            **options,
        )
        torch_internals.silence_redistribution_warnings()
        # Nothing writes into the outputs of a micro-batch.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        layers = layerwise_lr.find_layers(getattr(module, "base_model", module)) or ()
        self._fsdp_modules: Any = [
            *(layer for layer in layers if all(map(dtensor_utils.is_materialized, layer.parameters()))),
            module,
        ]
        self._shards_weights = shard_weights
        absent_parameters = {
            parameter for parameter in module.parameters() if not dtensor_utils.is_materialized(parameter)
        }
        for fsdp_module in self._fsdp_modules:
            fully_shard(
                fsdp_module,
                mesh=self._mesh[mesh.REPLICAS],
                reshard_after_forward=None if shard_weights else False,
                shard_placement_fn=_shard_axis,
                ignored_params=absent_parameters,
            )
            fsdp_module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean
            fsdp_module.set_custom_all_gather(_TimedCollective(self.timeline, all_gather))
            fsdp_module.set_custom_reduce_scatter(_TimedCollective(self.timeline, reduce_scatter))

    def pad_with_idle(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol
    ) -> Sequence[TokenBatch]:
        return [
            *micro_batches,
            *[runner.idle_tokens] * (max(1, self.max_over_replicas(len(micro_batches))) - len(micro_batches)),
        ]

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self._fsdp_modules[-1].set_reshard_after_backward(is_last or self._shards_weights)
        with self.record_waits():
            yield

    @contextlib.contextmanager
    def evaluation_micro_batches(self, num_micro_batches: int) -> Iterator[int]:
        try:
            yield self.max_over_replicas(num_micro_batches) - num_micro_batches
        finally:
            for fsdp_module in self._fsdp_modules:
                fsdp_module.reshard()

    def any_failed(self, has_failed: bool) -> bool:
        return bool(self.max_over_replicas(super().any_failed(has_failed)))


class _TimedCollective:
    """A collective of `fully_shard`, with a span of the timeline: a CPU waits for it."""

    def __init__(self, timeline: Timeline, collective: "Callable[..., dist.Work | None]"):
        self._timeline, self._collective = timeline, collective

    def allocate(self, size: Any, *, dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> "dist.Work | None":
        with self._timeline.span(COMM_WAIT):
            return self._collective(*args, **kwargs)


def all_gather(
    output_tensor: "torch.Tensor", input_tensor: "torch.Tensor", group: "dist.ProcessGroup", async_op: bool = False
) -> "dist.Work | None":
    """All-gather, called by `fully_shard`."""
    import torch.distributed as dist

    work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
    return work


def reduce_scatter(
    output_tensor: "torch.Tensor",
    input_tensor: "torch.Tensor",
    group: "dist.ProcessGroup",
    op: Any,
    async_op: bool = False,
) -> "dist.Work | None":
    """Reduce-scatter, called by `fully_shard`."""
    import torch.distributed as dist

    work: dist.Work | None = dist.reduce_scatter_single(
        output_tensor, input_tensor, op=op, group=group, async_op=async_op
    )
    return work


def _shard_axis(parameter: "torch.nn.Parameter") -> "Shard | None":
    """The dimension along which replicas shard a weight: the first, unless fused outputs are sharded along it within a
    replica. torch reassembles the rows of such doubly sharded weights in the wrong order."""
    from torch.distributed.tensor import DTensor, Shard

    is_fused = isinstance(parameter, DTensor) and any(
        torch_internals.is_strided_shard(placement) for placement in parameter.placements
    )
    return Shard(1) if is_fused else None
