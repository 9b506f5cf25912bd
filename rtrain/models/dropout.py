"""Dropout that costs a seventh of torch's on a CPU, where drawing its masks is a tenth of a training pass.

torch draws one Bernoulli number at a time. Here 16 random bits decide on each element, and one call of a generator
gives bits for millions (SFC64, Doty-Humphrey's small fast chaotic generator, as NumPy has it).
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


def seed_of(*parts: int) -> int:
    """A seed for torch's generator. As a function of seed, update and rank it lets a resumed run draw the same masks
    without stored state."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def mask(shape: tuple[int, ...], rate: float, dtype: "torch.dtype", salt: int = 0) -> "torch.Tensor":
    """Zeros with probability `rate`, to the next 1/65536, and 1 / (1 - rate) else.

    A function of torch's CPU generator, of which it takes one number: a resumed run, or a pass that is computed again,
    draws the same mask. Another `salt` gives another one.
    """
    import torch

    count = int(np.prod(shape))
    seed = int(torch.randint(1 << 62, (1,))) ^ salt << 62
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
    # Zero or one times the bit pattern of 1 / (1 - rate): no number is converted.
    pattern = _scaled(rate, dtype)
    keeps = (bits >= round(rate * LEVELS)).view(np.uint8).astype(pattern.dtype)
    return torch.from_numpy(keeps * pattern).view(dtype).view(shape)


def stock(shape: tuple[int, ...], rate: float, dtype: "torch.dtype") -> "torch.Tensor":
    """The same kind of mask, drawn by torch."""
    import torch

    return torch.nn.functional.dropout(torch.ones(shape, dtype=dtype), rate)


def stock_salted(shape: tuple[int, ...], rate: float, dtype: "torch.dtype", salt: int) -> "torch.Tensor":
    """A mask drawn by torch, another for each `salt`. As `mask` does, it takes one number of torch's CPU generator
    whatever its shape, so that workers with other salts go on alike."""
    import torch

    drawn = torch.Generator().manual_seed(seed_of(int(torch.randint(1 << 62, (1,))), salt))
    return torch.empty(shape, dtype=dtype).bernoulli_(1 - rate, generator=drawn).div_(1 - rate)


@lru_cache(maxsize=8)
def _scaled(rate: float, dtype: "torch.dtype") -> "npt.NDArray[Any]":
    """The bit pattern of 1 / (1 - rate), as an integer of the same width."""
    import torch

    unsigned = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor([1 / (1 - rate)], dtype=dtype).view(unsigned).numpy()


def replace(network: "torch.nn.Module") -> None:
    """Give the network's dropout layers these masks; on a GPU they go on with torch's own."""
    import torch

    for layer in network.modules():
        if type(layer) is torch.nn.Dropout:
            layer.forward = partial(drop, layer)  # type: ignore[method-assign]


def replace_by_native(network: "torch.nn.Module") -> None:
    """Let the network's dropout layers keep what they keep on a GPU, where torch's own mask is a byte an element; on a
    CPU it is an element."""
    import torch

    def native(layer: "torch.nn.Dropout", values: "torch.Tensor") -> "torch.Tensor":
        return torch.native_dropout(values, layer.p, layer.training)[0] if layer.p else values

    for layer in network.modules():
        if type(layer) is torch.nn.Dropout:
            layer.forward = partial(native, layer)  # type: ignore[method-assign]


def drop(
    layer: "torch.nn.Dropout",
    values: "torch.Tensor",
    salt: int = 0,
    draw: "Callable[..., torch.Tensor]" = mask,
) -> "torch.Tensor":
    """What the layer answers, with another mask for another `salt`; `draw` as `mask` does."""
    import torch

    if not layer.training or not layer.p:
        return values
    if values.device.type != "cpu":
        return torch.nn.functional.dropout(values, layer.p)
    return values * draw(tuple(values.shape), layer.p, values.dtype, salt)
