"""Position limits of a model, and extension of its position table."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rtrain.core.errors import Problem

OFFSET_ARCHITECTURES = (
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Architectures whose positions start at `pad_token_id` + 1: RoBERTa reads 512 tokens by a table of 514."""
TABLE_ARCHITECTURES = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Architectures whose only position information is a learned vector for each position."""


def first_position(settings: Mapping[str, Any]) -> int:
    """Position of a text's first token in the table of a model with these settings (config.json)."""
    if settings.get("model_type") not in OFFSET_ARCHITECTURES:
        return 0
    return (settings.get("pad_token_id", 1) or 0) + 1


def max_text_tokens(settings: Mapping[str, Any]) -> int | None:
    """Longest text in tokens that a model with these settings reads; None if unknown."""
    num_positions = settings.get("max_position_embeddings")
    return num_positions - first_position(settings) if num_positions else None


def check_max_positions(settings: Mapping[str, Any], max_positions: int | None) -> list[Problem]:
    """Problems of `max_positions` for a model with these settings."""
    model_type = settings.get("model_type")
    if max_positions is None or max_positions <= (max_text_tokens(settings) or 0) or model_type in TABLE_ARCHITECTURES:
        return []
    reason = f"{model_type} has no table of positions that can be repeated, unlike {', '.join(TABLE_ARCHITECTURES)}"
    return [Problem("model.max_position_embeddings", max_positions, reason, "write null", code="unsupported")]


def extend_positions(network: Any, max_positions: int) -> None:
    """Extend a network to texts of `max_positions` tokens by repeating the rows of its position table, as Longformer
    was initialized from RoBERTa (Beltagy et al. 2020, arXiv:2004.05150, section 5).

    A table that is long enough stays unchanged.
    """
    import torch

    settings = network.config.to_dict()
    current_tokens = max_text_tokens(settings)
    if current_tokens is None or max_positions <= current_tokens:
        return
    start, embeddings = first_position(settings), network.base_model.embeddings
    table = embeddings.position_embeddings
    repeats = -(-max_positions // current_tokens)
    rows = torch.cat([table.weight.detach()[:start], *[table.weight.detach()[start:]] * repeats])[
        : start + max_positions
    ]
    table.weight, table.num_embeddings = torch.nn.Parameter(rows), start + max_positions
    # These buffers have one column for each position of the table.
    for name, value in dict(embeddings.named_buffers(recurse=False)).items():
        if value.shape == (1, start + current_tokens):
            buffer = (
                torch.arange(start + max_positions) if name == "position_ids" else torch.zeros(start + max_positions)
            )
            embeddings.register_buffer(name, buffer.to(value)[None], persistent=False)
    network.config.max_position_embeddings = start + max_positions


@contextmanager
def truncate_positions(network: Any, tokens: int) -> Iterator[None]:
    """Shorten the position table of a network in evaluation mode to texts of `tokens` tokens inside the block, so that
    a traced graph holds no more positions. Outputs for such texts are unchanged.

    Architectures outside `TABLE_ARCHITECTURES` and shorter tables stay unchanged.
    """
    import torch

    settings = network.config.to_dict()
    current_tokens, start = max_text_tokens(settings), first_position(settings)
    if settings.get("model_type") not in TABLE_ARCHITECTURES or current_tokens is None or tokens >= current_tokens:
        yield
        return
    embeddings = network.base_model.embeddings
    table, num_rows = embeddings.position_embeddings, start + tokens
    full_weight, buffers = table.weight, dict(embeddings.named_buffers(recurse=False))
    try:
        table.weight = torch.nn.Parameter(full_weight.detach()[:num_rows].clone(), requires_grad=False)
        for name, value in buffers.items():
            if value.shape == (1, start + current_tokens):
                embeddings.register_buffer(name, value[:, :num_rows].clone(), persistent=False)
        yield
    finally:
        table.weight = full_weight
        for name, value in buffers.items():
            embeddings.register_buffer(name, value, persistent=False)
