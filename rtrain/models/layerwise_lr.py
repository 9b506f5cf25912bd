"""Layer-wise decay of the learning rate: layers near the input are more general, and learn slower.

Like the fine-tuning of BEiT (Bao et al. 2022, arXiv:2106.08254): the head has factor 1, the i-th layer from the top
(from 1) decay^i, and the embeddings below L layers decay^(L + 1). ELECTRA (Clark et al. 2020, arXiv:2003.10555) uses
one power more from the last layer downwards.
"""

import math
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


def lr_factors(network: "torch.nn.Module", decay: float) -> "dict[torch.nn.Parameter, float]":
    """The learning-rate factor of each parameter.

    Modules of the encoder before its layers count as embeddings, modules after them (a pooler, a final normalization)
    as head. Weights shared by the head and the embeddings count as embeddings. Raises `ConfigError` for an encoder
    without a list of layers.
    """
    if decay == 1.0:
        return dict.fromkeys(network.parameters(), 1.0)
    encoder: Any = getattr(network, "base_model", network)
    encoder_layers = find_layers(encoder)
    if encoder_layers is None:
        reason = f"{type(network).__name__} has no list of layers, so the learning rate cannot decay by layer"
        raise ConfigError([Problem("optim.layerwise_lr_decay", decay, reason, "write 1.0", code="unsupported")])
    depths = {parameter: place for place, layer in enumerate(encoder_layers, 1) for parameter in layer.parameters()}
    head_depth, has_passed_layers = len(encoder_layers) + 1, False
    for parameter in encoder.parameters():  # in the order of the forward pass, as every encoder registers them
        has_passed_layers = has_passed_layers or parameter in depths
        depths.setdefault(parameter, head_depth if has_passed_layers else 0)
    return {parameter: decay ** (head_depth - depths.get(parameter, head_depth)) for parameter in network.parameters()}


def find_layers(encoder: "torch.nn.Module") -> "torch.nn.ModuleList | None":
    """The module list that holds most of the encoder's weights; the outermost of nested lists."""
    import torch

    lists = [part for part in encoder.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    return max(lists, key=lambda part: sum(parameter.numel() for parameter in part.parameters()), default=None)


def spaced_layers(depth: int, count: int) -> list[int]:
    """Evenly spaced layers, counted from 0, including the last one: 3 of 6 are 1, 3, 5."""
    return [math.ceil(depth * (place + 1) / count) - 1 for place in range(count)]
