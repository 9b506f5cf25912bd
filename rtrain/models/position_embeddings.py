"""How many tokens the positions of a model reach, and a table of positions that is made longer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rtrain.core.errors import Problem

AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Architectures that count positions from `pad_token_id` + 1 on: so many places of their tables are no text's, and
RoBERTa reads 512 tokens by its table of 514."""
TABLES = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Architectures that learn a vector for each position, and nothing else about where a token stands."""


def first(settings: Mapping[str, Any]) -> int:
    """The place of a text's first token in the table of a model with these settings (config.json)."""
    if settings.get("model_type") not in AFTER_PADDING:
        return 0
    return (settings.get("pad_token_id", 1) or 0) + 1


def reached(settings: Mapping[str, Any]) -> int | None:
    """Tokens of the longest text that a model with these settings reads; None where the settings do not say."""
    places = settings.get("max_position_embeddings")
    return places - first(settings) if places else None


def problems(settings: Mapping[str, Any], asked: int | None) -> list[Problem]:
    """What is wrong with `asked` positions for a model with these settings."""
    kind = settings.get("model_type")
    if asked is None or asked <= (reached(settings) or 0) or kind in TABLES:
        return []
    reason = f"{kind} has no table of positions that can be repeated (those that have: {', '.join(TABLES)})"
    return [Problem("model.positions", asked, reason, "write null", code="unsupported")]


def lengthen(network: Any, asked: int) -> None:
    """Let a network read texts of `asked` tokens: the rows of its table of positions are repeated until there are as
    many, which is how Longformer began from RoBERTa (Beltagy et al. 2020, arXiv:2004.05150, section 5).

    A table that is as long already stays as it is.
    """
    import torch

    settings = network.config.to_dict()
    own = reached(settings)
    if own is None or asked <= own:
        return
    start, embeddings = first(settings), network.base_model.embeddings
    table = embeddings.position_embeddings
    times = -(-asked // own)
    rows = torch.cat([table.weight.detach()[:start], *[table.weight.detach()[start:]] * times])[: start + asked]
    table.weight, table.num_embeddings = torch.nn.Parameter(rows), start + asked
    # What a call without positions or second texts takes has one column for each place of the table.
    for name, value in dict(embeddings.named_buffers(recurse=False)).items():
        if value.shape == (1, start + own):
            filled = torch.arange(start + asked) if name == "position_ids" else torch.zeros(start + asked)
            embeddings.register_buffer(name, filled.to(value)[None], persistent=False)
    network.config.max_position_embeddings = start + asked


@contextmanager
def shortened(network: Any, tokens: int) -> Iterator[None]:
    """While the block runs, the table of positions of a network in evaluation ends where a text of `tokens` tokens
    does: a graph that is traced in it has no further places. Its answers to such texts are the same.

    Other architectures than those of `TABLES` stay as they are, and so does a table that is no longer than that.
    """
    import torch

    settings = network.config.to_dict()
    own, start = reached(settings), first(settings)
    if settings.get("model_type") not in TABLES or own is None or tokens >= own:
        yield
        return
    embeddings = network.base_model.embeddings
    table, many = embeddings.position_embeddings, start + tokens
    whole, buffers = table.weight, dict(embeddings.named_buffers(recurse=False))
    try:
        table.weight = torch.nn.Parameter(whole.detach()[:many].clone(), requires_grad=False)
        for name, value in buffers.items():
            if value.shape == (1, start + own):
                embeddings.register_buffer(name, value[:, :many].clone(), persistent=False)
        yield
    finally:
        table.weight = whole
        for name, value in buffers.items():
            embeddings.register_buffer(name, value, persistent=False)
