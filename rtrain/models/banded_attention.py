"""Local attention with a global first token on a GPU, by three calls of flash attention.

The first call computes the band: each token reads its neighbors. The second call adds the window's first token for the
tokens out of its reach, with one key. Each call returns outputs and log-sum-exp values, which weight the two outputs of
a token as in ring attention (Liu et al. 2023, arXiv:2310.01889). The third call lets the first tokens read all tokens.

The backward pass gives each call the final outputs and the final log-sum-exp values. Each call then has the true
weights of its keys, and computes its part of the gradient. A log-sum-exp of infinity leaves a query out of a call.

The kernel drops attention weights after it has computed the sums, so the weighting is right with dropout too.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain.torch_internals import flash_backward, flash_forward

if TYPE_CHECKING:
    import torch

    from rtrain.models.pack_layout import Band


class BandKernel(NamedTuple):
    """Windowed attention and its gradient, with the signatures of `flash_forward` and `flash_backward`."""

    forward: "Callable[..., tuple[torch.Tensor, ...]]"
    backward: "Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]"


FLASH_KERNEL = BandKernel(flash_forward, flash_backward)


def attend_in_band(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    band: "Band",
    scale: float,
    rate: float = 0.0,
    kernel: BandKernel = FLASH_KERNEL,
) -> "torch.Tensor":
    """Compute local attention: [tokens, heads, dim] of each -> outputs of the same shape. `rate`: the dropout rate."""
    output: torch.Tensor = _band_function().apply(query, key, value, band, scale, rate, kernel)
    return output


@lru_cache(maxsize=1)
def _band_function() -> Any:
    import torch

    class BandedAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            query, key, value, band, scale, rate, kernel = args
            options = {"scale": scale, "dropout": rate}
            in_long = slice(band.num_tokens)
            output: torch.Tensor
            output, log_sums, *state = kernel.forward(query, key, value, band.bounds, **options, window=band.window)
            keys, values = (part.index_select(0, band.span_keys) for part in (key, value))
            far_output, far_log_sums, *far_state = kernel.forward(
                query[in_long], keys, values, band.far_bounds, **options
            )
            first_output, first_log_sums, *first_state = kernel.forward(
                query.index_select(0, band.first_tokens), key[in_long], value[in_long], band.first_bounds, **options
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
                *(gradient, query, key, value, output, band_log_sums, states[:2], band.bounds),
                **options,
                window=band.window,
            )
            keys, values = (part.index_select(0, band.span_keys) for part in (key, value))
            far_log_sums = log_sums[:, in_long].masked_fill(band.reaches_first, torch.inf)
            far_args = (gradient[in_long], query[in_long], keys, values, output[in_long], far_log_sums)
            far_query_grad, *span_grads = backward(*far_args, states[2:4], band.far_bounds, **options)
            first_gradient, first_query, first_output = (
                part.index_select(0, band.first_tokens) for part in (gradient, query, output)
            )
            first_args = (first_gradient, first_query, key[in_long], value[in_long], first_output, first_log_sums)
            first_query_grad, *key_grads = backward(*first_args, states[4:], band.first_bounds, **options)
            grads[0][in_long].add_(far_query_grad)
            grads[0].index_copy_(0, band.first_tokens, first_query_grad)
            for grad, key_grad, span_grad in zip(grads[1:], key_grads, span_grads, strict=True):
                grad[in_long].add_(key_grad)
                exact_grad = span_grad.to(torch.promote_types(span_grad.dtype, torch.float32))
                window_grad = torch.segment_reduce(
                    exact_grad, "sum", lengths=band.spans_per_window, axis=0, unsafe=True
                )
                grad.index_add_(0, band.first_tokens, window_grad.to(grad.dtype))
            return (*grads, None, None, None, None)

    return BandedAttention
