"""Tensor parallelism: a replica on several workers, which shard its layers."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.models import layerwise_lr, tp_plan
from rtrain.parallel import collectives, dtensor_utils, mesh
from rtrain.parallel.data_parallel import EventLogger, ignore_event
from rtrain.parallel.model_parallel import ModelParallelStrategy
from rtrain.parallel.sparse_embedding import find_embedding
from rtrain.parallel.timeline import COMM_WAIT
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class TensorParallelStrategy(ModelParallelStrategy):
    """A shard of the layers on each of `tensor_parallel_size` workers, which form a replica.

    All workers of a replica compute the same rows. Unsharded weights, such as normalizations, get the same gradient on
    all of them, so gradients are synchronized between replicas only.
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        *,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        **options: Any,
    ):
        """`sequence_parallel`: shard the tokens between layers' products; `options`: options of
        `ModelParallelStrategy`."""
        super().__init__(module, watchdog, log_event, tensor_parallel_size=tensor_parallel_size, **options)
        self._is_split = tensor_parallel_size > 1
        self.drop_absent_layers(module)
        if self._is_split:
            parallelize_layers(module, self._mesh[mesh.TENSOR], sequence_parallel)

    def drop_absent_layers(self, module: Any) -> None:
        """Drop the parts of the network that other workers of the replica have, before the rest is sharded."""

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        with self.record_waits(), super().micro_batch(is_last):
            yield

    def record_waits(self) -> "contextlib.AbstractContextManager[None]":
        """Record waits for the collectives of this worker's replica in the timeline, inside the block."""
        if not self._is_split:
            return contextlib.nullcontext()
        return torch_internals.wrap_collective_waits(lambda: self.timeline.span(COMM_WAIT))

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        for name, tensor in tensors.items():
            self.watchdog.heartbeat()
            full = dtensor_utils.full_tensor(tensor)
            if collectives.is_rank_zero():
                yield name, full

    def max_over_replicas(self, num_micro_batches: int) -> int:
        """The largest number of micro-batches of a replica."""
        import torch
        import torch.distributed as dist

        maximum = torch.tensor([num_micro_batches], dtype=torch.int64)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._group)
        return int(maximum.item())


def parallelize_layers(module: Any, group: "DeviceMesh", sequence_parallel: bool) -> None:
    """Shard the encoder's layers, and its word embedding unless it is tied to another module, across the workers of
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

    layer_plan, embedding, encoder_layers = (
        tp_plan.TP_PLANS[module.config.model_type],
        find_embedding(module),
        layerwise_lr.find_layers(module.base_model),
    )
    assert encoder_layers is not None  # `tp_plan` has checked the architectures
    layers = torch.nn.ModuleList(
        layer for layer in encoder_layers if all(map(dtensor_utils.is_materialized, layer.parameters()))
    )
    requires_grad_by_name = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in layer_plan.colwise}
    plan |= {name: _fused_colwise(parts) for name, parts in layer_plan.fused_outputs.items()}
    plan |= {name: RowwiseParallel() for name in layer_plan.rowwise}
    if sequence_parallel:
        replicated, split_tokens = (Replicate(),), (Shard(1),)
        # As DTensors, which know the number of tokens: workers may have unequal shares.
        plan |= {
            name: RowwiseParallel(output_layouts=split_tokens[0], use_local_output=False) for name in layer_plan.rowwise
        }
        plan |= {name: SequenceParallel() for name in layer_plan.norms}
        plan |= {
            name: PrepareModuleInput(
                input_layouts=split_tokens, desired_input_layouts=replicated, use_local_output=True
            )
            for name in layer_plan.full_sequence
        }
        embedding_output = PrepareModuleOutput(
            output_layouts=replicated, desired_output_layouts=split_tokens, use_local_output=False
        )
        encoder = module.base_model
        parallelize_module(getattr(encoder, "embeddings_project", encoder.embeddings), group, embedding_output)
        parallelize_module(
            layers[-1], group, PrepareModuleOutput(output_layouts=split_tokens, desired_output_layouts=replicated)
        )
        tp_plan.use_local_dropout(layers, group.get_local_rank())
    for layer in layers:
        parallelize_module(layer, group, plan)
    if embedding is not None and dtensor_utils.is_materialized(embedding[1].weight):
        parallelize_module(embedding[1], group, RowwiseParallel(input_layouts=Replicate()))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(requires_grad_by_name[name])  # torch's sequence parallelism omits it
    tp_plan.use_local_inner_dropout(module, layers, group.get_local_rank())
    tp_plan.shard_heads(module, group.size(), group.get_local_rank())
    dtensor_utils.copy_from_file(module)


def _fused_colwise(num_parts: int) -> Any:
    """Shards a linear layer with fused outputs: several concatenated vectors. Each worker computes its share of each.
    torch treats tensors with this sharding as replicated."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class FusedColwiseParallel(ParallelStyle):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            def compute(values: "torch.Tensor") -> "torch.Tensor":
                # The workers' gradients of this layer's input are summed: each worker has some of the layer's outputs.
                replicated = DTensor.from_local(values, device_mesh, [Replicate()], run_check=False)
                bias = None if module.bias is None else module.bias.to_local()
                local_values = replicated.to_local(grad_placements=[Partial()])
                return torch.nn.functional.linear(local_values, module.weight.to_local(), bias)

            import torch

            placements = [torch_internals.make_strided_shard(0, num_parts)]
            for name, parameter in list(module.named_parameters(recurse=False)):
                shard = distribute_tensor(parameter.detach(), device_mesh, placements, src_data_rank=None)
                module.register_parameter(name, torch.nn.Parameter(shard, parameter.requires_grad))
            module.forward = compute
            return module

    return FusedColwiseParallel()
