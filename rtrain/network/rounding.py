"""A network that rounds its weights and activations as its int8 graph will, while it is trained.

Quantization-aware training (Jacob et al. 2018, arXiv:1712.05877): forward passes round, backward passes go straight
through what rounds. Weights have 255 levels for each row of a matrix, as far as the row's largest number reaches.
Activations have 256 levels for a whole tensor, whose width is learned by the gradient of the rounding itself (Esser et
al. 2020, arXiv:1902.08153, "Learned Step Size Quantization"). `rtrain.compress` measures where these begin, and makes
a graph of what they have become.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rtrain.network import beside

if TYPE_CHECKING:
    import torch

FILE = "quantizers.safetensors"
"""In the artefact of a network that has learned to be rounded."""
LEVELS, WEIGHT_LEVELS = 256, 255
"""Levels of activations, and of weights, which are as many on either side of 0."""
SMALLEST = 1e-12
"""In place of the largest number of a row of zeros."""
GAIN = 30.0
"""How many times faster than a weight the logarithm of a width moves. Adam moves each parameter by about the learning
rate in an update, whatever its gradient: at 3e-4 a width can halve in 80 updates."""
WIDTHS = f"{beside.NAME}.widths"
"""Name of the learned parameter: of each quantizer, the logarithm of its width over the one that it began with, divided
by `GAIN`."""


Side = Literal["input", "output"]


@dataclass(frozen=True)
class Quantizer:
    """The levels of one tensor of activations: `LEVELS` whole multiples of `step`."""

    side: Side
    layers: tuple[str, ...]
    """Names of the linear layers that all read the tensor, or of the one whose answer it is."""
    step: float
    zero: int
    """The level that stands for 0."""
    smooth: npt.NDArray[np.float32] | None = None
    """What an input's channels are multiplied by before, and the layers' columns divided by: [inputs]. It evens out
    channels that would take the levels from all others (Xiao et al. 2023, arXiv:2211.10438)."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The numbers of the first and the last level."""
        return -self.zero * self.step, (LEVELS - 1 - self.zero) * self.step


@dataclass(frozen=True)
class Quantizers:
    """All that an int8 graph rounds: these activations, the weights of the layers that read them, and tables."""

    activations: tuple[Quantizer, ...]
    tables: tuple[str, ...]
    """Names of the embeddings."""

    def write(self, path: Path) -> None:
        from safetensors.numpy import save_file

        tensors: dict[str, npt.NDArray[Any]] = {
            "step": np.array([one.step for one in self.activations], dtype=np.float64),
            "zero": np.array([one.zero for one in self.activations], dtype=np.int64),
        }
        tensors |= {
            f"smooth.{place}": one.smooth for place, one in enumerate(self.activations) if one.smooth is not None
        }
        named = [[one.side, *one.layers] for one in self.activations]
        save_file(tensors, path, {"activations": json.dumps(named), "tables": json.dumps(self.tables)})

    @classmethod
    def read(cls, path: Path) -> "Quantizers":
        from safetensors import safe_open
        from safetensors.numpy import load_file

        tensors = load_file(path)
        with safe_open(path, framework="np") as file:
            told = file.metadata()
        found = [
            Quantizer(side, tuple(layers), float(step), int(zero), tensors.get(f"smooth.{place}"))
            for place, ((side, *layers), step, zero) in enumerate(
                zip(json.loads(told["activations"]), tensors["step"], tensors["zero"], strict=True)
            )
        ]
        return cls(tuple(found), tuple(json.loads(told["tables"])))


def attach(network: "torch.nn.Module", quantizers: Quantizers) -> None:
    """Have a network round. Before it is moved to a device, and before the exchange and the optimizer are made."""
    part = _widths()(quantizers.activations)
    beside.attach(network, part)
    outputs = {one.layers[0]: place for place, one in enumerate(quantizers.activations) if one.side == "output"}
    for place, one in enumerate(quantizers.activations):
        for name in one.layers if one.side == "input" else ():
            layer = network.get_submodule(name)
            layer.forward = partial(_linear, layer, part, place, outputs.get(name))
    for name in quantizers.tables:
        network.get_submodule(name).register_forward_hook(_rows)


def learned(quantizers: Quantizers, weights: "Mapping[str, torch.Tensor]") -> Quantizers:
    """What `quantizers` have become, by a network's whole weights."""
    factors = np.exp(GAIN * weights[WIDTHS].detach().double().cpu().numpy())
    steps: Sequence[float] = [one.step * factor for one, factor in zip(quantizers.activations, factors, strict=True)]
    changed = (replace(one, step=float(step)) for one, step in zip(quantizers.activations, steps, strict=True))
    return replace(quantizers, activations=tuple(changed))


def by_rows(weights: "torch.Tensor") -> "torch.Tensor":
    """Weights [rows, columns] rounded to the levels of their rows; the gradient is as if they were not."""
    exact = weights.detach()
    step = exact.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST) / (WEIGHT_LEVELS // 2)
    return weights + ((exact / step).round() * step - exact)


def _rows(table: "torch.nn.Module", inputs: Any, vectors: "torch.Tensor") -> "torch.Tensor":
    """The looked up rows [..., columns] of a table, rounded as all of its rows would be."""
    return by_rows(vectors)


def _linear(layer: Any, part: Any, place: int, output: int | None, values: "torch.Tensor") -> "torch.Tensor":
    import torch

    smooth = getattr(part, f"smooth_{place}", None)
    weight = layer.weight
    if smooth is not None:
        values, weight = values * smooth, weight / smooth
    answer = torch.nn.functional.linear(part(place, values), by_rows(weight), layer.bias)
    # In half precision the answers of all layers have one type, in which attention multiplies them.
    return answer if output is None else part(output, answer).to(answer.dtype)


@lru_cache(maxsize=1)
def rounded() -> Any:
    """An autograd function of (values, step, zero): the nearest of the levels from 0 to `LEVELS` - 1, times `step`."""
    import torch

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, step: torch.Tensor, zero: int) -> torch.Tensor:
            ctx.save_for_backward(values, step)
            ctx.zero = zero
            return ((values / step + zero).round_().clamp_(0, LEVELS - 1) - zero).mul_(step)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            """The gradient of a value between the first and the last level is as if it were not rounded; to that of the
            step each value adds its distance to its level in steps, and beyond the levels the outermost level."""
            values, step = ctx.saved_tensors
            [gradient] = gradients
            place = values / step + ctx.zero
            level = place.round().clamp_(0, LEVELS - 1)
            inside = (place >= 0) & (place <= LEVELS - 1)
            of_step = torch.where(inside, level - place, level - ctx.zero)
            # Thousands of values have a part in it: unscaled, it would be the whole of a clipped gradient. By a number
            # that is the same however an update is cut into passes.
            share = (values.shape[-1] * LEVELS / 2) ** -0.5
            return gradient * inside, (gradient * of_step).sum() * share, None

    return Rounded


@lru_cache(maxsize=1)
def _widths() -> Any:
    import torch

    class Widths(torch.nn.Module):
        """The quantizers' widths, learned; called with a quantizer's place and its tensor."""

        def __init__(self, quantizers: Sequence[Quantizer]) -> None:
            super().__init__()
            self.widths = torch.nn.Parameter(torch.zeros(len(quantizers)))
            self._steps, self._zeros = [one.step for one in quantizers], [one.zero for one in quantizers]
            for place, one in enumerate(quantizers):
                if one.smooth is not None:
                    self.register_buffer(f"smooth_{place}", torch.from_numpy(one.smooth), persistent=False)

        def forward(self, place: int, values: torch.Tensor) -> torch.Tensor:
            exact = values.to(torch.promote_types(values.dtype, torch.float32))
            step = self._steps[place] * torch.exp(GAIN * self.widths[place].to(exact.dtype))
            answer: torch.Tensor = rounded().apply(exact, step, self._zeros[place])
            return answer

    return Widths
