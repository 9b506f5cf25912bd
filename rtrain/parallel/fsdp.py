"""Sharded gradients and optimizer state, or weights too: ZeRO stages 2 and 3 (Rajbhandari et al. 2020,
arXiv:1910.02054) by torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277).

Replicas gather a layer's weights before it computes; after its backward pass each keeps its shard of the summed
gradient. So every micro-batch of every replica is a collective, and all compute equally many.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.models import network_parts
from rtrain.parallel import dtensor_utils
from rtrain.parallel.profiler import COMM_WAIT, Timeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


class ShardedModules:
    """A shard of every tensor of a network on every replica: of each layer, and of the rest."""

    def __init__(self, network: "torch.nn.Module", replicas: "DeviceMesh", timeline: Timeline, *, shard_weights: bool):
        """`shard_weights`: keep only a shard of a layer's weights between two micro-batches (stage 3); otherwise the
        weights are full from the first micro-batch of a step to its last (stage 2)."""
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        torch_internals.silence_redistribution_warnings()
        # Nothing writes into the outputs of a micro-batch.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        layers = network_parts.find_layers(getattr(network, "base_model", network)) or ()
        self._shards_weights = shard_weights
        self._modules: list[Any] = [
            *(layer for layer in layers if all(map(dtensor_utils.is_materialized, layer.parameters()))),
            network,
        ]
        absent_parameters = {
            parameter for parameter in network.parameters() if not dtensor_utils.is_materialized(parameter)
        }
        for module in self._modules:
            fully_shard(
                module,
                mesh=replicas,
                reshard_after_forward=None if shard_weights else False,
                shard_placement_fn=_shard_axis,
                ignored_params=absent_parameters,
            )
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean
            module.set_custom_all_gather(_TimedCollective(timeline, dist.all_gather_single))
            module.set_custom_reduce_scatter(_TimedCollective(timeline, dist.reduce_scatter_single))

    def start_micro_batch(self, is_last: bool) -> None:
        """Prepare a micro-batch of a step."""
        self._modules[-1].set_reshard_after_backward(is_last or self._shards_weights)

    def reshard(self) -> None:
        """Keep only the shards of all weights."""
        for module in self._modules:
            module.reshard()


class _TimedCollective:
    """A collective of `fully_shard`, with a span of the timeline: a CPU waits for it."""

    def __init__(self, timeline: Timeline, collective: "Callable[..., dist.Work | None]"):
        self._timeline, self._collective = timeline, collective

    def allocate(self, size: Any, *, dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, **options: Any) -> "dist.Work | None":
        with self._timeline.span(COMM_WAIT):
            return self._collective(output_tensor, input_tensor, **options)


def _shard_axis(parameter: "torch.nn.Parameter") -> "Shard | None":
    """The dimension along which replicas shard a weight: the first, unless fused outputs are sharded along it within a
    replica. torch reassembles the rows of such doubly sharded weights in the wrong order."""
    from torch.distributed.tensor import DTensor, Shard

    is_fused = isinstance(parameter, DTensor) and any(map(torch_internals.is_strided_shard, parameter.placements))
    return Shard(1) if is_fused else None
