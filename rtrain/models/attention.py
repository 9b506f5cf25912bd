"""Attention over a pack of windows.

A GPU uses a variable-length flash-attention kernel. Elsewhere windows of similar length are padded, multiplied together
and unpacked. Local attention (two of ModernBERT's three layers) works on chunks of windows.

Dropout of attention weights follows the model's configuration on every path.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rtrain.models import dropout as masks, long_texts, precision
from rtrain.models.device import effective_type
from rtrain.models.pack_layout import Band, PackLayout, WindowGroup
from rtrain.torch_internals import FlashOptions, Qkv, SequenceBounds, flash_backward, flash_forward, softmax_backward

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


class AttentionOptions(NamedTuple):
    heads: int
    scale: float
    rate: float
    """The dropout rate."""
    draw: "Callable[[tuple[int, ...], float, torch.dtype], torch.Tensor]"
    """The sampler of dropout masks on a CPU."""


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
            window = long_texts.attention_window(getattr(module, "config", None))
            if sliding_window is not None:
                attention_mask = (positions[:, None] - positions).abs() < sliding_window
            elif window is not None:
                attention_mask = long_texts.window_mask(positions[:, None], positions, window)
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    heads, count, dim = query.shape[1:]
    options = AttentionOptions(
        heads, dim**-0.5 if scaling is None else scaling, dropout if module.training else 0.0, draw
    )
    window_size = layout.attention_window if sliding_window is None else sliding_window - 1
    device_type = effective_type(query.device)
    is_pretend = device_type != query.device.type
    kernel = select_kernel(
        device_type,
        precision.AMPERE if is_pretend else _capability(query.device),
        str(query.dtype).removeprefix("torch."),
        dim,
        dropout=options.rate,
        training=torch.is_grad_enabled() and query.requires_grad,
        max_context=layout.max_seqlen if window_size is None else min(layout.max_seqlen, 2 * window_size + 1),
    )
    if kernel == "varlen":
        flash_options = FlashOptions(options.scale, options.rate, window_size)
        return varlen_attention((query, key, value), layout, flash_options), None
    groups = layout.groups if window_size is None else layout.windowed_groups(window_size)
    q, k, v = (part.transpose(1, 2).reshape(count * heads, dim) for part in (query, key, value))
    outputs: torch.Tensor
    if kernel == "plain":
        outputs = _plain_function().apply(q, k, v, groups, options)
    else:
        # torch's fused kernel keeps squares with dropout on a CPU, and none on a GPU.
        outputs = _fused_attention((q, k, v), groups, options._replace(rate=0.0) if is_pretend else options)
    if layout.global_tokens is not None:
        outputs = _attend_globally(outputs, (q, k, v), layout.global_tokens, options)
    return outputs.view(1, count, heads, dim), None


def varlen_attention(
    qkv: Qkv,
    layout: PackLayout,
    options: FlashOptions,
    kernel: "Callable[[Qkv, SequenceBounds, FlashOptions], tuple[torch.Tensor, ...]]" = flash_forward,
) -> "torch.Tensor":
    """Compute varlen attention: [1, heads, tokens, dim] of each -> [1, tokens, heads, dim]."""
    # Views, not indexing: the gradient of an index would be a tensor of zeros and a copy.
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in qkv)
    if layout.band is not None and layout.attention_window == options.window:
        return attend_in_band((query, key, value), layout.band, options._replace(window=None))[None]
    return kernel((query, key, value), layout.bounds, options)[0][None]


def _fused_attention(qkv: Qkv, groups: Sequence[WindowGroup], options: AttentionOptions) -> "torch.Tensor":
    """Attention by torch's fused kernels, group by group; the tensors are [tokens * heads, dim]."""
    import torch

    heads, dim, outputs = options.heads, qkv[0].shape[-1], []
    for group in groups:
        query, key, value = (part[group.start * heads : group.stop * heads] for part in qkv)
        q = query.index_select(0, group.gather).view(group.num_windows, heads, group.width, dim)
        k, v = (
            part.index_select(0, group.gather_keys).view(group.num_windows, heads, group.num_keys, dim)
            for part in (key, value)
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=None if group.bias is None else group.bias.to(q.dtype),
            dropout_p=options.rate,
            scale=options.scale,
        )
        outputs.append(output.reshape(-1, dim).index_select(0, group.scatter))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_globally(
    outputs: "torch.Tensor", qkv: Qkv, group: WindowGroup, options: AttentionOptions
) -> "torch.Tensor":
    """Replace the outputs [tokens * heads, dim] of the global first tokens. Each of them reads its whole window."""
    import torch

    query, key, value = qkv
    heads, dim = options.heads, query.shape[-1]
    q = query.index_select(0, group.gather).view(group.num_windows, heads, 1, dim)
    k, v = (
        part.index_select(0, group.gather_keys).view(group.num_windows, heads, group.num_keys, dim)
        for part in (key, value)
    )
    assert group.bias is not None
    weights = torch.softmax(q @ k.transpose(2, 3) * options.scale + group.bias.to(q.dtype), dim=-1)
    if options.rate and weights.device.type == "cpu":
        weights = weights * options.draw(tuple(weights.shape), options.rate, weights.dtype)
    elif options.rate:
        weights = torch.nn.functional.dropout(weights, options.rate)
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
            *parts, groups, options = args
            heads, scale, rate, draw = options
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
            return (*gradients_out, None, None)

    return PlainAttention


# ------------------------------------------------------------------------------------------------------------ the band


class BandKernel(NamedTuple):
    """Windowed attention and its gradient, with the signatures of `flash_forward` and `flash_backward`."""

    forward: "Callable[[Qkv, SequenceBounds, FlashOptions], tuple[torch.Tensor, ...]]"
    backward: "Callable[..., Qkv]"


FLASH_KERNEL = BandKernel(flash_forward, flash_backward)


def attend_in_band(qkv: Qkv, band: Band, options: FlashOptions, kernel: BandKernel = FLASH_KERNEL) -> "torch.Tensor":
    """Compute local attention with a global first token on a GPU, by three calls of flash attention: [tokens, heads,
    dim] of each -> outputs of the same shape.

    The first call computes the band: each token reads its neighbors. The second call adds the window's first token for
    the tokens out of its reach, with one key. Each call returns outputs and log-sum-exp values, which weight the two
    outputs of a token as in ring attention (Liu et al. 2023, arXiv:2310.01889). The third call lets the first tokens
    read all tokens.

    The backward pass gives each call the final outputs and the final log-sum-exp values. Each call then has the true
    weights of its keys, and computes its part of the gradient. A log-sum-exp of infinity leaves a query out of a call.

    The kernel drops attention weights after it has computed the sums, so the weighting is right with dropout too.
    """
    output: torch.Tensor = _band_function().apply(*qkv, band, options, kernel)
    return output


@lru_cache(maxsize=1)
def _band_function() -> Any:
    import torch

    class BandedAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            query, key, value, band, options, kernel = args
            in_long = slice(band.num_tokens)
            output: torch.Tensor
            output, log_sums, *state = kernel.forward(
                (query, key, value), band.bounds, options._replace(window=band.window)
            )
            keys, values = (part.index_select(0, band.span_keys) for part in (key, value))
            far_output, far_log_sums, *far_state = kernel.forward(
                (query[in_long], keys, values), band.far_bounds, options
            )
            first_query = query.index_select(0, band.first_tokens)
            first_output, first_log_sums, *first_state = kernel.forward(
                (first_query, key[in_long], value[in_long]), band.first_bounds, options
            )
            far_log_sums = far_log_sums.masked_fill_(band.reaches_first, -torch.inf)
            long_log_sums = log_sums[:, in_long]
            far_weight = torch.sigmoid(far_log_sums - long_log_sums).t().to(output.dtype)
            output[in_long].lerp_(far_output, far_weight[:, :, None])
            output.index_copy_(0, band.first_tokens, first_output)
            long_log_sums.copy_(torch.logaddexp(long_log_sums, far_log_sums))
            ctx.save_for_backward(query, key, value, output, log_sums, first_log_sums, *state, *far_state, *first_state)
            ctx.band, ctx.options, ctx.kernel = band, options, kernel
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            query, key, value, output, log_sums, first_log_sums, *states = ctx.saved_tensors
            band, options, backward = ctx.band, ctx.options, ctx.kernel.backward
            gradient, in_long = gradients[0].contiguous(), slice(band.num_tokens)
            band_log_sums = log_sums.index_fill(1, band.first_tokens, torch.inf)
            grads = backward(
                *(gradient, (query, key, value), (output, band_log_sums, *states[:2]), band.bounds),
                options._replace(window=band.window),
            )
            keys, values = (part.index_select(0, band.span_keys) for part in (key, value))
            far_log_sums = log_sums[:, in_long].masked_fill(band.reaches_first, torch.inf)
            far_query_grad, *span_grads = backward(
                *(gradient[in_long], (query[in_long], keys, values), (output[in_long], far_log_sums, *states[2:4])),
                *(band.far_bounds, options),
            )
            first_gradient, first_query, first_output = (
                part.index_select(0, band.first_tokens) for part in (gradient, query, output)
            )
            first_query_grad, *key_grads = backward(
                *(first_gradient, (first_query, key[in_long], value[in_long])),
                *((first_output, first_log_sums, *states[4:]), band.first_bounds, options),
            )
            grads[0][in_long].add_(far_query_grad)
            grads[0].index_copy_(0, band.first_tokens, first_query_grad)
            for grad, key_grad, span_grad in zip(grads[1:], key_grads, span_grads, strict=True):
                grad[in_long].add_(key_grad)
                exact_grad = span_grad.to(torch.promote_types(span_grad.dtype, torch.float32))
                window_grad = torch.segment_reduce(
                    exact_grad, "sum", lengths=band.spans_per_window, axis=0, unsafe=True
                )
                grad.index_add_(0, band.first_tokens, window_grad.to(grad.dtype))
            return (*grads, None, None, None)

    return BandedAttention
