"""Weights that only training needs, e.g. the map between the hidden states of two models.

They belong to the network during training: their gradients are all-reduced, the optimizer updates them and checkpoints
hold them. An artifact leaves them out.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MODULE_NAME = "rtrain_auxiliary"


def attach_auxiliary(network: "torch.nn.Module", module: "torch.nn.Module") -> None:
    """Attach `module` to the network. Call before the strategy and the optimizer are built."""
    network.add_module(MODULE_NAME, module)


def drop_auxiliary(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The network's weights by name, without the auxiliary ones."""
    return {name: value for name, value in weights.items() if not name.startswith(f"{MODULE_NAME}.")}


def auxiliary_parameters(network: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """The auxiliary weights. The network's forward pass does not use them."""
    module = getattr(network, MODULE_NAME, None)
    return [] if module is None else list(module.parameters())
