"""Texts longer than a model was trained for: a longer position table, and local attention.

Local attention: each token reads its neighbors and the text's first token, which reads all tokens and is read by all
(Beltagy et al. 2020, arXiv:2004.05150: sliding windows and global attention, here with the same weights). config.json
holds the window. Transformers ignores it and would read all tokens, so the head of such an artifact is guarded
(`rtrain.models.model_files`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import Problem

if TYPE_CHECKING:
    import torch


OFFSET_ARCHITECTURES = (
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Architectures whose positions start at `pad_token_id` + 1: RoBERTa reads 512 tokens by a table of 514."""
TABLE_ARCHITECTURES = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Architectures whose only position information is a learned vector for each position."""
CONFIG_KEY = "rtrain_attention_window"
"""Key of config.json: tokens that a token reads on either side."""
FACT = "attention_window"
"""Key of the same fact in an artifact."""
ATTENTION_NAME = "rtrain_local"
"""Name of the attention implementation for padded texts in Transformers."""


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


def attention_window(config: Any) -> int | None:
    """Tokens that a token of this model reads on either side; None for full attention and for architectures with their
    own local attention."""
    window: int | None = getattr(config, CONFIG_KEY, None)
    return window


def check_attention_window(settings: Mapping[str, Any], requested_window: int | None) -> list[Problem]:
    """Problems of `requested_window` for a model with these settings (config.json)."""
    model_type = settings.get("model_type")
    if requested_window is None or model_type in TABLE_ARCHITECTURES:
        return []
    reason = f"attention of {model_type} cannot be made local, only of {', '.join(TABLE_ARCHITECTURES)}"
    return [Problem("model.attention_window", requested_window, reason, "write null", code="unsupported")]


def set_attention_window(network: Any, window: int) -> None:
    """Restrict attention to `window` tokens on either side and the first token."""
    setattr(network.config, CONFIG_KEY, window)
    enable_local_attention(network)


def enable_local_attention(network: Any) -> None:
    """Enable local attention of padded texts if the network's configuration asks for it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    if attention_window(network.config) is not None:
        AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
        network.set_attn_implementation(ATTENTION_NAME)


def make_mask(**kwargs: Any) -> Any:
    """The mask of padded texts [windows, 1, tokens, tokens] in the format of Transformers. Without a window only
    padding is masked."""
    from transformers.masking_utils import and_masks, sdpa_mask

    window = attention_window(kwargs["config"])
    if window is not None:

        def is_in_window(
            batch: "torch.Tensor", head: "torch.Tensor", q_idx: "torch.Tensor", kv_idx: "torch.Tensor"
        ) -> Any:
            return window_mask(q_idx, kv_idx, window)

        kwargs |= {
            "mask_function": and_masks(kwargs["mask_function"], is_in_window),
            "allow_is_bidirectional_skip": False,
        }
    return sdpa_mask(**kwargs)


def window_mask(queries: "torch.Tensor", keys: "torch.Tensor", window: int) -> "torch.Tensor":
    """Whether the token at a position of a text reads the token at another position."""
    visible: torch.Tensor = (queries == 0) | (keys == 0) | ((queries - keys).abs() <= window)
    return visible
