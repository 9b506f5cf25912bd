"""Attention over a pack of windows.

A GPU uses a variable-length flash-attention kernel. Elsewhere windows of similar length are padded, multiplied together
and unpacked. Local attention (two of ModernBERT's three layers) works on chunks of windows.

Dropout of attention weights follows the model's configuration on every path.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rtrain.models import dropout as masks, local_attention, precision
from rtrain.models.banded_attention import attend_in_band
from rtrain.models.device import effective_type
from rtrain.models.pack_layout import PackLayout, WindowGroup
from rtrain.torch_internals import flash_attention, softmax_backward

if TYPE_CHECKING:
    import torch


Kernel = Literal["varlen", "plain", "fused"]
SIMD_LANES = 16
"""fp32 numbers in a 512-bit vector."""
MAX_FLASH_DIM = 256
"""Largest head dimension of flash attention, which also requires a multiple of 8."""
MAX_PLAIN_CONTEXT = 512
"""Largest context of a token for plain products in training on a CPU. Plain products keep the square of a window's
attention weights for the backward pass: 268 MB in fp32 for each head of each layer at 8,192 tokens. Without dropout
torch's kernel is also faster for such windows (measured with 2,048 tokens and 6 heads of 64: 249 ms against 403)."""


def select_kernel(
    device: str,
    capability: tuple[int, int],
    dtype: str,
    dim: int,
    *,
    dropout: float,
    training: bool,
    max_context: int = 0,
) -> Kernel:
    """Select the attention kernel of a pack. Pure.

    `varlen` is a GPU's flash attention over the unpadded pack. `plain` products train
    faster on a CPU than torch's fused kernel, except for long windows. `fused` is torch's kernel over padded groups.
    Without dropout it keeps no square of a window, which would take gigabytes in the large micro-batches of an
    evaluation.

    Args:
        max_context: The largest number of tokens that a token reads.
    """
    if device == "cpu":
        return "plain" if training and (dropout or max_context <= MAX_PLAIN_CONTEXT) else "fused"
    supports_flash = device == "cuda" and capability >= precision.AMPERE and dtype in ("bfloat16", "float16")
    return "varlen" if supports_flash and dim % 8 == 0 and dim <= MAX_FLASH_DIM else "fused"


@lru_cache(maxsize=8)
def _capability(device: "torch.device") -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def packed_attention(
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: PackLayout | None = None,
    draw: "Callable[[tuple[int, ...], float, torch.dtype], torch.Tensor]" = masks.draw_mask,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Transformers' attention interface: `query`, `key`, `value` [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    Without a layout the tensors are padded and the mask is a usual attention mask.

    Args:
        draw: The sampler of dropout masks for plain attention.
        sliding_window: Tokens that a token reads on either side, itself included; None for all.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if layout is None:
        if attention_mask is None:
            positions = torch.arange(query.shape[2], device=query.device)
            window = local_attention.attention_window(getattr(module, "config", None))
            if sliding_window is not None:
                attention_mask = (positions[:, None] - positions).abs() < sliding_window
            elif window is not None:
                attention_mask = local_attention.window_mask(positions[:, None], positions, window)
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    rate = dropout if module.training else 0.0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, count, dim = query.shape[1:]
    window_size = layout.attention_window if sliding_window is None else sliding_window - 1
    device_type = effective_type(query.device)
    is_pretend = device_type != query.device.type
    kernel = select_kernel(
        device_type,
        precision.AMPERE if is_pretend else _capability(query.device),
        str(query.dtype).removeprefix("torch."),
        dim,
        dropout=rate,
        training=torch.is_grad_enabled() and query.requires_grad,
        max_context=layout.max_seqlen if window_size is None else min(layout.max_seqlen, 2 * window_size + 1),
    )
    if kernel == "varlen":
        return varlen_attention(query, key, value, layout, scale, rate, window_size), None
    groups = layout.groups if window_size is None else layout.windowed_groups(window_size)
    q, k, v = (part.transpose(1, 2).reshape(count * heads, dim) for part in (query, key, value))
    outputs: torch.Tensor
    if kernel == "plain":
        outputs = _plain_function().apply(q, k, v, groups, heads, scale, rate, draw)
    else:
        # torch's fused kernel keeps squares with dropout on a CPU, and none on a GPU.
        outputs = _fused_attention(q, k, v, groups, heads, scale, 0.0 if is_pretend else rate)
    if layout.global_tokens is not None:
        outputs = _attend_globally(outputs, q, k, v, layout.global_tokens, scale, rate, draw)
    return outputs.view(1, count, heads, dim), None


def varlen_attention(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    layout: PackLayout,
    scale: float,
    rate: float = 0.0,
    attention_window: int | None = None,
    kernel: "Callable[..., torch.Tensor]" = flash_attention,
) -> "torch.Tensor":
    """Compute varlen attention: [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    Args:
        rate: The dropout rate.
        attention_window: Tokens that a token reads on either side; None for all.
        kernel: A function with the signature of `flash_attention`.
    """
    # Views, not indexing: the gradient of an index would be a tensor of zeros and a copy.
    tensors = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
    if layout.band is not None and layout.attention_window == attention_window:
        return attend_in_band(tensors[0], tensors[1], tensors[2], layout.band, scale, rate)[None]
    return kernel(*tensors, layout.cu_seqlens, layout.max_seqlen, scale=scale, dropout=rate, window=attention_window)[
        None
    ]


def _fused_attention(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    groups: Sequence[WindowGroup],
    heads: int,
    scale: float,
    rate: float,
) -> "torch.Tensor":
    """Attention by torch's fused kernels, group by group; the tensors are [tokens * heads, dim]."""
    import torch

    dim, outputs = query.shape[-1], []
    for group in groups:
        rows = slice(group.start * heads, group.stop * heads)
        q = query[rows].index_select(0, group.gather).view(group.num_windows, heads, group.width, dim)
        k, v = (
            part[rows].index_select(0, group.gather_keys).view(group.num_windows, heads, group.num_keys, dim)
            for part in (key, value)
        )
        bias = None if group.bias is None else group.bias.to(query.dtype)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate, scale=scale)
        outputs.append(output.reshape(-1, dim).index_select(0, group.scatter))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_globally(
    outputs: "torch.Tensor",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    group: WindowGroup,
    scale: float,
    rate: float,
    draw: "Callable[[tuple[int, ...], float, torch.dtype], torch.Tensor]",
) -> "torch.Tensor":
    """Replace the outputs [tokens * heads, dim] of the global first tokens. Each of them reads its whole window."""
    import torch

    dim = query.shape[-1]
    heads = len(group.gather) // group.num_windows
    q = query.index_select(0, group.gather).view(group.num_windows, heads, 1, dim)
    k, v = (
        part.index_select(0, group.gather_keys).view(group.num_windows, heads, group.num_keys, dim)
        for part in (key, value)
    )
    assert group.bias is not None
    weights = torch.softmax(q @ k.transpose(2, 3) * scale + group.bias.to(q.dtype), dim=-1)
    if rate and weights.device.type == "cpu":
        weights = weights * draw(tuple(weights.shape), rate, weights.dtype)
    elif rate:
        weights = torch.nn.functional.dropout(weights, rate)
    return outputs.index_copy(0, group.gather, (weights @ v).view(-1, dim))


def _softmax_dtype(scores: "torch.Tensor") -> "torch.dtype":
    """The dtype in which the softmax of `scores` [..., width] and its gradient are computed. torch's half-precision
    kernels also compute in fp32, but process rows shorter than a vector of 32 one number at a time (measured with rows
    of 18 and 31 on an AMD EPYC: 2 to 5 times as long forward, 6 to 8 backward)."""
    import torch

    narrow = scores.dtype.itemsize == 2 and SIMD_LANES <= scores.shape[-1] < 2 * SIMD_LANES
    return torch.float32 if narrow else scores.dtype


@lru_cache(maxsize=1)
def _plain_function() -> Any:
    import torch

    class PlainAttention(torch.autograd.Function):
        """`_fused_attention` by plain products with a hand-written backward pass. It avoids autograd's copies for
        gather and scatter, and a gradient of all tokens for each group."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            *parts, groups, heads, scale, rate, draw = args
            dim = parts[0].shape[-1]
            output, saved = torch.empty_like(parts[2]), []
            for group in groups:
                rows = slice(group.start * heads, group.stop * heads)
                query = parts[0][rows].index_select(0, group.gather).view(-1, group.width, dim)
                key, value = (
                    part[rows].index_select(0, group.gather_keys).view(-1, group.num_keys, dim) for part in parts[1:]
                )
                query.mul_(scale)
                scores = torch.bmm(query, key.transpose(1, 2))
                if group.bias is not None:
                    # Adding a row to rows this short takes ten times as long, so the bias is expanded first.
                    bias = group.bias.to(scores.dtype).expand(-1, heads, group.width, -1)
                    scores.add_(bias.reshape(scores.shape))
                weights = torch.softmax(scores.to(_softmax_dtype(scores)), dim=-1).to(scores.dtype)
                mask = draw(weights.shape, rate, weights.dtype) if rate else None
                group_output = torch.bmm(weights if mask is None else weights * mask, value)
                torch.index_select(group_output.view(-1, dim), 0, group.scatter, out=output[rows])
                saved += [query, key, value, weights, mask]
            ctx.save_for_backward(*saved)
            ctx.groups, ctx.heads, ctx.scale = groups, heads, scale
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            saved, heads = ctx.saved_tensors, ctx.heads
            dim = gradients[0].shape[-1]
            gradients_out = [torch.empty_like(gradients[0]) for _ in range(3)]
            for index, group in enumerate(ctx.groups):
                rows = slice(group.start * heads, group.stop * heads)
                query, key, value, weights, mask = saved[5 * index : 5 * index + 5]
                # Outputs of padding get no gradient. Nothing reads them, but the sums below include padding.
                output_grad = gradients[0][rows].index_select(0, group.gather).view(query.shape)
                if group.token_mask is not None:
                    output_grad.view(group.num_windows, -1, group.width, dim).mul_(
                        group.token_mask.to(output_grad.dtype)
                    )
                dropped_weights = weights if mask is None else weights * mask
                value_grad = torch.bmm(dropped_weights.transpose(1, 2), output_grad)
                weights_grad = torch.bmm(output_grad, value.transpose(1, 2))
                if mask is not None:
                    weights_grad.mul_(mask)
                dtype = _softmax_dtype(weights)
                scores_grad = softmax_backward(weights_grad.to(dtype), weights.to(dtype)).to(weights.dtype)
                query_grad = torch.bmm(scores_grad, key).mul_(ctx.scale)
                key_grad = torch.bmm(scores_grad.transpose(1, 2), query)
                torch.index_select(query_grad.view(-1, dim), 0, group.scatter, out=gradients_out[0][rows])
                for part, part_grad in zip(gradients_out[1:], (key_grad, value_grad), strict=True):
                    if group.has_shared_keys:
                        # Keys that no token reads (padding, keys outside the window) have a gradient of zero.
                        part[rows].zero_().index_add_(0, group.gather_keys, part_grad.view(-1, dim))
                    else:
                        torch.index_select(part_grad.view(-1, dim), 0, group.scatter, out=part[rows])
            return (*gradients_out, *(None,) * 5)

    return PlainAttention
