"""Inputs and logits of a network."""

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYOUT = "layout"
"""Name of the argument that holds the pack layout of a network that computes no padding."""


def accepted_inputs(network: Any) -> frozenset[str]:
    """Arguments that the network's forward accepts. DistilBERT has no token types. XLM-RoBERTa and relatives have a
    single type and raise an index error for the second text of a pair."""
    network_class: Any = type(network)
    names = _forward_parameters(network_class)
    return names - {"token_type_ids"} if getattr(getattr(network, "config", None), "type_vocab_size", 2) < 2 else names


@lru_cache(maxsize=8)
def _forward_parameters(network_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(network_class.forward).parameters)


def logits_of(output: Any) -> "torch.Tensor":
    """The single output tensor of a Transformers model; a span's two ends are its last axis."""
    import torch

    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: torch.Tensor = output.logits
    return logits
