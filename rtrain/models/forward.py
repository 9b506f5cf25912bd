"""The inputs that a network takes, and the logits that it returns."""

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYOUT = "layout"
"""Name of the argument that says where a pass's windows are in its pack, where a network computes no padding."""


def accepted(network: Any) -> frozenset[str]:
    """Names that the network's forward takes: DistilBERT, for one, has no token types. XLM-RoBERTa and its kin know a
    single type, and fail with an index error at a second text that is marked as such."""
    kind: Any = type(network)
    names = _parameters(kind)
    return names - {"token_type_ids"} if getattr(getattr(network, "config", None), "type_vocab_size", 2) < 2 else names


@lru_cache(maxsize=8)
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def logits_of(output: Any) -> "torch.Tensor":
    """The one tensor of what a Transformers model returns; a span's two ends are its last axis."""
    import torch

    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: torch.Tensor = output.logits
    return logits
