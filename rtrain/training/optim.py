"""AdamW on the fused kernel, and the learning rate as a pure function of the update number."""

import math
from typing import TYPE_CHECKING

from rtrain.config import Optim

if TYPE_CHECKING:
    import torch


def build(model: "torch.nn.Module", optim: Optim) -> "torch.optim.Optimizer":
    """AdamW (Loshchilov and Hutter 2019). One-dimensional parameters, biases and normalisations, are not decayed."""
    import torch

    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, fused=True)


def learning_rate(optim: Optim, update: int, updates: int) -> float:
    """Learning rate of `update` (from 0) of `updates`: a linear rise over the warm-up, then the schedule."""
    warmup = math.ceil(optim.warmup * updates)
    if update < warmup:
        return optim.lr * (update + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    return optim.lr * (updates - update) / max(1, updates - warmup)
