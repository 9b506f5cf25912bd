"""A replica on several workers, each of which has some of the tokens: context parallelism by all-to-all (Jacobs et al.
2023, arXiv:2309.14509, DeepSpeed Ulysses).

All of an encoder but attention answers each token by itself. For attention the workers exchange: each gives most heads
of its tokens away and gets all tokens of its own heads, and the same the other way with the answers. So a pass may be
so long that no worker could hold its activations. What the head reads is gathered: it is computed on every worker.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from rtrain.core.errors import UserError
from rtrain.models import tp_plan, unpadded
from rtrain.models.forward import LAYOUT
from rtrain.parallel import mesh, transport
from rtrain.parallel.data_parallel import Replicas, Say, unsaid
from rtrain.parallel.model_parallel import Parted
from rtrain.parallel.timeline import WAITS
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

TOKENS = ("input_ids", "position_ids", "token_type_ids")
"""Inputs of an encoder with a column for each token."""


class Context(Parted):
    """All weights on each of `context` workers, which share the tokens of a replica's passes."""

    def __init__(self, module: "torch.nn.Module", watch: Watch | None = None, say: Say = unsaid, *, context: int):
        super().__init__(module, watch, say, context=context)
        if not unpadded.enabled(module):
            kind = type(module).__name__
            reason = f"train.context={context}: {kind} computes padding; write train.context=1"
            raise UserError(reason, code="unsupported_model")
        group, encoder = self._grid.get_group(mesh.CONTEXT), cast(Any, module).base_model
        self._context, place = group, self._grid.get_local_rank(mesh.CONTEXT)
        tp_plan.keep_tokens(cast(Any, module), context, place, partial(_attended, group))
        encoder.register_forward_pre_hook(partial(_split, place, context), with_kwargs=True)
        # Before all other hooks, which make of the last layer's answers what the head reads.
        encoder.register_forward_hook(partial(_gathered, group), with_kwargs=True, prepend=True)

    def optimizer(self, made: Any) -> "torch.optim.Optimizer":
        return Replicas.optimizer(self, made)

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        """Each worker's passes give what its tokens and its copy of the head come to. A head's gradient comes to the
        same on all of them, and so does what it gives each token, of which a token's worker gets the sum: the mean is
        that of the replica."""
        with super().during(last):
            yield
            if last:
                with self.timeline.during(WAITS):
                    transport.add_up(self.collected(), self._context)
                self.multiply(self.world / self.workers)

    @property
    def tells_noise(self) -> bool:
        """No: what a worker's tokens give of the first pass is not yet that pass's gradient."""
        return False


def _split(place: int, parts: int, encoder: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """An encoder's inputs for a pack [1, tokens] as this worker's stretch of them; the last one ends in padding, so
    that all are equally long, also where there are fewer tokens than workers."""
    import torch

    named = dict(named)
    if named.get(LAYOUT) is None:
        return given, named
    if given:
        named["input_ids"], given = given[0], given[1:]
    count = named["input_ids"].shape[1]
    size = -(-count // parts)
    for name in TOKENS:
        if named.get(name) is not None:
            full = torch.nn.functional.pad(named[name], (0, size * parts - count))
            named[name] = full[:, place * size : (place + 1) * size]
    return given, named


def _gathered(group: "dist.ProcessGroup", encoder: Any, given: Any, named: Mapping[str, Any], output: Any) -> Any:
    """The last layer's answers for this worker's tokens as those for the whole pack."""
    if named.get(LAYOUT) is not None:
        every = _gather().apply(output.last_hidden_state[0], group)
        output.last_hidden_state = every[None, : len(named[LAYOUT].order)]
    return output


def _attended(
    group: "dist.ProcessGroup",
    attend: Any,
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    *,
    layout: Any = None,
    **named: Any,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """`attention.packed` over all tokens, of some heads, for this worker's tokens of all heads: [1, heads, own, dim] ->
    [1, own, heads, dim]."""
    import torch
    import torch.distributed as dist

    if layout is None:
        found: tuple[torch.Tensor, None] = attend(module, query, key, value, attention_mask, **named)
        return found
    parts, count = dist.get_world_size(group), len(layout.order)
    heads, own, dim = query.shape[1] // dist.get_world_size(group), query.shape[2], query.shape[3]
    # [3, parts, heads, own, dim]: to each worker its heads; then from each worker its tokens.
    mine = torch.cat((query, key, value)).view(3, parts, heads, own, dim).transpose(0, 1)
    every = _swap().apply(mine, group).permute(1, 2, 0, 3, 4).reshape(3, 1, heads, parts * own, dim)[..., :count, :]
    answer, _ = attend(module, every[0], every[1], every[2], None, layout=layout, **named)
    full = torch.nn.functional.pad(answer[0], (0, 0, 0, 0, 0, parts * own - count)).view(parts, own, heads, dim)
    return _swap().apply(full, group).transpose(0, 1).reshape(1, own, parts * heads, dim), None


@cache
def _swap() -> Any:
    import torch
    import torch.distributed as dist

    class Swap(torch.autograd.Function):
        """Parts [workers, ...], one for each worker -> the parts that the workers have for this one."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            parts, ctx.group = given
            parts = parts.contiguous()
            found = torch.empty_like(parts)
            dist.all_to_all_single(found, parts, group=ctx.group)
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            parts = gradients[0].contiguous()
            found = torch.empty_like(parts)
            dist.all_to_all_single(found, parts, group=ctx.group)
            return found, None

    return Swap


@cache
def _gather() -> Any:
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        """A worker's tokens [own, width] -> all workers' [workers * own, width]."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            own, ctx.group = given
            own = own.contiguous()
            found: torch.Tensor = own.new_empty(len(own) * dist.get_world_size(ctx.group), own.shape[1])
            dist.all_gather_single(found, own, group=ctx.group)
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            every = gradients[0].contiguous()
            own = every.new_empty(len(every) // dist.get_world_size(ctx.group), every.shape[1])
            dist.reduce_scatter_single(own, every, group=ctx.group)
            return own, None

    return Gather
