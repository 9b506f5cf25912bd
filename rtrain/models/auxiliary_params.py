"""Weights that training needs and no answer does, e.g. the map between two models' hidden states.

They are a part of the network, so that its gradients are exchanged, its optimizer updates them and its checkpoints hold
them; they are left out where it is saved as an artefact.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAME = "rtrain_beside"


def attach(network: "torch.nn.Module", part: "torch.nn.Module") -> None:
    """Before the exchange and the optimizer are made."""
    network.add_module(NAME, part)


def without(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """A network's weights by name, without these."""
    return {name: value for name, value in weights.items() if not name.startswith(f"{NAME}.")}


def parameters(network: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """Their weights; a forward pass of the network does not touch them."""
    part = getattr(network, NAME, None)
    return [] if part is None else list(part.parameters())
