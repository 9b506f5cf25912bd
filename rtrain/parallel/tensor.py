"""Tensor parallelism: the workers of a replica shard its layers (torch's `parallelize_module`, by
`rtrain.models.tp_plan`)."""

from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.models import network_parts, tp_plan
from rtrain.parallel import dtensor_utils
from rtrain.parallel.ddp import find_embedding

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


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
        network_parts.find_layers(module.base_model),
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
