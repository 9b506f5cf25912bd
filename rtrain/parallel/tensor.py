"""A replica on several workers: its layers are cut across them by torch's tensor parallelism."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.models import layerwise_lr, tp_plan
from rtrain.parallel import collectives, dtensor_utils, mesh
from rtrain.parallel.data_parallel import Say, unsaid
from rtrain.parallel.model_parallel import Parted
from rtrain.parallel.sparse_embedding import table_of
from rtrain.parallel.timeline import WAITS
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Cut(Parted):
    """A share of the layers on each of `tensor` workers, which together are a replica.

    All workers of a replica compute the same rows. Weights that are not cut, such as normalisations, get the same
    gradient on all of them, so that gradients are exchanged between replicas alone.
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        *,
        tensor: int = 1,
        sequence: bool = False,
        **others: Any,
    ):
        """`sequence`: between layers' products, each worker of a replica has some of the tokens. `others`: as `Parted`
        has them."""
        super().__init__(module, watch, say, tensor=tensor, **others)
        self._cut = tensor > 1
        self.leave(module)
        if self._cut:
            cut_layers(module, self._grid[mesh.TENSOR], sequence)

    def leave(self, module: Any) -> None:
        """Put away what of the network other workers of the replica have, before the rest is cut."""

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        with self.sums_told(), super().during(last):
            yield

    def sums_told(self) -> "contextlib.AbstractContextManager[None]":
        """Inside, the timeline is told for how long this worker waits for the sums of its replica's workers."""
        if not self._cut:
            return contextlib.nullcontext()
        return torch_internals.around_waits(lambda: self.timeline.during(WAITS))

    def whole(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        for name, tensor in tensors.items():
            self.watch.alive()
            found = dtensor_utils.full(tensor)
            if collectives.first():
                yield name, found

    def most(self, passes: int) -> int:
        """The most passes that any replica makes."""
        import torch
        import torch.distributed as dist

        found = torch.tensor([passes], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found.item())


def cut_layers(module: Any, group: "DeviceMesh", sequence: bool) -> None:
    """Cut the encoder's layers, and its table of words where nothing else is tied to it, across the workers of
    `group`; and the tokens between the layers' products."""
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    cut, table, found = tp_plan.CUTS[module.config.model_type], table_of(module), layerwise_lr.layers(module.base_model)
    assert found is not None  # `cuts` knows the architectures
    layers = torch.nn.ModuleList(layer for layer in found if all(map(dtensor_utils.here, layer.parameters())))
    trained = {name: one.requires_grad for name, one in module.named_parameters()}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in cut.by_outputs}
    plan |= {name: _of_several(parts) for name, parts in cut.several.items()}
    plan |= {name: RowwiseParallel() for name in cut.by_inputs}
    if sequence:
        every, own = (Replicate(),), (Shard(1),)
        # As DTensors, which know how many tokens there are: the workers may have unequally many.
        plan |= {name: RowwiseParallel(output_layouts=own[0], use_local_output=False) for name in cut.by_inputs}
        plan |= {name: SequenceParallel() for name in cut.norms}
        plan |= {
            name: PrepareModuleInput(input_layouts=own, desired_input_layouts=every, use_local_output=True)
            for name in cut.whole
        }
        first = PrepareModuleOutput(output_layouts=every, desired_output_layouts=own, use_local_output=False)
        encoder = module.base_model
        parallelize_module(getattr(encoder, "embeddings_project", encoder.embeddings), group, first)
        parallelize_module(layers[-1], group, PrepareModuleOutput(output_layouts=own, desired_output_layouts=every))
        tp_plan.drop_apart(layers, group.get_local_rank())
    for layer in layers:
        parallelize_module(layer, group, plan)
    if table is not None and dtensor_utils.here(table[1].weight):
        parallelize_module(table[1], group, RowwiseParallel(input_layouts=Replicate()))
    for name, one in module.named_parameters():
        one.requires_grad_(trained[name])  # torch's sequence parallelism forgets it
    tp_plan.drop_inside(module, layers, group.get_local_rank())
    tp_plan.keep_heads(module, group.size(), group.get_local_rank())
    dtensor_utils.leave_file(module)


def _of_several(parts: int) -> Any:
    """How a linear layer is cut whose outputs are so many vectors after each other, of each of which a worker computes
    its share. torch computes with tensors that are cut in this way as if each worker had all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class OfSeveral(ParallelStyle):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            def compute(values: "torch.Tensor") -> "torch.Tensor":
                # What the workers give this layer's input adds up: each has some of its outputs.
                every = DTensor.from_local(values, device_mesh, [Replicate()], run_check=False)
                bias = None if module.bias is None else module.bias.to_local()
                own = every.to_local(grad_placements=[Partial()])
                return torch.nn.functional.linear(own, module.weight.to_local(), bias)

            import torch

            how = [torch_internals.shares_of_several(0, parts)]
            for name, one in list(module.named_parameters(recurse=False)):
                share = distribute_tensor(one.detach(), device_mesh, how, src_data_rank=None)
                module.register_parameter(name, torch.nn.Parameter(share, one.requires_grad))
            module.forward = compute
            return module

    return OfSeveral()
