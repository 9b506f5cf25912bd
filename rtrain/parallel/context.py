"""Context parallelism by all-to-all (Jacobs et al. 2023, arXiv:2309.14509, DeepSpeed Ulysses): each worker of a replica
has some of the tokens.

All modules of an encoder except attention compute each token by itself. For attention an all-to-all gives each worker
all tokens of its own heads, and another one returns the outputs. So a micro-batch may be too long for the activations
to fit on one worker. The inputs of the head are gathered, and every worker computes the head.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from rtrain.config import TrainConfig
from rtrain.core.errors import UserError
from rtrain.models import tp_plan, unpadded
from rtrain.models.network_parts import LAYOUT
from rtrain.parallel import collectives, mesh
from rtrain.parallel.base import EventLogger, Strategy, ignore_event
from rtrain.parallel.mesh import ModelParallelStrategy
from rtrain.parallel.profiler import COMM_WAIT
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

TOKEN_INPUTS = ("input_ids", "position_ids", "token_type_ids")
"""Inputs of an encoder with a column for each token."""


class ContextParallelStrategy(ModelParallelStrategy):
    """All weights on each of `context_parallel_size` workers, which share the tokens of a replica's micro-batches."""

    def __init__(
        self,
        module: "torch.nn.Module",
        train: TrainConfig,
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
    ):
        super().__init__(module, train, watchdog, log_event)
        context_parallel_size = train.context_parallel_size
        if not unpadded.is_packed(module):
            class_name = type(module).__name__
            reason = (
                f"train.context_parallel_size={context_parallel_size}: {class_name} computes padding; write "
                "train.context_parallel_size=1"
            )
            raise UserError(reason, code="unsupported_model")
        group, encoder = self._mesh.get_group(mesh.CONTEXT), cast(Any, module).base_model
        self._context_group, cp_rank = group, self._mesh.get_local_rank(mesh.CONTEXT)
        tp_plan.shard_tokens(cast(Any, module), context_parallel_size, cp_rank, partial(_attend_all_tokens, group))
        encoder.register_forward_pre_hook(partial(_split_tokens, cp_rank, context_parallel_size), with_kwargs=True)
        # Register before all other hooks, which convert the last layer's outputs to the head's inputs.
        encoder.register_forward_hook(partial(_gather_tokens, group), with_kwargs=True, prepend=True)

    def make_optimizer(self, build: Any) -> "torch.optim.Optimizer":
        return Strategy.make_optimizer(self, build)

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Each rank computes gradients from its tokens and a full copy of the head. The head's gradient is the same on
        all ranks, and each token's rank receives the sum of the gradients of the head's inputs over the ranks. So the
        replica's gradient is the mean over its ranks."""
        with super().micro_batch(is_last):
            yield
            if is_last:
                with self.timeline.span(COMM_WAIT):
                    collectives.all_reduce_sum(self.local_gradients(), self._context_group)
                self.scale_gradients(self.num_replicas / self.num_workers)

    @property
    def supports_noise_scale(self) -> bool:
        """False: a rank's tokens give only part of the first micro-batch's gradient."""
        return False


def _split_tokens(cp_rank: int, cp_size: int, encoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Cut an encoder's inputs for a pack [1, tokens] to this worker's tokens. The last shard is padded, so that all
    have the same length, even with fewer tokens than workers."""
    import torch

    kwargs = dict(kwargs)
    if kwargs.get(LAYOUT) is None:
        return args, kwargs
    if args:
        kwargs["input_ids"], args = args[0], args[1:]
    count = kwargs["input_ids"].shape[1]
    shard_size = -(-count // cp_size)
    for name in TOKEN_INPUTS:
        if kwargs.get(name) is not None:
            padded = torch.nn.functional.pad(kwargs[name], (0, shard_size * cp_size - count))
            kwargs[name] = padded[:, cp_rank * shard_size : (cp_rank + 1) * shard_size]
    return args, kwargs


def _gather_tokens(group: "dist.ProcessGroup", encoder: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Gather the last layer's outputs of all workers for the whole pack."""
    if kwargs.get(LAYOUT) is not None:
        all_hidden = _all_gather().apply(output.last_hidden_state[0], group)
        output.last_hidden_state = all_hidden[None, : len(kwargs[LAYOUT].order)]
    return output


def _attend_all_tokens(
    group: "dist.ProcessGroup",
    attend: Any,
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    *,
    layout: Any = None,
    **kwargs: Any,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Compute `attention.packed_attention` over all tokens for some heads, and return all heads for this worker's
    tokens: [1, heads, own, dim] -> [1, own, heads, dim]."""
    import torch
    import torch.distributed as dist

    if layout is None:
        output: tuple[torch.Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
        return output
    cp_size, count = dist.get_world_size(group), len(layout.order)
    heads, num_local, dim = query.shape[1] // dist.get_world_size(group), query.shape[2], query.shape[3]
    # [3, parts, heads, own, dim]: send each worker its heads; then receive each worker's tokens.
    local_qkv = torch.cat((query, key, value)).view(3, cp_size, heads, num_local, dim).transpose(0, 1)
    full_qkv = _all_to_all(local_qkv.contiguous(), group).permute(1, 2, 0, 3, 4)
    full_qkv = full_qkv.reshape(3, 1, heads, cp_size * num_local, dim)[..., :count, :]
    heads_output, _ = attend(module, full_qkv[0], full_qkv[1], full_qkv[2], None, layout=layout, **kwargs)
    padded = torch.nn.functional.pad(heads_output[0], (0, 0, 0, 0, 0, cp_size * num_local - count))
    outputs = _all_to_all(padded.view(cp_size, num_local, heads, dim), group)
    return outputs.transpose(0, 1).reshape(1, num_local, cp_size * heads, dim), None


def _all_to_all(parts: "torch.Tensor", group: "dist.ProcessGroup") -> "torch.Tensor":
    """All-to-all: parts [workers, ...] for each worker -> the parts from each worker for this one."""
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    received: torch.Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return received


@cache
def _all_gather() -> Any:
    import torch
    import torch.distributed as dist

    class AllGather(torch.autograd.Function):
        """All-gather: a worker's tokens [own, width] -> all workers' [workers * own, width]."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            local_hidden, ctx.group = args
            local_hidden = local_hidden.contiguous()
            all_hidden: torch.Tensor = local_hidden.new_empty(
                len(local_hidden) * dist.get_world_size(ctx.group), local_hidden.shape[1]
            )
            dist.all_gather_single(all_hidden, local_hidden, group=ctx.group)
            return all_hidden

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            all_gradients = gradients[0].contiguous()
            local_gradient = all_gradients.new_empty(
                len(all_gradients) // dist.get_world_size(ctx.group), all_gradients.shape[1]
            )
            dist.reduce_scatter_single(local_gradient, all_gradients, group=ctx.group)
            return local_gradient, None

    return AllGather
