"""A worker's own gradient, looked at before the exchange takes the mean over the workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtrain.exchange import whole

if TYPE_CHECKING:
    import torch


class Own:
    """Its squared norm, in the updates that measure."""

    def __init__(self) -> None:
        self._measures = False
        self._parts: list[torch.Tensor] = []

    def begin(self, measures: bool) -> None:
        self._measures, self._parts = measures, []

    def add(self, part: "torch.Tensor") -> None:
        """A part of the gradient, which is about to be exchanged."""
        if self._measures:
            self._parts.append(_square(part))

    @property
    def square(self) -> float:
        return float(sum(self._parts))


def squared(tensors: "Sequence[torch.Tensor]") -> float:
    """The squared norm of a vector that is given in parts."""
    return float(sum(_square(one) for one in tensors))


def _square(tensor: "torch.Tensor") -> "torch.Tensor":
    """[], on the tensor's device: nothing waits for it yet."""
    import torch

    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return whole.full(norm).double() ** 2
