"""Attention inside a pack: windows of about equal length are padded and multiplied together, and taken apart again."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rtrain.tasks.batch import Ints
from rtrain.training import dropout as masks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Group:
    """Windows of about equal length, next to each other in the pack."""

    start: int
    stop: int
    windows: int
    width: int
    """Tokens of the longest."""
    gather: "torch.Tensor"
    """[windows * heads * width]: for each place of the padded group, where its vector is among [tokens * heads]. Places
    of padding repeat the window's first token, whose answer nobody reads: no zeros need to be written."""
    scatter: "torch.Tensor"
    """[tokens * heads]: for each token's vector, its place in the padded group."""
    bias: "torch.Tensor | None"
    """[windows, 1, 1, width]: minus infinity for padding; None where all windows are equally long."""
    real: "torch.Tensor | None"
    """[windows, 1, width, 1]: zero for padding, one else; None as well."""


@dataclass(frozen=True)
class Layout:
    """Where the windows of a pass are in its pack, longest first."""

    order: Ints
    """Of the pass's tokens: the pack's token i is the pass's token order[i]."""
    groups: tuple[Group, ...]
    lengths: "torch.Tensor"
    """Of the windows, in the pack's order."""
    starts: "torch.Tensor"
    """Of the pass's windows, in the pass's order: where each begins in the pack."""
    window: "torch.Tensor"
    """[windows]: of each of the pass's windows, its place in the pack's order."""


def packed(
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **named: Any,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Transformers' attention interface: `query`, `key`, `value` [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    Without a layout the tensors are padded, as everywhere else.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if layout is None:
        answer: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
        return answer
    rate = dropout if module.training else 0.0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, count, dim = query.shape[1:]
    flat = [part.transpose(1, 2).reshape(count * heads, dim) for part in (query, key, value)]
    # On a CPU torch's fused kernel trains slower than plain products. It holds no square of a window, of which an
    # evaluation's large passes would take gigabytes.
    plain = torch.is_grad_enabled() and query.requires_grad and query.device.type == "cpu"
    attend = _plain().apply if plain else _fused
    found = []
    for group in layout.groups:
        parts = [part[group.start * heads : group.stop * heads] for part in flat]
        found.append(attend(parts[0], parts[1], parts[2], group, heads, scale, rate))
    return (found[0] if len(found) == 1 else torch.cat(found)).view(1, count, heads, dim), None


def _fused(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    group: Group,
    heads: int,
    scale: float,
    rate: float,
) -> "torch.Tensor":
    """Of one group, [tokens * heads, dim] each, by torch's fused kernels."""
    import torch

    dim = query.shape[-1]
    q, k, v = (
        part.index_select(0, group.gather).view(group.windows, heads, group.width, dim) for part in (query, key, value)
    )
    bias = None if group.bias is None else group.bias.to(query.dtype)
    answer = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate, scale=scale)
    return answer.reshape(-1, dim).index_select(0, group.scatter)


@lru_cache(maxsize=1)
def _plain() -> Any:
    import torch

    class Plain(torch.autograd.Function):
        """As `_fused`, by plain products, with the backward pass written out: what autograd would keep and copy for
        gathering and scattering is not needed."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
            query, key, value, group, heads, scale, rate = arguments
            shape, dim = (group.windows * heads, group.width, query.shape[-1]), query.shape[-1]
            query, key, value = (part.index_select(0, group.gather).view(shape) for part in (query, key, value))
            query.mul_(scale)
            scores = torch.bmm(query, key.transpose(1, 2))
            if group.bias is not None:
                squares = scores.view(group.windows, heads, group.width, group.width)
                squares.add_(group.bias.to(scores.dtype))
            weights = torch.softmax(scores, dim=-1)
            kept = masks.mask(weights.shape, rate, weights.dtype) if rate else None
            answer = torch.bmm(weights if kept is None else weights * kept, value)
            ctx.save_for_backward(query, key, value, weights, kept)
            ctx.group, ctx.scale = group, scale
            return answer.view(-1, dim).index_select(0, group.scatter)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            query, key, value, weights, kept = ctx.saved_tensors
            group, dim = ctx.group, query.shape[-1]
            # What padding answered is zero here, as nothing reads it; all sums below run over padding too.
            answer = gradients[0].index_select(0, group.gather).view(query.shape)
            if group.bias is not None:
                answer.view(group.windows, -1, group.width, dim).mul_(group.real.to(answer.dtype))
            dropped = weights if kept is None else weights * kept
            of_value = torch.bmm(dropped.transpose(1, 2), answer)
            of_weights = torch.bmm(answer, value.transpose(1, 2))
            if kept is not None:
                of_weights.mul_(kept)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_query = torch.bmm(of_scores, key).mul_(ctx.scale)
            of_key = torch.bmm(of_scores.transpose(1, 2), query)
            found = (part.view(-1, dim).index_select(0, group.scatter) for part in (of_query, of_key, of_value))
            return (*found, None, None, None, None)

    return Plain
