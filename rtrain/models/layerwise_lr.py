"""Layer-wise decay of the learning rate: what is nearer to the input is of more general use, and learns slower.

As in the fine-tuning of BEiT (Bao et al. 2022, arXiv:2106.08254): the head has factor 1, the i-th layer from the top,
from 1, decay^i, and the embeddings below L layers decay^(L + 1). ELECTRA (Clark et al. 2020, arXiv:2003.10555) has one
power more from the last layer downwards.
"""

import math
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


def factors(network: "torch.nn.Module", decay: float) -> "dict[torch.nn.Parameter, float]":
    """Each parameter's factor of the learning rate.

    What the encoder has before its layers counts as embeddings, what it has after them (a pooler, a last
    normalisation) as head. Weights that a head shares with the embeddings are embeddings. Raises `ConfigError` for an
    encoder without a list of layers.
    """
    if decay == 1.0:
        return dict.fromkeys(network.parameters(), 1.0)
    encoder: Any = getattr(network, "base_model", network)
    found = layers(encoder)
    if found is None:
        reason = f"{type(network).__name__} has no list of layers, by which the learning rate could fall"
        raise ConfigError([Problem("optim.layer_decay", decay, reason, "write 1.0", code="unsupported")])
    places = {parameter: place for place, layer in enumerate(found, 1) for parameter in layer.parameters()}
    head, passed = len(found) + 1, False
    for parameter in encoder.parameters():  # in the order of the path, as every encoder registers them
        passed = passed or parameter in places
        places.setdefault(parameter, head if passed else 0)
    return {parameter: decay ** (head - places.get(parameter, head)) for parameter in network.parameters()}


def layers(encoder: "torch.nn.Module") -> "torch.nn.ModuleList | None":
    """The list of modules that holds most of the encoder's weights; of nested lists the outer one."""
    import torch

    lists = [part for part in encoder.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    return max(lists, key=lambda part: sum(parameter.numel() for parameter in part.parameters()), default=None)


def chosen_layers(depth: int, layers: int) -> list[int]:
    """Evenly spaced layers, counted from 0, with the last one included: 3 of 6 are 1, 3, 5."""
    return [math.ceil(depth * (place + 1) / layers) - 1 for place in range(layers)]
