"""Which inputs a network takes."""

import inspect
from functools import lru_cache
from typing import Any

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
