"""Dropout at a seventh of the cost of torch's on a CPU, where drawing masks takes a tenth of a training step.

torch draws one Bernoulli number at a time. This module decides each element by 16 random bits; one call of a generator
gives bits for millions of elements (SFC64, Doty-Humphrey's small fast chaotic generator, as in NumPy).
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

LEVELS = 1 << 16


def derive_seed(*parts: int) -> int:
    """Derive a seed for torch's generator from seed, step and rank, so that a resumed run draws the same masks without
    stored state."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def draw_mask(shape: tuple[int, ...], rate: float, dtype: "torch.dtype", salt: int = 0) -> "torch.Tensor":
    """Draw a mask: zeros with probability `rate` (rounded to 1/65536), otherwise 1 / (1 - rate).

    The mask depends on one number from torch's CPU generator, so a resumed run or a recomputed forward pass draws the
    same mask. Each `salt` gives another mask.
    """
    import torch

    count = int(np.prod(shape))
    seed = int(torch.randint(1 << 62, (1,))) ^ salt << 62
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
    # Zero or one times the bit pattern of 1 / (1 - rate): no type conversion.
    pattern = _scale_bits(rate, dtype)
    is_kept = (bits >= round(rate * LEVELS)).view(np.uint8).astype(pattern.dtype)
    return torch.from_numpy(is_kept * pattern).view(dtype).view(shape)


def draw_torch_mask(shape: tuple[int, ...], rate: float, dtype: "torch.dtype") -> "torch.Tensor":
    """Draw a mask by torch's generator."""
    import torch

    return torch.nn.functional.dropout(torch.ones(shape, dtype=dtype), rate)


def draw_salted_torch_mask(shape: tuple[int, ...], rate: float, dtype: "torch.dtype", salt: int) -> "torch.Tensor":
    """Draw a mask by torch, another for each `salt`. Like `draw_mask` it takes one number from torch's CPU generator
    for any shape, so workers with different salts keep the same generator state."""
    import torch

    generator = torch.Generator().manual_seed(derive_seed(int(torch.randint(1 << 62, (1,))), salt))
    return torch.empty(shape, dtype=dtype).bernoulli_(1 - rate, generator=generator).div_(1 - rate)


@lru_cache(maxsize=8)
def _scale_bits(rate: float, dtype: "torch.dtype") -> "npt.NDArray[Any]":
    import torch

    unsigned = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor([1 / (1 - rate)], dtype=dtype).view(unsigned).numpy()


def replace_dropout(module: "torch.nn.Module", function: "Callable[..., torch.Tensor]", **options: Any) -> None:
    """Make the dropout layers of a module compute `function(layer, values, **options)`."""
    import torch

    for layer in module.modules():
        if type(layer) is torch.nn.Dropout:
            layer.forward = partial(function, layer, **options)  # type: ignore[method-assign]


def use_fast_dropout(network: "torch.nn.Module") -> None:
    """Use these masks in the network's dropout layers; on a GPU they keep torch's own."""
    replace_dropout(network, apply_dropout)


def use_native_dropout(network: "torch.nn.Module") -> None:
    """Make dropout layers on fake tensors keep a mask of the GPU's size: one byte an element, not one element as on a
    CPU."""
    replace_dropout(network, _drop_natively)


def _drop_natively(layer: "torch.nn.Dropout", values: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.native_dropout(values, layer.p, layer.training)[0] if layer.p else values


def apply_dropout(
    layer: "torch.nn.Dropout", values: "torch.Tensor", salt: int = 0, draw: "Callable[..., torch.Tensor]" = draw_mask
) -> "torch.Tensor":
    """Apply dropout as the layer does, with another mask for each `salt`. `draw`: a sampler like `draw_mask`."""
    import torch

    if not layer.training or not layer.p:
        return values
    if values.device.type != "cpu":
        return torch.nn.functional.dropout(values, layer.p)
    return values * draw(tuple(values.shape), layer.p, values.dtype, salt)
