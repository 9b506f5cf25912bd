"""Gradients and optimizer state in shares, or the weights too: ZeRO stages 2 and 3 (Rajbhandari et al. 2020,
arXiv:1910.02054), by torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277).

Before a layer computes, the replicas gather its weights; after its backward pass each keeps its share of the gradient's
sum alone. So every pass of every replica is an exchange: all make equally many of them.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.core.ragged import Tokens
from rtrain.models import layerwise_lr
from rtrain.parallel import dtensor_utils, mesh
from rtrain.parallel.base import Work
from rtrain.parallel.data_parallel import Say, unsaid
from rtrain.parallel.tensor import Cut
from rtrain.parallel.timeline import WAITS, Timeline
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard


class Fully(Cut):
    """A share of every tensor on every replica."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        *,
        tensor: int = 1,
        sequence: bool = False,
        weights: bool = True,
        **others: Any,
    ):
        """`weights`: between two passes over a layer, keep a share of its weights alone (stage 3); else they are whole
        from an update's first pass to its last (stage 2)."""
        from torch.distributed.fsdp import fully_shard

        super().__init__(module, watch, say, tensor=tensor, sequence=sequence, **others)
        torch_internals.hush_redistribution()
        # Nothing writes into what a pass answers.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        layers = layerwise_lr.layers(getattr(module, "base_model", module)) or ()
        self._parts: Any = [*(layer for layer in layers if all(map(dtensor_utils.here, layer.parameters()))), module]
        self._weights = weights
        absent = {one for one in module.parameters() if not dtensor_utils.here(one)}
        for part in self._parts:
            fully_shard(
                part,
                mesh=self._grid[mesh.REPLICAS],
                reshard_after_forward=None if weights else False,
                shard_placement_fn=_across,
                ignored_params=absent,
            )
            part.set_force_sum_reduction_for_comms(True)  # Gloo takes no means
            part.set_custom_all_gather(_Told(self.timeline, gathered))
            part.set_custom_reduce_scatter(_Told(self.timeline, shared_out))

    def filled(self, passes: Sequence[Tokens], work: Work) -> Sequence[Tokens]:
        return [*passes, *[work.idle] * (max(1, self.most(len(passes))) - len(passes))]

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        self._parts[-1].set_reshard_after_backward(last or self._weights)
        with self.sums_told():
            yield

    @contextlib.contextmanager
    def answering(self, passes: int) -> Iterator[int]:
        try:
            yield self.most(passes) - passes
        finally:
            for part in self._parts:
                part.reshard()

    def stops(self, failed: bool) -> bool:
        return bool(self.most(super().stops(failed)))


class _Told:
    """A collective as `fully_shard` calls it, of which the timeline is told: a processor stands still for it."""

    def __init__(self, timeline: Timeline, collective: "Callable[..., dist.Work | None]"):
        self._timeline, self._collective = timeline, collective

    def allocate(self, size: Any, *, dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *given: Any, **named: Any) -> "dist.Work | None":
        with self._timeline.during(WAITS):
            return self._collective(*given, **named)


def gathered(
    output_tensor: "torch.Tensor", input_tensor: "torch.Tensor", group: "dist.ProcessGroup", async_op: bool = False
) -> "dist.Work | None":
    """The whole of what every worker has a share of."""
    import torch.distributed as dist

    work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
    return work


def shared_out(
    output_tensor: "torch.Tensor",
    input_tensor: "torch.Tensor",
    group: "dist.ProcessGroup",
    op: Any,
    async_op: bool = False,
) -> "dist.Work | None":
    """The sum of what every worker has the whole of, a share of it for each."""
    import torch.distributed as dist

    work: dist.Work | None = dist.reduce_scatter_single(
        output_tensor, input_tensor, op=op, group=group, async_op=async_op
    )
    return work


def _across(parameter: "torch.nn.Parameter") -> "Shard | None":
    """The axis along which replicas share a weight: the first, but for one that is cut within a replica by parts of
    that. Of what is cut twice so, torch puts the rows together in a wrong order."""
    from torch.distributed.tensor import DTensor, Shard

    cut = isinstance(parameter, DTensor) and any(torch_internals.is_of_several(one) for one in parameter.placements)
    return Shard(1) if cut else None
