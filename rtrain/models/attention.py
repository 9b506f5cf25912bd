"""Attention inside a pack: by a kernel for windows of any length where a GPU has one. Elsewhere windows of about equal
length are padded and multiplied together, and taken apart again; where attention is local, as ModernBERT's is in two
layers of three, pieces of windows are.

Dropout of attention weights is as the model's configuration says, on every path.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rtrain.models import dropout as masks, local_attention, precision
from rtrain.models.device import kind
from rtrain.models.pack_layout import Group, Layout
from rtrain.torch_internals import flash_attention, softmax_backward

if TYPE_CHECKING:
    import torch


Kernel = Literal["varlen", "plain", "fused"]
LANES = 16
"""Numbers of fp32 in a vector of 512 bits."""
FLASH_DIM = 256
"""Most numbers of a head's vector that flash attention takes; it wants a multiple of 8."""
SQUARE = 512
"""Most tokens that a token reads where a CPU trains by plain products, which keep the square of a window's attention
weights for the backward pass: of 8,192 tokens 268 MB for each head of each layer, in fp32. Without dropout torch's
kernel trains such windows faster too (measured with 2,048 tokens and 6 heads of 64: 249 ms against 403)."""


def kernel_for(
    device: str,
    capability: tuple[int, int],
    dtype: str,
    dim: int,
    *,
    dropout: float,
    trains: bool,
    reads: int = 0,
    firsts: bool = False,
) -> Kernel:
    """How attention inside a pack is computed. Pure. `reads`: most tokens that a token reads; `firsts`: its window's
    first one among them, wherever it is itself.

    `varlen`, a GPU's flash attention over the pack as it is, knows of tokens that are read but those next to each
    other. `plain` products train faster on a CPU than torch's fused kernel does, but for long windows. `fused` is that
    kernel, over padded groups; it holds no square of a window, of which an evaluation's large passes would take
    gigabytes. With dropout it does.
    """
    if device == "cpu":
        return "plain" if trains and (dropout or reads <= SQUARE) else "fused"
    flash = device == "cuda" and capability >= precision.AMPERE and dtype in ("bfloat16", "float16")
    return "varlen" if flash and not firsts and dim % 8 == 0 and dim <= FLASH_DIM else "fused"


@lru_cache(maxsize=8)
def _capability(device: "torch.device") -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def packed(
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    draw: "Callable[[tuple[int, ...], float, torch.dtype], torch.Tensor]" = masks.mask,
    sliding_window: int | None = None,
    **named: Any,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Transformers' attention interface: `query`, `key`, `value` [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    Without a layout the tensors are padded, as everywhere else, and the mask says what is read. `draw`: what gives
    dropout's masks to plain attention. `sliding_window`: tokens that a token reads on either side, itself included;
    None for all.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if layout is None:
        if attention_mask is None:
            places = torch.arange(query.shape[2], device=query.device)
            own = local_attention.reach(getattr(module, "config", None))
            if sliding_window is not None:
                attention_mask = (places[:, None] - places).abs() < sliding_window
            elif own is not None:
                attention_mask = local_attention.near(places[:, None], places, own)
        answer: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
        return answer
    rate = dropout if module.training else 0.0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, count, dim = query.shape[1:]
    reach = layout.reach if sliding_window is None else sliding_window - 1
    where = kind(query.device)
    foretold = where != query.device.type
    name = kernel_for(
        where,
        precision.AMPERE if foretold else _capability(query.device),
        str(query.dtype).removeprefix("torch."),
        dim,
        dropout=rate,
        trains=torch.is_grad_enabled() and query.requires_grad,
        reads=layout.longest if reach is None else min(layout.longest, 2 * reach + 1),
        firsts=layout.reach is not None,
    )
    if name == "varlen":
        return by_window(query, key, value, layout, scale, rate, reach), None
    groups = layout.groups if reach is None else layout.within(reach)
    q, k, v = (part.transpose(1, 2).reshape(count * heads, dim) for part in (query, key, value))
    found: torch.Tensor
    if name == "plain":
        found = _plain().apply(q, k, v, groups, heads, scale, rate, draw)
    else:
        # A processor's kernel keeps squares with dropout, a GPU's none.
        found = _fused(q, k, v, groups, heads, scale, 0.0 if foretold else rate)
    if layout.firsts is not None:
        found = _reading_all(found, q, k, v, layout.firsts, scale, rate, draw)
    return found.view(1, count, heads, dim), None


def by_window(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    layout: Layout,
    scale: float,
    rate: float = 0.0,
    reach: int | None = None,
    kernel: "Callable[..., torch.Tensor]" = flash_attention,
) -> "torch.Tensor":
    """[1, heads, tokens, dim] -> [1, tokens, heads, dim] by a kernel that is called as `flash_attention`. `rate`: of
    dropout; `reach`: tokens that a token reads on either side, None for all."""
    # Views back and forth: the gradient of an index would be a tensor of zeros, and a copy into it.
    parts = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
    return kernel(*parts, layout.ends, layout.longest, scale=scale, dropout=rate, reach=reach)[None]


def _fused(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    groups: Sequence[Group],
    heads: int,
    scale: float,
    rate: float,
) -> "torch.Tensor":
    """Attention by torch's fused kernels, group by group; the tensors are [tokens * heads, dim]."""
    import torch

    dim, found = query.shape[-1], []
    for group in groups:
        own = slice(group.start * heads, group.stop * heads)
        q = query[own].index_select(0, group.gather).view(group.windows, heads, group.width, dim)
        k, v = (
            part[own].index_select(0, group.read).view(group.windows, heads, group.reads, dim) for part in (key, value)
        )
        bias = None if group.bias is None else group.bias.to(query.dtype)
        answer = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate, scale=scale)
        found.append(answer.reshape(-1, dim).index_select(0, group.scatter))
    return found[0] if len(found) == 1 else torch.cat(found)


def _reading_all(
    found: "torch.Tensor",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    group: Group,
    scale: float,
    rate: float,
    draw: "Callable[[tuple[int, ...], float, torch.dtype], torch.Tensor]",
) -> "torch.Tensor":
    """The answers `found` [tokens * heads, dim] with those of first tokens, each of which reads all of its window."""
    import torch

    dim = query.shape[-1]
    heads = len(group.gather) // group.windows
    q = query.index_select(0, group.gather).view(group.windows, heads, 1, dim)
    k, v = (part.index_select(0, group.read).view(group.windows, heads, group.reads, dim) for part in (key, value))
    assert group.bias is not None
    weights = torch.softmax(q @ k.transpose(2, 3) * scale + group.bias.to(q.dtype), dim=-1)
    if rate and weights.device.type == "cpu":
        weights = weights * draw(tuple(weights.shape), rate, weights.dtype)
    elif rate:
        weights = torch.nn.functional.dropout(weights, rate)
    return found.index_copy(0, group.gather, (weights @ v).view(-1, dim))


def _within(scores: "torch.Tensor") -> "torch.dtype":
    """The type in which the softmax of rows [..., width] and its gradient are computed: torch's own of half precision
    compute in fp32 too, but take rows of less than a vector of 32 numbers one number at a time. (Measured with rows of
    18 and 31 on an AMD EPYC: 2 to 5 times as long forward, 6 to 8 backward.)"""
    import torch

    narrow = scores.dtype.itemsize == 2 and LANES <= scores.shape[-1] < 2 * LANES
    return torch.float32 if narrow else scores.dtype


@lru_cache(maxsize=1)
def _plain() -> Any:
    import torch

    class Plain(torch.autograd.Function):
        """As `_fused`, by plain products, with the backward pass written out: what autograd would keep and copy for
        gathering and scattering is not needed, nor a gradient of all tokens for each group."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
            *parts, groups, heads, scale, rate, draw = arguments
            dim = parts[0].shape[-1]
            found, kept = torch.empty_like(parts[2]), []
            for group in groups:
                own = slice(group.start * heads, group.stop * heads)
                query = parts[0][own].index_select(0, group.gather).view(-1, group.width, dim)
                key, value = (part[own].index_select(0, group.read).view(-1, group.reads, dim) for part in parts[1:])
                query.mul_(scale)
                scores = torch.bmm(query, key.transpose(1, 2))
                if group.bias is not None:
                    # Spread out first: to add a row to so short ones takes ten times as long.
                    bias = group.bias.to(scores.dtype).expand(-1, heads, group.width, -1)
                    scores.add_(bias.reshape(scores.shape))
                weights = torch.softmax(scores.to(_within(scores)), dim=-1).to(scores.dtype)
                mask = draw(weights.shape, rate, weights.dtype) if rate else None
                answer = torch.bmm(weights if mask is None else weights * mask, value)
                torch.index_select(answer.view(-1, dim), 0, group.scatter, out=found[own])
                kept += [query, key, value, weights, mask]
            ctx.save_for_backward(*kept)
            ctx.groups, ctx.heads, ctx.scale = groups, heads, scale
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            kept, heads = ctx.saved_tensors, ctx.heads
            dim = gradients[0].shape[-1]
            found = [torch.empty_like(gradients[0]) for _ in range(3)]
            for place, group in enumerate(ctx.groups):
                own = slice(group.start * heads, group.stop * heads)
                query, key, value, weights, mask = kept[5 * place : 5 * place + 5]
                # Padding's answers get no gradient: nothing reads them, but all sums below run over padding too.
                answer = gradients[0][own].index_select(0, group.gather).view(query.shape)
                if group.real is not None:
                    answer.view(group.windows, -1, group.width, dim).mul_(group.real.to(answer.dtype))
                dropped = weights if mask is None else weights * mask
                of_value = torch.bmm(dropped.transpose(1, 2), answer)
                of_weights = torch.bmm(answer, value.transpose(1, 2))
                if mask is not None:
                    of_weights.mul_(mask)
                within = _within(weights)
                of_scores = softmax_backward(of_weights.to(within), weights.to(within)).to(weights.dtype)
                of_query = torch.bmm(of_scores, key).mul_(ctx.scale)
                of_key = torch.bmm(of_scores.transpose(1, 2), query)
                torch.index_select(of_query.view(-1, dim), 0, group.scatter, out=found[0][own])
                for part, of_part in zip(found[1:], (of_key, of_value), strict=True):
                    if group.pieces:
                        # What nobody reads has gradients of zero: padding, and what is too far away.
                        part[own].zero_().index_add_(0, group.read, of_part.view(-1, dim))
                    else:
                        torch.index_select(of_part.view(-1, dim), 0, group.scatter, out=part[own])
            return (*found, *(None,) * 5)

    return Plain
